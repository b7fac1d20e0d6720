"""Workers: the processes of ranks 1..N-1, seen from rank 0: started, watched, and ended."""

import multiprocessing
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.ranks.call_channel import CallWriter
from nanovllm.engine.ranks.process_group import abort_group, join_group, open_store, remove_store, share_memory
from nanovllm.engine.ranks.ranks import ENDED, Ranks, device_of_rank
from nanovllm.engine.ranks.worker import (
    BLAME_SECONDS,
    HEARTBEAT_SECONDS,
    WorkerSeat,
    check_may_spawn,
    main_guard,
    worker_main,
)
from nanovllm.layers.parallel.tensor_parallel import CollectiveError, TensorParallel
from nanovllm.utils.interrupts import InterruptPipe, held_interrupt
from nanovllm.utils.python_process import processes_with_safe_path
from nanovllm.utils.threads import threads_per_rank

EXIT_SECONDS = 10.0  # for workers that have been told to exit; half as long for those that have been killed
_POLL_SECONDS = 0.1
_STORE_BYTES = 2**20  # far more than the ranks write into the store
# Some programs that start others pass Ctrl-C on, although the terminal has sent it to them as well.
_SAME_INTERRUPT_SECONDS = 0.5


class WorkerError(RuntimeError):
    """A worker process died or failed; the message says which rank and how. The engine has ended: make a new one."""


class Workers(Ranks):
    """The processes of ranks 1..N-1, which `meet` starts.

    A thread sleeps until one of them reports or ends. The first that fails or ends unasked, or shows no sign of life
    for watchdog_timeout, makes the `failure`; the thread then ends the others and aborts the collectives, so that rank
    0 does not wait for ever. Repeated Ctrl-C does this too.

    Attributes:
        failure: once a worker has died or failed, which one, and how.
        is_interrupted: whether Ctrl-C has ended them, and nobody has been told.
    """

    def __init__(self, config: Config):
        """Raises RuntimeError if this process may start none."""
        check_may_spawn()
        super().__init__()
        self.failure: str | None = None
        self.is_interrupted = False
        self._config, self._device, self._size = config, device_of_rank(config, 0), config.tensor_parallel_size
        self._owner = os.getpid()
        self._condition = threading.Condition()
        self._stages: dict[int, set[str]] = {rank: set() for rank in range(1, self._size)}
        self._processes: dict[int, BaseProcess] = {}
        self._reports: dict[int, Connection] = {}
        self._heartbeats: dict[int, Connection] = {}
        self._timeout = config.watchdog_timeout
        self._interrupts_left = 0  # that rank 0 waits on; 0 while it does not wait for the others
        self._last_interrupt = 0.0
        self._group: TensorParallel | None = None
        self.has_ended = False
        self._channel: CallWriter | None = None
        self._interrupts = InterruptPipe()
        self._store_folder = os.path.join(_store_parent(), f"nanovllm-{secrets.token_hex(8)}")
        self._watcher = threading.Thread(target=self._watch, name="nanovllm-workers", daemon=True)

    def _start(self, run: Callable[..., object]) -> None:
        """Start them, and wait until they have the segment."""
        with processes_with_safe_path():  # Shared memory may start multiprocessing's resource tracker.
            self._channel = channel = CallWriter(self._size - 1, self.check)
        with held_interrupt(), processes_with_safe_path():
            self._start_processes(channel, run)
        self.processes, self.events = list(self._processes.values()), channel.events
        self._watcher.start()
        self._wait_for("attached")
        channel.unlink()

    def _start_processes(self, channel: CallWriter, run: Callable[..., object]) -> None:
        config = self._config
        context = multiprocessing.get_context("spawn")
        # Plain fields for hf_config: to unpickle its class a worker would import transformers, which takes long.
        config, hf_config = copy(config), config.hf_config
        config.hf_config = SimpleNamespace(**vars(hf_config) | {"model_type": hf_config.model_type})
        # Ctrl-C reaches every process of a terminal. Blocked here, it stays blocked in what is started from here.
        blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for rank in range(1, self._size):
                self._reports[rank], reports = context.Pipe(duplex=False)
                self._heartbeats[rank], heartbeats = context.Pipe(duplex=False)
                seat = WorkerSeat(
                    run=run,
                    config=config,
                    rank=rank,
                    num_threads=threads_per_rank(self._size),
                    store_folder=self._store_folder,
                    segment=channel.name,
                    event=channel.worker_event(rank - 1),
                    reports=reports,
                    heartbeats=heartbeats,
                )
                process = context.Process(target=worker_main, args=(seat,), name=f"nanovllm-rank-{rank}", daemon=True)
                process.start()
                self._processes[rank] = process
                reports.close()
                heartbeats.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
            channel.close_worker_events()

    # -- what rank 0 does with them --------------------------------------------------------------------------------

    def meet(self, run: Callable[..., object]) -> TensorParallel:
        """Start them. Rank 0's place among all ranks, once all of them are connected. Raises WorkerError."""
        self._start(run)
        store = open_store(self._store_folder)
        outcome: list[TensorParallel | BaseException] = []

        def join() -> None:
            try:
                self._group = join_group(store, 0, self._size, self._device)
                outcome.append(share_memory(self._group, self._config, self._device))
            except BaseException as error:
                outcome.append(error)

        # In a thread, because it cannot be interrupted, and would wait a minute for a worker that dies now.
        thread = threading.Thread(target=join, name="nanovllm-join", daemon=True)
        thread.start()
        while thread.is_alive():
            self.check()
            thread.join(0.05)
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        self._group = outcome[0]
        self.check()
        return self._group

    def wait_ready(self) -> None:
        """Wait until all of them wait for calls. Raises WorkerError."""
        self._wait_for("ready")
        remove_store(self._store_folder)

    def _wait_for(self, stage: str) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self.failure or all(stage in seen for seen in self._stages.values()))
        self.check()

    @contextmanager
    def interruptible(self, times: int) -> Iterator[None]:
        """A block in which rank 0 waits for the others. Ctrl-C ends them when pressed `times` times, and with
        them the wait, wherever the main thread hangs."""
        self._interrupts_left = times
        with self._interrupts.listening():
            try:
                yield
            finally:
                self._interrupts_left = 0

    def check(self) -> None:
        """Raises WorkerError if one of them has died or failed."""
        if self.failure is not None:
            raise WorkerError(self.failure)

    @property
    def shm(self) -> SharedMemory | None:  # type: ignore[override]
        return None if self._channel is None else self._channel.segment

    @contextmanager
    def leaving(self) -> Iterator[None]:
        with held_interrupt(), self.interruptible(1):
            yield

    @contextmanager
    def calling(self, give_back: Callable[[], None]) -> Iterator[None]:
        """With several ranks an exception ends the engine, because the ranks are out of step then. It is a WorkerError
        if a worker caused it. Ctrl-C waits until rank 0 has done its part. A second Ctrl-C does not, and ends the
        engine."""
        try:
            with held_interrupt(), self.interruptible(2):
                yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.end_after(error, give_back)

    def write(self, message: bytes) -> None:
        """A call, to all of them. Raises WorkerError or CollectiveError."""
        self.check()
        if self.has_ended or self._channel is None:
            raise RuntimeError(ENDED)
        try:
            self._channel.write(message)
        except (EOFError, OSError) as error:
            raise CollectiveError(f"a worker does not read its calls any more: {error!r}") from error

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for an exception of rank 0's: the failure of the worker that caused it, or itself."""
        if isinstance(error, CollectiveError):
            with self._condition:
                self._condition.wait_for(lambda: self.failure, BLAME_SECONDS + 1)
        if self.is_interrupted:
            self.is_interrupted = False  # so that the next call raises WorkerError
            return KeyboardInterrupt(self.failure)
        return WorkerError(self.failure) if isinstance(error, CollectiveError) and self.failure else error

    def end(self, farewell: bytes | None = None) -> None:
        """End them, and give back all that they shared with rank 0. Harmless when called again.

        farewell: a call after which they end by themselves; without it, or after a failure, they are killed. So are
            those that do not answer it.
        """
        if self.has_ended or os.getpid() != self._owner:  # A fork of the caller's owns none of it.
            return
        with held_interrupt():
            self.has_ended = True
            deadline = time.monotonic()
            is_asked = self.failure is None and farewell is not None
            if is_asked and farewell is not None:
                deadline += EXIT_SECONDS
                try:
                    if self._channel is not None:
                        self._channel.write(farewell, deadline)
                except (EOFError, OSError, WorkerError):
                    is_asked, deadline = False, time.monotonic()
            running = [process.sentinel for process in self._processes.values()]
            while running and time.monotonic() < deadline and not self._interrupts.receive():
                ended = wait(running, _POLL_SECONDS)
                running = [sentinel for sentinel in running if sentinel not in ended]
            for process in self._processes.values():
                process.kill()  # They hold nothing that would want an orderly end.
            for process in self._processes.values():
                process.join(EXIT_SECONDS / 2)
            if self._watcher.is_alive() and threading.current_thread() is not self._watcher:
                self._watcher.join(EXIT_SECONDS / 2)  # All that it waits for has ended.
            if not is_asked and self._group is not None:
                abort_group(self._group)
            if self._channel is not None:
                self._channel.close()
            remove_store(self._store_folder)
            for connection in (*self._reports.values(), *self._heartbeats.values()):
                connection.close()
            self._interrupts.close()
            self._group = None

    # -- the thread that watches them ------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Watch them until one fails, or they are to end."""
        ranks = {connection: rank for rank, connection in self._reports.items()}
        beating = {connection: rank for rank, connection in self._heartbeats.items()}
        silence = dict.fromkeys(self._reports, 0.0)  # rank -> seconds since its last sign of life
        before = time.monotonic()
        while True:
            failure = None
            ready: list[Any] = wait([*ranks, *beating, self._interrupts.reader], HEARTBEAT_SECONDS)
            if self.has_ended:  # `end` itself listens for Ctrl-C then.
                return
            # At most two beats at once: the time in which this process itself was stopped, as by Ctrl-Z, counts little.
            passed = min(time.monotonic() - before, 2 * HEARTBEAT_SECONDS)
            before = time.monotonic()
            silence = {rank: seconds + passed for rank, seconds in silence.items()}
            for connection in ready:
                if connection in ranks:
                    failure = failure or self._read_report(ranks[connection])
                elif connection in beating:
                    silence[beating[connection]] = 0.0
                    if not _read_heartbeats(connection):
                        del beating[connection]  # Its process ends, which shows in its reports.
                elif self._interrupts.receive():
                    failure = failure or self._read_interrupt()
            if self._timeout is not None:
                silent = [rank for rank, seconds in silence.items() if seconds > self._timeout]
                failure = failure or (self._describe_silence(silent[0]) if silent else None)
            if failure is not None and not self.has_ended:
                self._fail(failure)
                return

    def _read_interrupt(self) -> str | None:
        """What to say if this Ctrl-C ends the wait for the others."""
        now = time.monotonic()
        is_another = now - self._last_interrupt > _SAME_INTERRUPT_SECONDS
        self._last_interrupt = now
        if not is_another or self._interrupts_left == 0:
            return None
        self._interrupts_left -= 1
        if self._interrupts_left:
            return None
        self.is_interrupted = True
        return "Ctrl-C has ended the engine while it waited for its other ranks"

    def _describe_silence(self, rank: int) -> str:
        return (
            f"{self._name(rank)} has not answered for {self._timeout:g} s, which is watchdog_timeout: its process is "
            "stopped, or gets no time to run"
        )

    def _read_report(self, rank: int) -> str | None:
        """What to say if the worker has failed or ended."""
        try:
            stage, text = self._reports[rank].recv()
        except (EOFError, OSError):
            return self._describe_end(rank)
        if stage == "failed":
            return f"{self._name(rank)} failed:\n\n{text}"
        with self._condition:
            self._stages[rank].add(stage)
            self._condition.notify_all()
        return None

    def _describe_end(self, rank: int) -> str:
        self._processes[rank].join(1.0)  # Its end of a pipe closes a moment before it can be asked how it ended.
        code = self._processes[rank].exitcode
        if code is not None and code < 0:
            try:
                reason = signal.Signals(-code).name
            except ValueError:
                reason = f"signal {-code}"
            return f"{self._name(rank)} was killed by {reason}"
        text = f"{self._name(rank)} ended with exit code {code}"
        if "attached" not in self._stages[rank]:
            guard = main_guard("tensor_parallel_size")
            text += f" while it started. Its own output says why; if it names __main__: {guard}"
        return text

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self._size} (process {self._processes[rank].pid})"

    def _fail(self, text: str) -> None:
        """End all, and make `failure` known."""
        with self._condition:
            self.failure = text
            self._condition.notify_all()
        for process in self._processes.values():
            process.kill()
        if self._group is not None:
            abort_group(self._group)


def _store_parent() -> str:
    """Where the store's folder goes: into memory, if that has room."""
    memory = "/dev/shm"
    if os.access(memory, os.W_OK):
        room = os.statvfs(memory)
        if room.f_bavail * room.f_frsize >= _STORE_BYTES:
            return memory
    return tempfile.gettempdir()


def _read_heartbeats(connection: Connection) -> bool:
    """Read all that have arrived. False if the other end is closed."""
    try:
        while connection.poll():
            connection.recv_bytes()
    except (EOFError, OSError):
        return False
    return True
