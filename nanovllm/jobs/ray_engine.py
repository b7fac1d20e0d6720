"""RayEngine: what runs in an actor of a job on Ray."""

import os
import pickle
import queue
import socket
import time
from copy import copy
from typing import Any, NamedTuple

from nanovllm.jobs.arguments import Arguments
from nanovllm.jobs.fingerprint import Fingerprint, engine_fingerprint
from nanovllm.jobs.first_lines import Packages
from nanovllm.jobs.generate_actor import SharedEngine, start_engine
from nanovllm.jobs.prepared import Prepared
from nanovllm.jobs.progress import Generated, generated
from nanovllm.jobs.task import Output, Task
from nanovllm.jobs.writer import Finished, make_rows
from nanovllm.openai_format.openai_batch import Responder
from nanovllm.utils.checks import one_line

_ENOUGH = 64  # answers for which an exchange does not wait for more
_TICK_SECONDS = 0.02


class Started(NamedTuple):
    """How the start of an engine has ended."""

    fingerprint: Fingerprint  # of its model
    error: Exception | None  # a wrong option or model, as this machine has it


class Exchanged(NamedTuple):
    """What an engine has done since it was last asked."""

    rows: list[Finished]
    generated: Generated  # since it has started
    error: Exception | None = None  # a missing package, which ends the job


class RayEngine:
    """An engine that works without a pause on the lines which it was given."""

    _engine: SharedEngine
    _task: Task
    _responder: Responder
    _packages: Packages
    _num_lines = 0  # that it has

    def start(self, arguments: Arguments, num_threads: int) -> Started:
        try:
            engine = start_engine(arguments, num_threads)
        except (ValueError, TypeError, ImportError, OSError) as error:
            kind = OSError if isinstance(error, OSError) else ValueError
            return Started({}, kind(f"{error if str(error) else one_line(error)} (on {socket.gethostname()})"))
        self._engine, self._task, self._responder = engine, arguments.task, arguments.responder()
        self._packages = Packages(engine.llm, self._task)
        self._finished: queue.SimpleQueue[tuple[Prepared, Output]] = queue.SimpleQueue()
        return Started(engine_fingerprint(engine.llm), None)

    def exchange(self, lines: bytes, pause: float) -> bytes:
        """Take a pickled list of Prepared, and return an Exchanged, pickled: what is complete after at most this
        many seconds."""
        new: list[Prepared] = pickle.loads(lines)
        try:
            for prepared in new:
                if prepared.line is not None:
                    self._packages.check(prepared.line)
        except ImportError as error:
            missing = ImportError(f"{error} (on {socket.gethostname()})")
            return pickle.dumps(Exchanged([], self._generated(), missing))
        self._engine.submit(new, self._finished.put)
        self._num_lines += len(new)
        deadline = time.monotonic() + pause
        while self._finished.qsize() < min(_ENOUGH, self._num_lines) and time.monotonic() < deadline:
            self._engine.check()
            time.sleep(_TICK_SECONDS)
        outputs = [self._finished.get() for _ in range(self._finished.qsize())]
        self._num_lines -= len(outputs)
        return pickle.dumps(Exchanged(make_rows(outputs, self._task, self._responder), self._generated()))

    def _generated(self) -> Generated:
        return generated(self._engine.llm, self._task.counter)


def on_any_machine(arguments: Arguments) -> Arguments:
    """The same with absolute paths, since workers have another working directory."""
    absolute: Any = copy(arguments)
    absolute.model = _absolute(os.fspath(arguments.model))  # type: ignore[arg-type]
    absolute.engine_options = dict(arguments.engine_options)
    if (tokenizer := absolute.engine_options.get("tokenizer")) is not None:
        absolute.engine_options["tokenizer"] = _absolute(os.fspath(tokenizer))
    return absolute


def _absolute(name: str) -> str:
    path = os.path.expanduser(name)
    return os.path.abspath(path) if os.path.isdir(path) else name
