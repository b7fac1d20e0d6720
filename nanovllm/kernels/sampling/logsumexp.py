"""log(sum(exp(logits))) of each row, in one pass over the logits.

torch's logsumexp makes six passes over a float32 copy, and a dozen launches for each chunk of rows.
"""

import torch
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.sampling.sampler import MAX_FLOAT
from nanovllm.kernels.triton_stub import tl, triton

_BLOCK = 4096
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-MAX_FLOAT)
_NEG_INF = tl.constexpr(float("-inf"))
# Logits that the twin converts to float32 at a time: 64 MiB.
_MAX_ELEMENTS = 2**24


@triton.jit
def _logsumexp_kernel(logits, sums, vocab_size, row_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    # Of each lane, finite, so that no infinity is subtracted from another.
    peaks = tl.full([BLOCK], _LOWEST, tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, loop_unroll_factor=2):
        at = start + lanes
        x = tl.load(logits + row * row_stride + at, mask=at < vocab_size, other=_NEG_INF).to(tl.float32)
        higher = tl.maximum(peaks, x)
        totals = totals * tl.exp2((peaks - higher) * _LOG2_E) + tl.exp2((x - higher) * _LOG2_E)
        peaks = higher
    peak = tl.max(peaks, axis=0)
    total = tl.sum(totals * tl.exp2((peaks - peak) * _LOG2_E), axis=0)
    tl.store(sums + row, peak + tl.log2(total) * _LN_2)


@kernel_or_twin
def logsumexp(logits: Tensor) -> Tensor:
    """log(sum(exp(logits))), float32 `[batch]`. NaN for a row with a NaN; a row with +inf has NaN or +inf.

    logits: `[batch, vocab_size]`, float32, float16 or bfloat16, any row stride, and contiguous rows.
    """
    rows = max(1, _MAX_ELEMENTS // logits.shape[1])
    return torch.cat([some.float().logsumexp(dim=1) for some in logits.split(rows)])


@kernel_of(logsumexp)
def _launch_logsumexp(logits):
    batch, vocab_size = logits.shape
    sums = torch.empty(batch, device=logits.device)
    if batch:
        launcher(_logsumexp_kernel, (batch,), has_pdl(logits.device))(
            logits, sums, vocab_size, logits.stride(0), BLOCK=_BLOCK, num_warps=8
        )
    return sums
