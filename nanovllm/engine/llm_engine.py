"""LLMEngine: tokenizer, scheduler and rank-0 model runner, and the loop that drives them."""

import logging
import secrets
import time
import weakref
from collections.abc import Iterable, Iterator
from itertools import count
from typing import NamedTuple, TypedDict

from tqdm.auto import tqdm
from xxhash import xxh64_intdigest

from nanovllm.config import Config
from nanovllm.engine.inputs import SampledTokens
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.requests import check_params, check_token_ids, load_tokenizer, params_per_prompt
from nanovllm.engine.sampling_pipeline import Forward
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.structured import Grammar, Grammars
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

logger = logging.getLogger(__name__)

Prompt = str | list[int]


class RequestOutput(TypedDict):
    """One request's result.

    text: the completion, special tokens left out; None with skip_tokenizer_init.
    token_ids: the completion's token ids, the end-of-sequence token included.
    finish_reason: "stop" (end of sequence) or "length" (max_tokens, or the engine's longest sequence).
    num_cached_tokens: prompt tokens that the prefix cache supplied.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    num_cached_tokens: int


class _Step(NamedTuple):
    """A step under way: its sequences, what `step` reports of it, and its tokens to be, or what they are to be drawn
    from."""

    seqs: list[Sequence]
    num_tokens: int
    tokens: SampledTokens | Forward


class LLMEngine:
    """Generates completions for batches of prompts.

    Use it as a context manager, or call exit(), or just drop it: each gives all memory back.

    Attributes:
        config: the checked options.
        tokenizer: the model's transformers tokenizer; None with skip_tokenizer_init.
        scheduler, model_runner: the parts that a step goes through.
    """

    def __init__(self, model: str, **options):
        """
        Args:
            model: a directory, a hub id, or a published shape's name; see Config for it and all options.

        Raises:
            TypeError, ValueError, FileNotFoundError: as Config does, and for weights that do not fit the model.
            MemoryError: no room for a single KV cache block.
        """
        start = time.perf_counter()
        self.config = config = Config.create(model, **options)
        self.tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.model)
        eos = set(config.eos)
        if self.tokenizer is not None and "eos" not in options and self.tokenizer.eos_token_id is not None:
            eos.add(self.tokenizer.eos_token_id)
        config.eos = tuple(sorted(eos))
        self.model_runner = ModelRunner(config)
        # Runs once: at exit(), when the engine is collected, or when the interpreter ends.
        self._finalizer = weakref.finalize(self, self.model_runner.exit)
        self.scheduler = Scheduler(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            self.model_runner.num_kvcache_blocks,
            config.kvcache_block_size,
            eos,
            config.enable_prefix_caching,
        )
        self._seed = secrets.randbits(63) if config.seed is None else config.seed
        self._seq_ids = count()
        self._grammars: Grammars | None = None
        logger.info("ready in %.1f s", time.perf_counter() - start)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.exit()

    def exit(self) -> None:
        """Give all memory back; unfinished requests are dropped. Harmless when called again."""
        self._finalizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends. Raises ValueError where that cannot be used."""
        return SamplingParams.from_generation_config(self.config.generation_config)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt; `step` then works on it. Returns its id.

        Raises ValueError (or TypeError) where generate would, and RuntimeError after exit().
        """
        self._check_alive()
        token_ids = self._tokenize([prompt])[0]
        self._check_prompt(token_ids)
        seq = self._make_sequence(token_ids, check_params(sampling_params or SamplingParams()))
        self.scheduler.add(seq)
        return seq.seq_id

    def abort_request(self, request_id: int) -> None:
        """Drop an unfinished request of add_request and free its blocks; an id that is not queued is ignored."""
        self.scheduler.abort([request_id])

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their blocks."""
        self.scheduler.block_manager.reset_prefix_cache()

    def is_finished(self) -> bool:
        """Whether no request is left to work on."""
        return self.scheduler.is_finished()

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Compute one step.

        Returns:
            [(request id, completion token ids)] of the requests that finished, and the number of tokens that a
            prefill computed, or minus the number of sequences that a decode step advanced.

        Raises:
            RuntimeError: nothing is queued, or the engine has exited.

        After any other exception, from the model or from Ctrl-C, every request is dropped and the engine is usable.
        """
        finished, num_tokens = self._step()
        return [(seq.seq_id, seq.completion_token_ids) for seq in finished], num_tokens

    def _step(self) -> tuple[list[Sequence], int]:
        self._check_alive()
        if self.is_finished():
            raise RuntimeError("step() with no request queued: call add_request() first")
        try:
            step = self._sample(self._launch())
            self.scheduler.advance(step.seqs)
            return self._collect(step), step.num_tokens
        except BaseException:
            # Its sequences count as computed where they were not: going on would give wrong tokens.
            self.scheduler.reset()
            raise

    def _launch(self) -> "_Step":
        """Schedule the next step and start it."""
        seqs, is_prefill = self.scheduler.schedule()
        num_tokens = sum(seq.num_scheduled_tokens for seq in seqs) if is_prefill else -len(seqs)
        return _Step(seqs, num_tokens, self.model_runner.call("launch", seqs, is_prefill))

    def _sample(self, step: "_Step") -> "_Step":
        """Start the drawing of a step that had to wait with it for the tokens of the step before."""
        if isinstance(step.tokens, Forward):
            return step._replace(tokens=self.model_runner.launch_sampling(step.tokens))
        return step

    def _collect(self, step: "_Step") -> list[Sequence]:
        """Wait for a step's tokens and book them; the sequences that finished."""
        token_ids, logprobs = step.tokens.wait(), step.tokens.logprobs
        if logprobs is not None:
            logprobs.book_prompts(step.seqs)
        return self.scheduler.collect(step.seqs, token_ids, logprobs)

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt.

        Args:
            prompts: texts or lists of token ids, mixed as you like; one text alone is a batch of one.
            sampling_params: one for all prompts, or a list with one each; None samples with the defaults.
            use_tqdm: show finished prompts, and prefill and decode tokens a second.

        Returns:
            One RequestOutput a prompt, in the order of the prompts.

        Raises:
            ValueError, TypeError: a wrong argument, before any work: the message names the argument and the
                prompt's index. The engine stays usable, also after an exception or Ctrl-C half-way: the batch's
                requests are dropped and their blocks are free again.
            RuntimeError: after exit(), or while requests from add_request() are unfinished.
        """
        self._check_alive()
        if not self.is_finished():
            raise RuntimeError("generate() while requests from add_request() are unfinished: step() through them")
        if not isinstance(prompts, Iterable):
            raise TypeError(f"prompts: must be a string or a list of prompts, not {type(prompts).__name__}")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        params = params_per_prompt(sampling_params, len(prompts))
        token_ids = self._tokenize(prompts)
        for i, ids in enumerate(token_ids):
            self._check_prompt(ids, f"prompts[{i}]: ")
        seqs = [self._make_sequence(ids, p) for ids, p in zip(token_ids, params, strict=True)]
        del token_ids  # The sequences hold them; a second copy of a large batch would be for nothing.
        try:
            for seq in seqs:
                self.scheduler.add(seq)
            texts = self._run_all(len(seqs), use_tqdm)
        except BaseException:
            self.scheduler.reset()
            raise
        return [
            RequestOutput(
                text=texts.get(seq.seq_id),
                token_ids=seq.completion_token_ids,
                finish_reason=seq.finish_reason,
                num_cached_tokens=seq.num_shared_tokens,
            )
            for seq in seqs
        ]

    def _run_all(self, num_requests: int, use_tqdm: bool) -> dict[int, str]:
        """Step until nothing is left; the texts of what finished, by sequence id."""
        texts: dict[int, str] = {}
        with tqdm(total=num_requests, desc="Generating", disable=not use_tqdm, dynamic_ncols=True) as bar:
            tokens, seconds = {"prefill": 0, "decode": 0}, {"prefill": 0.0, "decode": 0.0}
            start = time.perf_counter()
            for finished, num_tokens in self._steps():
                texts |= self._detokenize(finished)  # while the GPU works on the step that follows
                if not use_tqdm:
                    continue
                kind, now = "prefill" if num_tokens > 0 else "decode", time.perf_counter()
                tokens[kind] += abs(num_tokens)
                seconds[kind] += now - start
                start = now
                rates = {kind: f"{int(tokens[kind] / seconds[kind])}tok/s" for kind in tokens if seconds[kind]}
                bar.set_postfix(rates, refresh=False)
                bar.update(len(finished))
        return texts

    def _steps(self) -> Iterator[tuple[list[Sequence], int]]:
        """Step until nothing is left, as `_step` does, but one ahead: while the GPU works on a step, the host
        schedules and launches the next one and only then reads the tokens. An end of sequence is noticed a step
        late; the surplus token is dropped."""
        if not self.config.overlap_steps:
            while not self.is_finished():
                yield self._step()
            return
        flying: _Step | None = None
        while flying or not self.is_finished():
            launched = None if self.is_finished() else self._launch()
            finished = self._collect(flying) if flying else []
            if launched:
                launched = self._sample(launched)
                self.scheduler.advance(launched.seqs)
            if flying:
                yield finished, flying.num_tokens
            flying = launched

    def _detokenize(self, seqs: list[Sequence]) -> dict[int, str]:
        if self.tokenizer is None or not seqs:
            return {}
        completions = [seq.completion_token_ids for seq in seqs]
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        return {seq.seq_id: text for seq, text in zip(seqs, texts, strict=True)}

    def _check_alive(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("this engine has exited: make a new LLM")

    def _tokenize(self, prompts: list[Prompt]) -> list[list[int]]:
        """Token ids of each prompt; texts go through the tokenizer in one batch."""
        texts = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str)]
        if texts and self.tokenizer is None:
            raise ValueError(f"prompts[{texts[0]}]: is a text, but skip_tokenizer_init is set: pass token ids")
        token_ids = list(prompts)
        if texts:
            encoded = self.tokenizer([prompts[i] for i in texts])["input_ids"]
            for i, ids in zip(texts, encoded, strict=True):
                token_ids[i] = ids
        return token_ids

    def _check_prompt(self, token_ids: list[int], where: str = "prompt: ") -> None:
        check_token_ids(token_ids, self.config.hf_config.vocab_size, where)
        try:
            self.scheduler.check(len(token_ids))
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None

    def _make_sequence(self, token_ids: list[int], params: SamplingParams) -> Sequence:
        seq_id = next(self._seq_ids)
        # Neighbouring requests must not draw from related streams, hence a hash and no sum.
        seed = xxh64_intdigest(seq_id.to_bytes(8, "little"), self._seed) >> 1
        grammar = self._start_grammar(params.structured_outputs)
        return Sequence(seq_id, token_ids, params, self.config.kvcache_block_size, seed, grammar)

    def _start_grammar(self, form: StructuredOutputsParams | None) -> Grammar | None:
        """A request's grammar. Raises ValueError where the form cannot be enforced, and ImportError without the
        library that would do it."""
        if form is None:
            return None
        if self.tokenizer is None:
            raise ValueError("structured_outputs: need the model's tokenizer, but skip_tokenizer_init is set")
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.config.hf_config.vocab_size, self.config.eos)
        return self._grammars.start(form)
