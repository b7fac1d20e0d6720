"""Context: the contract between engine and layers. It is all that the layers see of a step: the model runner sets it
before and resets it after.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch


@dataclass(frozen=True, slots=True)
class Context:
    """What layers need to know of one step. Tensors are on the model's device, and int32 unless noted.

    A row of a decode step is a sequence's new token. In a mixed step, a prompt has a row for each of its new tokens.
    """

    is_prefill: bool = False  # a flat batch of new tokens; else one token a row
    cu_seqlens_q: torch.Tensor | None = None  # [num_seqs + 1] prefill: running sum of each sequence's new tokens
    cu_seqlens_k: torch.Tensor | None = None  # [num_seqs + 1] prefill: of its keys, cached prefix and new tokens
    max_seqlen_q: int = 0  # prefill: most new tokens of a sequence
    max_seqlen_k: int = 0  # prefill: most keys of a sequence
    slot_mapping: torch.Tensor | None = None  # [num_tokens] KV cache slot, block * block_size + offset; -1 = none
    context_lens: torch.Tensor | None = None  # [num_rows] decode: keys, the row's own included; 0 = padding
    # [num_seqs or num_rows, max_blocks], right-padded with -1; None in a prefill that reads nothing from the cache
    block_tables: torch.Tensor | None = None
    # The sequences' cells in stores beside the KV cache; None without any. [num_rows]: where each row's state is
    # written, -1 = padding. Of a prefill [4, num_seqs]: the cell that the state before the first new token is in, -1 =
    # it is empty; the cell of the state after the last one; the cell of a snapshot, -1 = none; and the number of new
    # tokens before that.
    cells: torch.Tensor | None = None
    # [num_rows] with cells and speculation: 1 = the row's token is proposed and continues the row before, whose state
    # stays in its own cell; else 0
    is_proposed: torch.Tensor | None = None
    # int64 [num_rows] mixed step, with cells: the rows in such an order that the rows of a prompt follow each other
    row_order: torch.Tensor | None = None
    # With M-RoPE, whose positions have three parts, int64 [num_rows]: the positions in RoPE's table, in the place of
    # those in the sequence, from which they differ behind an image.
    rope_positions: torch.Tensor | None = None
    # float32 [num_tokens, 1, rotary_dim] prefill with images, with M-RoPE: the table, which has a row for each token
    rope: torch.Tensor | None = None
    images: Any = None  # prefill with images: a `models.seeing_decoder.ImageRows`
    # int64 [num_seqs] prefill: where each sequence ends in the batch. The model returns these hidden states; None: all.
    last_tokens: torch.Tensor | None = None
    attention: Any = None  # decode: `AttentionBackend.arguments`, which the back end alone reads
    of_windows: "WindowFields | None" = None  # of layers with a window that have tables of their own; None: all share
    num_sampled: int | None = None  # mixed step: the model returns only the first num_sampled rows, to sample from

    def of_last_tokens(self) -> "Context":
        """The same prefill with each sequence's last new token as its one query."""
        ends = cast(torch.Tensor, self.cu_seqlens_k)
        cu_seqlens_q = torch.arange(len(ends), dtype=torch.int32, device=ends.device)
        return replace(self, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=1)


@dataclass(slots=True)
class WindowFields:
    """What is different in a step's context for layers with a window, whose keys and values have blocks of their own.
    The fields are named as in `Context`."""

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor  # There are none in a prefill in which the other layers read nothing from the cache.
    attention: Any = None
    _context: Context | None = None

    def context(self, step: Context) -> Context:
        """The step's, for those layers. It is made once."""
        if self._context is None:
            tables = None if step.block_tables is None else self.block_tables
            fields = {"slot_mapping": self.slot_mapping, "block_tables": tables, "attention": self.attention}
            self._context = replace(step, **fields)
        return self._context


# A context variable rather than a global: engines driven from two threads do not see each other's steps.
_EMPTY = Context()
_CONTEXT: ContextVar[Context] = ContextVar("nanovllm_context", default=_EMPTY)


# Every layer calls the first in every step. So these are the variable's own methods, not functions that call them.
get_context: Callable[[], Context] = _CONTEXT.get
use_context: Callable[[Context], object] = _CONTEXT.set  # for a context that is built already
reset_context: Callable[[], object] = partial(_CONTEXT.set, _EMPTY)


def get_window_context() -> Context:
    """`get_context` of a layer with a window that has tables of its own. Without a cache all layers see one context."""
    context = get_context()
    return context if context.of_windows is None else context.of_windows.context(context)


def set_context(
    is_prefill: bool,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    slot_mapping: torch.Tensor | None = None,
    context_lens: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    **more: Any,
) -> None:
    """Build a `Context` of these fields, and of `more` of them, and set it. Raises TypeError for a field that it does
    not have, or if the first argument is a Context: `use_context` sets one."""
    if isinstance(is_prefill, Context):
        raise TypeError("set_context takes the fields of a Context; use_context takes a Context")
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    use_context(Context(is_prefill, *lengths, slot_mapping, context_lens, block_tables, **more))


@contextmanager
def step_context(context: Context) -> Iterator[None]:
    """Set the context for the block."""
    use_context(context)
    try:
        yield
    finally:
        reset_context()
