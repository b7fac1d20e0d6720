"""Where top-k, top-p and min-p cut a row of logits: one number a row, below which no token is drawn."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.kernels import use_kernels
from nanovllm.kernels.sampling import sampling_thresholds as kernels


def sampling_thresholds(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The lowest logit of each row that truncation keeps: tokens with logit >= threshold may be drawn.

    The order and the definitions are transformers'. Logits are divided by the temperature. Top-k keeps the k highest.
    Top-p keeps the likeliest of these whose probabilities reach p, the one that crosses p included. Min-p keeps no
    token less likely than min_p times the likeliest. All tokens that tie with the last one kept are kept as well. One
    threshold can express all three because each keeps the highest logits and no others.

    Args:
        logits: `[batch, vocab_size]`, any float dtype, not divided by the temperature. NaN counts as -inf.
        temperatures: float32 `[batch]`; 0 (greedy) truncates nothing.
        top_k: int32 `[batch]`; 0 is off.
        top_p: float32 `[batch]`, in (0, 1]; 1 is off.
        min_p: float32 `[batch]`, in 0..1; 0 is off.

    Returns:
        float32 `[batch]`, in units of `logits`; -inf where nothing is truncated.
    """
    if use_kernels(logits):
        return kernels.sampling_thresholds(logits, temperatures, top_k, top_p, min_p)
    return sampling_thresholds_torch(logits, temperatures, top_k, top_p, min_p)


def sampling_thresholds_torch(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Twin of `kernels.sampling_thresholds.sampling_thresholds`."""
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
