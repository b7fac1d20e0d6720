"""StepLoop: what drives scheduler and model runner, one step after the other or one ahead."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.requests.detokenizer import read_new_tokens
from nanovllm.engine.requests.outputs import EngineStats
from nanovllm.engine.runner.sampled_tokens import SampledTokens
from nanovllm.engine.sampling.sampling_pipeline import Forward
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_lock import StepLock
from nanovllm.utils.collector import old_objects_set_aside


class Step(NamedTuple):
    """A step under way: its sequences; those of them that it prefills, all or the last ones or none; the tokens that a
    prefill computes, or minus the number of sequences that a decode step advances, a mixed one too, whose prompt tokens
    are not counted; and its tokens to be, or what they are to be drawn from."""

    seqs: list[Sequence]
    prefilled: list[Sequence]
    num_tokens: int
    tokens: SampledTokens | Forward | None


class User:
    """Who steps: one generate(), one stream(), or the caller by hand. Compared by identity."""

    def __init__(self, name: str, hears_of_aborts: bool = True):
        """hears_of_aborts: whether `steps` gives it what was aborted; who steps by hand gets what a step completed."""
        self.name = name
        self.hears_of_aborts = hears_of_aborts


class _Turn(NamedTuple):
    """One call into the engine: its thread, and the name of the method."""

    thread: int
    name: str


class StepLoop:
    """Steps through the queued sequences, for one user at a time, in one thread at a time.

    Attributes:
        scheduler, model_runner: what a step goes through.
        num_steps: steps launched so far.
        seconds: wall-clock time in which there was work.
    """

    def __init__(self, scheduler: Scheduler, model_runner: ModelRunner, overlap: bool, step_lock: StepLock):
        """overlap: launch a step before the one ahead of it is read. step_lock: to hold during a step."""
        self.scheduler = scheduler
        self.model_runner = model_runner
        self.num_steps = 0
        self.seconds = 0.0
        self._overlap = overlap
        self._step_lock = step_lock
        # For `_user` and `_turn`. Held for moments only, and nobody waits for the step lock while holding it.
        self._lock = threading.RLock()
        self._user: User | None = None
        self._turn: _Turn | None = None  # the call under way, in whichever thread
        self._flying: Step | None = None  # launched by `steps`, its tokens not read yet
        self._watches_text = False
        self._aborted: list[Sequence] = []

    def claim(self, user: User) -> None:
        """Let `user` queue and step.

        Raises:
            RuntimeError: after exit, while another thread is inside a call, or while another user's requests are
                unfinished.
            WorkerError: a worker has died.
        """
        self._check_usable(user.name)
        with self._lock:
            self._take(user)

    @contextmanager
    def turn(self, user: User) -> Iterator[None]:
        """A block in which `user` queues and steps, and no other thread can. Raises as claim."""
        self._check_usable(user.name)
        turn = _Turn(threading.get_ident(), user.name)
        try:
            with self._lock:
                self._take(user)
                if self._turn is None:  # Otherwise this thread's outer call has it, such as score()'s.
                    self._turn = turn
            yield
        finally:
            if self._turn is turn:
                self._turn = None

    @contextmanager
    def no_other_thread(self, name: str) -> Iterator[None]:
        """A block in which no other thread can begin a turn, for a moment's work of the method with this name. Raises
        RuntimeError while another thread has a turn."""
        with self._lock:
            self._check_thread(name)
            yield

    def _check_usable(self, name: str) -> None:
        self._step_lock.check()
        self._check_thread(name)
        if self.model_runner.workers is not None:
            with self._step_lock.hold():  # A dead worker ends the engine.
                self.model_runner.check_workers()

    def _check_thread(self, name: str) -> None:
        turn = self._turn
        if turn is not None and turn.thread != threading.get_ident():
            raise RuntimeError(
                f"{name} is called while another thread is inside {turn.name}: an LLM serves one thread at a time; "
                "queue the prompts in one call, or make one LLM per process"
            )

    def _take(self, user: User) -> None:
        self._check_thread(user.name)
        if user is self._user:
            return
        if self._is_busy():
            raise RuntimeError(
                f"{user.name} while other requests are unfinished: step() through those of add_request(), or drop them "
                "with abort_request(); read a stream() or generate_iter() to its end, or close() it"
            )
        self._user = user

    def has_work(self, user: User) -> bool:
        """Whether `steps` has something to give to this user. Another can have come in between only where nothing of
        this one's was left."""
        return user is self._user and self._is_busy()

    def _is_busy(self) -> bool:
        """Whether somebody's requests are unfinished, or their last tokens not delivered."""
        return bool(self._flying or self._aborted) or not self.scheduler.is_finished()

    @contextmanager
    def driving(self, user: User) -> Iterator[None]:
        """A block in which `user` queues and steps, and which none of its sequences outlive."""
        self.claim(user)
        try:
            with old_objects_set_aside():
                yield
        except GeneratorExit:
            # Nobody reads on: that happens between two steps, where everything is in order and the cache worth keeping.
            self._drop(user, self.scheduler.abort)
            raise
        except BaseException:
            self._drop(user, self.scheduler.reset)
            raise

    def _drop(self, user: User, drop: Callable[[], object]) -> None:
        """Drop all sequences, unless another user's turn has come. A stream may be closed in any thread."""
        with self._lock:
            if user is self._user:
                drop()
                self._flying, self._aborted = None, []

    def queue(self, user: User, seqs: list[Sequence]) -> None:
        """Add a user's checked sequences to what there is to do. Claims once more: since it did so first, the caller's
        own code has run, which gave the prompts."""
        self.claim(user)
        if self.scheduler.is_finished():
            self._watches_text = False
        now = time.perf_counter()
        for seq in seqs:
            seq.arrival_time = now
            self._watches_text |= seq.text_stream is not None
            self.scheduler.add(seq)

    def abort(self, request_id: int | None) -> None:
        """Drop one request's sequences, or all. For a block of no_other_thread."""
        aborted = self.scheduler.abort(None if request_id is None else [request_id])
        now = time.perf_counter()
        for seq in aborted:
            seq.finish_time = now
        if self._user is not None and self._user.hears_of_aborts:
            self._aborted += aborted

    def step(self) -> tuple[list[Sequence], Step]:
        """Compute one step; the sequences that it completed. Drops all requests where it fails."""
        start = time.perf_counter()
        with self._step_lock.hold():
            try:
                step = self._draw(self._launch())
                self.scheduler.advance(step.seqs)
                finished = self._collect(step)
            except BaseException:
                # Its sequences count as computed where they were not: going on would give wrong tokens.
                self.scheduler.reset()
                raise
        self.seconds += time.perf_counter() - start
        return finished, step

    def steps(self, user: User) -> Iterator[tuple[list[Sequence], Step]]:
        """Step until nothing is left, one ahead: while the GPU works on a step, the host schedules and launches the
        next one and only then reads the tokens. An end that they bring is noticed a step late; the surplus token is
        dropped.

        Gives the sequences that a step completed, and those aborted since the one before, and the step. More may be
        queued in between.
        """
        start = time.perf_counter()
        while self.has_work(user):
            with self._step_lock.hold():
                flying, finished = self._step_ahead()
            now = time.perf_counter()
            self.seconds += now - start
            start = now
            finished += self._aborted
            self._aborted = []
            if flying or finished:
                yield finished, flying or Step([], [], 0, None)

    def _step_ahead(self) -> tuple[Step | None, list[Sequence]]:
        """Launch a step, and collect the one launched before it: (that one, the sequences that it completed)."""
        if self.model_runner.workers is not None:
            self.model_runner.check_workers()
        flying = self._flying
        launched = None if self.scheduler.is_finished() else self._launch()
        if launched and not self._overlap:
            flying, launched = self._draw(launched), None
            self.scheduler.advance(flying.seqs)
        finished = self._collect(flying) if flying else []
        if launched:
            launched = self._draw(launched)
            self.scheduler.advance(launched.seqs)
        self._flying = launched
        return flying, finished

    def _launch(self) -> Step:
        """Schedule the next step and start it."""
        seqs, is_prefill = self.scheduler.schedule()
        prefilled = seqs if is_prefill else _last_prefilled(seqs)
        num_tokens = sum(seq.num_scheduled_tokens for seq in seqs) if is_prefill else len(prefilled) - len(seqs)
        if prefilled:
            now = time.perf_counter()
            for seq in prefilled:
                seq.scheduled_time = seq.scheduled_time or now
        self.num_steps += 1
        return Step(seqs, prefilled, num_tokens, self.model_runner.call("launch", seqs, is_prefill))

    def _draw(self, step: Step) -> Step:
        """Start the drawing of a step that had to wait with it for the tokens of the step before."""
        if isinstance(step.tokens, Forward):
            return step._replace(tokens=self.model_runner.call("launch_sampling", step.tokens))
        return step

    def _collect(self, step: Step) -> list[Sequence]:
        """Wait for a step's tokens and book them; the sequences that they complete."""
        token_ids, logprobs = step.tokens.wait(), step.tokens.logprobs
        if logprobs is not None:
            logprobs.book_prompts(step.seqs)
        finished = self.scheduler.collect(step.seqs, token_ids, logprobs)
        if self._watches_text:
            finished += self._stop_at_texts(step.seqs)
        now = time.perf_counter()
        for seq in step.prefilled:
            if seq.first_token_time is None and seq.num_completion_tokens:
                seq.first_token_time = now
        for seq in finished:
            seq.finish_time = now
        return finished

    def _stop_at_texts(self, seqs: list[Sequence]) -> list[Sequence]:
        """End the sequences whose newest token completes a stop string; those that had not ended anyway."""
        stopped = [seq for seq in seqs if seq.text_stream is not None and read_new_tokens(seq)]
        ended = [seq for seq in stopped if not seq.is_finished]
        self.scheduler.stop(ended)
        return ended

    def stats(self) -> EngineStats:
        """A reading of all counters."""
        scheduler, manager = self.scheduler, self.scheduler.block_manager
        queries, hits = scheduler.num_prefix_queries, scheduler.num_prefix_hits
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_blocks_total=len(manager.blocks),
            kv_blocks_used=len(manager.used_block_ids),
            kv_blocks_free=len(manager.free_block_ids),
            prefix_cache_queries=queries,
            prefix_cache_hits=hits,
            prefix_cache_hit_rate=hits / queries if queries else 0.0,
            prompt_tokens=scheduler.num_prompt_tokens,
            generated_tokens=scheduler.num_generated_tokens,
            steps=self.num_steps,
            preemptions=scheduler.num_preemptions,
            seconds=self.seconds,
            tokens_per_second=scheduler.num_generated_tokens / self.seconds if self.seconds else 0.0,
        )


def _last_prefilled(seqs: list[Sequence]) -> list[Sequence]:
    """The sequences at the end that are prefilled: those of a mixed step that are."""
    first = len(seqs)
    while first and seqs[first - 1].is_prefilling:
        first -= 1
    return seqs[first:]
