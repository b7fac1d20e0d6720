"""Sequence: one completion of one prompt, from the waiting queue to its last token."""

import sys
from collections.abc import Iterable
from enum import Enum, auto
from itertools import count
from typing import Any

import torch

from nanovllm.engine.request import Completion, Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.token_ids import TokenIds

PLACEHOLDER = 0  # any id that the model has
MAX_SEED = 2**63 - 1


class SequenceStatus(Enum):
    """WAITING -> RUNNING -> FINISHED; preemption leads back from RUNNING to WAITING."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Tokens, how many of them are in the KV cache, and the blocks that hold them.

    Attributes:
        block_size: tokens of a block; the class's is a default, and a scheduler gives each sequence its own.
        seq_id: unique within the process.
        token_ids: prompt and completion, and a placeholder if there is one; what equals a list of them.
        last_token: the input of the next decode step.
        num_tokens: how many token_ids there are. A worker's copy may lack the tokens themselves.
        num_cached_tokens: the first tokens, whose keys and values are in the KV cache.
        num_scheduled_tokens: tokens after those that the step being launched computes.
        is_prefill: whether it is (to be) prefilled; after preemption prompt and completion are.
        block_table: ids of its blocks, in order.
        temperature, max_tokens, ignore_eos: its request's. Without a limit max_tokens is sys.maxsize.
        seed: of the sampler's noise, which also depends on the position.
        is_plain: whether sampling it needs only logits, temperature and seed.
        request, completion: what was asked for, and the answer so far.
        pending_row: if the last token is a placeholder, the row of the step in flight whose token it stands for.
        block_hashes: of its first full blocks, computed when needed.
        cell: an engine.features.states.cells.Cell in stores beside the KV cache; None without such stores.
    """

    block_size = 256
    counter = count()

    def __init__(
        self,
        token_ids: Iterable[int],
        sampling_params: SamplingParams = SamplingParams(),  # noqa: B008 (immutable)
        request: Request | None = None,
        completion: Completion | None = None,
        seed: int | None = None,
    ):
        """token_ids: at least one. request: the one that all samples share; else one of these sampling_params. seed: of
        this sample; by default the request's own, or one of torch's generator."""
        self.seq_id = next(Sequence.counter)
        self.status = SequenceStatus.WAITING
        self.token_ids = TokenIds("i", token_ids)
        self.last_token: int = self.token_ids[-1]
        self.num_tokens = self.num_prompt_tokens = len(self.token_ids)
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.is_prefill = True
        self.block_table: list[int] = []
        self.request = request or Request(sampling_params)
        self.completion = completion or Completion.of(self.request, 0, self.num_prompt_tokens)
        params = self.request.params
        self.temperature = params.temperature
        self.max_tokens = sys.maxsize if params.max_tokens is None else params.max_tokens
        self.ignore_eos = params.ignore_eos
        self.is_plain = params.is_plain
        self.seed = params.seed if seed is None else seed
        if self.seed is None:
            self.seed = int(torch.randint(MAX_SEED, ()))
        self.pending_row = -1
        self.block_hashes: list[int] = []
        self.cell: Any = None

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, key: int | slice) -> Any:
        return self.token_ids[key]

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
    def num_completion_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> int:
        """num_tokens without a placeholder."""
        return self.num_tokens - (self.pending_row >= 0)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens].tolist()

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def num_blocks(self) -> int:
        """Blocks that its tokens need. The block table may still lack the last one."""
        return -(-self.num_tokens // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    def block(self, i: int) -> TokenIds:
        """Token ids of block i; the last block may be shorter than block_size."""
        if not 0 <= i < self.num_blocks:
            raise IndexError(f"block {i} of a sequence that has {self.num_blocks}")
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.last_token = token_id
        self.num_tokens += 1

    def append_pending(self, row: int) -> None:
        """Append a placeholder for the token that the step in flight samples in this row."""
        self.token_ids.append(PLACEHOLDER)
        self.num_tokens += 1
        self.pending_row = row

    def resolve_pending(self, token_id: int) -> int:
        """Replace the placeholder by the sampled token. Returns how many tokens that gives, 1."""
        self.token_ids[-1] = self.last_token = token_id
        self.pending_row = -1
        return 1

    def drop_pending(self) -> None:
        """Remove the placeholder, if there is one: its token will be ignored."""
        if self.pending_row >= 0:
            self.token_ids.pop()
            self.last_token = self.token_ids[-1]
            self.num_tokens -= 1
            self.pending_row = -1

    def __getstate__(self) -> tuple:
        """What a worker needs to prepare a step by itself: all tokens of a prefill, the last one of a decode step."""
        tokens = self.token_ids if self.is_prefill else self.last_token
        counts = self.num_tokens, self.num_prompt_tokens, self.num_cached_tokens, self.num_scheduled_tokens
        needed = self.is_plain, self.cell, self.completion.first_needed_logits
        return (*counts, *needed, self.block_table, self.temperature, self.seed, tokens)

    def __setstate__(self, state: tuple) -> None:
        *counts, first_needed_logits, self.block_table, self.temperature, self.seed, tokens = state
        self.num_tokens, self.num_prompt_tokens, self.num_cached_tokens, self.num_scheduled_tokens = counts[:4]
        (self.is_plain, self.cell), self.completion = counts[4:], Completion(first_needed_logits=first_needed_logits)
        self.is_prefill = not isinstance(tokens, int)
        self.token_ids = tokens if self.is_prefill else TokenIds("i")
        self.last_token = tokens[-1] if self.is_prefill else tokens
        self.pending_row = -1
