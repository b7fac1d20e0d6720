"""EngineLock: one call at a time, in one thread; exit() from any thread, between two steps."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakMethod

_EXITED = "this engine has exited: make a new LLM"


@dataclass(eq=False)
class Call:
    """A call of the public interface, which owns the requests that it queues."""

    name: str  # of the method, for messages


class EngineLock:
    """Protects an engine from concurrent use.

    A thread holds `step` while it computes a step. `exit` waits for that, so no step begins after it. A signal handler
    or the garbage collector can call `exit` in the middle of a step of its own thread: then it returns at once, and the
    end of the step gives the memory back.

    A thread holds `turn` while it is inside a call that queues requests or computes steps. Another thread's call raises
    RuntimeError meanwhile. So does any other call while this one's requests are unfinished: a stream holds no turn
    between two of its deltas.
    """

    def __init__(self, end: Callable[[], None], is_busy: Callable[[], bool], check_workers: Callable[[], None] | None):
        """end: gives the engine's memory back; called once. is_busy: whether requests are unfinished, or results not
        delivered. check_workers: raises WorkerError if another rank has died; None with one rank."""
        self._end = end
        self._is_busy = WeakMethod(is_busy)  # The engine's finalizer holds this lock, which must not hold the engine.
        self._check_workers = check_workers
        self._step_lock = threading.RLock()
        self._is_in_step = False  # the thread that holds the lock
        self._is_exiting = False
        self._has_ended = False
        self._lock = threading.RLock()  # for the two fields below; never held while waiting for the step lock
        self._turn: tuple[int, str] | None = None  # (thread, name) of the call under way
        self.owner: Call | None = None  # of the unfinished requests

    # -- steps and the end -----------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """A block that `exit` waits for. Raises RuntimeError after exit, and inside another such block."""
        try:
            with self._step_lock:
                if self._is_in_step:
                    raise RuntimeError("a signal handler can exit() an engine in the middle of a step, but not use it")
                if self._is_exiting:
                    raise RuntimeError(_EXITED)
                try:
                    self._is_in_step = True
                    yield
                finally:
                    self._is_in_step = False
        finally:
            if self._is_exiting:
                self.exit()

    def exit(self) -> None:
        """Give the memory back. Harmless when called again."""
        self._is_exiting = True
        with self._step_lock:
            if not self._is_in_step and not self._has_ended:
                self._has_ended = True
                self._end()

    # -- calls -----------------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self, call: Call) -> Iterator[None]:
        """A block in which `call` alone queues requests and computes steps. Raises RuntimeError after exit and if
        that is another call's turn, and WorkerError if a worker has died."""
        if self._check_workers is not None and not self._is_exiting:
            self.check_thread(call.name)
            with self.step():  # because a dead worker ends the engine
                self._check_workers()
        turn = threading.get_ident(), call.name
        try:
            with self._lock:
                self.own(call)
                if self._turn is None:  # else it is an outer call's: score() calls generate()
                    self._turn = turn
            yield
        finally:
            if self._turn is turn:
                self._turn = None

    def own(self, call: Call) -> None:
        """Make the call the owner of what is queued from now on. Raises RuntimeError as `turn` does."""
        if self._is_exiting:
            raise RuntimeError(_EXITED)
        with self._lock:
            self.check_thread(call.name)
            if call is self.owner:
                return
            is_busy = self._is_busy()
            if is_busy is not None and is_busy():
                raise RuntimeError(
                    f"{call.name} while other requests are unfinished: step() through those of add_request(), or drop "
                    "them with abort_request(); read a stream() or generate_iter() to its end, or close() it"
                )
            self.owner = call

    @contextmanager
    def no_other_thread(self, name: str) -> Iterator[None]:
        """A block in which no other thread can begin a turn. Raises RuntimeError if another thread has one."""
        with self._lock:
            self.check_thread(name)
            yield

    def check_thread(self, name: str) -> None:
        """Raises RuntimeError if another thread has a turn."""
        turn = self._turn
        if turn is not None and turn[0] != threading.get_ident():
            raise RuntimeError(
                f"{name} is called while another thread is inside {turn[1]}: an LLM serves one thread at a time; "
                "queue the prompts in one call, or make one LLM per process"
            )

    @contextmanager
    def if_owner(self, call: Call) -> Iterator[bool]:
        """A block in which the owner stays the same. Yields whether it is this call."""
        with self._lock:
            yield call is self.owner
