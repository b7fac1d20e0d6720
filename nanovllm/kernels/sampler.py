"""Drawing tokens from softmax(logits / temperature) in one pass, with noise that belongs to the request."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.launch import launcher

MAX_FLOAT = tl.constexpr(3.4028234663852886e38)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_NO_COLUMN = tl.constexpr(2**31 - 1)
_GROUP = tl.constexpr(16)  # layers.sampler.GROUP
_NON_FINITE = tl.constexpr(-1)  # layers.sampler.NON_FINITE


@triton.jit
def scale_of(temperature):
    """What makes of a logit the exponent of 2 of its weight: log2 e / temperature, neither infinite nor 0."""
    # A tensor at the left: in Triton 3.7's interpreter a constant's quotient is a constant, whatever it is divided by.
    return tl.minimum(tl.maximum(tl.full([], _LOG2_E, tl.float32) / temperature, 1e-30), 1e30)


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
def _words(index, PURPOSE: tl.constexpr, seed, position):
    """The Philox blocks of a draw whose counters begin with index and PURPOSE: four uint32, of index's shape."""
    zero = (index * 0).to(tl.uint32)
    return philox4x32(
        index.to(tl.uint32),
        zero + PURPOSE,
        zero + position.to(tl.uint32),
        zero + (position >> 32).to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )


@triton.jit
def _load(logits_row, columns, vocab_size, threshold, TRUNCATED: tl.constexpr):
    """Logits in float32, -inf for what is never to be drawn: past the vocabulary, below the threshold. NaN stays."""
    logit = tl.load(logits_row + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(logit < threshold, float("-inf"), logit) if TRUNCATED else logit


@triton.jit
def _race(
    logits_row,
    first_group,
    vocab_size,
    scale,
    seed,
    position,
    threshold,
    FIRST_COLUMN: tl.constexpr,
    NOISY: tl.constexpr,
    TRUNCATED: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    FAST_LOG2: tl.constexpr,
):
    """The best score among TILES * GROUPS groups of columns, and the column that has it. The score is +inf where a
    logit is NaN or +inf, -inf where all are -inf, and finite else."""
    lane = tl.arange(0, GROUPS)
    best = tl.full([GROUPS], float("-inf"), tl.float32)
    highest_logit = tl.full([GROUPS], float("-inf"), tl.float32)
    has_nan = tl.zeros([GROUPS], tl.int1)
    best_group = first_group + lane
    # Unrolled by the compiler, not by Python as static_range would be: the same PTX, a start that is sooner there.
    for tile in tl.range(TILES, loop_unroll_factor=TILES):
        group = first_group + tile * GROUPS + lane
        # A thread has a group of 16-bit logits, which it loads in two wide loads.
        columns = group[:, None] * _GROUP + tl.arange(0, _GROUP // 2)[None, :]
        left = _load(logits_row, columns, vocab_size, threshold, TRUNCATED)
        right = _load(logits_row, columns + _GROUP // 2, vocab_size, threshold, TRUNCATED)
        score = tl.maximum(tl.max(left, axis=1), tl.max(right, axis=1))  # Which drops a NaN, or does not.
        highest_logit = tl.maximum(highest_logit, score)
        if NOISY:
            # Within what is finite, so that one infinity does not meet another.
            highest = tl.minimum(tl.maximum(score * scale, -MAX_FLOAT), MAX_FLOAT)
            weights = tl.exp2(left * scale - highest[:, None]) + tl.exp2(right * scale - highest[:, None])
            weight = tl.sum(weights, axis=1)
            has_nan |= weight != weight  # One logit is NaN; nothing else makes it so.
            bits, _, _, _ = _words(group + FIRST_COLUMN // _GROUP, 1, seed, position)
            score = highest + _log2(weight, FAST_LOG2) - log2_exponential(bits, FAST_LOG2)
        else:
            # Scaled, so that no finite logits overflow: NaN if one of them is, or where +inf meets -inf.
            total = tl.sum(left * 0.03125 + right * 0.03125, axis=1)
            has_nan |= total != total
        take = score > best
        best = tl.where(take, score, best)
        best_group = tl.where(take, group, best_group)
    # A score may have left the finite numbers where no logit has: a tiny temperature does that.
    best = tl.minimum(tl.maximum(best, -MAX_FLOAT), MAX_FLOAT)
    best = tl.where(highest_logit > float("-inf"), best, float("-inf"))
    best = tl.where(has_nan | (highest_logit == float("inf")), float("inf"), best)
    score = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == score, best_group, _NO_COLUMN), axis=0)

    quad = winner * (_GROUP // 4) + tl.arange(0, _GROUP // 4)
    columns = quad[:, None] * 4 + tl.arange(0, 4)[None, :]
    within = _load(logits_row, columns, vocab_size, threshold, TRUNCATED)
    if NOISY:
        r0, r1, r2, r3 = _words(quad + FIRST_COLUMN // 4, 0, seed, position)
        bits = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (_GROUP // 4, 4))
        within = within * scale - log2_exponential(bits, FAST_LOG2)
    is_best = within == tl.max(tl.max(within, axis=1), axis=0)
    column = tl.min(tl.min(tl.where(is_best, columns, _NO_COLUMN), axis=1), axis=0)
    return score, column


@triton.jit
def best_split(scores, columns, mask):
    """The best of some scores of `_race`, and its column: the lowest of those that tie."""
    score = tl.load(scores, mask=mask, other=float("-inf"))
    column = tl.load(columns, mask=mask, other=_NO_COLUMN)
    highest = tl.max(score, axis=0)
    return highest, tl.min(tl.where(score == highest, column, _NO_COLUMN), axis=0)


@triton.jit
def token_of(score, column):
    """The column, but NON_FINITE where the score is infinite."""
    return tl.where(tl.abs(score) < float("inf"), column, _NON_FINITE).to(tl.int64)


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
    GROUPS: tl.constexpr,
    FAST_LOG2: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    first_group = split * (TILES * GROUPS)
    logits_row = logits + row * row_stride
    temperature = tl.load(temperatures + row)
    seed = tl.load(seeds + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    threshold = float("-inf")
    if TRUNCATED:
        threshold = tl.load(thresholds + row)
    if temperature > 0:
        scale = scale_of(temperature)
        score, column = _race(
            logits_row,
            first_group,
            vocab_size,
            scale,
            seed,
            position,
            threshold,
            FIRST_COLUMN=FIRST_COLUMN,
            NOISY=True,
            TRUNCATED=TRUNCATED,
            TILES=TILES,
            GROUPS=GROUPS,
            FAST_LOG2=FAST_LOG2,
        )
    else:
        score, column = _race(
            logits_row,
            first_group,
            vocab_size,
            temperature,
            seed,
            position,
            threshold,
            FIRST_COLUMN=FIRST_COLUMN,
            NOISY=False,
            TRUNCATED=TRUNCATED,
            TILES=TILES,
            GROUPS=GROUPS,
            FAST_LOG2=FAST_LOG2,
        )
    tl.store(best_scores + row * num_splits + split, score)
    tl.store(best_columns + row * num_splits + split, column)


@triton.jit
def _combine_kernel(best_scores, best_columns, tokens, num_splits, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK)
    at = row * num_splits + split
    score, column = best_split(best_scores + at, best_columns + at, split < num_splits)
    tl.store(tokens + row, token_of(score, column))


def sample(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    thresholds: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Draws one token a row from softmax(logits / temperature); see `layers.sampler.Sampler`.

    Two launches, no host synchronization, nothing as large as the logits allocated: fit for CUDA graph
    capture. A group's score does not depend on how the vocabulary is split, so neither does the result.

    Args:
        logits: `[batch, vocab_size]`, any float dtype and row stride, contiguous in its last dimension.
        temperatures: float32 `[batch]`; 0 takes the lowest of the highest logits.
        seeds: int64 `[batch]`.
        positions: int64 `[batch]`.
        thresholds: float32 `[batch]`; None costs nothing.
        out: int64 `[batch]`, contiguous, to write to.

    Returns:
        int64 `[batch]`; `out`, if that is given. `layers.sampler.NON_FINITE` for a row that has no token.

    Raises:
        ValueError: if logits are strided in the vocabulary, or the vocabulary is empty.
    """
    batch = check_logits(logits)
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device) if out is None else out
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
    tiles, groups = _split_size(batch)
    num_splits = triton.cdiv(vocab_size, tiles * groups * _GROUP.value)
    best_scores = torch.empty(batch, num_splits, dtype=torch.float32, device=logits.device)
    best_columns = torch.empty(batch, num_splits, dtype=torch.int32, device=logits.device)
    launcher(_race_kernel, (batch, num_splits), has_pdl(logits.device))(
        logits,
        temperatures.contiguous(),
        seeds.contiguous(),
        positions.contiguous(),
        (temperatures if thresholds is None else thresholds).contiguous(),  # without TRUNCATED, nobody reads it
        best_scores,
        best_columns,
        vocab_size,
        logits.stride(0),
        num_splits,
        FIRST_COLUMN=first_column,
        TRUNCATED=thresholds is not None,
        TILES=tiles,
        GROUPS=groups,
        FAST_LOG2=isinstance(_race_kernel, triton.JITFunction),
        num_warps=groups // 32,
    )
    return best_scores, best_columns


def _split_size(batch: int) -> tuple[int, int]:
    """A split's tiles, and the groups of a tile, one a thread. Few rows: small splits, so that they reach every SM.
    Many: larger ones, which reduce less often."""
    return (1, 64) if batch <= 8 else (4, 128)
