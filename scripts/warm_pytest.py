"""Run pytest many times, each time in a fork of this process, which has imported the large packages already.

    python warm_pytest.py torch transformers

For each line of its input, JSON of a file for the output and of pytest's arguments, it prints two lines: the id of the
fork, which leads a session of its own, and its exit code, after which no process of the session is left.
"""

import importlib
import json
import os
import signal
import sys
from contextlib import suppress


def import_all(names: list[str]) -> None:
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)
        # Triton must know when it is imported, see tests/conftest.py.
        if name == "torch" and not _has_gpu():
            os.environ["TRITON_INTERPRET"] = "1"


def _has_gpu() -> bool:
    """Asked in a fork: after CUDA has begun in a process, its forks cannot use it."""
    pid = os.fork()
    if pid == 0:
        import torch

        os._exit(int(torch.cuda.is_available()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def become_pytest(output: str, arguments: list[str]) -> None:
    os.setsid()
    print(os.getpid(), flush=True)
    to = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(to, 1)
    os.dup2(to, 2)
    import pytest

    sys.argv = ["pytest", *arguments]
    sys.exit(pytest.main(arguments))


def main() -> None:
    import_all(sys.argv[1:])
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become_pytest(*json.loads(line))
        # Processes that tests have started may outlive them. While the fork is a zombie, its id is not used again.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
