"""Drawing tokens from softmax(logits / temperature) in one pass, with noise that belongs to the request."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.launch import launcher

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_NO_COLUMN = tl.constexpr(2**31 - 1)
# One quad of columns for each thread of four warps.
_QUADS = 128


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Ten rounds of Philox4x32 (Salmon et al. 2011) on uint32 counter words c0..c3 under the key k0, k1."""
    for _ in tl.range(10, loop_unroll_factor=10):
        # One 64-bit product yields both halves: a single wide multiplication where umulhi and mul would be
        # two.
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product2 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product2 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product2.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _log2(x, FAST: tl.constexpr):
    # The hardware's instruction is right to about 2^-22 and takes a tenth of tl.log2's instructions, which
    # would be most of the kernel. Triton's interpreter has no libdevice.
    return libdevice.fast_log2f(x) if FAST else tl.log2(x)


@triton.jit
def log2_exponential(bits, FAST: tl.constexpr):
    """log2 of the Exponential(1) draw that belongs to uint32 bits; see `layers.sampler.log2_exponential`."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return _log2(tl.where(u < 0.03125, series, _log2(1.0 - u, FAST) * -_LN_2), FAST)


@triton.jit
def _better(score, column, other, other_column):
    """The better of two candidates; the first, which has the lower column, on a tie. NaN never wins."""
    take = other > score
    return tl.where(take, other, score), tl.where(take, other_column, column)


@triton.jit
def _race(
    logits_row,
    start,
    vocab_size,
    scale,
    seed,
    position,
    threshold,
    FIRST_COLUMN: tl.constexpr,
    NOISY: tl.constexpr,
    TRUNCATED: tl.constexpr,
    TILES: tl.constexpr,
    QUADS: tl.constexpr,
    FAST_LOG2: tl.constexpr,
):
    """The best score and its column for each of QUADS lanes, over TILES * QUADS * 4 columns."""
    best = tl.full([QUADS], float("-inf"), tl.float32)
    best_column = start + tl.arange(0, QUADS) * 4
    # Unrolled by the compiler, not by Python as static_range would be: the same PTX, a start that is sooner there.
    for tile in tl.range(TILES, loop_unroll_factor=TILES):
        first = start + tile * (QUADS * 4)
        columns = first + tl.arange(0, QUADS * 4)
        logit = tl.load(logits_row + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
        if TRUNCATED:
            logit = tl.where(logit >= threshold, logit, float("-inf"))
        # Four neighbouring columns share a Philox block. With as many quads as threads, a thread has loaded
        # just the four that it draws for: they are taken apart in registers, and the load is still a wide
        # one.
        even, odd = tl.split(tl.reshape(logit, (QUADS, 2, 2)))
        s0, s2 = tl.split(even)
        s1, s3 = tl.split(odd)
        if NOISY:
            counter = (FIRST_COLUMN // 4 + first // 4 + tl.arange(0, QUADS)).to(tl.uint32)
            zero = counter * 0
            r0, r1, r2, r3 = philox4x32(
                counter,
                zero,
                zero + position.to(tl.uint32),
                zero + (position >> 32).to(tl.uint32),
                seed.to(tl.uint32),
                (seed >> 32).to(tl.uint32),
            )
            s0 = s0 * scale - log2_exponential(r0, FAST_LOG2)
            s1 = s1 * scale - log2_exponential(r1, FAST_LOG2)
            s2 = s2 * scale - log2_exponential(r2, FAST_LOG2)
            s3 = s3 * scale - log2_exponential(r3, FAST_LOG2)
        column = first + tl.arange(0, QUADS) * 4
        best, best_column = _better(best, best_column, s0, column)
        best, best_column = _better(best, best_column, s1, column + 1)
        best, best_column = _better(best, best_column, s2, column + 2)
        best, best_column = _better(best, best_column, s3, column + 3)
    return best, best_column


@triton.jit
def _race_kernel(
    logits,
    temperatures,
    seeds,
    positions,
    thresholds,
    best_scores,
    best_columns,
    vocab_size,
    row_stride,
    num_splits,
    FIRST_COLUMN: tl.constexpr,
    TRUNCATED: tl.constexpr,
    TILES: tl.constexpr,
    QUADS: tl.constexpr,
    FAST_LOG2: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    start = split * (TILES * QUADS * 4)
    logits_row = logits + row * row_stride
    temperature = tl.load(temperatures + row)
    seed = tl.load(seeds + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    threshold = float("-inf")
    if TRUNCATED:
        threshold = tl.load(thresholds + row)
    if temperature > 0:
        scale = tl.full([], _LOG2_E, tl.float32) / temperature  # see threshold_kernels._scale
        score, column = _race(
            logits_row,
            start,
            vocab_size,
            scale,
            seed,
            position,
            threshold,
            FIRST_COLUMN=FIRST_COLUMN,
            NOISY=True,
            TRUNCATED=TRUNCATED,
            TILES=TILES,
            QUADS=QUADS,
            FAST_LOG2=FAST_LOG2,
        )
    else:
        score, column = _race(
            logits_row,
            start,
            vocab_size,
            temperature,
            seed,
            position,
            threshold,
            FIRST_COLUMN=FIRST_COLUMN,
            NOISY=False,
            TRUNCATED=TRUNCATED,
            TILES=TILES,
            QUADS=QUADS,
            FAST_LOG2=FAST_LOG2,
        )
    best = tl.max(score, axis=0)
    best_column = tl.min(tl.where(score == best, column, _NO_COLUMN), axis=0)
    tl.store(best_scores + row * num_splits + split, best)
    tl.store(best_columns + row * num_splits + split, best_column)


@triton.jit
def _combine_kernel(best_scores, best_columns, tokens, num_splits, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK)
    mask = split < num_splits
    score = tl.load(best_scores + row * num_splits + split, mask=mask, other=float("-inf"))
    column = tl.load(best_columns + row * num_splits + split, mask=mask, other=_NO_COLUMN)
    winner = tl.min(tl.where(score == tl.max(score, axis=0), column, _NO_COLUMN), axis=0)
    tl.store(tokens + row, winner.to(tl.int64))


def sample(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, thresholds: Tensor | None = None
) -> Tensor:
    """Draws one token a row from softmax(logits / temperature); see `layers.sampler.Sampler`.

    Two launches, no host synchronization, nothing as large as the logits allocated: fit for CUDA graph
    capture. A column's score does not depend on how the vocabulary is split, so neither does the result.

    Args:
        logits: `[batch, vocab_size]`, any float dtype and row stride, contiguous in its last dimension.
        temperatures: float32 `[batch]`; 0 takes the lowest of the highest logits.
        seeds: int64 `[batch]`.
        positions: int64 `[batch]`.
        thresholds: float32 `[batch]`; None costs nothing.

    Returns:
        int64 `[batch]`.

    Raises:
        ValueError: if logits are strided in the vocabulary, or the vocabulary is empty.
    """
    batch = check_logits(logits)
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if batch == 0:
        return tokens
    scores, columns = race_splits(logits, temperatures, seeds, positions, thresholds, 0)
    num_splits = scores.shape[1]
    launch = launcher(_combine_kernel, (batch,), has_pdl(logits.device))
    launch(scores, columns, tokens, num_splits, BLOCK=triton.next_power_of_2(num_splits), num_warps=1)
    return tokens


def check_logits(logits: Tensor) -> int:
    """The batch size. Raises ValueError as `sample`."""
    batch, vocab_size = logits.shape
    if vocab_size == 0 or (vocab_size > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits must be [batch, vocab_size > 0] with contiguous rows, not {list(logits.shape)}")
    return batch


def race_splits(logits, temperatures, seeds, positions, thresholds, first_column: int) -> tuple[Tensor, Tensor]:
    """The best score and its column in each split of each row: float32 and int32 `[batch, num_splits]`."""
    batch, vocab_size = logits.shape
    # Few rows: small splits, so that they reach every SM. Many: larger ones, which reduce less often.
    tiles = 2 if batch <= 4 else 8
    num_splits = triton.cdiv(vocab_size, tiles * _QUADS * 4)
    best_scores = torch.empty(batch, num_splits, dtype=torch.float32, device=logits.device)
    best_columns = torch.empty(batch, num_splits, dtype=torch.int32, device=logits.device)
    launcher(_race_kernel, (batch, num_splits), has_pdl(logits.device))(
        logits,
        temperatures,
        seeds,
        positions,
        temperatures if thresholds is None else thresholds,  # without TRUNCATED, a pointer that nobody reads
        best_scores,
        best_columns,
        vocab_size,
        logits.stride(0),
        num_splits,
        FIRST_COLUMN=first_column,
        TRUNCATED=thresholds is not None,
        TILES=tiles,
        QUADS=_QUADS,
        FAST_LOG2=isinstance(_race_kernel, triton.JITFunction),
        num_warps=_QUADS // 32,
    )
    return best_scores, best_columns
