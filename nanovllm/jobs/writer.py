"""Writing behind: a thread that makes rows of answers and appends them to the job's folder."""

import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from typing_extensions import Self

from nanovllm.jobs.folder import Counts
from nanovllm.jobs.lines import Row, read_answer
from nanovllm.jobs.part_writer import PartWriter
from nanovllm.jobs.reader import Prepared
from nanovllm.jobs.receipts import row_with_receipt
from nanovllm.openai_format.openai_batch import Responder
from nanovllm.utils.text_json import to_json

SYNC_SECONDS = 2.0  # A crash of the machine loses the rows of this time.
_PAUSE_SECONDS = 0.05  # Rows are written together: each time the thread wakes up, the engine's thread may have to wait.
_MAX_WAITING = 1 << 15
_INDEX = re.compile(r"^(prompts|sampling_params)\[\d+\]: ")

Output = Mapping[str, Any]  # a RequestOutput, or only an "error" for a line that is wrong


class Finished(NamedTuple):
    """A row of output."""

    position: int  # as in Prepared
    is_error: bool  # a row of the errors
    json: str
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


def make_rows(batch: Iterable[tuple[Prepared, Output]], responder: Responder) -> list[Finished]:
    rows = []
    for prepared, output in batch:
        if prepared.line is None or "error" in output:
            rows.append(error_line(prepared, output["error"]))
        else:
            row = row_with_receipt(prepared.id, prepared.line, output, responder)
            rows.append(Finished(prepared.position, False, to_json(row), *read_answer(row)[1:]))
    return rows


def error_line(prepared: Prepared, error: str) -> Finished:
    return Finished(prepared.position, True, to_json(error_row(prepared, error)))


def error_row(prepared: Prepared, error: str) -> Row:
    """A row of the errors."""
    return {"id": prepared.id, "file": prepared.file, "line": prepared.number, "error": _INDEX.sub("", error)}


class Writer:
    """Writes answers in a thread. A context manager, whose end waits until all is written.

    Attributes:
        error: what ended the writing, or None. Later answers are dropped.
        counts: of what has been written.
        num_in_order: ordered: how many positions from 0 on are written.
    """

    def __init__(
        self,
        parts: PartWriter,
        finish: Callable[[list[Any]], list[Finished]],
        ordered: bool,
        early: Iterable[Finished] = (),
    ):
        """finish: makes rows of what was `put`. ordered: keep the order of the positions. early: rows of an earlier
        call that wait for those before them."""
        self.error: Exception | None = None
        self.counts = Counts()
        self.num_in_order = 0
        self._parts, self._finish, self._ordered = parts, finish, ordered
        self._queue: queue.Queue[Any] = queue.Queue(_MAX_WAITING)
        self._early: dict[int, Finished | None] = {row.position: row for row in early}  # None: of an error
        self._kept = set(self._early)  # positions of early rows that are on the disk
        self._next_sync = time.monotonic() + SYNC_SECONDS
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nanovllm-jobs-writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_closing.set()
        self._thread.join()

    def put(self, item: Any) -> None:
        self._queue.put(item)

    def _run(self) -> None:
        try:
            is_closing = False
            while not is_closing:
                is_closing = self._is_closing.wait(_PAUSE_SECONDS)
                self._write(self._finish(self._take()))
                if is_closing or time.monotonic() >= self._next_sync:
                    self._sync()
            self._parts.close()
            return
        except Exception as error:  # The main thread raises it.
            self.error = error
        with suppress(OSError):
            self._parts.close(complete=False)
        while not self._is_closing.wait(_PAUSE_SECONDS):
            self._take()  # so that no `put` waits for ever

    def _take(self) -> list[Any]:
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    def _write(self, rows: list[Finished]) -> None:
        errors = [row for row in rows if row.is_error]
        answers = self._in_order(rows) if self._ordered else [row for row in rows if not row.is_error]
        self._parts.write([row.json for row in answers], [row.json for row in errors])
        num_prompt_tokens = sum(row.num_prompt_tokens for row in answers)
        num_completion_tokens = sum(row.num_completion_tokens for row in answers)
        new = len(answers), len(errors), num_prompt_tokens, num_completion_tokens
        self.counts = Counts(*map(sum, zip(self.counts, new, strict=True)))

    def _in_order(self, rows: list[Finished]) -> list[Finished]:
        """The answers whose turn it is."""
        self._early |= {row.position: None if row.is_error else row for row in rows}
        answers = []
        while self.num_in_order in self._early:
            answers.append(self._early.pop(self.num_in_order))
            self._kept.discard(self.num_in_order)
            self.num_in_order += 1
        return [row for row in answers if row is not None]

    def _sync(self) -> None:
        self._parts.sync()
        if self._ordered:
            early = self._early.items()
            new = {position: row.json for position, row in early if row is not None and position not in self._kept}
            self._parts.keep_early(list(new.values()))
            self._kept.update(new)
            if not self._kept:
                self._parts.forget_early()
        self._next_sync = time.monotonic() + SYNC_SECONDS
