"""Where top-k, top-p and min-p cut a row of logits: one number a row, below which no token is drawn.

Top-k and top-p both ask for the lowest value v such that the logits strictly above v weigh less than a target. Top-k
weighs every logit 1, and its target is k. Top-p weighs it exp(logit / T), and its target is p of the mass. The values
that a dtype can hold are numbered in their order, and a bracket of these keys is narrowed by weighing above a few of
them at a time, so the result is exact.

One program serves a row. It first finds the maximum of every lane (a lane is every LANES-th column). The k-th highest
maximum bounds the k-th highest logit from below, and (1 - p) / V of the mass bounds what top-p keeps. Mostly a few
lanes then hold all candidates. These are copied, and the search reads only them; else it reads the whole row each time.
"""

import numpy as np
import torch
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.sampling.sampler import MAX_FLOAT, scale_of
from nanovllm.kernels.triton_stub import tl, triton

LANES = 4096
CAPACITY = 16384  # logits of a row's candidates
BLOCK = 2048  # logits that are weighed at a time
_PIVOTS = tl.constexpr(4)  # A whole row is bound by arithmetic, and four narrow the most for each instruction.
_MAX_FLOAT = tl.constexpr(MAX_FLOAT)
_NEG_INF = tl.constexpr(float("-inf"))
# Low bits of a float32 that are 0 whatever value of the dtype it holds.
_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def _key_of(value, SHIFT: tl.constexpr):
    """The number of a float32 in the order of the dtype's values, as int64."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0 leaves one zero of the two
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT).to(tl.int64)


@triton.jit
def _value_of(key, SHIFT: tl.constexpr):
    """The float32 that a key stands for."""
    bits = (key << SHIFT).to(tl.int32)
    return tl.where(bits < 0, bits ^ (0x7FFFFFFF >> SHIFT << SHIFT), bits).to(tl.float32, bitcast=True)


@triton.jit
def _weigh_above(source, count, values, peak, scale, BLOCK: tl.constexpr):
    """The sum of exp2((x - peak) * scale) over the x of source [count] above each of values [_PIVOTS]."""
    above = tl.zeros([BLOCK, _PIVOTS], tl.float32)
    for start in tl.range(0, count, BLOCK, loop_unroll_factor=2):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(source + at, mask=at < count, other=_NEG_INF).to(tl.float32)
        weights = tl.exp2(tl.minimum(x - peak, 0.0) * scale)  # NaN for NaN and -inf, which are above no value
        above += tl.where(x[:, None] > values[None, :], weights[:, None], 0.0)
    return tl.sum(above, axis=0)


@triton.jit
def _search(source, count, peak, scale, target, low, high, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest key in [low, high] above whose value the source weighs less than the target; high if there is none."""
    while low < high:
        step = (high - low + _PIVOTS) // (_PIVOTS + 1)
        # None of the pivots is `high`, so each of them narrows the bracket.
        pivots = tl.minimum(low + step * (tl.arange(0, _PIVOTS).to(tl.int64) + 1), high) - 1
        is_under = _weigh_above(source, count, _value_of(pivots, SHIFT), peak, scale, BLOCK) < target
        low = tl.maximum(low, tl.max(tl.where(is_under, low, pivots + 1), axis=0))
        high = tl.minimum(high, tl.min(tl.where(is_under, pivots, high), axis=0))
    return low


@triton.jit
def _cut(source, count, peak, temperature, top_k, top_p, low, total, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The key at which top-k and then top-p cut a source that holds all logits from the key `low` on. top_k 0 and top_p
    1 are off. total: the mass of the row; with top-k nobody reads it."""
    least = _key_of(tl.full([], float("-inf"), tl.float32), SHIFT)
    high = _key_of(peak, SHIFT)
    if top_k > 0:
        low = _search(source, count, peak, 0.0, top_k.to(tl.float32), low, high, SHIFT, BLOCK)
    if top_p < 1.0:
        scale = scale_of(temperature)
        if top_k > 0:
            below = _value_of(tl.maximum(low - 1, least), SHIFT) + tl.zeros([_PIVOTS], tl.float32)
            total = tl.max(_weigh_above(source, count, below, peak, scale, BLOCK), axis=0)
        low = _search(source, count, peak, scale, top_p * total, low, high, SHIFT, BLOCK)
    return low


@triton.jit
def _thresholds_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, maxima, live_lanes, candidates, thresholds, vocab_size, row_stride,
    SHIFT: tl.constexpr, LANES: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    threshold = _NEG_INF
    if (temperature > 0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0)):
        logits_row = logits + row * row_stride
        lanes = tl.arange(0, LANES)
        maximum = tl.full([LANES], float("-inf"), tl.float32)
        for start in tl.range(0, vocab_size, LANES, loop_unroll_factor=4):
            x = tl.load(logits_row + start + lanes, mask=start + lanes < vocab_size, other=_NEG_INF).to(tl.float32)
            maximum = tl.maximum(maximum, tl.where(x > _NEG_INF, x, _NEG_INF))  # no NaN
        peak = tl.minimum(tl.max(maximum, axis=0), _MAX_FLOAT)
        if peak > _NEG_INF:
            if (top_k > 0) | (top_p < 1.0):
                top = _key_of(peak, SHIFT)
                low = _key_of(tl.full([], float("-inf"), tl.float32), SHIFT)
                total = 0.0
                if top_k > 0:
                    if top_k <= LANES:
                        tl.store(maxima + row * LANES + lanes, maximum)
                        tl.debug_barrier()  # until all threads have stored theirs
                        low = _key_of(tl.min(maximum, axis=0), SHIFT)
                        target = top_k.to(tl.float32)
                        low = _search(maxima + row * LANES, LANES, peak, 0.0, target, low, top, SHIFT, BLOCK)
                else:
                    scale = scale_of(temperature)
                    all_values = tl.full([_PIVOTS], float("-inf"), tl.float32)
                    total = tl.max(_weigh_above(logits_row, vocab_size, all_values, peak, scale, BLOCK), axis=0)
                    # If every logit were at most this high, all of them together would weigh less than what may be
                    # left out. 0.999 is more than all rounding.
                    share = tl.maximum(1.0 - top_p, 0.0) * total / vocab_size * 0.999
                    low = tl.minimum(_key_of(peak + tl.log2(share) / scale, SHIFT), top)
                is_live = (maximum >= _value_of(low, SHIFT)) & (maximum > _NEG_INF)
                num_live = tl.sum(is_live.to(tl.int32), axis=0)
                count = num_live * tl.cdiv(vocab_size, LANES)
                if count <= CAPACITY:
                    live_row = live_lanes + row * LANES
                    candidates_row = candidates + row * CAPACITY
                    tl.store(live_row + tl.cumsum(is_live.to(tl.int32), axis=0) - 1, lanes, mask=is_live)
                    tl.debug_barrier()
                    for start in range(0, count, BLOCK):
                        at = start + tl.arange(0, BLOCK)
                        column = tl.load(live_row + at % num_live, mask=at < count, other=0) + at // num_live * LANES
                        x = tl.load(logits_row + column, mask=(at < count) & (column < vocab_size), other=_NEG_INF)
                        tl.store(candidates_row + at, x, mask=at < count)
                    tl.debug_barrier()
                    key = _cut(candidates_row, count, peak, temperature, top_k, top_p, low, total, SHIFT, BLOCK)
                else:
                    key = _cut(logits_row, vocab_size, peak, temperature, top_k, top_p, low, total, SHIFT, BLOCK)
                threshold = _value_of(key, SHIFT)
            if min_p > 0:
                threshold = tl.maximum(threshold, peak + tl.log(tl.minimum(min_p, 1.0)) * temperature)
    tl.store(thresholds + row, threshold)


@kernel_or_twin
def sampling_thresholds(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The lowest logit of each row that truncation keeps: tokens with logit >= threshold may be drawn.

    The order and the definitions are transformers'. Logits are divided by the temperature. Top-k keeps the k highest.
    Top-p keeps the likeliest of these whose probabilities reach p, the one that crosses p included. Min-p keeps no
    token less likely than min_p times the likeliest. All tokens that tie with the last one kept are kept as well. One
    threshold can express all three because each keeps the highest logits and no others.

    The kernel is one launch without host synchronization. Equal arguments give equal bits.

    Args:
        logits: `[batch, vocab_size]`, not divided by the temperature. NaN counts as -inf. The twin accepts any float
            dtype. The kernel accepts float32, float16 and bfloat16, any row stride, and contiguous rows.
        temperatures: float32 `[batch]`; 0 (greedy) truncates nothing.
        top_k: int32 `[batch]`; 0 is off.
        top_p: float32 `[batch]`, in (0, 1]; 1 is off.
        min_p: float32 `[batch]`, in 0..1; 0 is off.

    Returns:
        float32 `[batch]`, in units of `logits`; -inf where nothing is truncated.
    """
    thresholds = logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)
    is_cut = (temperatures > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    rows = is_cut.nonzero().squeeze(1)
    if len(rows) == 0:
        return thresholds
    logits = torch.nan_to_num(logits[rows].float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    temperatures, top_k, top_p, min_p = (x[rows] for x in (temperatures, top_k.long(), top_p, min_p))
    best = logits.max(dim=1).values
    cut = best + temperatures * min_p.log()  # probability >= min_p * the highest, in logits
    if ((top_k > 0) | (top_p < 1)).any():
        cut = cut.maximum(_rank_thresholds(logits, best, temperatures, top_k, top_p))
    # A best logit of +inf leaves no choice. One of -inf means that there is no token at all.
    thresholds[rows] = cut.where(best.isfinite(), best)
    return thresholds


@kernel_of(sampling_thresholds)
def _launch_sampling_thresholds(logits, temperatures, top_k, top_p, min_p):
    batch, vocab_size = logits.shape
    thresholds = torch.empty(batch, device=logits.device)
    if batch == 0:
        return thresholds
    # One tensor each: as parts of one, odd batches would have other alignments, and so other kernels to compile.
    maxima = torch.empty(batch, LANES, device=logits.device)
    live_lanes = torch.empty(batch, LANES, dtype=torch.int32, device=logits.device)
    candidates = torch.empty(batch, CAPACITY, dtype=logits.dtype, device=logits.device)
    launcher(_thresholds_kernel, (batch,), has_pdl(logits.device))(
        logits, temperatures, top_k, top_p, min_p, maxima, live_lanes, candidates, thresholds, vocab_size,
        logits.stride(0), SHIFT=_SHIFTS[logits.dtype], LANES=LANES, CAPACITY=CAPACITY, BLOCK=BLOCK, num_warps=8,
        maxnreg=128,  # so that two programs fit a multiprocessor
    )  # fmt: skip
    return thresholds


def _rank_thresholds(logits: Tensor, best: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """float32 `[batch]`: where top-k and then top-p cut; -inf where both are off."""
    vocab_size = logits.shape[1]
    num_kept = top_k.where(top_k > 0, vocab_size).clamp(max=vocab_size).unsqueeze(1)
    ranked = _highest(logits, int(num_kept.max()))
    lowest = ranked.gather(1, num_kept - 1)
    best, temperatures = best.unsqueeze(1), temperatures.unsqueeze(1)

    def mass(x: Tensor) -> Tensor:
        """Unnormalized probabilities of what top-k keeps. In float64: of 150,000 terms the last ones count."""
        return torch.where(x >= lowest, ((x - best) / temperatures).double().exp(), 0)

    # Ties with the k-th may lie beyond the ranks: the total holds them, and a crossing among them is at `lowest`.
    reached = mass(ranked).cumsum(dim=1) >= top_p.unsqueeze(1) * mass(logits).sum(dim=1, keepdim=True)
    crossing = ranked.gather(1, (~reached).sum(dim=1, keepdim=True).minimum(num_kept - 1))
    cut = lowest.where(top_k.unsqueeze(1) > 0, -torch.inf)
    return crossing.where(top_p.unsqueeze(1) < 1, cut).squeeze(1)


def _highest(logits: Tensor, count: int) -> Tensor:
    """The `count` highest of each row, the highest first."""
    if logits.device.type != "cpu":
        return logits.topk(count, dim=1).values
    # numpy sorts with SIMD instructions: 49,152 numbers in 0.1 ms, for which torch.topk takes 3 ms.
    return torch.from_numpy(np.sort(logits.numpy(), axis=1))[:, -count:].flip(1)
