"""Reading ahead: a process that parses and tokenizes lines while the engine works on those before them.

A process and not a thread: the engine's thread would wait for Python's lock, and the GPU with it.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import numpy as np

from nanovllm import AnswerFormat, PromptEncoder, find_format, find_tokenizer
from nanovllm.jobs.inputs import Inputs, RawLine
from nanovllm.jobs.lines import Line, LineFormat, LineId
from nanovllm.openai_format.request_names import ChatOptions
from nanovllm.utils.python_process import python_command
from nanovllm.utils.text_json import as_json

Item = TypeVar("Item")

# Lines are grouped by their beginnings within a window.
_WINDOW, _WINDOW_BYTES = 4096, 16 << 20
# What is on its way to the engine: at most _QUEUE batches.
_BATCH, _BATCH_BYTES, _QUEUE = 64, 1 << 20, 128
_MAX_TOOLS = 256  # sets of tools that are kept


class ReadPlan(NamedTuple):
    """What to read, and how."""

    paths: list[str]
    line_format: LineFormat
    tokenizer: str  # a directory or a hub id
    revision: str | None
    is_done: np.ndarray | None  # bool [num_lines]: lines to leave out
    block_size: int  # tokens of a KV cache block: prompts share whole blocks
    max_len: int | None  # tokens of the longest sequence, at most; None is unknown
    names: list[str] | None = None  # of the files, if they are not all of the job
    chat_format: str | None = None  # of answers to chats; None: found


class Prepared(NamedTuple):
    """A line on its way. Exactly one of line and error is given."""

    position: int  # of those that this process reads, from 0, in the order of the input
    id: LineId
    file: str
    number: int
    line: Line | None  # its prompt is token ids
    error: str | None


class Preparer:
    """Turns lines into requests: chat template and tokenizer, many lines at a time."""

    def __init__(self, tokenizer: Any, line_format: LineFormat, max_len: int | None, chat_format: str | None = None):
        """max_len: tokens of the longest sequence, at most. None is unknown. chat_format: of answers to chats."""
        self._tokenizer, self._format, self._chat_format = tokenizer, line_format, chat_format
        self._encoder = PromptEncoder(tokenizer, max_len)
        self._tools: dict[str, list[Any]] = {}  # those of late, by their JSON

    @cached_property
    def _answers(self) -> AnswerFormat:
        template = self._encoder.template_text(self._format.chat_template)
        # The process that splits the answers says what is unknown.
        return AnswerFormat(self._tokenizer, find_format(self._tokenizer, template, self._chat_format, log=False))

    def prepare(self, raw_lines: Iterable[tuple[int, RawLine]]) -> list[Prepared]:
        """Raises nothing: what is wrong with a line is its error."""
        lines = [(position, raw, self._read(raw)) for position, raw in raw_lines]
        prompts: Any = [line.prompt for _, _, line in lines if isinstance(line, Line) and not line.is_chat]
        encoded = iter(self._encoder.encode(prompts))
        prepared = []
        for position, raw, line in lines:
            result: Line | Exception = line
            if isinstance(line, Line):
                prompt: Any = self._encode_chat(line) if line.is_chat else next(encoded)
                # The engine's process gets no tools, unless it reads calls by them: many lines have the same thousands
                # of characters.
                is_wrong = isinstance(prompt, Exception)
                result = prompt if is_wrong else line._replace(prompt=prompt, chat_options=ChatOptions())
                if line.split is not None and isinstance(result, Line):
                    is_open = self._answers.opens_reasoning(prompt)
                    split = line.split._replace(tools=self._shared(line.split.tools), is_open=is_open)
                    result = result._replace(split=split, params=self._answers.with_tags(line.params))
            outcome = (result, None) if isinstance(result, Line) else (None, str(result))
            prepared.append(Prepared(position, raw.id, raw.file, raw.number, *outcome))
        return prepared

    def _shared(self, tools: list[Any] | None) -> list[Any] | None:
        """The same object for equal tools, which a pickle then holds once for many lines."""
        if tools is None:
            return None
        if len(self._tools) > _MAX_TOOLS:
            self._tools.clear()
        return self._tools.setdefault(as_json(tools), tools)

    def _read(self, raw: RawLine) -> Line | Exception:
        if raw.row is None:
            return ValueError(raw.error)
        try:
            return self._format.read(raw.row, raw.id)
        except (TypeError, ValueError) as error:
            return error

    def _encode_chat(self, line: Line) -> list[int] | Exception:
        try:
            return self._encoder.encode_chat(line.prompt, self._format.chat_template, *line.chat_options)
        except Exception as error:  # Templates raise whatever they like.
            return error


def read(plan: ReadPlan) -> Iterator[list[Prepared]]:
    """Small batches of all lines. Raises ValueError for a damaged file."""
    preparer = make_preparer(plan)
    inputs = Inputs(plan.paths, plan.names, plan.line_format.id_column)
    raw_lines = enumerate(line for _, line in inputs.lines(plan.is_done))
    for window in _chunks(raw_lines, lambda item: item[1].size, _WINDOW, _WINDOW_BYTES):
        lines = grouped(preparer.prepare(window), plan.block_size)
        yield from _chunks(lines, lambda each: 4 * len(each.line.prompt) if each.line else 0, _BATCH, _BATCH_BYTES)


def make_preparer(plan: ReadPlan) -> Preparer:
    tokenizer = find_tokenizer(plan.tokenizer, plan.revision)
    return Preparer(tokenizer, plan.line_format, plan.max_len, plan.chat_format)


def _chunks(
    items: Iterable[Item], num_bytes: Callable[[Item], int], max_items: int, max_bytes: int
) -> Iterator[list[Item]]:
    chunk, size = list[Item](), 0
    for item in items:
        chunk.append(item)
        size += num_bytes(item)
        if len(chunk) >= max_items or size >= max_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def grouped(lines: list[Prepared], block_size: int) -> list[Prepared]:
    """Lines that begin with the same block side by side, so that it is computed once."""
    firsts: dict[tuple[int, ...], int] = {}

    def place(item: tuple[int, Prepared]) -> tuple[int, list[int]]:
        index, prepared = item
        if prepared.line is None or len(prepared.line.prompt) < block_size:
            return index, []
        token_ids: Any = prepared.line.prompt
        return firsts.setdefault(tuple(token_ids[:block_size]), index), token_ids

    return [prepared for _, prepared in sorted(enumerate(lines), key=place)]


# -- the process -------------------------------------------------------------------------------------------------------


class ReadAhead:
    """The lines of a plan, read by a process of its own. A context manager, whose end ends the process."""

    def __init__(self, plan: ReadPlan):
        ours, theirs = Pipe()
        # No fork, which copies threads' locks, and no spawn, which runs the caller's script again.
        command = [*python_command("from nanovllm.jobs.reader import main; main()"), str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()
        self._connection = ours
        self._has_ended = threading.Event()
        self._queue: queue.Queue[list[Prepared] | Exception | None] = queue.Queue(_QUEUE)
        self._thread = threading.Thread(target=self._receive, args=(plan,), name="nanovllm-jobs-reader", daemon=True)
        self._thread.start()

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._has_ended.set()
        self._process.kill()
        self._process.wait()
        self._thread.join()
        self._connection.close()
        with suppress(queue.Full):
            self._queue.put_nowait(None)  # A thread that waits for lines ends.

    def __iter__(self) -> Iterator[Prepared]:
        """Raises ValueError for a damaged file, and RuntimeError if the process has died."""
        while (batch := self._queue.get()) is not None:
            if isinstance(batch, Exception):
                raise batch
            yield from batch

    def _receive(self, plan: ReadPlan) -> None:
        batch: Any = []
        try:
            self._connection.send(plan)
            while isinstance(batch, list):
                batch = self._connection.recv()
                self._put(batch)
        except (EOFError, OSError):
            self._put(RuntimeError(f"the process that reads the input has died (exit status {self._process.wait()})"))
        except Exception as error:
            self._put(error)

    def _put(self, batch: Any) -> None:
        while not self._has_ended.is_set():
            try:
                return self._queue.put(batch, timeout=0.1)
            except queue.Full:
                continue


def main() -> None:
    """The process: a plan comes in, batches go out, then None, or an exception."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends this process when it has finished its work.
    # Tokenizers need no torch, and importing it takes longer than all else here. transformers does without.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    with Connection(int(sys.argv[1])) as connection:
        try:
            for batch in read(connection.recv()):
                connection.send(batch)
            connection.send(None)
        except (BrokenPipeError, ConnectionError, EOFError):
            pass  # The parent has ended.
        except Exception as error:
            connection.send(_picklable(error))


def _picklable(error: Exception) -> Exception:
    error.__traceback__ = None
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
