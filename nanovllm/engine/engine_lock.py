"""EngineLock: one user at a time, in one thread; exit() from any thread, between two steps."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

_EXITED = "this engine has exited: make a new LLM"


@dataclass(eq=False)
class User:
    """A call of a public method, or all calls by hand together. It owns the requests that it queues."""

    name: str  # of the method, for messages
    keeps_requests: bool = False  # after an error outside a step
    reads_steps: bool = False  # It wants each token as it comes, and not only results.


class EngineLock:
    """Protects an engine from concurrent use.

    A user queues requests and computes steps inside a `turn`. Meanwhile another thread's turn raises RuntimeError. So
    does any other user's turn while this user's requests are unfinished: a stream has no turn between two deltas.

    Inside a turn, a `step` is what `exit` waits for. A signal handler or the garbage collector can call `exit` in the
    middle of a step of its own thread: then it returns at once, and the end of the step gives the memory back.

    An exception in a turn drops the user's requests, and one in a step all requests.

    Attributes:
        user: whose requests are unfinished, or were the last ones.
    """

    def __init__(self, engine: Any, end: Callable[[], None], check_workers: Callable[[], None] | None):
        """engine: an LLMEngine. end: gives its memory back; harmless when called again. check_workers: raises
        WorkerError if another rank has died; None with one rank."""
        self._engine: Callable[[], Any] = ref(engine)  # Its finalizer holds this lock.
        self._end = end
        self._check_workers = check_workers
        self._step_lock = threading.RLock()
        self._is_in_step = False  # the thread that holds the lock
        self._is_exiting = False
        self._lock = threading.RLock()  # for the two fields below; never held while waiting for the step lock
        self._turn: tuple[int, str] | None = None  # (thread, user's name) of the outermost turn
        self.user: User | None = None

    @contextmanager
    def turn(self, user: User) -> Iterator[None]:
        """A block in which the user alone works. Turns of one thread nest. Raises RuntimeError after exit, in another
        thread's turn and while another user's requests are unfinished; and WorkerError if a worker has died."""
        turn = threading.get_ident(), user.name
        try:
            with self.no_other_thread(user.name):
                if self._is_exiting:
                    raise RuntimeError(_EXITED)
                if user is not self.user and self.is_serving(self.user):
                    raise RuntimeError(
                        f"{user.name} while other requests are unfinished: step() through those of add_request(), or "
                        "drop them with abort_request(); read a stream() or generate_iter() to its end, or close() it"
                    )
                self.user = user
                self._turn = self._turn or turn
            if self._check_workers is not None:
                with self.step():  # because a dead worker ends the engine
                    self._check_workers()
            yield
        except BaseException:
            if not user.keeps_requests:
                self.drop(user, between_steps=False)
            raise
        finally:
            if self._turn is turn:
                self._turn = None

    @contextmanager
    def no_other_thread(self, name: str) -> Iterator[None]:
        """A short block in which no other thread begins a turn. Raises RuntimeError if one has a turn."""
        with self._lock:
            if self._turn is not None and self._turn[0] != threading.get_ident():
                raise RuntimeError(
                    f"{name} is called while another thread is inside {self._turn[1]}: an LLM serves one thread at a "
                    "time; queue the prompts in one call, or make one LLM per process"
                )
            yield

    def is_serving(self, user: User | None) -> bool:
        """Whether the user has unfinished requests, or finished ones not returned."""
        engine = self._engine()
        return user is self.user and engine is not None and not engine.is_finished()

    def drop(self, user: User, between_steps: bool = True) -> None:
        """Drop what requests the user still has: a stream may be closed late, and in any thread. between_steps: the
        cache is in order, and its prefixes can be kept."""
        with self._lock:
            if self.is_serving(user):
                self._engine()._drop_all(between_steps)

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
                except BaseException:  # Counters may be ahead of the cache: going on would give wrong tokens.
                    self._engine()._drop_all(between_steps=False)
                    raise
                finally:
                    self._is_in_step = False
        finally:
            if self._is_exiting:
                self.exit()

    def exit(self) -> None:
        """Give the memory back, now or at the end of the step under way. Harmless when called again."""
        self._is_exiting = True
        with self._step_lock:
            if not self._is_in_step:
                self._end()
