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
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state_row = state + tl.load(state_rows + i) * vocab_size
    held = tl.load(state_row + columns, mask=columns < vocab_size, other=0)
    # Of 150,000 tokens a request holds a few hundred: the other logits are neither read nor written.
    mask = held != 0
    at = logits + tl.load(rows + i) * logits_stride + columns
    logit = tl.load(at, mask=mask, other=0.0)
    factor = tl.load(repetition + i)
    logit = tl.where(logit > 0, tl.math.div_rn(logit, factor), logit * factor)
    count = held & (IN_PROMPT - 1)
    logit -= count.to(tl.float32) * tl.load(frequency + i)
    logit -= tl.where(count > 0, tl.load(presence + i), 0.0)
    tl.store(at, logit, mask=mask)


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    state: Tensor,
    state_rows: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    in_prompt: int,
) -> None:
    """See `layers.penalties.apply_penalties`; in_prompt is its IN_PROMPT. `state` is contiguous, as logits' rows are.

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
        BLOCK=_BLOCK,
        num_warps=8,
    )
