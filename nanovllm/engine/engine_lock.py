"""EngineLock: one call at a time, in one thread; exit() from any thread, between two steps."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakMethod


class Call(NamedTuple):
    """A call of the public interface, to which the requests that it queues belong.

    Attributes:
        name: of the method, as a message shows it.
        number: tells two calls of a method apart.
    """

    name: str
    number: int = 0


class _Turn(NamedTuple):
    """A call under way: its thread, and the name of the method."""

    thread: int
    name: str


class EngineLock:
    """Protects an engine from concurrent use.

    A thread holds `step` while it computes a step. `exit` waits for that, so no step begins after it. In the middle of
    a step of its own thread, where a signal handler or the garbage collector can call it, `exit` returns at once, and
    the end of the step gives the memory back.

    A thread holds `turn` while it is inside a call that queues requests or computes steps. Another thread that begins
    such a call gets a RuntimeError instead of waiting, and so does another call while this one's requests are
    unfinished: a stream, for example, holds no turn between two of its deltas.
    """

    def __init__(self, end: Callable[[], None], is_busy: Callable[[], bool], check_workers: Callable[[], None] | None):
        """
        Args:
            end: gives the engine's memory back; called once.
            is_busy: whether requests are unfinished, or results not delivered.
            check_workers: raises WorkerError where another rank has died; None with one rank.
        """
        self._end = end
        self._is_busy = WeakMethod(is_busy)  # The engine's finalizer holds this lock, which must not hold the engine.
        self._check_workers = check_workers
        self._step_lock = threading.RLock()
        self._is_in_step = False  # The thread that holds the lock is inside `step`.
        self._is_exiting = False
        self._has_ended = False
        # For the two fields below; held for moments only, and never while waiting for the step lock.
        self._lock = threading.RLock()
        self._turn: _Turn | None = None
        self.owner: Call | None = None  # whose requests the unfinished ones are

    # -- steps and the end -----------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """A block that `exit` waits for. Raises RuntimeError after exit, and inside such a block."""
        try:
            with self._step_lock:
                if self._is_in_step:
                    raise RuntimeError("a signal handler can exit() an engine in the middle of a step, but not use it")
                try:
                    self._is_in_step = True
                    self._check_open()
                    yield
                finally:
                    self._is_in_step = False
        finally:
            if self._is_exiting:  # since the block began
                self.exit()

    def exit(self) -> None:
        """Give the memory back. Harmless when called again."""
        self._is_exiting = True
        with self._step_lock:
            if not self._is_in_step and not self._has_ended:
                self._has_ended = True
                self._end()

    def _check_open(self) -> None:
        if self._is_exiting:
            raise RuntimeError("this engine has exited: make a new LLM")

    # -- calls -----------------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self, call: Call) -> Iterator[None]:
        """A block in which `call` queues requests and computes steps, and no other thread can.

        Raises:
            RuntimeError: after exit, while another thread is inside a call, or while another call's requests are
                unfinished.
            WorkerError: a worker has died.
        """
        self._check_open()
        self._check_thread(call.name)
        if self._check_workers is not None:
            with self.step():  # A dead worker ends the engine.
                self._check_workers()
        turn = _Turn(threading.get_ident(), call.name)
        try:
            with self._lock:
                self.own(call)
                if self._turn is None:  # Otherwise an outer call of this thread has it: score() calls generate().
                    self._turn = turn
            yield
        finally:
            if self._turn is turn:
                self._turn = None

    @contextmanager
    def no_other_thread(self, name: str) -> Iterator[None]:
        """A block in which no other thread can begin a turn. Raises RuntimeError while another thread has one."""
        with self._lock:
            self._check_thread(name)
            yield

    def _check_thread(self, name: str) -> None:
        turn = self._turn
        if turn is not None and turn.thread != threading.get_ident():
            raise RuntimeError(
                f"{name} is called while another thread is inside {turn.name}: an LLM serves one thread at a time; "
                "queue the prompts in one call, or make one LLM per process"
            )

    def own(self, call: Call) -> None:
        """Make the call the owner of what is queued from here on. Raises RuntimeError as `turn` does."""
        self._check_open()
        with self._lock:
            self._check_thread(call.name)
            if call == self.owner:
                return
            if self._is_busy()():
                raise RuntimeError(
                    f"{call.name} while other requests are unfinished: step() through those of add_request(), or drop "
                    "them with abort_request(); read a stream() or generate_iter() to its end, or close() it"
                )
            self.owner = call

    @contextmanager
    def if_owner(self, call: Call) -> Iterator[bool]:
        """A block in which the owner stays the same; whether it is this call."""
        with self._lock:
            yield call == self.owner
