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
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import numpy as np

from nanovllm import ImageRules, find_image_reader, find_tokenizer
from nanovllm.jobs.inputs import Inputs
from nanovllm.jobs.prepared import NO_IMAGES, ImagePreparer, Prepared, Preparer
from nanovllm.jobs.task import Task
from nanovllm.utils.array_messages import pack, receive, send, unpack
from nanovllm.utils.python_process import python_command

Item = TypeVar("Item")

# Lines are grouped by their beginnings within a window.
_WINDOW, _WINDOW_BYTES = 4096, 16 << 20
# What is on its way to the engine: at most _QUEUE batches.
_BATCH, _BATCH_BYTES, _QUEUE = 64, 1 << 20, 128
# Images fill it with fewer batches. Each thread of the reading process has two lines with images at most.
_QUEUE_BYTES = 512 << 20
_LINES_OF_A_THREAD = 2


class ImagePlan(NamedTuple):
    """How images are read."""

    model: str  # a directory or a hub id, whose image processor it is
    rules: ImageRules
    dtype: str | None  # torch's name of the model's, to which pixels are rounded; None: unknown


class ReadPlan(NamedTuple):
    """What to read, and how."""

    paths: list[str]
    task: Task
    tokenizer: str  # a directory or a hub id
    revision: str | None
    is_done: np.ndarray | None  # bool [num_lines]: lines to leave out
    block_size: int  # tokens of a KV cache block: prompts share whole blocks
    max_len: int | None  # tokens of the longest sequence, at most; None is unknown
    names: list[str] | None = None  # of the files, if they are not all of the job
    chat_format: str | None = None  # of answers to chats; None: found
    images: ImagePlan | str = NO_IMAGES  # a text: why lines with images are refused
    image_prompt: str | None = None  # as Inputs'


def read(plan: ReadPlan) -> Iterator[list[Prepared]]:
    """Small batches of all lines. Raises ValueError for a damaged file."""
    preparer = make_preparer(plan)
    inputs = Inputs(plan.paths, plan.names, plan.task.line_format.id_column, plan.image_prompt)
    raw_lines = enumerate(line for _, line in inputs.lines(plan.is_done))
    windows = _chunks(raw_lines, lambda item: item[1].size, _WINDOW, _WINDOW_BYTES)
    lines = chain.from_iterable(grouped(preparer.prepare(window), plan.block_size) for window in windows)
    if isinstance(plan.images, str) or not isinstance(preparer, ImagePreparer):
        yield from _chunks(lines, num_bytes, _BATCH, _BATCH_BYTES)
        return
    with closing(with_images(lines, preparer)) as read_lines:
        yield from _chunks(read_lines, num_bytes, _BATCH, _BATCH_BYTES)


def num_bytes(prepared: Prepared) -> int:
    """What a line takes, about, on its way to the engine."""
    line = prepared.line
    return 0 if line is None else 4 * line.num_prompt_tokens + getattr(line, "num_image_bytes", 0)


def with_images(lines: Iterable[Prepared], preparer: ImagePreparer) -> Generator[Prepared, None, None]:
    """The lines with their images, in order. Threads read them ahead, which Pillow and numpy let work side by side."""
    from nanovllm.utils.threads import image_threads  # It imports torch.

    num_threads = image_threads()
    under_way = deque[Future[Prepared]]()
    with ThreadPoolExecutor(num_threads, "nanovllm-jobs-images") as threads:
        try:
            for line in lines:
                under_way.append(threads.submit(preparer.read_images, line))
                if len(under_way) >= _LINES_OF_A_THREAD * num_threads:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def make_preparer(plan: ReadPlan) -> Preparer:
    tokenizer, images = find_tokenizer(plan.tokenizer, plan.revision), plan.images
    if not isinstance(images, str):
        found = find_image_reader(images.model, plan.revision, tokenizer, images.rules, images.dtype)
        return plan.task.preparer(tokenizer, plan.max_len, plan.chat_format, found or NO_IMAGES)
    return plan.task.preparer(tokenizer, plan.max_len, plan.chat_format, images)


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
        token_ids: list[int] = [] if prepared.line is None else prepared.line.prefix
        if len(token_ids) < block_size:
            return index, []
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
        self._num_bytes, self._has_room = 0, threading.Condition()
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
            with self._has_room:
                self._num_bytes -= sum(map(num_bytes, batch))
                self._has_room.notify()
            yield from batch

    def _receive(self, plan: ReadPlan) -> None:
        batch: Any = []
        try:
            self._connection.send(plan)
            while isinstance(batch, list):
                batch = unpack(receive(self._connection))
                self._put(batch)
        except (EOFError, OSError):
            self._put(RuntimeError(f"the process that reads the input has died (exit status {self._process.wait()})"))
        except Exception as error:
            self._put(error)

    def _put(self, batch: Any) -> None:
        if isinstance(batch, list):
            size = sum(map(num_bytes, batch))
            with self._has_room:
                while self._num_bytes and self._num_bytes + size > _QUEUE_BYTES and not self._has_ended.is_set():
                    self._has_room.wait(0.1)
                self._num_bytes += size
        while not self._has_ended.is_set():
            try:
                return self._queue.put(batch, timeout=0.1)
            except queue.Full:
                continue


def main() -> None:
    """The process: a plan comes in, batches go out, then None, or an exception."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends this process when it has finished its work.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    with Connection(int(sys.argv[1])) as connection:
        try:
            plan: ReadPlan = connection.recv()
            if isinstance(plan.images, str):
                # Tokenizers need no torch, and importing it takes longer than all else here. transformers does without.
                sys.modules["torch"] = None  # type: ignore[assignment]
            else:
                _use_one_thread()
            for batch in read(plan):
                send(connection, pack(batch))
            send(connection, pack(None))
        except (BrokenPipeError, ConnectionError, EOFError):
            pass  # The parent has ended.
        except Exception as error:
            send(connection, pack(_picklable(error)))


def _use_one_thread() -> None:
    """An image has one, as many images are read at a time."""
    import torch

    torch.set_num_threads(1)


def _picklable(error: Exception) -> Exception:
    error.__traceback__ = None
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
