"""Replicas: the processes of all engines, seen from the caller: started, watched, and ended."""

import builtins
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.ranks.ranks import device_of_rank
from nanovllm.engine.ranks.worker import check_may_spawn, main_guard
from nanovllm.engine.ranks.workers import WorkerError
from nanovllm.engine.replicas import messages
from nanovllm.engine.replicas.messages import PackedTensor, pack, unpack
from nanovllm.engine.replicas.replica import ALIVE_SECONDS, ReplicaSeat, replica_main
from nanovllm.engine.start.model_check import untie_other_head
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.model_size import meta_model
from nanovllm.utils.array_messages import Packed, receive, send
from nanovllm.utils.interrupts import held_interrupt
from nanovllm.utils.python_process import processes_with_safe_path
from nanovllm.utils.threads import threads_per_rank

EXIT_SECONDS = 10.0  # for replicas that have been told to exit; half as long for those that have been killed
OPTION = "data_parallel_size"
_CHECK_SECONDS = 0.2
_PIECE_BYTES = 2**28  # of weights that are sent at once

Message = tuple[int, bytes, Any]  # the replica, the kind, the content


class Replicas:
    """The processes of an engine's replicas, each a child of this one. In their place a ModelRunner is what an engine
    with one has, so the names are the same where the meaning is.

    A thread for each replica sends, and one more receives and watches, so the caller never waits for a step. The first
    replica that fails or ends unasked, or shows no sign of life for watchdog_timeout, makes the `failure`: the others
    are ended then.

    Attributes:
        processes, connections: of each replica.
        failure: once a replica has died or failed, which one, and how.
        device: the first one's.
        device_name: "2 x NVIDIA H100", of all GPUs.
        mixed_step_rows: of each replica.
    """

    def __init__(self, config: Config, options: Mapping[str, Any], run: Callable[[ReplicaSeat], None] = replica_main):
        """Start them. options: as the caller has given them. Raises RuntimeError if this process may start none."""
        check_may_spawn(OPTION)
        self.failure: str | None = None
        self.device = device_of_rank(config, 0)
        self.device_name, self.mixed_step_rows = "", 0
        self.processes: list[BaseProcess] = []
        self.connections: list[Connection] = []
        self._config, self._size, self._owner = config, config.data_parallel_size, os.getpid()
        self._error: Exception | None = None  # the failure, if it is to be raised as another type
        self._ready: dict[int, Any] = {}
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._unread: list[Message] = []
        self._outboxes: list[queue.SimpleQueue[Packed | None]] = []
        self._senders: list[threading.Thread] = []
        self._call_number = self._sleep_level = 0
        self._has_ended = False
        self._waker, self._wakes = multiprocessing.Pipe(duplex=False)
        self._watcher = threading.Thread(target=self._watch, name="nanovllm-replicas", daemon=True)
        try:
            with held_interrupt(), processes_with_safe_path():
                self._start(options, run)
            self._watcher.start()
        except BaseException:
            self.exit()
            raise

    def _start(self, options: Mapping[str, Any], run: Callable[[ReplicaSeat], None]) -> None:
        config, context = self._config, multiprocessing.get_context("spawn")
        own = dict(options) | {OPTION: 1, "use_tqdm": False, "tokenizer": config.tokenizer}
        own.pop("revision", None)  # The model has been downloaded by now.
        # Ctrl-C reaches every process of a terminal. Blocked here, it stays blocked in what is started from here.
        blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for i in range(self._size):
                gpu = None
                if config.device_index is not None:
                    gpu = config.device_index + i * config.tensor_parallel_size
                own["device"] = "cpu" if gpu is None else f"cuda:{gpu}"
                ours, theirs = context.Pipe()
                seat = ReplicaSeat(str(config.model), dict(own), gpu, threads_per_rank(self._size), theirs)
                process = context.Process(target=run, args=(seat,), name=f"nanovllm-replica-{i}", daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self.connections.append(ours)
                self._outboxes.append(queue.SimpleQueue())
                sender = threading.Thread(target=_send_all, args=(self._outboxes[i], ours), daemon=True)
                sender.name = "nanovllm-replica-sender"
                sender.start()
                self._senders.append(sender)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)

    def wait_ready(self) -> int:
        """Wait until all engines have started. Returns the blocks of the smallest KV cache. Raises what has kept one
        from starting, naming it, or WorkerError."""
        while len(self._ready) < self._size:
            self.check()
            self._unread += self.receive(_CHECK_SECONDS)
        facts = [self._ready[i] for i in range(self._size)]
        names = [name for _, name, _ in facts]
        num = self._size * self._config.tensor_parallel_size
        name = names[0].partition(" x ")[2] or names[0]
        self.device_name, self.mixed_step_rows = f"{num} x {name}", facts[0][2]
        return min(num_blocks for num_blocks, _, _ in facts)

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, i: int, kind: bytes, content: object = None) -> None:
        self._outboxes[i].put(pack(kind, content))

    def receive(self, timeout: float) -> list[Message]:
        """What has arrived, in order. Waits for something, up to so many seconds. Raises WorkerError."""
        found, self._unread = self._unread, []
        with suppress(queue.Empty):
            if not found:
                found = [self._messages.get(timeout=timeout)]  # type: ignore[list-item]
            while True:
                found.append(self._messages.get_nowait())  # type: ignore[arg-type]
        self.check()
        return [each for each in found if each is not None]

    def check(self) -> None:
        """Raises WorkerError if one of them has died or failed."""
        if self._error is not None:
            raise self._error
        if self.failure is not None:
            raise WorkerError(self.failure)

    # -- calls to all of them ------------------------------------------------------------------------------------------

    @cached_property
    def model(self) -> DecoderForCausalLM:
        """Its names and shapes, without memory: what weights are checked against."""
        config = self._config
        if config.load_format != "dummy" and config.hf_config.tie_word_embeddings:
            untie_other_head(config)  # as each replica has done
        return meta_model(config)

    def call(self, name: str, *args: Any, for_workers: object = None) -> None:
        """Run a method of `Replica` on all of them, and wait for it. Ctrl-C waits, too. Raises what one of them raises,
        naming it. for_workers: as a ModelRunner's, and of no use here."""
        with held_interrupt():
            if name == "update_weights":
                for piece in _pieces(args[0]):
                    self._ask_all(name, piece)
                return
            if name == "sleep":
                self._sleep_level = args[0]
            errors = self._answers(name, *args)
            if errors and name == "wake_up":  # All sleep, or none.
                self._answers("sleep", self._sleep_level, only=set(range(self._size)) - set(errors))
            self._raise_first(errors)

    def _ask_all(self, name: str, *args: Any) -> None:
        self._raise_first(self._answers(name, *args))

    def _answers(self, name: str, *args: Any, only: set[int] | None = None) -> dict[int, tuple[str, str]]:
        """The errors of those where the call has failed: (type, message)."""
        self._call_number += 1
        waiting = set(range(self._size)) if only is None else only
        message = pack(messages.CALL, (self._call_number, name, args))
        for i in waiting:
            self._outboxes[i].put(message)
        errors, others = {}, []
        while waiting:
            for i, kind, content in self.receive(_CHECK_SECONDS):
                if kind != messages.ANSWER:
                    others.append((i, kind, content))
                elif content[0] == self._call_number:
                    waiting = waiting - {i}
                    if content[1] is not None:
                        errors[i] = content[1:]
        self._unread += others
        return errors

    def _raise_first(self, errors: dict[int, tuple[str, str]]) -> None:
        for i, (kind, text) in sorted(errors.items()):
            raise getattr(builtins, kind)(f"{self._name(i)}: {text}")

    # -- the end -------------------------------------------------------------------------------------------------------

    def exit(self) -> None:
        """End them, and give back all that this process has of them. Harmless when called again."""
        if self._has_ended or os.getpid() != self._owner:  # A fork of the caller's owns none of it.
            return
        with held_interrupt():
            self._has_ended = True
            is_asked = self.failure is None and len(self._ready) == self._size
            deadline = time.monotonic() + (EXIT_SECONDS if is_asked else 0.0)
            if is_asked:
                for i in range(self._size):
                    self.send(i, messages.EXIT)
            running = [process.sentinel for process in self.processes]
            while running and (left := deadline - time.monotonic()) > 0:
                ended = wait(running, left)
                running = [sentinel for sentinel in running if sentinel not in ended]
            for process in self.processes:
                process.kill()
            for process in self.processes:
                process.join(EXIT_SECONDS / 2)
            for outbox in self._outboxes:
                outbox.put(None)
            self._wakes.send_bytes(b"")
            # Before the connections are closed: a file opened next may get the number of one that is still written to.
            for sender in self._senders:
                sender.join(EXIT_SECONDS / 2)
            if self._watcher.is_alive() and threading.current_thread() is not self._watcher:
                self._watcher.join(EXIT_SECONDS / 2)
            for connection in (*self.connections, self._waker, self._wakes):
                connection.close()
            self._unread = []

    # -- the thread that watches them ------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Receive until one fails, or they are to end."""
        numbers = {connection: i for i, connection in enumerate(self.connections)}
        # Seconds since a replica's last sign of life. Its first one comes when it has imported this package.
        silence: dict[int, float] = {}
        before, timeout = time.monotonic(), self._config.watchdog_timeout
        while True:
            failure = None
            ready: list[Any] = wait([*numbers, self._waker], ALIVE_SECONDS)
            if self._has_ended:
                return
            # At most two beats at once: the time in which this process itself was stopped, as by Ctrl-Z, counts little.
            passed = min(time.monotonic() - before, 2 * ALIVE_SECONDS)
            before = time.monotonic()
            silence = {i: seconds + passed for i, seconds in silence.items()}
            for connection in ready:
                if connection is not self._waker:
                    silence[numbers[connection]] = 0.0
                    failure = failure or self._read(numbers[connection])
            if timeout is not None:
                silent = [i for i, seconds in silence.items() if seconds > timeout]
                failure = failure or (self._describe_silence(silent[0]) if silent else None)
            if failure is not None and not self._has_ended:
                self.failure = failure
                self._messages.put(None)  # Wakes who waits.
                for process in self.processes:
                    process.kill()
                return

    def _read(self, i: int) -> str | None:
        """Read a message of a replica. What to say if it has failed or ended."""
        try:
            kind, content = unpack(receive(self.connections[i]))
        except (EOFError, OSError):
            return self._describe_end(i)
        if kind == messages.FAILED:
            return self._describe_failure(i, *content)
        if kind == messages.READY:
            self._ready[i] = content
        elif kind != messages.ALIVE:
            self._messages.put((i, kind, content))
        return None

    def _describe_failure(self, i: int, stage: str, kind: str | None, message: str, trace: str) -> str:
        if stage == "start":
            text = f"{OPTION}={self._size}: {self._name(i)} cannot start: "
            if kind is not None:
                self._error = getattr(builtins, kind)(text + message)
            return f"{text}{trace if kind is None else message}"
        return f"{self._name(i)} failed:\n\n{trace}"

    def _describe_silence(self, i: int) -> str:
        seconds = self._config.watchdog_timeout
        return (
            f"{self._name(i)} has not answered for {seconds:g} s, which is watchdog_timeout: its process is stopped, "
            "or gets no time to run"
        )

    def _describe_end(self, i: int) -> str:
        self.processes[i].join(1.0)  # Its end of a connection closes a moment before it can be asked how it ended.
        code = self.processes[i].exitcode
        if code is not None and code < 0:
            names = {each.value: each.name for each in signal.Signals}
            return f"{self._name(i)} was killed by {names.get(-code, f'signal {-code}')}"
        text = f"{self._name(i)} ended with exit code {code}"
        if i not in self._ready:
            text += f" while it started. Its own output says why; if it names __main__: {main_guard(OPTION)}"
        return text

    def _name(self, i: int) -> str:
        """As "replica 1 of 2 (cuda:1, process 123)"."""
        first, size = self._config.device_index, self._config.tensor_parallel_size
        gpus = "" if first is None else ",".join(f"cuda:{first + i * size + rank}" for rank in range(size)) + ", "
        return f"replica {i} of {self._size} ({gpus}process {self.processes[i].pid})"


def _send_all(outbox: "queue.SimpleQueue[Packed | None]", connection: Connection) -> None:
    with suppress(OSError):  # The replica has gone, which the watcher sees.
        while (message := outbox.get()) is not None:
            send(connection, message)


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tensors as bytes, a few at a time, so that they need no room for all of them in the host's memory again."""
    piece, size = {}, 0
    for name, tensor in tensors.items():
        piece[name] = PackedTensor.of(tensor)
        size += piece[name].content.nbytes
        if size >= _PIECE_BYTES:
            yield piece
            piece, size = {}, 0
    if piece:
        yield piece
