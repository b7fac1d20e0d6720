"""Processes that compile kernels side by side, into a package's cache on the disk.

A kernel of the packages written in CuTe takes seconds to compile, and holds the interpreter's lock: threads would take
turns. So several processes launch each kernel once, and the process that needs the kernels finds them on the disk.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from threading import Thread
from typing import Any

from nanovllm.utils.light_imports import import_without_torch_compile

_MAX_PROCESSES = 8
_PATIENCE_SECONDS = 600.0


class CompileProcesses:
    """Use as a context manager: no process outlives the block.

    A task that fails, or whose process dies, is left to the kernel's first launch, which reports the error.

    Attributes:
        num_tasks: tasks submitted so far.
    """

    def __init__(self, modules: list[str]):
        """Start them. modules: what the tasks need; imported at once, before there is a task."""
        self.num_tasks = 0
        self._tasks: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        command = [sys.executable, "-c", f"from {__name__} import work; work()", *modules]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # A session of their own, or Ctrl-C would reach them. What they print is not the caller's.
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with suppress(OSError):
            for _ in range(max(1, min(_MAX_PROCESSES, (os.cpu_count() or 1) // 2))):
                self._processes.append(subprocess.Popen(command, env=env, start_new_session=True, **streams))
        self._threads = [Thread(target=self._serve, args=(process,), daemon=True) for process in self._processes]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "CompileProcesses":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the assembler that it may have started
        for _ in self._threads:
            self._tasks.put(None)
        for process, thread in zip(self._processes, self._threads, strict=True):
            thread.join()
            process.wait()
            process.stdout.close()

    def submit(self, function: Callable[..., object], *args: Any) -> None:
        """Have one of them call a function of a module, with arguments that can be pickled."""
        self.num_tasks += 1
        self._tasks.put((function, args))

    def wait(self, tell: Callable[[int, int], None]) -> None:
        """Return when all tasks have ended, no process is left, or ten minutes have passed. tell: called with how many
        tasks have ended, and how many there are."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (num_ended := self._ended.qsize()) < self.num_tasks and time.monotonic() < deadline:
            if not any(thread.is_alive() for thread in self._threads):
                return
            tell(num_ended, self.num_tasks)
            time.sleep(0.01)

    def _serve(self, process: subprocess.Popen[bytes]) -> None:
        """Give tasks to one process, one after the other."""
        with suppress(OSError), process.stdin:
            while (task := self._tasks.get()) is not None:
                try:
                    pickle.dump(task, process.stdin)
                    process.stdin.flush()
                    if not process.stdout.readline():
                        return  # It has died.
                finally:
                    self._ended.put(None)


def work() -> None:
    """What such a process does: import the modules of its command line, then answer each task with a line."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # What the packages print is no answer.
    for module in sys.argv[1:]:
        with suppress(Exception):
            import_without_torch_compile(partial(import_module, module))
    with suppress(EOFError):
        while True:
            function, args = pickle.load(sys.stdin.buffer)
            with suppress(Exception):
                function(*args)
            answers.write(b"\n")
