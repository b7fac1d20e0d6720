"""A replica: a process with an engine of its own, from its start to its end."""

import gc
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.prefix_cache import reset_prefix_cache
from nanovllm.engine.replicas import messages
from nanovllm.engine.replicas.gpu_cores import use_cores_of_gpu
from nanovllm.engine.replicas.messages import News, PackedTensor, Work, pack, unpack
from nanovllm.engine.sequence import Sequence
from nanovllm.models.loader import TensorFacts
from nanovllm.utils.array_messages import Packed, receive, send

ALIVE_SECONDS = 1.0
_PARENT_CHECK_SECONDS = 1.0
# News that nobody waits for is told this often.
_REPORT_SECONDS = 0.05


class ReplicaSeat(NamedTuple):
    """All that a replica's process is given.

    Attributes:
        model, options: its engine's.
        gpu: its first one; None on a CPU.
        num_threads: of torch, on a CPU.
        connection: to the caller.
    """

    model: str
    options: dict[str, Any]
    gpu: int | None
    num_threads: int
    connection: Connection


def replica_main(seat: ReplicaSeat) -> None:
    """Start the engine and answer the caller, until it says exit or has gone.

    Says nothing to the terminal: the caller's process answers Ctrl-C and reports failures.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Daemonic, so that it ends with the caller whatever happens. But it starts the other ranks of its engine, which
    # end with it by themselves.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    link = _Link(seat.connection)
    for name, target in (("nanovllm-parent", _end_with_parent), ("nanovllm-alive", link.keep_telling)):
        threading.Thread(target=target, name=name, daemon=True).start()
    stage = "start"
    try:
        if seat.gpu is None:
            torch.set_num_threads(seat.num_threads)
        else:
            use_cores_of_gpu(seat.gpu)
        engine = LLMEngine(seat.model, **seat.options)
        gc.freeze()  # These objects stay, and requests would wait while a collection looks at them.
        runner = engine.model_runner
        link.send(messages.READY, (engine.config.num_kvcache_blocks, runner.device_name, runner.mixed_step_rows))
        stage = "work"
        Replica(engine, link.send, link.inbox).run()
        link.end()
        engine.exit()
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        with suppress(OSError):  # The caller may have gone.
            link.send(messages.FAILED, (stage, _builtin_name(error), str(error), text))
        os._exit(1)
    os._exit(0)  # Nothing is left to give back, and taking torch down takes half a second.


class Replica:
    """Works on what the caller sends, and tells it what comes of it.

    Attributes:
        engine: an LLMEngine, or what a test takes for one.
    """

    def __init__(
        self,
        engine: Any,
        send: Callable[[bytes, object], None],
        inbox: "queue.SimpleQueue[Packed]",
    ):
        """inbox: messages of the caller."""
        self.engine = engine
        self._send, self._inbox = send, inbox
        self._seqs: dict[int, Sequence] = {}  # the caller's id -> ours
        self._ids: dict[Sequence, int] = {}
        self._movable: set[Sequence] = set()
        self._read_stepwise: set[Sequence] = set()
        self._num_received = 0
        self._has_exited = False
        self._last_report = 0.0
        self._was_waiting = False

    def run(self) -> None:
        """Until the caller says exit."""
        while True:
            self.read()
            if self._has_exited:
                return
            if not self.engine.is_finished():
                self.step()

    def read(self) -> None:
        """Do what the caller has asked for, and wait for it if there is nothing else to do."""
        with suppress(queue.Empty):
            while not self._has_exited:
                self._handle(*unpack(self._inbox.get(block=self.engine.is_finished())))

    def step(self) -> None:
        engine = self.engine
        finished, step = engine._step()
        engine._set_texts(finished)
        told = [(self._ids[seq], seq, True) for seq in finished if seq in self._ids]
        if self._read_stepwise:
            going = self._read_stepwise.difference(finished)
            told += [(self._ids[seq], seq, False) for seq in step.seqs if seq in going and _has_news(seq)]
        for _, seq, has_ended in told:
            if has_ended:
                self._forget(seq)
        is_waiting, now = bool(engine.scheduler.waiting), time.perf_counter()
        is_late = now - self._last_report > _REPORT_SECONDS
        if told or is_late or is_waiting != self._was_waiting or engine.is_finished():
            self._tell(told)

    def _tell(self, told: list[tuple[int, Sequence, bool]]) -> None:
        engine = self.engine
        self._was_waiting, self._last_report = bool(engine.scheduler.waiting), time.perf_counter()
        num_movable = sum(map(self._may_leave, engine.scheduler.waiting)) if self._movable else 0
        self._send(messages.NEWS, News.of(told, self._num_received, num_movable, engine.stats()))

    def _forget(self, seq: Sequence) -> None:
        del self._seqs[self._ids.pop(seq)]
        self._movable.discard(seq)
        self._read_stepwise.discard(seq)

    # -- what the caller asks for ------------------------------------------------------------------------------------

    def _handle(self, kind: bytes, content: Any) -> None:
        if kind == messages.WORK:
            self._add(content)
        elif kind == messages.ABORT:
            self._abort(content)
        elif kind == messages.DROP_ALL:
            self._drop_all()
        elif kind == messages.GIVE_BACK:
            self._give_back(content)
        elif kind == messages.CALL:
            number, name, arguments = content
            try:
                answer = getattr(self, f"do_{name}")(*arguments)
            except Exception as error:
                self._send(messages.ANSWER, (number, _builtin_name(error) or "RuntimeError", str(error)))
            else:
                self._send(messages.ANSWER, (number, None, answer))
        elif kind == messages.EXIT:
            self._has_exited = True

    def _add(self, work: Work) -> None:
        seqs = work.make(self.engine._sequences)
        self._num_received += len(seqs)
        now = time.perf_counter()
        for seq_id, seq, is_movable in zip(work.ids.tolist(), seqs, work.is_movable.tolist(), strict=True):
            seq.completion.arrival_time = now
            self._seqs[seq_id], self._ids[seq] = seq, seq_id
            if is_movable:
                self._movable.add(seq)
            if work.reads_steps:
                self._read_stepwise.add(seq)
            self.engine.scheduler.add(seq)

    def _abort(self, ids: list[int]) -> None:
        """All samples that are here of the requests of these sequences."""
        seqs = [self._seqs[seq_id] for seq_id in ids if seq_id in self._seqs]
        if not seqs:
            return
        aborted = self.engine.scheduler.abort({seq.request.request_id for seq in seqs})
        now = time.perf_counter()
        for seq in aborted:
            seq.completion.finish_time = now
        self.engine._set_texts(aborted)
        told = [(self._ids[seq], seq, True) for seq in aborted]
        for seq in aborted:
            self._forget(seq)
        self._tell(told)

    def _drop_all(self) -> None:
        self.engine._drop_all(between_steps=True)
        for kept in (self._seqs, self._ids, self._movable, self._read_stepwise):
            kept.clear()  # type: ignore[attr-defined]
        self._num_received = 0
        self._tell([])

    def _may_leave(self, seq: Sequence) -> bool:
        """Whether nothing has been computed for it, and it may be asked back."""
        return seq in self._movable and not seq.block_table and seq.completion.num_shared_tokens < 0

    def _give_back(self, num: int) -> None:
        """The last ones of those that wait: the others begin sooner."""
        scheduler = self.engine.scheduler
        leaving = [seq for seq in reversed(scheduler.waiting) if self._may_leave(seq)][:num]
        ids = [self._ids[seq] for seq in leaving]
        gone = set(leaving)
        scheduler.waiting = deque(seq for seq in scheduler.waiting if seq not in gone)
        for seq in leaving:
            self._forget(seq)
        self._send(messages.GIVEN_BACK, ids)
        self._tell([])

    # Calls, by their names.

    def do_update_weights(self, packed: dict[str, PackedTensor]) -> None:
        engine = self.engine
        tensors = {name: each.tensor() for name, each in packed.items()}
        facts = {name: TensorFacts(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self.do_reset_prefix_cache()
        engine.model_runner.call("update_weights", tensors, for_workers=(facts,))

    def do_sleep(self, level: int) -> None:
        self.do_reset_prefix_cache()
        self.engine.model_runner.call("sleep", level)

    def do_wake_up(self) -> None:
        self.engine.model_runner.call("wake_up")

    def do_reset_prefix_cache(self) -> None:
        reset_prefix_cache(self.engine.scheduler.block_manager)


def _has_news(seq: Sequence) -> bool:
    return seq.num_known_tokens - seq.num_prompt_tokens > seq.completion.num_streamed_tokens


def _builtin_name(error: BaseException) -> str | None:
    """The nearest exception of Python's own that a caller may expect of a start or a call; None for another one."""
    for each in (FileNotFoundError, MemoryError, ImportError, ValueError, TypeError, OSError):
        if isinstance(error, each):
            return each.__name__
    return "MemoryError" if isinstance(error, torch.OutOfMemoryError) else None


class _Link:
    """The connection to the caller. Messages are read by a thread, so that the caller never waits for a step."""

    def __init__(self, connection: Connection):
        self.inbox: queue.SimpleQueue[Packed] = queue.SimpleQueue()
        self._connection = connection
        self._lock = threading.Lock()
        self._has_ended = False
        threading.Thread(target=self._read, name="nanovllm-inbox", daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                self.inbox.put(receive(self._connection))
        except (EOFError, OSError):
            if not self._has_ended:
                os._exit(1)  # The caller has gone.

    def send(self, kind: bytes, content: object = None) -> None:
        message = pack(kind, content)
        with self._lock:
            send(self._connection, message)

    def keep_telling(self) -> None:
        """Show the caller that this process runs, however long a step takes."""
        with suppress(OSError):
            while True:
                self.send(messages.ALIVE)
                time.sleep(ALIVE_SECONDS)

    def end(self) -> None:
        """The caller may close its end."""
        self._has_ended = True


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)
