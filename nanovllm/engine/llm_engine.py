"""LLMEngine: add_request, step, generate, exit; the loop that stays one step ahead of the tokens it reads."""

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, NoReturn, overload

from typing_extensions import Self

from nanovllm.config import Config
from nanovllm.engine.engine_lock import EngineLock, User
from nanovllm.engine.features.logits.logprobs import record_prompt_logprobs
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.prefix_cache import reset_prefix_cache
from nanovllm.engine.ranks.ranks import Ranks
from nanovllm.engine.ranks.workers import Workers
from nanovllm.engine.request_order import longest_first
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.start.schedulers import make_scheduler
from nanovllm.engine.step import Step
from nanovllm.engine.text.formats.all_formats import end_tokens
from nanovllm.engine.text.outputs import EngineStats, ErrorOutput, RequestOutput, engine_stats
from nanovllm.engine.text.prompts import Prompt, as_prompts, params_per_prompt
from nanovllm.engine.text.results import Results
from nanovllm.engine.text.sequence_maker import SequenceMaker
from nanovllm.models.tokenizer_files import load_tokenizer
from nanovllm.pooling_params import PoolingParams
from nanovllm.sampling_params import SamplingParams, misplaced_option
from nanovllm.utils.checks import quoted
from nanovllm.utils.collector import old_objects_set_aside
from nanovllm.utils.option_hints import HINTS, explains_unknown_options, takes_options_of
from nanovllm.utils.progress_bar import progress_bar

logger = logging.getLogger(__name__)

OnError = Literal["raise", "return"]
BY_HAND = User("add_request() or step()", keeps_requests=True, reads_steps=True)


class LLMEngine:
    """Generates completions for batches of prompts.

    Use it as a context manager, call exit(), or delete it: each frees all memory. It cannot be pickled or copied.

    It serves one thread at a time. While one thread is inside a call, others may call exit(), stats() and
    is_finished(); any other call of theirs raises RuntimeError.

    With tensor_parallel_size > 1, an exception in a step ends the engine, because its processes are out of step then.
    It is a WorkerError if a worker died or failed. Ctrl-C leaves the engine usable.

    Attributes:
        config: the checked options.
        tokenizer: the model's transformers tokenizer; None with skip_tokenizer_init.
        scheduler, model_runner: what a step goes through.
        ps, events: the processes of the other ranks, and what tells each of them of a call.
    """

    @takes_options_of(Config)
    def __init__(self, model: str | os.PathLike[str], **options: Any):
        """
        Args:
            model: a directory, a hub id, or a published shape's name.
            options: see Config, whose fields they are.

        Raises:
            TypeError, ValueError, FileNotFoundError: a wrong option, or weights that do not fit the model.
            MemoryError: no room for the weights, or for a single KV cache block.
        """
        start = time.perf_counter()
        self.config = config = Config(model, **options)
        self.tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.model, config.tokenizer)
        if self.tokenizer is not None and "eos" not in options:
            config.add_eos(end_tokens(self.tokenizer, config.chat_format), "tokenizer")
        ranks = Workers(config) if config.tensor_parallel_size > 1 else Ranks()
        self.model_runner = ModelRunner(config, 0, ranks)
        self.ps, self.events = ranks.processes, ranks.events
        self._check_workers = self.model_runner.check_workers if self.ps else None
        self._lock = EngineLock(self, self.model_runner.exit, self._check_workers)
        # Called once: by exit(), when the engine is collected, or when the interpreter ends.
        self._finalizer = weakref.finalize(self, self._lock.exit)
        self.scheduler = make_scheduler(config, self.model_runner)
        self._sequences = SequenceMaker(config, self.tokenizer, self.scheduler.length_limit)
        self._num_steps = 0
        self._seconds = 0.0  # in _step
        self._in_flight: Step | None = None  # launched, its tokens not read yet
        self._aborted: list[Sequence] = []  # to be returned by the next _step
        self._sleep_level = 0  # 0 while it is awake
        logger.info("ready in %.1f s", time.perf_counter() - start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.exit()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be pickled or copied: make one LLM per process")

    def exit(self) -> None:
        """Give all memory back; unfinished requests are dropped. Calling it again does nothing.

        Any thread may call it. It waits for the step under way, whose call then raises RuntimeError. In a signal
        handler it returns at once, and the end of the step gives the memory back.
        """
        self._finalizer()

    # -- whole batches -----------------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool | Callable = True,
        on_error: Literal["raise"] = "raise",
        on_step: Callable[[EngineStats], object] | None = None,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool | Callable = True,
        *,
        on_error: OnError,
        on_step: Callable[[EngineStats], object] | None = None,
    ) -> list[RequestOutput | ErrorOutput]: ...

    @explains_unknown_options(HINTS["generate"], misplaced_option)
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool | Callable = True,
        on_error: OnError = "raise",
        on_step: Callable[[EngineStats], object] | None = None,
    ) -> list[RequestOutput] | list[RequestOutput | ErrorOutput]:
        """Complete every prompt. Prompts with a larger max_tokens may begin first.

        Args:
            prompts: one prompt, or an iterable of prompts. A prompt is a text; a list, tuple, array or tensor of token
                ids; {"prompt": text}, also with "images"; {"prompt_token_ids": token ids}; a tokenizer's output for one
                text. Several may also be its output for all of them, or an array or tensor [num_prompts, num_tokens].
            sampling_params: one for all prompts, or a list with one each; None for the defaults.
            use_tqdm: show a progress bar in a terminal or a notebook; or a function that makes the bar, such as
                functools.partial(tqdm, leave=False).
            on_error: "raise" refuses all prompts before any work if one cannot be served; "return" serves the others,
                and returns an ErrorOutput for that one.
            on_step: called with stats() after every step; may call abort_request.

        Returns:
            One RequestOutput for each prompt, in order, or an ErrorOutput. With either on_error, finish_reason is
            "error" if the model's logits are NaN or infinite, or no token is left to sample.

        Raises:
            ValueError, TypeError: a wrong argument, before any work. The message names the argument and the prompt's
                index.
            RuntimeError: after exit(), also by another thread; while requests of add_request(), a stream() or a
                generate_iter() are unfinished; and while another thread is inside a call.

        After an exception or Ctrl-C, the requests are dropped and the engine is usable.
        """
        with self._lock.turn(user := User("generate()")):
            check_arguments(on_error, on_step, use_tqdm)
            prompts = list(as_prompts(prompts, "prompts", self.tokenizer))
            params = params_per_prompt(sampling_params, len(prompts))
            with old_objects_set_aside():  # Thousands of new objects would make the collector look at all old ones.
                requests = self._sequences.make_all(prompts, params, on_error)
            results = Results(requests)
            num_seqs = self._queue(user, requests, reorder=True)
            del requests  # so that each sequence is freed with its result, not all after the last step
            with old_objects_set_aside(), progress_bar(use_tqdm, num_seqs) as show:
                while self._lock.is_serving(user):
                    finished, step = self._step()
                    self._set_texts(finished)  # while the device computes the next step
                    results.record(finished)
                    if on_step is not None:
                        on_step(self.stats())
                    if show is not None:
                        show(len(finished), step.num_tokens)
            return [results.ready[i] for i in range(len(prompts))]

    def _queue(self, user: User, requests: list[list[Sequence] | Exception], reorder: bool = False) -> int:
        """Queue the requests that can be served. Returns the number of sequences. reorder: as `longest_first` says."""
        seqs = [seq for request in requests if isinstance(request, list) for seq in request]
        if reorder:
            manager = self.scheduler.block_manager
            capacity = len(manager.blocks) * manager.block_size
            seqs = longest_first(seqs, self.scheduler.max_seq_len, capacity, manager.enable_prefix_caching)
        if self._sleep_level:
            raise RuntimeError(f"{user.name}: the engine sleeps; call wake_up() first")
        with self._lock.turn(user):  # again, because the iterable of prompts may have used the engine itself
            now = time.perf_counter()
            for seq in seqs:
                seq.completion.arrival_time = now
                self.scheduler.add(seq)
        return len(seqs)

    def _set_texts(self, finished: list[Sequence]) -> None:
        detokenizer = self._sequences.detokenizer
        if detokenizer is not None:
            for seq in finished:
                stream = seq.completion.text_stream
                seq.completion.text = detokenizer.text(seq) if stream is None else stream.finish(seq)

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step(self) -> tuple[list[Sequence], Step]:
        """Launch step N+1, then wait for the tokens of step N. Returns the sequences that step N finished, and step N.

        So the device has work while the host reads tokens, makes results and schedules. Step N+1 takes the tokens that
        the host has not read yet from the device's memory. The host learns one step late that a token ended its
        sequence, and drops the surplus token that step N+1 computes for it.
        """
        start = time.perf_counter()
        scheduler = self.scheduler
        if self._in_flight is None and not scheduler.is_finished():  # nothing to read yet
            with self._lock.step():
                self._advance(self._launch())
        with self._lock.step():
            if self._check_workers is not None:
                self._check_workers()
            step, following = self._in_flight, None
            if self.config.overlap_steps and not scheduler.is_finished() and not scheduler.awaits_tokens:
                following = self._launch()
            finished = [] if step is None else self._read(step)
            self._in_flight = None
            if following is not None:
                self._advance(following)
        self._seconds += time.perf_counter() - start
        finished += self._aborted
        self._aborted = []
        return finished, step or Step([], is_prefill=False)

    def _launch(self) -> Step:
        step = self.scheduler.schedule()
        self._num_steps += 1
        self.model_runner.prepare(step)
        self.model_runner.call("launch", step)
        return step

    def _read(self, step: Step) -> list[Sequence]:
        """Wait for a step's tokens and record them. Returns the sequences that finished."""
        token_ids = step.wait(self._check_workers)
        if step.prompt_logprobs is not None:
            record_prompt_logprobs(step.prompt_logprobs, step.seqs)
        finished = self.scheduler.record(step, token_ids)
        now = time.perf_counter()
        for seq in step.seqs[len(step.seqs) - step.num_prefilled :]:
            if seq.completion.first_token_time is None and seq.num_tokens > seq.num_prompt_tokens:
                seq.completion.first_token_time = now
        for seq in finished:
            seq.completion.finish_time = now
        return finished

    def _advance(self, step: Step) -> None:
        """Record the launched step, so that another can be scheduled. A step that waited for the tokens of the step
        before, as with a grammar, is sampled here: they have been read by now."""
        if step.waits_for_tokens:
            self.model_runner.call("sample", step, for_workers=())
        self.scheduler.advance(step)
        self._in_flight = step

    # -- requests by hand --------------------------------------------------------------------------------------------

    @explains_unknown_options(HINTS["generate"], misplaced_option)
    def add_request(
        self, prompt: Prompt, sampling_params: SamplingParams | PoolingParams | None = None, streams: bool = False
    ) -> int:
        """Queue one prompt, in any form that generate accepts, for `step` or `step_deltas`. Returns its request id.

        Args:
            sampling_params: or PoolingParams, for a vector, which step_deltas gives.
            streams: whether step_deltas gives its text as it comes, and not whole with the last delta.

        Raises ValueError or TypeError as generate does, and RuntimeError after exit() or while a generate(), stream()
        or generate_iter() is under way.
        """
        with self._lock.turn(BY_HAND):
            params = SamplingParams() if sampling_params is None else sampling_params
            seqs = self._sequences.make_one(prompt, params, streams)
            self._queue(BY_HAND, [seqs])
            return seqs[0].request.request_id

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Compute one step.

        Returns:
            [(request id, completion token ids)] of the sequences that finished, and the number of tokens that a
            prefill computed, or minus the number of tokens that a decode step (also a mixed one) gave its running
            sequences: one each, or with speculation more.

        Raises:
            RuntimeError: nothing is queued, or a generate(), stream() or generate_iter() is under way, or the engine
                has exited.

        Any other exception, from the model or from Ctrl-C, drops all requests and leaves the engine usable.
        """
        with self._lock.turn(BY_HAND):
            finished, step = self._step_by_hand()
        return [(seq.request.request_id, seq.completion_token_ids) for seq in finished], step.num_tokens

    def _step_by_hand(self) -> tuple[list[Sequence], Step]:
        if self.is_finished():
            raise RuntimeError("step() with no request queued: call add_request() first")
        return self._step()

    def is_finished(self) -> bool:
        """Whether no request is left to work on, and no finished one to return."""
        return not (self._in_flight or self._aborted or self.scheduler.waiting or self.scheduler.running)

    def stats(self) -> EngineStats:
        """The engine's state now, and what it has done so far. Only reads counters."""
        return engine_stats(self.scheduler, self._num_steps, self._seconds)

    def _abort(self, request_ids: list[int] | None) -> None:
        """End these requests, or all. The next step returns them to whoever waits for results."""
        aborted = self.scheduler.abort(request_ids)
        now = time.perf_counter()
        for seq in aborted:
            seq.completion.finish_time = now
        if self._lock.user is not BY_HAND:
            self._aborted += aborted

    def _forget_prefixes(self) -> None:
        reset_prefix_cache(self.scheduler.block_manager)

    def _drop_all(self, between_steps: bool) -> None:
        """Drop all requests, for the lock. between_steps: the cache is in order, and its prefixes are kept."""
        (self.scheduler.abort if between_steps else self.scheduler.reset)()
        self._in_flight, self._aborted = None, []


def check_arguments(on_error: str, on_step: object, use_tqdm: object) -> None:
    """Raises ValueError or TypeError for wrong arguments of generate()."""
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error={quoted(on_error)}: must be one of raise, return")
    if on_step is not None and not callable(on_step):
        raise TypeError(f"on_step={quoted(on_step)}: must be callable, or None")
    if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
        raise TypeError(f"use_tqdm={quoted(use_tqdm)}: must be True, False, or a function that makes a bar")
