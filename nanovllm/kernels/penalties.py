"""Penalties on tokens that a request holds already, where they stand."""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import launcher

_BLOCK = 4096


@triton.jit
def _penalties_kernel(
    logits,
    rows,
    state,
    state_rows,
    presence,
    frequency,
    repetition,
    vocab_size,
    logits_stride,
    IN_PROMPT: tl.constexpr,
    MAX_LOGIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state_row = state + tl.load(state_rows + i) * vocab_size
    held = tl.load(state_row + columns, mask=columns < vocab_size, other=0)
    # Of 150,000 tokens a request holds a few hundred: the other logits are neither read nor written.
    mask = held != 0
    at = logits + tl.load(rows + i) * logits_stride + columns
    before = tl.load(at, mask=mask, other=0.0)
    factor = tl.load(repetition + i)
    logit = tl.where(before > 0, tl.math.div_rn(before, factor), before * factor)
    count = held & (IN_PROMPT - 1)
    logit -= count.to(tl.float32) * tl.load(frequency + i)
    logit -= tl.where(count > 0, tl.load(presence + i), 0.0)
    logit = tl.minimum(tl.maximum(logit, -MAX_LOGIT), MAX_LOGIT)
    tl.store(at, tl.where(tl.abs(before) < float("inf"), logit, before), mask=mask)


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    state: Tensor,
    state_rows: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    in_prompt: int,
    max_logit: float,
) -> None:
    """See `layers.penalties.apply_penalties`, whose constants in_prompt and max_logit are. `state` is contiguous, as
    logits' rows are.

    One launch that reads the states once (4 bytes a token) and next to nothing else; as a chain of torch's
    operations it takes some twenty passes over float32 logits, and memory for five copies of them.
    """
    vocab_size = logits.shape[1]
    grid = (len(rows), triton.cdiv(vocab_size, _BLOCK))
    if len(rows) == 0:
        return
    launcher(_penalties_kernel, grid)(
        logits,
        rows,
        state,
        state_rows,
        presence,
        frequency,
        repetition,
        vocab_size,
        logits.stride(0),
        IN_PROMPT=in_prompt,
        MAX_LOGIT=max_logit,
        BLOCK=_BLOCK,
        num_warps=8,
    )
