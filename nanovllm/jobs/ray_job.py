"""A job on several GPUs or machines: Ray runs an engine in each of its actors, and this process hands out the lines.

Reading and writing work as in a job with one engine: only this process has the input and the folder. A line is done
when its row is written. If an actor dies, its unfinished lines are handed out again.
"""

import logging
import pickle
import queue
import signal
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.job_config import JobConfig
from typing_extensions import Self

import nanovllm
from nanovllm import Config
from nanovllm.jobs.arguments import Arguments, Cluster
from nanovllm.jobs.fingerprint import Fingerprint
from nanovllm.jobs.prepared import Prepared
from nanovllm.jobs.progress import Generated, Progress
from nanovllm.jobs.ray_engine import Exchanged, RayEngine, Started, on_any_machine
from nanovllm.jobs.reader import num_bytes
from nanovllm.jobs.writer import Finished, Writer, error_line
from nanovllm.utils.checks import one_line
from nanovllm.utils.host_memory import host_memory
from nanovllm.utils.threads import available_cores

# An engine has this share of max_num_seqs beyond those, so that it does not run empty until it gets more.
_AHEAD_SHARE, _MIN_AHEAD = 0.5, 64
# An exchange with an engine waits so long for answers, unless there are enough. With many engines it waits longer,
# because each exchange costs this process about a millisecond.
_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 2.0
_SECONDS_PER_ENGINE = 0.005
_POLL_SECONDS = 0.1
_LAST_SECONDS = 5.0  # After an interrupt, for what is finished.
_MAX_STARTS = 3  # of an engine, if its process dies before it has started
_MAX_DEATHS = 10  # of engines while they had a certain line
_READ_BATCH, _READ_AHEAD = 64, 128  # lines, and batches of a reading process
# What lines take on their way, if they have images: read and not handed out, and in one exchange.
_READ_BYTES, _EXCHANGE_BYTES = 512 << 20, 256 << 20
# Images of an engine's lines are here until these are answered, so that another engine can get them: so many bytes, or
# an engine's part of a share of the memory that is free when the job begins. The engine has them too.
_ENGINE_BYTES, _MEMORY_SHARE = 16 << 30, 0.25


class EngineDied(RuntimeError):
    """No engine can go on. Says why in one line."""


class RayEngines:
    """Engines on Ray. A context manager, which starts them and ends them, and Ray too if it was not running."""

    def __init__(self, cluster: Cluster, arguments: Arguments, begin: Callable[["RayEngines", Fingerprint], None]):
        """begin: called whenever an engine has started, with these and the fingerprint of its model. What it raises
        ends the job."""
        self._cluster, self._arguments, self._begin = cluster, arguments, begin
        self._is_own = not ray.is_initialized()
        self._all: list[_Engine] = []
        self._num_before = 0  # tokens in the rows of engines that have died

    def __enter__(self) -> Self:
        """Raises ConnectionError without such a cluster, and ValueError for more engines than GPUs."""
        if self._is_own:
            _connect(self._cluster.address)
        try:
            options = self._arguments.engine_options
            num_gpus, num_cards = _gpus_of_engine(options), int(ray.cluster_resources().get("GPU", 0))
            num_engines = self._cluster.replicas or max(1, num_cards // max(1, num_gpus))
            if self._cluster.address is None and num_engines * num_gpus > num_cards:
                needed = f"{num_engines} engines need {num_engines * num_gpus} GPUs, and this machine has {num_cards}"
                raise ValueError(f"replicas={num_engines}: {needed}")
            engine = on_any_machine(self._arguments), max(1, available_cores() // num_engines)
            actor = ray.remote(RayEngine).options(num_gpus=num_gpus, num_cpus=0, scheduling_strategy="SPREAD")
            self._all = [_Engine(actor, engine) for _ in range(num_engines)]
        except BaseException:
            self.__exit__()
            raise
        limit = options.get("max_num_seqs", Config.max_num_seqs)
        self._most_lines = limit + max(_MIN_AHEAD, int(_AHEAD_SHARE * limit))
        of_memory = int(_MEMORY_SHARE * host_memory().available / num_engines)
        self._most_bytes = min(_ENGINE_BYTES, of_memory)
        self._pause = min(max(_PAUSE_SECONDS, num_engines * _SECONDS_PER_ENGINE), _MAX_PAUSE_SECONDS)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._is_own:
            ray.shutdown()
        else:
            for engine in self._all:
                ray.kill(engine.actor)

    def answer(
        self,
        readers: list[Iterable[Prepared]],
        num_lines: int,
        writer: Writer,
        progress: Progress,
        max_ahead: int | None,
    ) -> None:
        """Answer all lines.

        Args:
            num_lines: of all readers.
            writer: of rows, not of outputs.
            max_ahead: in order, lines that are handed out beyond the last one that is written. None: in any order.

        Raises EngineDied, ValueError for a damaged file, ValueError or OSError for an engine that cannot start, and
        ImportError for a package that a line needs and an engine's machine lacks.
        """
        self._lines, self._num_left, self._writer, self._progress = _Lines(readers), num_lines, writer, progress
        self._max_ahead = max_ahead
        self._again = deque[_Given]()  # lines whose engine has died
        try:
            while self._num_left and writer.error is None:
                self._hand_out()
                self._receive(_POLL_SECONDS)
        except KeyboardInterrupt:
            self._receive_last()
            raise
        finally:
            self._lines.close()

    def generated(self) -> Generated:
        """Of all engines, without what those had under way that have died."""
        each = [engine.generated for engine in self._all]
        num_tokens = self._num_before + sum(one.num_tokens for one in each)
        return Generated(num_tokens, sum(one.num_running for one in each))

    # -- handing out ---------------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Give every engine that waits as many lines as it should have."""
        # No engine gets more than its share of the lines that are left, so that all end together.
        most = min(self._most_lines, -(-self._num_left // len(self._all)))
        for engine in self._all:
            if engine.has_started and engine.call is None:
                lines = self._take(engine, most)
                if lines or engine.lines:
                    engine.exchange(lines, self._pause)

    def _take(self, engine: "_Engine", most: int) -> list["_Given"]:
        """Lines for an engine, which then has so many at most. With images, fewer: one alone always has room."""
        taken, size = list[_Given](), 0
        while len(engine.lines) + len(taken) < most and (given := self._next()) is not None:
            now = size + given.num_bytes
            is_too_much = engine.num_bytes + now > self._most_bytes and engine.num_bytes + size
            if given.num_bytes and (is_too_much or (now > _EXCHANGE_BYTES and size)):
                self._again.appendleft(given)
                break
            taken.append(given)
            size = now
        return taken

    def _next(self) -> "_Given | None":
        """The next line for any engine; None if there is none at the moment."""
        if self._again:
            return self._again.popleft()
        while (prepared := self._lines.take(self._last_position())) is not None:
            if prepared.line is not None:
                self._progress.hand_out(prepared.line)
                return _Given(prepared)
            self._write([(error_line(prepared, str(prepared.error)), None)])
        return None

    def _last_position(self) -> float:
        return float("inf") if self._max_ahead is None else self._writer.num_in_order + self._max_ahead

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _receive(self, seconds: float) -> None:
        """Wait for any engine, and take what has come of all."""
        engines = {engine.call: engine for engine in self._all if engine.call is not None}
        if not engines:
            time.sleep(seconds)  # The readers are slow, or the order holds all engines up.
            return
        ray.wait(list(engines), timeout=seconds)
        ready, _ = ray.wait(list(engines), num_returns=len(engines), timeout=0)
        for call in ready:
            engine = engines[call]
            engine.call = None
            try:
                result = ray.get(call)
            except RayError as error:
                self._replace(engine, error)
                continue
            if isinstance(result, Started):
                if result.error is not None:
                    raise result.error
                self._begin(self, result.fingerprint)
                engine.has_started, engine.num_starts = True, 0
            else:
                exchanged: Exchanged = pickle.loads(result)
                if exchanged.error is not None:
                    raise exchanged.error
                engine.generated = exchanged.generated
                self._write([(row, engine.take_back(row)) for row in exchanged.rows])

    def _write(self, rows: list[tuple[Finished, Any]]) -> None:
        """rows: each with its line; None if no engine got it."""
        self._num_left -= len(rows)
        for row, line in rows:
            self._writer.put(row)
            self._progress.add(row.num_completion_tokens, row.is_error, line)

    def _replace(self, engine: "_Engine", error: RayError) -> None:
        if not engine.has_started and (engine.num_starts >= _MAX_STARTS or not isinstance(error, RayActorError)):
            raise EngineDied(f"an engine could not start: {_cause(error)}") from error
        for given in engine.lines.values():
            given.num_deaths += 1
            if given.num_deaths >= _MAX_DEATHS:
                line = f"{given.line.file}:{given.line.number}"
                raise EngineDied(f"{_MAX_DEATHS} engines have died that had {line}: {_cause(error)}") from error
        logging.getLogger(__name__).warning("An engine has died, and another one takes its place: %s", _cause(error))
        self._again.extend(engine.lines.values())
        self._num_before += engine.num_returned
        engine.restart()

    def _receive_last(self) -> None:
        """What engines have finished, after an interrupt."""
        deadline = time.monotonic() + _LAST_SECONDS
        for engine in self._all:
            engine.lines = {} if engine.call is None or not engine.has_started else engine.lines
        with suppress(Exception):
            while any(engine.lines and engine.call for engine in self._all) and time.monotonic() < deadline:
                self._receive(_POLL_SECONDS)


class _Given:
    """A line that an engine has, or had."""

    def __init__(self, line: Prepared):
        self.line = line
        self.num_bytes = getattr(line.line, "num_image_bytes", 0)  # of its images
        self.num_deaths = 0  # of engines that had it


class _Engine:
    """An actor.

    Attributes:
        call: the result of the call under way; None if there is none.
        lines: that it has, by their positions.
        num_bytes: of their images.
        num_starts: since it has last started.
        generated: its counters, as it has last told them.
        num_returned: tokens in the rows that have come since it started.
    """

    def __init__(self, actor: Any, arguments: tuple[Arguments, int]):
        self._class, self._arguments = actor, arguments
        self.lines: dict[int, _Given] = {}
        self.num_bytes = 0
        self.num_starts = 0
        self._start()

    def _start(self) -> None:
        self.has_started = False
        self.num_starts += 1
        self.generated, self.num_returned = Generated(), 0
        self.actor = self._class.remote()
        self.call = self.actor.start.remote(*self._arguments)

    def restart(self) -> None:
        ray.kill(self.actor)
        self.lines, self.num_bytes = {}, 0
        self._start()

    def exchange(self, lines: list[_Given], pause: float) -> None:
        """Give it lines, and ask for what it has finished."""
        self.lines |= {given.line.position: given for given in lines}
        self.num_bytes += sum(given.num_bytes for given in lines)
        self.call = self.actor.exchange.remote(pickle.dumps([given.line for given in lines]), pause)

    def take_back(self, row: Finished) -> Any:
        """The line of a row that has come."""
        given = self.lines.pop(row.position)
        self.num_bytes -= given.num_bytes
        self.num_returned += row.num_completion_tokens
        return given.line.line


class _Lines:
    """The lines of several readers, with positions of their own if these are more than one. Never waits."""

    def __init__(self, readers: list[Iterable[Prepared]]):
        self._is_one = len(readers) == 1
        self._has_ended = threading.Event()
        self._num_taken = 0
        self._batch = deque[Prepared]()
        self._queue: queue.Queue[list[Prepared] | Exception] = queue.Queue(_READ_AHEAD)
        self._num_bytes, self._has_room = 0, threading.Condition()  # of lines that are here
        for reader in readers:
            threading.Thread(target=self._read, args=(reader,), name="nanovllm-jobs-lines", daemon=True).start()

    def take(self, last_position: float) -> Prepared | None:
        """The next line; None if there is none at the moment. Raises what a reader has raised."""
        if not self._batch:
            try:
                batch = self._queue.get_nowait()
            except queue.Empty:
                return None
            if isinstance(batch, Exception):
                raise batch
            self._batch.extend(batch)
        if not self._batch or self._batch[0].position > last_position:
            return None
        line = self._batch.popleft()
        with self._has_room:
            self._num_bytes -= num_bytes(line)
            self._has_room.notify_all()
        self._num_taken += 1
        return line if self._is_one else line._replace(position=self._num_taken - 1)

    def _read(self, reader: Iterable[Prepared]) -> None:
        batch = list[Prepared]()
        try:
            for line in reader:
                batch.append(line)
                # One with large images is a batch of its own.
                if len(batch) == _READ_BATCH or num_bytes(line) > _READ_BYTES // _READ_AHEAD:
                    self._put(batch)
                    batch = []
            self._put(batch)
        except Exception as error:
            self._put(error)

    def _put(self, batch: list[Prepared] | Exception) -> None:
        size = sum(map(num_bytes, batch)) if isinstance(batch, list) else 0
        with self._has_room:
            while self._num_bytes and self._num_bytes + size > _READ_BYTES and not self._has_ended.is_set():
                self._has_room.wait(_POLL_SECONDS)
            self._num_bytes += size
        while not self._has_ended.is_set():
            try:
                return self._queue.put(batch, timeout=_POLL_SECONDS)
            except queue.Full:
                continue

    def close(self) -> None:
        """Let the threads end."""
        self._has_ended.set()


class _OwnPath(JobConfig):
    """Workers that look for modules in their own packages, and for this one where it is here. Ray would put the current
    directory and the script's first on their path, where a file may be called as a module of Python."""

    def __init__(self) -> None:
        root = str(Path(nanovllm.__file__).resolve().parents[1])
        super().__init__(_py_driver_sys_path=[] if root in sysconfig.get_paths().values() else [root])

    def _runtime_env_has_working_dir(self) -> bool:
        return True  # Then Ray adds neither.


def _connect(address: str | None) -> None:
    on_sigterm = signal.getsignal(signal.SIGTERM)
    options: Any = {"log_to_driver": False, "logging_level": logging.ERROR, "job_config": _OwnPath()}
    ray.init(address, **options) if address else ray.init("local", include_dashboard=False, **options)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has set one that aborts the process.


def _gpus_of_engine(options: dict[str, Any]) -> int:
    has_gpus = options.get("device") != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    return options.get("tensor_parallel_size", 1) if has_gpus else 0


def _cause(error: RayError) -> str:
    """Says why in one line, without Ray's report of where."""
    if isinstance(error, RayTaskError) and error.cause is not None:
        return one_line(error.cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RayActorError):
        reasons = [line for line in lines if line.startswith("The actor is dead because")]
        return (reasons or lines[:1] or [type(error).__name__])[0].partition(" Some common causes")[0]
    return one_line(error)
