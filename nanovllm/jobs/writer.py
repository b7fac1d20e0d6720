"""Writing behind: a thread that makes rows of answers and appends them to the job's folder."""

import queue
import re
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from typing_extensions import Self

from nanovllm.jobs.folder import Counts, PartWriter
from nanovllm.jobs.lines import Row, answer_row, read_answer
from nanovllm.jobs.openai_batch import Responder
from nanovllm.jobs.reader import Prepared
from nanovllm.jobs.text_json import to_json

_PAUSE_SECONDS = 0.05  # Rows are written together: each time the thread wakes up, the engine's thread may have to wait.
_MAX_WAITING = 1 << 15
_INDEX = re.compile(r"^(prompts|sampling_params)\[\d+\]: ")

Output = Mapping[str, Any]  # a RequestOutput, or only an "error" for a line that is wrong


class Writer:
    """Writes answers in a thread. A context manager, whose end waits until all is written.

    Attributes:
        error: what ended the writing, or None. Later answers are dropped.
        counts: of what has been written.
    """

    def __init__(self, parts: PartWriter, responder: Responder, ordered: bool):
        """ordered: keep the order of the positions."""
        self.error: Exception | None = None
        self.counts = Counts()
        self._parts, self._responder, self._ordered = parts, responder, ordered
        self._queue: queue.Queue[tuple[Prepared, Output]] = queue.Queue(_MAX_WAITING)
        self._early: dict[int, tuple[Prepared, Output]] = {}  # ordered: those that wait for one before them
        self._next = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nanovllm-jobs-writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_closing.set()
        self._thread.join()

    def put(self, prepared: Prepared, output: Output) -> None:
        self._queue.put((prepared, output))

    def _run(self) -> None:
        try:
            is_closing = False
            while not is_closing:
                is_closing = self._is_closing.wait(_PAUSE_SECONDS)
                self._write(self._take())
            self._parts.close()
            return
        except Exception as error:  # The main thread raises it.
            self.error = error
        with suppress(OSError):
            self._parts.close(complete=False)
        while not self._is_closing.wait(_PAUSE_SECONDS):
            self._take()  # so that no `put` waits for ever

    def _take(self) -> list[tuple[Prepared, Output]]:
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    def _write(self, batch: list[tuple[Prepared, Output]]) -> None:
        if self._ordered:
            self._early |= {item[0].position: item for item in batch}
            batch = []
            while self._next in self._early:
                batch.append(self._early.pop(self._next))
                self._next += 1
        answers, errors = make_rows(batch, self._responder)
        self._parts.write([to_json(row) for row in answers], [to_json(row) for row in errors])
        num_tokens = [read_answer(row)[1:] for row in answers]
        new = (len(answers), len(errors), *map(sum, zip((0, 0), *num_tokens, strict=True)))
        self.counts = Counts(*map(sum, zip(self.counts, new, strict=True)))


def make_rows(batch: Iterable[tuple[Prepared, Output]], responder: Responder) -> tuple[list[Row], list[Row]]:
    """Rows of parts, and of errors.jsonl."""
    answers, errors = [], []
    for prepared, output in batch:
        if "error" in output:
            errors.append(error_row(prepared, output["error"]))
        else:
            answers.append(answer_row(prepared.id, prepared.line, output, responder))
    return answers, errors


def error_row(prepared: Prepared, error: str) -> Row:
    """A row of errors.jsonl."""
    return {"id": prepared.id, "file": prepared.file, "line": prepared.number, "error": _INDEX.sub("", error)}
