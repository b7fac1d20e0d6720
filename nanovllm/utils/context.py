"""Context: all that the layers see of a step, set by the model runner before it and reset after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Context:
    """Attention metadata of one step. All tensors are on the model's device, and int32 but for one.

    Attributes:
        is_prefill: whether the step prefills (a flat batch of new tokens) or decodes (one token a row).
        cu_seqlens_q: [num_seqs + 1] prefill: running sum of the new tokens of each sequence.
        cu_seqlens_k: [num_seqs + 1] prefill: running sum of the keys, cached prefix and new tokens.
        max_seqlen_q, max_seqlen_k: prefill: the longest of each.
        slot_mapping: [num_tokens] KV cache slot (block * block_size + offset) of each token, -1 = store nothing.
        context_lens: [num_rows] decode: keys of each row, its own token included; 0 = padding row. A row is a
            sequence's new token; in a mixed step a prompt has several.
        block_tables: [num_seqs, max_blocks] KV cache blocks of each sequence, in decode of each row's, right-padded
            with -1; None in a prefill that reads nothing from the cache.
        last_tokens: int64 [num_seqs] prefill: where in the flat batch each sequence's last new token is. The model
            returns the hidden states of these alone; None makes it return all.
        decode_plan: decode: int32 [num_items, PIECE_FIELDS], the pieces that attention is cut into, for back ends that
            want a plan (see the module of that name).
        num_drawn: decode: of how many of the first rows tokens are drawn; the model returns the hidden states of these
            alone. None: of all rows.
    """

    is_prefill: bool = False
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    slot_mapping: torch.Tensor | None = None
    context_lens: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    last_tokens: torch.Tensor | None = None
    decode_plan: torch.Tensor | None = None
    num_drawn: int | None = None

    def of_last_tokens(self) -> "Context":
        """The same prefill with each sequence's last new token as its one query."""
        cu_seqlens_q = torch.arange(len(self.cu_seqlens_k), dtype=torch.int32, device=self.cu_seqlens_k.device)
        return replace(self, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=1)


# A context variable rather than a global: engines driven from two threads do not see each other's steps.
_EMPTY = Context()
_context: ContextVar[Context] = ContextVar("nanovllm_context", default=_EMPTY)


def get_context() -> Context:
    return _context.get()


def set_context(context: Context) -> None:
    _context.set(context)


def reset_context() -> None:
    _context.set(_EMPTY)


@contextmanager
def step_context(context: Context) -> Iterator[None]:
    """Set the context for the block, and reset it also where the block raises."""
    set_context(context)
    try:
        yield
    finally:
        reset_context()
