"""Samples tokens from softmax(logits / temperature) in one pass, with noise that belongs to the request.

It is an exponential race of groups of columns, and then of the columns of the best group. The class Sampler in
`layers.sampling` explains it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.triton_stub import libdevice, tl, triton

# The "token" of a row without one: its logits hold a NaN or +inf, or are all -inf.
NON_FINITE = -1
# Neighbouring columns race as a group first, and then among themselves. Shards of the vocabulary are whole groups.
GROUP = 16
_COLUMNS_AT_ONCE = 2**19  # logits of all rows together, of the twin on a CPU

_WORD = 0xFFFFFFFF
MAX_FLOAT = torch.finfo(torch.float32).max
_MIN_SCALE, _MAX_SCALE = 1e-30, 1e30

_MAX_FLOAT = tl.constexpr(MAX_FLOAT)
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))
_NO_COLUMN = tl.constexpr(2**31 - 1)
_GROUP = tl.constexpr(GROUP)
_NON_FINITE = tl.constexpr(NON_FINITE)


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
    """log2 of the Exponential(1) draw that belongs to uint32 bits; see `log2_exponential_torch`."""
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
        highest = tl.minimum(tl.maximum(score * scale, -_MAX_FLOAT), _MAX_FLOAT)
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
    best = tl.minimum(tl.maximum(best, -_MAX_FLOAT), _MAX_FLOAT)
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


@kernel_or_twin
def best_of_shard(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    thresholds: Tensor | None = None,
    first_column: int = 0,
    shard_size: int | None = None,
) -> Tensor:
    """The best of each split of some columns of the vocabulary: the first half of `layers.sampling.sampler.Sampler`,
    which describes the arguments that are not described here. The draw does not depend on how the vocabulary is split.

    Args:
        logits: `[batch, num_columns]`, any float dtype, rows contiguous; there may be no columns.
        first_column: the first of the columns in the whole vocabulary, a multiple of GROUP.
        shard_size: the most columns that a rank has; None for num_columns.

    Returns:
        int32 `[batch, num_splits, 2]`: the bits of the float32 score, and the winner's column in the whole vocabulary.
        num_splits follows from batch and shard_size; the twin has one. The score is +inf for a split with a NaN or
        +inf, and -inf for one of nothing else; the column then means nothing.
    """
    if shard_size is not None and logits.shape[1] < shard_size:  # There may be none.
        logits = F.pad(logits, (0, shard_size - logits.shape[1]), value=-math.inf)
    if thresholds is not None:
        logits = logits.masked_fill(logits.float() < thresholds.unsqueeze(1), -math.inf)  # A NaN stays.
    highest, columns = logits.max(dim=1)  # NaN, if any is.
    highest = highest.float()
    best = highest.clone()
    # A few rows at a time, so that intermediate results stay in a CPU's cache.
    rows_at_once = max(1, _COLUMNS_AT_ONCE // logits.shape[1])
    # Whole vectors of torch's exp2, whose rest has other bits than they: so no row's depend on its place in the batch.
    missing = -logits.shape[1] % (2 * GROUP)
    for rows in (temperatures > 0).nonzero().squeeze(1).split(rows_at_once):
        # [rows, num_groups, GROUP]. A pad of nothing would copy.
        chosen = F.pad(logits[rows], (0, missing), value=-math.inf) if missing else logits[rows]
        chosen = chosen.unflatten(1, (-1, GROUP))
        draw = temperatures[rows], seeds[rows], positions[rows]
        best[rows], groups = group_scores(chosen, *draw, first_column).max(dim=1)
        members = chosen[torch.arange(len(rows), device=logits.device), groups]
        within = race_scores(members, *draw, first_column + groups * GROUP).argmax(dim=1)
        columns[rows] = groups * GROUP + within
    # A tiny temperature makes scores infinite where the logits are finite.
    best = best.clamp(-MAX_FLOAT, MAX_FLOAT).where(highest > -math.inf, -math.inf)
    best = best.where(highest < math.inf, math.inf)
    return torch.stack((best.view(torch.int32), (first_column + columns).int()), dim=-1).unsqueeze(1)


@kernel_or_twin
def pick_best(candidates: Tensor, out: Tensor | None = None) -> Tensor:
    """The second half: each row's winner, int64 `[batch]` (or `out`). On a tie it is the lowest column. A row without a
    token has NON_FINITE.

    candidates: int32 `[num_shards, batch, num_splits, 2]`, contiguous: what `best_of_shard` returned for each shard of
    the vocabulary.
    """
    bits, columns = candidates.transpose(0, 1).flatten(1, 2).unbind(-1)
    scores, winner = bits.contiguous().view(torch.float32).max(dim=1)  # The first of equals: the lowest column.
    tokens = columns.gather(1, winner.unsqueeze(1)).squeeze(1).where(scores.isfinite(), NON_FINITE).long()
    return tokens if out is None else out.copy_(tokens)


@kernel_of(best_of_shard)
def _launch_best_of_shard(
    logits, temperatures, seeds, positions, thresholds=None, first_column=0, shard_size=None
):  # fmt: skip
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


@kernel_of(pick_best)
def _launch_pick_best(candidates, out=None):
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


def philox4x32_torch(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): four words for the counter
    c0..c3 under the key k0, k1. A word is an int64 that holds an unsigned 32-bit number; all broadcast."""
    for _ in range(10):
        # The product of two words may set int64's sign bit, but its bits are right. c1 and c3 keep their high halves,
        # because the mask after the next xor removes them. This saves a third of the passes.
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product2 >> 32) ^ c1 ^ k0) & _WORD, product2
        c2, c3 = ((product0 >> 32) ^ c3 ^ k1) & _WORD, product0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def log2_exponential_torch(bits: Tensor) -> Tensor:
    """log2(E) of the Exponential(1) draw E = -log(1 - u), u = (bits + 0.5) / 2^32, in float32, for 32-bit words.

    Among 150,000 tokens the winner's E is near 1e-5, where 1 - u has lost most of u's digits. So below 1/32 this uses
    the logarithm's series in u (whose fifth term is under 2e-7 of the sum there). u stays below 1, so E is finite.
    """
    u = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    return torch.where(u < 0.03125, series, torch.log2(1.0 - u).mul_(-math.log(2.0))).log2_()


def race_scores(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, first_column: int | Tensor = 0
) -> Tensor:
    """The scores of columns: (logit / T - log E) / log 2, each with an E of its own. float32 `[batch, num_columns]`;
    NaN for a NaN logit. Word 0 of E's Philox counter is column // 4, and column % 4 selects one of the outputs.

    logits: `[batch, num_columns]`, any float dtype. temperatures: float32 `[batch]`, positive. seeds, positions: int64
    `[batch]`. first_column: of all rows or of each, int64 `[batch]`; in the whole vocabulary, a multiple of 4.
    """
    num_columns = logits.shape[1]
    first = torch.as_tensor(first_column, device=logits.device).reshape(-1, 1)
    quads = first // 4 + torch.arange((num_columns + 3) // 4, device=logits.device)
    bits = torch.stack(_random_words(quads, 0, seeds, positions), dim=-1).flatten(1)[:, :num_columns]
    scale = (math.log2(math.e) / temperatures).clamp(_MIN_SCALE, _MAX_SCALE)  # because 0 * inf is NaN
    return logits.float() * scale.unsqueeze(1) - log2_exponential_torch(bits)


def group_scores(
    groups: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, first_column: int = 0
) -> Tensor:
    """The scores of groups of columns: log2 of the sum of their weights 2^(logit / T * log2 e), less log2 E. float32
    `[batch, num_groups]`; -inf for a group whose logits are all -inf, NaN for one that holds a NaN.

    groups: the logits `[batch, num_groups, GROUP]`. The other arguments are those of `race_scores`, with first_column
    a multiple of GROUP. E comes from the first output of the Philox block whose counter has the group's number in word
    0.
    """
    scale = (math.log2(math.e) / temperatures).clamp(_MIN_SCALE, _MAX_SCALE)
    exponents = groups.float() * scale.view(-1, 1, 1)
    # Finite, so that no infinity is subtracted from another.
    highest = exponents.amax(dim=2).clamp_(-MAX_FLOAT, MAX_FLOAT)
    scores = (exponents - highest.unsqueeze(2)).exp2_().sum(dim=2).log2_() + highest
    index = first_column // GROUP + torch.arange(groups.shape[1], device=groups.device).unsqueeze(0)
    return scores - log2_exponential_torch(_random_words(index, 1, seeds, positions)[0])


def _random_words(index: Tensor, purpose: int, seeds: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """The Philox blocks whose counters begin with `index` `[1 or batch, n]` and `purpose`: four words `[batch, n]`."""
    seeds, positions = seeds.unsqueeze(1), positions.unsqueeze(1)
    counter = (index, torch.full_like(index, purpose), positions & _WORD, positions >> 32 & _WORD)
    return philox4x32_torch(*counter, seeds & _WORD, seeds >> 32 & _WORD)
