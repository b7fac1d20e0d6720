"""Sampler: an exact draw from softmax(logits / temperature), its noise the request's and not the batch's."""

import math

import torch
from torch import Tensor, nn

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.utils.parallel import TensorParallel

if HAS_TRITON:
    from nanovllm.kernels.sampler import sample
    from nanovllm.kernels.shard_sampler import best_of_shard, pick_best

_WORD = 0xFFFFFFFF
_NO_COLUMN = 2**31 - 1


def philox4x32(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor | int, k1: Tensor | int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Args:
        c0: int64, holding an unsigned 32-bit word of the counter, as c1..c3 do; all broadcast.
        c1: second word.
        c2: third word.
        c3: fourth word.
        k0: first word of the key, likewise unsigned.
        k1: second word.

    Returns:
        Four int64 tensors of unsigned 32-bit words.
    """
    for _ in range(10):
        # The product of two words wraps into int64's sign bit, but its bits are right. c1 and c3 keep their
        # high halves, which only ever meet an xor and fall to the mask after it: this saves a third of the
        # passes.
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product2 >> 32) ^ c1 ^ k0) & _WORD, product2
        c2, c3 = ((product0 >> 32) ^ c3 ^ k1) & _WORD, product0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def log2_exponential(bits: Tensor) -> Tensor:
    """log2(E) of the Exponential(1) draw E = -log(1 - u), u = (bits + 0.5) / 2^32, in float32.

    Among 150,000 tokens the winner's E is near 1e-5, where 1 - u has lost most of u's digits: below 1/32 the
    logarithm's series in u itself takes over (its fifth term is under 2e-7 of the sum there). u stays below
    1, so E stays finite.

    Args:
        bits: int64, unsigned 32-bit words.
    """
    u = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    return torch.where(u < 0.03125, series, torch.log2(1.0 - u).mul_(-math.log(2.0))).log2_()


def race_scores(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, first_column: int = 0
) -> Tensor:
    """What the columns of each row race with: logit / T - log E, in units of log 2.

    Args:
        logits: `[batch, vocab_size]`, any float dtype.
        temperatures: float32 `[batch]`, positive.
        seeds: int64 `[batch]`: the Philox keys.
        positions: int64 `[batch]`: words 2 and 3 of the Philox counter, whose word 0 is column // 4 and whose
            word 1 is 0; column % 4 picks one of the four outputs.
        first_column: the first of these columns in the whole vocabulary, a multiple of 4.

    Returns:
        float32 `[batch, vocab_size]`; -inf for a NaN logit.
    """
    vocab_size = logits.shape[1]
    quad = first_column // 4 + torch.arange((vocab_size + 3) // 4, device=logits.device).unsqueeze(0)
    seeds, positions = seeds.unsqueeze(1), positions.unsqueeze(1)
    position_words = (positions & _WORD, positions >> 32 & _WORD)
    bits = philox4x32(quad, torch.zeros_like(quad), *position_words, seeds & _WORD, seeds >> 32 & _WORD)
    noise = log2_exponential(torch.stack(bits, dim=-1).flatten(1)[:, :vocab_size])
    scores = logits.float() * (math.log2(math.e) / temperatures).unsqueeze(1) - noise
    return scores.nan_to_num_(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def sample_torch(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, thresholds: Tensor | None = None
) -> Tensor:
    """Twin of `kernels.sampler.sample`."""
    logits = _without_unlikely(logits, thresholds)
    # A NaN would win any argmax; it may not, so that the rest of its row still counts.
    tokens = torch.nan_to_num(logits, nan=-math.inf, posinf=math.inf, neginf=-math.inf).argmax(dim=-1)
    # A few rows at a time, so that Philox's many passes stay within a CPU's cache: some 100,000 columns.
    rows_at_once = max(1, 2**17 // logits.shape[1])
    for rows in (temperatures > 0).nonzero().squeeze(1).split(rows_at_once):
        scores = race_scores(logits[rows], temperatures[rows], seeds[rows], positions[rows])
        tokens[rows] = scores.argmax(dim=-1)
    return tokens


def _without_unlikely(logits: Tensor, thresholds: Tensor | None) -> Tensor:
    if thresholds is None:
        return logits
    return logits.masked_fill(logits.float() < thresholds.unsqueeze(1), -math.inf)


def best_of_shard_torch(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first_column: int,
    thresholds: Tensor | None = None,
) -> Tensor:
    """Twin of `kernels.shard_sampler.best_of_shard`."""
    logits = _without_unlikely(logits, thresholds)
    scores = logits.float().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    noisy = temperatures > 0
    scores[noisy] = race_scores(logits[noisy], temperatures[noisy], seeds[noisy], positions[noisy], first_column)
    best, columns = scores.max(dim=-1)
    return torch.stack((best.view(torch.int32), (first_column + columns).int()), dim=-1)


def pick_best_torch(candidates: Tensor) -> Tensor:
    """Twin of `kernels.shard_sampler.pick_best`."""
    scores, columns = candidates.unbind(-1)
    winner = scores.contiguous().view(torch.float32).argmax(dim=0)  # The first of equals: the lowest column.
    return columns.gather(0, winner.unsqueeze(0)).squeeze(0).long()


class Sampler(nn.Module):
    """Draws from softmax(logits / T) by an exponential race, on the device, without a softmax.

    With independent E ~ Exponential(1) for every token, argmax(p / E) is distributed as p (the race of
    exponential clocks, known in its logarithm as the Gumbel-max trick), and it is argmax(logit / T - log E):
    no normalization, one pass over the logits.

    The noise is Philox4x32-10 with the request's seed as key and (column // 4, position) as counter. So a
    request's token at a position depends on its logits, temperature and seed alone, never on the batch, its
    order, or a preemption in between.

    With several ranks each finds the best of its columns, only that is gathered, and every rank takes the same
    winner. Scores do not depend on how the columns are shared out.

    Args:
        tp: this rank's place.
        first_column: of this rank's logits, in the whole vocabulary.
    """

    def __init__(self, tp: TensorParallel | None = None, first_column: int = 0):
        super().__init__()
        self.tp = tp or TensorParallel()
        self.first_column = first_column

    def forward(
        self,
        logits: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        positions: Tensor,
        thresholds: Tensor | None = None,
    ) -> Tensor:
        """Draws one token a row.

        A logit of -inf is never drawn unless all of the row are; then token 0 is. NaN logits are treated as
        -inf.

        Args:
            logits: `[batch, vocab_size]`, any float dtype; with several ranks this rank's columns of it, maybe none.
            temperatures: float32 `[batch]`; 0 is greedy: the highest logit, the lowest token id on ties.
            seeds: int64 `[batch]`, all 64 bits used.
            positions: int64 `[batch]`: the position of the token to be drawn (any number that is new to the
                seed).
            thresholds: float32 `[batch]`: lower logits are never drawn, see `sampling_thresholds`; None for -inf.

        Returns:
            int64 `[batch]`, on the logits' device.
        """
        on_gpu = use_kernels(logits)
        if self.tp.size == 1:
            return (sample if on_gpu else sample_torch)(logits, temperatures, seeds, positions, thresholds)
        if logits.shape[1] == 0:
            best = _no_candidates(logits)
        else:
            reduce = best_of_shard if on_gpu else best_of_shard_torch
            best = reduce(logits, temperatures, seeds, positions, self.first_column, thresholds)
        return (pick_best if on_gpu else pick_best_torch)(self.tp.all_gather(best))


def _no_candidates(logits: Tensor) -> Tensor:
    """What a rank without columns brings: int32 [batch, 2], (the bits of -inf, no column)."""
    best = torch.empty(len(logits), 2, dtype=torch.int32, device=logits.device)
    best[:, 0].view(torch.float32).fill_(-math.inf)
    best[:, 1].fill_(_NO_COLUMN)
    return best
