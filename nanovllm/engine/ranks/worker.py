"""A worker process: one of the ranks 1..N-1, from its start to its end."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from nanovllm.config import Config
from nanovllm.engine.ranks.call_channel import CallReader
from nanovllm.engine.ranks.process_group import join_group, open_store, remove_store, share_memory
from nanovllm.engine.ranks.ranks import Ranks, device_of_rank
from nanovllm.layers.parallel.tensor_parallel import CollectiveError, TensorParallel

PARENT_CHECK_SECONDS = 1.0
HEARTBEAT_SECONDS = 1.0
BLAME_SECONDS = 2.0  # How long a failed collective waits for the failure that caused it to become known.


class WorkerSeat(NamedTuple):
    """All that a worker process is given.

    run: a ModelRunner's class, whose instance does what rank 0 asks for.
    reports: where it tells rank 0 its stage and a text: ("attached", "") to the segment, ("ready", "") for calls, or
        ("failed", the traceback).
    heartbeats: where a thread of its own sends a byte every HEARTBEAT_SECONDS, for as long as the process runs.
    """

    run: Callable[[Config, int, Ranks], Any]
    config: Config
    rank: int
    num_threads: int
    store_folder: str
    segment: str
    event: Connection
    reports: Connection
    heartbeats: Connection


class WorkerSide(Ranks):
    """A worker's end of the channel, and its way to the others."""

    def __init__(self, seat: WorkerSeat):
        super().__init__()
        self._seat = seat
        self._calls = CallReader(seat.segment, seat.event)
        self.shm = self._calls.segment

    def meet(self, run: Callable[..., object]) -> TensorParallel:
        config, device = self._seat.config, device_of_rank(self._seat.config, self._seat.rank)
        tp = join_group(open_store(self._seat.store_folder), self._seat.rank, config.tensor_parallel_size, device)
        return share_memory(tp, config, device)

    def read(self) -> bytes:
        return self._calls.read()


def main_guard(option: str) -> str:
    """What a script must do that starts processes, because of an option."""
    return (
        f"{option} > 1 starts processes, each of which imports the script that it is called from: what the "
        'script does belongs under `if __name__ == "__main__":`'
    )


def check_may_spawn(option: str = "tensor_parallel_size") -> None:
    """Raises RuntimeError, naming the option that needs them, if this process may start no others."""
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):  # While a spawned process imports its parent's script.
        raise RuntimeError(main_guard(option))
    if process.daemon:
        raise RuntimeError(f"{option} > 1 starts processes, which a daemonic process may not")
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script is not None and getattr(main, "__spec__", None) is None and not os.path.exists(script):
        raise RuntimeError(
            f"{option} > 1 starts processes, each of which imports the script that it is called from, and "
            f"{script} is no file: save the script as one"
        )


def worker_main(seat: WorkerSeat) -> None:
    """Build this rank's ModelRunner beside the others and run what rank 0 calls, until it calls exit.

    Says nothing to the terminal: rank 0 answers Ctrl-C and reports failures.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name, target, argument in (
        ("nanovllm-parent", _end_with_parent, seat.store_folder),
        ("nanovllm-heartbeat", _send_heartbeats, seat.heartbeats),
    ):
        threading.Thread(target=target, args=(argument,), name=name, daemon=True).start()
    try:
        side = WorkerSide(seat)
        seat.reports.send(("attached", ""))
        if seat.config.device == "cpu":
            torch.set_num_threads(seat.num_threads)
        else:
            torch.cuda.set_device(device_of_rank(seat.config, seat.rank))
        runner = seat.run(seat.config, seat.rank, side)
        gc.freeze()  # These objects stay, and all ranks would wait while a collection looks at them.
        seat.reports.send(("ready", ""))
        runner.loop()
    except BaseException as error:
        if isinstance(error, CollectiveError | EOFError):  # Another rank has gone: rank 0 should hear of that first.
            time.sleep(BLAME_SECONDS)
        with suppress(OSError):  # Rank 0 may have gone as well.
            seat.reports.send(("failed", "".join(traceback.format_exception(error))))
        with suppress(OSError):  # Rank 0 removes it, unless it was killed: that may be why this rank failed.
            remove_store(seat.store_folder)
        os._exit(1)  # An orderly end could wait for ranks that are gone.
    os._exit(0)  # Nothing is left to give back, and taking torch down takes half a second.


def _send_heartbeats(heartbeats: Connection) -> None:
    """Show rank 0 that this process runs, however long a step takes."""
    with suppress(OSError):  # Rank 0 has gone.
        while True:
            heartbeats.send_bytes(b"1")
            time.sleep(HEARTBEAT_SECONDS)


def _end_with_parent(store_folder: str) -> None:
    """End this process within seconds of its parent, whatever it is waiting for, and remove the folder that a killed
    parent has left."""
    parent = multiprocessing.parent_process()
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(PARENT_CHECK_SECONDS)
    remove_store(store_folder)
    os._exit(1)
