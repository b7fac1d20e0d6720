"""Sequence: one request's state, from the waiting queue to its last token."""

import sys
from array import array
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

from nanovllm.sampling_params import SamplingParams

PLACEHOLDER = 0  # any id that the model has


class SequenceStatus(Enum):
    """WAITING -> RUNNING -> FINISHED; preemption leads back from RUNNING to WAITING."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """One request: its tokens, how many of them are in the KV cache, and the blocks that hold them.

    Tokens are kept in an int32 array (4 bytes a token, so that 100,000 waiting prompts fit in memory);
    `token_ids`, `prompt_token_ids`, `completion_token_ids` and `block(i)` hand out lists, each a copy.

    Attributes:
        seq_id: unique within the engine, in order of arrival.
        status: see SequenceStatus.
        is_prefilling: whether the next step prefills it. State of its own, not derived from the number of
            completion tokens: a preempted sequence is prefilled again, completion and all.
        tokens: array("i") of prompt and completion.
        last_token: the newest token, the one that a decode step feeds to the model.
        num_tokens: prompt and completion tokens.
        num_prompt_tokens: prompt tokens.
        num_cached_tokens: tokens from the front whose keys and values are in the KV cache: the shared prefix
            right after allocation, more with every step.
        num_shared_tokens: tokens that the prefix cache gave when the sequence was first allocated, -1 before.
        pending_row: row of the step in flight that samples its last token, which is a placeholder until that
            step is read; -1 where every token is known.
        num_scheduled_tokens: tokens whose keys and values the current step computes.
        block_table: ids of the KV cache blocks that hold the sequence, in order.
        block_hashes: hash chain of the full blocks, as far as it has been computed; the block manager's.
        finish_reason: "stop", "length", "abort" or "error" once finished, else None.
        stop_reason: the stop string or the one of stop_token_ids that ended it, None for any other end.
        error: what went wrong, where finish_reason is "error", or will be: there is no token to draw. Else None.
        end_token_ids: tokens that end it, and NON_FINITE; the scheduler's.
        request_id: what its request is known by; the samples of one prompt share it.
        params: the request's SamplingParams.
        is_plain: whether temperature and seed are all that its draws need. A step of plain sequences alone is
            sampled within the model's CUDA graph.
        is_constrained: whether the tokens that it may draw depend on those before: it must follow a grammar, or not
            complete a bad word of several tokens.
        needs_prompt_logits: whether prompt_logprobs are still to be computed: they need the whole prompt computed,
            whatever the prefix cache holds.
        grammar: what it must follow, as far as it has got; None without, and once the sequence has finished.
        logit_edits: what logit_bias, allowed_token_ids and bad_words make of its logits; None without them.
        text_stream: its text as its tokens come (engine/requests/detokenizer.py), where somebody asks for that.
        text: the completion's text, once finished, where there is a tokenizer.
        logprobs: {token id: log-probability} for each completion token, the sampled one first; None unless asked for.
        prompt_logprobs: the same for each prompt token, None for the first; None unless asked for.
        arrival_time, scheduled_time, first_token_time, finish_time: time.perf_counter() seconds, None so far.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "block_size",
        "block_table",
        "end_token_ids",
        "error",
        "finish_reason",
        "finish_time",
        "first_token_time",
        "grammar",
        "ignore_eos",
        "is_constrained",
        "is_plain",
        "is_prefilling",
        "last_token",
        "logit_edits",
        "logprobs",
        "max_tokens",
        "needs_prompt_logits",
        "num_cached_tokens",
        "num_prompt_tokens",
        "num_scheduled_tokens",
        "num_shared_tokens",
        "num_tokens",
        "params",
        "pending_row",
        "prompt_logprobs",
        "request_id",
        "scheduled_time",
        "seed",
        "seq_id",
        "skip_special_tokens",
        "status",
        "stop_reason",
        "temperature",
        "text",
        "text_stream",
        "tokens",
    )

    def __init__(
        self,
        seq_id: int,
        token_ids: Iterable[int],
        sampling_params: SamplingParams | None = None,
        block_size: int = 256,
        seed: int = 0,
        grammar: Any = None,
        logit_edits: Any = None,
    ):
        """token_ids: the prompt, at least one token. seed: used where sampling_params names none. grammar, logit_edits:
        an `engine.sampling.structured.Grammar` and an `engine.sampling.logit_edits.LogitEdits`, where sampling_params
        ask for them."""
        self.params = sampling_params = sampling_params or SamplingParams()
        self.seq_id = seq_id
        self.block_size = block_size
        self.status = SequenceStatus.WAITING
        self.is_prefilling = True
        self.tokens = array("i", token_ids)
        self.last_token = self.tokens[-1]
        self.num_tokens = len(self.tokens)
        self.num_prompt_tokens = self.num_tokens
        self.num_cached_tokens = 0
        self.num_shared_tokens = -1
        self.num_scheduled_tokens = 0
        self.pending_row = -1
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.end_token_ids: frozenset[int] = frozenset()
        self.request_id = seq_id
        self.text_stream: Any = None
        self.text: str | None = None
        self.arrival_time: float | None = None
        self.scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.finish_time: float | None = None
        self.temperature = float(sampling_params.temperature)
        self.max_tokens = sys.maxsize if sampling_params.max_tokens is None else sampling_params.max_tokens
        # A grammar has nothing to offer after its end but an end-of-sequence token.
        self.ignore_eos = sampling_params.ignore_eos and grammar is None
        self.skip_special_tokens = sampling_params.skip_special_tokens
        self.grammar = grammar
        self.logit_edits = logit_edits
        self.is_constrained = grammar is not None or (logit_edits is not None and logit_edits.reads_completion)
        self.is_plain = sampling_params.is_plain
        self.logprobs: list[dict[int, float]] | None = None if sampling_params.logprobs is None else []
        self.prompt_logprobs: list[dict[int, float] | None] | None = None
        self.needs_prompt_logits = False
        if sampling_params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
            self.needs_prompt_logits = self.num_prompt_tokens > 1
        self.seed = seed if sampling_params.seed is None else sampling_params.seed

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence(seq_id={self.seq_id}, {self.status.name}, num_tokens={self.num_tokens}, "
            f"num_prompt_tokens={self.num_prompt_tokens}, num_cached_tokens={self.num_cached_tokens}, "
            f"block_table={self.block_table})"
        )

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def token_ids(self) -> list[int]:
        return self.tokens.tolist()

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.tokens[: self.num_prompt_tokens].tolist()

    @property
    def completion_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :].tolist()

    @property
    def num_completion_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> int:
        """num_tokens without the placeholder of a step in flight."""
        return self.num_tokens - (self.pending_row >= 0)

    @property
    def num_blocks(self) -> int:
        """Blocks that num_tokens tokens take: ceil(num_tokens / block_size)."""
        return -(-self.num_tokens // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        """Tokens in the last block, 1..block_size."""
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    def block(self, i: int) -> list[int]:
        """Token ids of block i, 0 <= i < num_blocks; the last one may be shorter than block_size."""
        if not 0 <= i < self.num_blocks:
            raise IndexError(f"block {i} of a sequence that has {self.num_blocks}")
        return self.tokens[i * self.block_size : (i + 1) * self.block_size].tolist()

    def append_token(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.last_token = token_id
        self.num_tokens += 1

    def append_pending(self, row: int) -> None:
        """Append a placeholder for the token that row `row` of the step in flight samples."""
        self.append_token(PLACEHOLDER)
        self.pending_row = row

    def resolve_pending(self, token_id: int) -> None:
        """Put the token that was sampled in the placeholder's place."""
        self.tokens[-1] = self.last_token = token_id
        self.pending_row = -1

    def drop_pending(self) -> None:
        """Take the placeholder back: nobody will look at the token that is being sampled."""
        if self.pending_row >= 0:
            self.tokens.pop()
            self.last_token = self.tokens[-1]
            self.num_tokens -= 1
            self.pending_row = -1
