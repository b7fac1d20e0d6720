"""Samples tokens from softmax(logits / temperature) in one pass, with noise that belongs to the request."""

import torch
from torch import Tensor

from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.triton_stub import libdevice, tl, triton

MAX_FLOAT = tl.constexpr(3.4028234663852886e38)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_NO_COLUMN = tl.constexpr(2**31 - 1)
_GROUP = tl.constexpr(16)  # layers.exponential_race.GROUP
_NON_FINITE = tl.constexpr(-1)  # layers.sampler.NON_FINITE


@triton.jit
def scale_of(temperature):
    """log2(e) / temperature, kept from being infinite or 0: a logit times this is the exponent of 2 of its weight."""
    # The left operand is a tensor because Triton 3.7's interpreter takes a constant's quotient for a constant.
    return tl.minimum(tl.maximum(tl.full([], _LOG2_E, tl.float32) / temperature, 1e-30), 1e30)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Ten rounds of Philox4x32 (Salmon et al. 2011) on uint32 counter words c0..c3 under the key k0, k1."""
    for _ in tl.range(10, loop_unroll_factor=10):
        # One 64-bit product yields both halves; umulhi and mul would be two multiplications.
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
    # The hardware's instruction is accurate to about 2^-22. tl.log2 has ten times as many instructions, which would be
    # most of the kernel. Triton's interpreter has no libdevice.
    return libdevice.fast_log2f(x) if FAST else tl.log2(x)


@triton.jit
def log2_exponential(bits, FAST: tl.constexpr):
    """log2 of the Exponential(1) draw that belongs to uint32 bits; see `layers.exponential_race.log2_exponential`."""
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
    """Logits in float32, with -inf past the vocabulary and below the threshold. NaN stays."""
    logit = tl.load(logits_row + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(logit < threshold, float("-inf"), logit) if TRUNCATED else logit


@triton.jit
def _race_kernel(
    logits, temperatures, seeds, positions, thresholds, candidates, vocab_size, row_stride,
    FIRST_COLUMN: tl.constexpr, TRUNCATED: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr,
    FAST_LOG2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best score of a row among TILES * GROUPS groups of columns, and its column. The score is +inf if a logit is
    NaN or +inf, -inf if all are -inf, and finite otherwise."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    logits_row = logits + row * row_stride
    temperature = tl.load(temperatures + row)
    seed = tl.load(seeds + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    threshold = float("-inf")
    if TRUNCATED:
        threshold = tl.load(thresholds + row)
    is_greedy = temperature <= 0
    scale = tl.full([], 1.0, tl.float32)
    if temperature > 0:
        scale = scale_of(temperature)

    lane = tl.arange(0, GROUPS)
    first_group = split * (TILES * GROUPS)
    best = tl.full([GROUPS], float("-inf"), tl.float32)
    highest_logit = tl.full([GROUPS], float("-inf"), tl.float32)
    has_nan = tl.zeros([GROUPS], tl.int1)
    best_group = first_group + lane
    # The compiler unrolls this to the same PTX as static_range, which Python would unroll, more slowly.
    for tile in tl.range(TILES, loop_unroll_factor=TILES):
        group = first_group + tile * GROUPS + lane
        # A thread loads its group of 16-bit logits in two wide loads.
        columns = group[:, None] * _GROUP + tl.arange(0, _GROUP // 2)[None, :]
        left = _load(logits_row, columns, vocab_size, threshold, TRUNCATED)
        right = _load(logits_row, columns + _GROUP // 2, vocab_size, threshold, TRUNCATED)
        score = tl.maximum(tl.max(left, axis=1), tl.max(right, axis=1))  # This may drop a NaN or keep it.
        highest_logit = tl.maximum(highest_logit, score)
        # Finite, so that no infinity is subtracted from another.
        highest = tl.minimum(tl.maximum(score * scale, -MAX_FLOAT), MAX_FLOAT)
        weights = tl.exp2(left * scale - highest[:, None]) + tl.exp2(right * scale - highest[:, None])
        weight = tl.sum(weights, axis=1)
        has_nan |= weight != weight  # only if a logit is NaN
        bits, _, _, _ = _words(group + FIRST_COLUMN // _GROUP, 1, seed, position)
        noisy = highest + _log2(weight, FAST_LOG2) - log2_exponential(bits, FAST_LOG2)
        score = tl.where(is_greedy, score, noisy)
        take = score > best
        best = tl.where(take, score, best)
        best_group = tl.where(take, group, best_group)
    # A tiny temperature makes scores infinite where the logits are finite.
    best = tl.minimum(tl.maximum(best, -MAX_FLOAT), MAX_FLOAT)
    best = tl.where(highest_logit > float("-inf"), best, float("-inf"))
    best = tl.where(has_nan | (highest_logit == float("inf")), float("inf"), best)
    score = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == score, best_group, _NO_COLUMN), axis=0)

    quad = winner * (_GROUP // 4) + tl.arange(0, _GROUP // 4)
    columns = quad[:, None] * 4 + tl.arange(0, 4)[None, :]
    r0, r1, r2, r3 = _words(quad + FIRST_COLUMN // 4, 0, seed, position)
    bits = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (_GROUP // 4, 4))
    noise = tl.where(is_greedy, 0.0, log2_exponential(bits, FAST_LOG2))
    within = _load(logits_row, columns, vocab_size, threshold, TRUNCATED) * scale - noise
    is_best = within == tl.max(tl.max(within, axis=1), axis=0)
    column = tl.min(tl.min(tl.where(is_best, columns, _NO_COLUMN), axis=1), axis=0)

    candidate = candidates + (row * tl.num_programs(1) + split) * 2
    tl.store(candidate, score.to(tl.int32, bitcast=True))
    tl.store(candidate + 1, column + FIRST_COLUMN)


@triton.jit(do_not_specialize=["batch"])
def _pick_kernel(candidates, tokens, batch, num_splits, num_candidates, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    at = (((i // num_splits) * batch + row) * num_splits + i % num_splits) * 2
    scores = candidates.to(tl.pointer_type(tl.float32))  # of the same bits
    score = tl.load(scores + at, mask=i < num_candidates, other=float("-inf"))
    column = tl.load(candidates + at + 1, mask=i < num_candidates, other=_NO_COLUMN)
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == best, column, _NO_COLUMN), axis=0)
    tl.store(tokens + row, tl.where(tl.abs(best) < float("inf"), winner, _NON_FINITE).to(tl.int64))


def best_of_shard(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    thresholds: Tensor | None = None,
    first_column: int = 0,
    shard_size: int | None = None,
) -> Tensor:
    """The best of each split of some columns of the vocabulary: the first half of `layers.sampler.Sampler`, which
    describes the arguments that are not described here. The draw does not depend on how the vocabulary is split.

    Args:
        logits: `[batch, num_columns]`, any float dtype, rows contiguous; there may be no columns.
        first_column: the first of the columns in the whole vocabulary, a multiple of `layers.exponential_race.GROUP`.
        shard_size: the most columns that a rank has; None for num_columns.

    Returns:
        int32 `[batch, num_splits, 2]`, where num_splits follows from batch and shard_size: the bits of the float32
        score, and the winner's column in the whole vocabulary. The score is +inf for a split with a NaN or +inf, and
        -inf for one of nothing else; the column then means nothing.
    """
    batch, num_columns = logits.shape
    # Few rows: small splits, so that they reach every multiprocessor. Many: larger ones, which reduce less often.
    tiles, groups = (1, 64) if batch <= 8 else (4, 128)
    num_splits = triton.cdiv(shard_size or num_columns, tiles * groups * _GROUP.value)
    candidates = torch.empty(batch, num_splits, 2, dtype=torch.int32, device=logits.device)
    if batch == 0:
        return candidates
    options = (temperatures, seeds, positions, temperatures if thresholds is None else thresholds)
    launcher(_race_kernel, (batch, num_splits), has_pdl(logits.device))(
        logits, *(option.contiguous() for option in options), candidates, num_columns, logits.stride(0),
        FIRST_COLUMN=first_column, TRUNCATED=thresholds is not None, TILES=tiles, GROUPS=groups,
        FAST_LOG2=isinstance(_race_kernel, triton.JITFunction), num_warps=groups // 32,
    )  # fmt: skip
    return candidates


def pick_best(candidates: Tensor, out: Tensor | None = None) -> Tensor:
    """The second half: each row's winner, int64 `[batch]` (or `out`); the lowest column on a tie;
    `layers.sampler.NON_FINITE` for a row that has no token. candidates: int32 `[num_shards, batch, num_splits, 2]`,
    contiguous: what `best_of_shard` returned for each shard of the vocabulary."""
    num_shards, batch, num_splits, _ = candidates.shape
    tokens = torch.empty(batch, dtype=torch.int64, device=candidates.device) if out is None else out
    if batch == 0:
        return tokens
    num_candidates = num_shards * num_splits
    pdl = num_shards == 1 and has_pdl(candidates.device)  # Several shards are gathered by launches that are not ours.
    block = triton.next_power_of_2(num_candidates)
    launcher(_pick_kernel, (batch,), pdl)(
        candidates, tokens, batch, num_splits, num_candidates, BLOCK=block, num_warps=1
    )
    return tokens
