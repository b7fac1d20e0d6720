"""Processes of further ranks that start in a tenth of a second: forks of a server that has imported torch and the
engine, which takes five. A plugin of pytest.

Programs that tests run start theirs as a user's program does (tests/tensor_parallel/test_tp_processes.py).
"""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing import context, forkserver
from typing import Any
from unittest import mock

import pytest

from nanovllm.engine.ranks import workers


class _Process(context.ForkServerProcess):
    """With the environment of its parent, while the server has that of its own start."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def start(self) -> None:
        _start_server()
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        # Its parent by number is the server.
        with mock.patch.object(os, "getppid", _parent_id):
            super().run()


def _parent_id() -> int:
    """0 after the parent's end."""
    parent = multiprocessing.parent_process()
    return parent.pid if parent is not None and parent.is_alive() else 0


def _start_server() -> None:
    # To import what it shall, it needs the paths of this process, which it is given only later.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path)):
        forkserver.ensure_running()


class _Context(context.ForkServerContext):
    Process = _Process


_get_context = multiprocessing.get_context


@pytest.fixture(scope="session", autouse=True)
def quick_ranks() -> Iterator[None]:
    if not hasattr(os, "fork"):
        yield
        return
    multiprocessing.set_forkserver_preload(["quick_ranks", "nanovllm.engine.model_runner"])
    started = _Context()
    with mock.patch.object(workers.multiprocessing, "get_context", return_value=started):
        yield


@pytest.fixture
def spawned(quick_ranks) -> Iterator[None]:
    """Processes start as in a user's program, and are children of this one."""
    with mock.patch.object(multiprocessing, "get_context", _get_context):
        yield
