"""Sequence: the state of one completion, from the waiting queue to its last token."""

import sys
from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from nanovllm.sampling_params import SamplingParams

PLACEHOLDER = 0  # any id that the model has


class SequenceStatus(Enum):
    """WAITING -> RUNNING -> FINISHED; preemption leads back from RUNNING to WAITING."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One completion of one prompt: its tokens, how many of them are in the KV cache, and the blocks that hold them.

    Tokens are an int32 array, so that 100,000 waiting prompts fit in memory. `token_ids` and its relatives return
    copies as lists. Times are seconds of time.perf_counter().
    """

    seq_id: int  # unique within the engine, in order of arrival
    tokens: array  # prompt and completion; given as any iterable of at least one token id
    params: SamplingParams = field(default_factory=SamplingParams)
    block_size: int = 256
    seed: int = 0  # used if params have none
    grammar: Any = None  # the engine.sampling.structured.Grammar that it follows; None after its end
    logit_edits: Any = None  # engine.sampling.logit_edits.LogitEdits, if params ask for them

    # Its state, which the scheduler and the block manager keep.
    status: SequenceStatus = SequenceStatus.WAITING
    is_prefilling: bool = True  # also after preemption, when prompt and completion are prefilled again
    num_prompt_tokens: int = field(init=False)
    num_cached_tokens: int = 0  # the first tokens, whose keys and values are in the KV cache
    num_shared_tokens: int = -1  # tokens that the prefix cache gave at the first allocation; -1 before
    record: Any = None  # engine.speculation.budget.Record, with speculation
    num_scheduled_tokens: int = 0  # tokens after the cached ones that the step being launched computes
    pending_row: int = -1  # if the last token is a placeholder: its row of the sampled tokens of the step in flight
    block_table: list[int] = field(default_factory=list)  # ids of its blocks, in order
    place: Any = None  # engine.places.Place, its slot in stores beside the KV cache; None without such stores
    block_hashes: list[int] = field(default_factory=list)  # of its first full blocks, computed when needed
    end_token_ids: frozenset[int] = frozenset()  # tokens that end it, and NON_FINITE
    stop_tokens: dict[int, str] = field(default_factory=dict)  # those that a stop string stands for, and the string

    # What its request asks for.
    request_id: int = field(init=False)  # shared by the samples of one prompt
    prompt_index: int = 0  # in its call
    sample: int = 0  # index of the completion
    max_tokens: int = field(init=False)  # without a limit, sys.maxsize
    is_constrained: bool = field(init=False)  # the allowed tokens depend on the completion so far
    # Position of the first prompt token whose logits prompt_logprobs still needs, so it cannot come from the prefix
    # cache; sys.maxsize if none is.
    first_needed_logits: int = sys.maxsize

    # Its result.
    text_stream: Any = None  # detokenizes token by token, for streams and stop strings
    text: str | None = None
    num_streamed_tokens: int = 0  # of the completion, in deltas
    # Of each completion token: its own log-probability, or where others are wanted {token id: log-probability}.
    logprobs: list[float | dict[int, float]] | None = field(init=False)
    prompt_logprobs: list[dict[int, float] | None] | None = field(init=False)
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: str | int | None = None  # the stop string or the token of stop_token_ids that ended it
    error: str | None = None  # why finish_reason is or will be "error"
    arrival_time: float = 0.0
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float = 0.0

    def __post_init__(self) -> None:
        params, edits = self.params, self.logit_edits
        self.tokens = array("i", self.tokens)
        self.num_prompt_tokens = len(self.tokens)
        self.request_id = self.seq_id
        self.max_tokens = sys.maxsize if params.max_tokens is None else params.max_tokens
        self.seed = self.seed if params.seed is None else params.seed
        self.is_constrained = self.grammar is not None or (edits is not None and edits.reads_completion)
        self.logprobs = None if params.logprobs is None else []
        self.prompt_logprobs = None
        if params.prompt_logprobs is not None:
            first, end, _ = slice(params.prompt_logprobs_start, None).indices(self.num_prompt_tokens)
            self.prompt_logprobs = [None] * max(first, 1)
            if len(self.prompt_logprobs) < end:
                self.first_needed_logits = len(self.prompt_logprobs) - 1

    def __len__(self) -> int:
        return len(self.tokens)

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
    def num_tokens(self) -> int:
        """Tokens of prompt and completion, with the placeholder if there is one."""
        return len(self.tokens)

    @property
    def last_token(self) -> int:
        """The input of its next decode step."""
        return self.tokens[-1]

    @property
    def token_ids(self) -> list[int]:
        return self.tokens.tolist()

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.tokens[: self.num_prompt_tokens].tolist()

    @property
    def completion_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :].tolist()

    def completion_logprobs(self, start: int = 0, end: int | None = None) -> list[dict[int, float]] | None:
        """{token id: log-probability} for each completion token from start to end; None unless asked for."""
        if self.logprobs is None:
            return None
        found, first = self.logprobs[start:end], self.num_prompt_tokens + start
        tokens = self.tokens[first : first + len(found)]
        return [each if isinstance(each, dict) else {token: each} for token, each in zip(tokens, found, strict=True)]

    @property
    def num_completion_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> int:
        """num_tokens without a placeholder."""
        return len(self.tokens) - (self.pending_row >= 0)

    @property
    def num_blocks(self) -> int:
        """Blocks that its tokens need. The block table may still lack the last one."""
        return -(-len(self.tokens) // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    def block(self, i: int) -> array:
        """Token ids of block i; the last block may be shorter than block_size."""
        if not 0 <= i < self.num_blocks:
            raise IndexError(f"block {i} of a sequence that has {self.num_blocks}")
        return self.tokens[i * self.block_size : (i + 1) * self.block_size]

    def append_token(self, token_id: int) -> None:
        self.tokens.append(token_id)

    def append_pending(self, row: int) -> None:
        """Append a placeholder for the token that the step in flight samples in this row."""
        self.tokens.append(PLACEHOLDER)
        self.pending_row = row

    def resolve_pending(self, token_id: int) -> None:
        """Replace the placeholder by the sampled token."""
        self.tokens[-1] = token_id
        self.pending_row = -1

    def drop_pending(self) -> None:
        """Remove the placeholder, if there is one: its token will be ignored."""
        if self.pending_row >= 0:
            self.tokens.pop()
            self.pending_row = -1
