"""A batch as a job whose lines go behind the live requests, and the files that it leaves."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple
from uuid import uuid4

import numpy as np

from nanovllm import LLM, EngineStats, ImageRules, PoolingParams, RequestChecker
from nanovllm.integrations.serving.background import Background
from nanovllm.integrations.serving.calls import error_body
from nanovllm.jobs.arguments import Arguments, answer_format
from nanovllm.jobs.folder import MANIFEST, Counts, JobFolder
from nanovllm.jobs.inputs import Inputs, Scan, scan
from nanovllm.jobs.run import Job
from nanovllm.openai_format.openai_batch import Responder
from nanovllm.openai_format.request_names import Row
from nanovllm.utils.file_errors import names_file
from nanovllm.utils.text_json import to_json

logger = logging.getLogger(__name__)

_WORK_SECONDS, _PAUSE_SECONDS = 0.0005, 0.005
_BYTES_AT_ONCE = 1 << 20


class Pace:
    """Called again and again by a thread that reads lines. While the engine works, it lets the engine's thread have
    Python's lock: that thread asks for it after each operation, and would wait five milliseconds each time."""

    def __init__(self, llm: LLM, check: Callable[[], None]):
        """check: called as often; may raise."""
        self._llm, self._check, self._last = llm, check, time.perf_counter()

    def __call__(self) -> None:
        self._check()
        if time.perf_counter() - self._last > _WORK_SECONDS:
            if not self._llm.is_finished():
                time.sleep(_PAUSE_SECONDS)
            self._last = time.perf_counter()


class _LineEngine:
    """What a job needs of an LLM. Its lines go through the background."""

    def __init__(self, llm: LLM, background: Background, check: Callable[[], None]):
        self._llm, self._background, self._check = llm, background, check
        self.config, self.scheduler = llm.config, llm.scheduler

    def stats(self) -> EngineStats:
        return self._llm.stats()

    def generate_iter(self, prompts: Iterable[Any], params: Iterable[Any], on_error: str) -> Iterator[tuple[int, Row]]:
        """As LLM's, which returns errors."""
        return self._background.answer(zip(prompts, params, strict=False), self._check)

    def embed_iter(
        self, prompts: Iterable[Any], prompt_name: None, on_error: str, **asked: Any
    ) -> Iterator[tuple[int, Row]]:
        """As LLM's, which returns errors. prompts: token ids, which have what the model puts before texts. asked: of
        PoolingParams."""
        params = PoolingParams(task="embed", **asked)
        return self._background.answer(((prompt, params) for prompt in prompts), self._check)


class BatchArguments(Arguments):
    """Those of a served model. What is written is OpenAI's format alone."""

    MAY_KEEP_RECEIPTS = False

    def __init__(
        self,
        llm: LLM,
        background: Background,
        served_name: str,
        check: Callable[[], None],
        checker: RequestChecker,
        image_rules: ImageRules,
        task: str = "generate",
        **of_lines: Any,
    ):
        """checker: of this model's requests. task, of_lines: of `make_task`."""
        super().__init__(llm, {}, task, **of_lines)
        self.image_rules = image_rules
        self.task = self.task.of_model(checker)
        self._llm, self._background, self._served_name, self._check = llm, background, served_name, check

    def engine(self) -> AbstractContextManager[Any]:
        return nullcontext(_LineEngine(self._llm, self._background, self._check))

    def responder(self) -> Responder:
        template = getattr(self.task.line_format, "chat_template", None)
        answers = partial(answer_format, template=template, name=self.chat_format, log=False)
        return Responder(self._served_name, self._llm.get_tokenizer, answers)


@dataclass
class BatchJob(Job):
    """A job beside live requests."""

    pace: Callable[[], None] = field(default=lambda: None)

    def scan(self) -> Scan:
        return scan(self.inputs, self.pace)

    def check_lines(self, all_may_fail: bool) -> None:
        """A batch may fail in all of its lines."""


def make_job(folder: Path, input: Path, arguments: Arguments, pace: Callable[[], None]) -> BatchJob:
    inputs = Inputs([str(input)])
    return BatchJob(JobFolder(folder), inputs, arguments, "jsonl", False, None, None, False, pace=pace)


# -- the files that it leaves ------------------------------------------------------------------------------------------


class Files(NamedTuple):
    """What was written of a batch."""

    counts: Counts  # num_failed: lines of the file of errors
    output_bytes: int
    error_bytes: int


def write_files(
    folder: Path, input: Path, unfinished: tuple[str, str] | None, output: Path, errors: Path, pace: Callable[[], None]
) -> Files:
    """Write the answers of a job that has stopped, and the errors of all other lines.

    unfinished: code and message for lines that have no outcome; None: there are none.
    """
    job = JobFolder(folder)
    if not (folder / MANIFEST).exists():  # It was stopped before its first line.
        found = Counts()
        with _new_file(output), _new_file(errors) as error_file:
            num_errors = _write_unfinished(error_file, input, b"", unfinished, pace)
            return Files(found._replace(failed=num_errors), 0, error_file.tell())
    with job, _new_file(output) as output_file, _new_file(errors) as error_file:
        job.recover(None)
        for part in job.parts():
            with names_file(part), part.open("rb") as source:
                while content := source.read(_BYTES_AT_ONCE):
                    output_file.write(content)
        for error in job.errors():
            error_file.write(_error_line(error["id"], refused=error["error"]))
            pace()
        hashes = bytearray()

        def see(line_id: bytes) -> None:
            hashes.extend(line_id)
            pace()

        counts = job.read(see)
        num_errors = counts.failed + _write_unfinished(error_file, input, bytes(hashes), unfinished, pace)
        return Files(counts._replace(failed=num_errors), output_file.tell(), error_file.tell())


def _write_unfinished(
    file: IO[bytes], input: Path, done: bytes, reason: tuple[str, str] | None, pace: Callable[[], None]
) -> int:
    """Errors of lines that are not done. done: `hash_id` of each that is. Returns how many there are."""
    num_lines = 0
    if reason is None:
        return num_lines
    try:
        inputs = Inputs([str(input)])
        found = scan(inputs, pace)
        is_done = np.zeros(found.num_lines, bool)
        is_done[found.find(done)] = True
        for _, line in inputs.lines(is_done):
            file.write(_error_line(line.id, unfinished=reason))
            num_lines += 1
            pace()
    except (FileNotFoundError, ValueError) as error:  # Somebody has damaged or deleted the input.
        logger.error("%s: lines without an answer are not listed: %s", input.name, error)
    return num_lines


def _error_line(line_id: Any, refused: str | None = None, unfinished: tuple[str, str] | None = None) -> bytes:
    """refused: why the request cannot be served. unfinished: code and message."""
    row: Row = {"id": f"batch_req_{uuid4().hex}", "custom_id": line_id, "response": None, "error": None}
    if refused is not None:
        body = error_body(refused, "invalid_request_error")
        row["response"] = {"status_code": 400, "request_id": f"req_{uuid4().hex}", "body": body}
    if unfinished is not None:
        row["error"] = dict(zip(("code", "message"), unfinished, strict=True))
    return f"{to_json(row)}\n".encode()


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that the disk keeps at the end of the block."""
    with names_file(path), path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
