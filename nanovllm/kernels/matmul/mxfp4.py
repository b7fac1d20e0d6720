"""MXFP4 weights (OCP Microscaling Formats, 2023) in plain torch: rounding to them, and the order of their halves."""

import torch
from torch import Tensor

from nanovllm.kernels.matmul.four_bit import UNIT, pack_torch

GROUP = UNIT  # columns that share a scale
_NUMBERS_AT_ONCE = 2**22  # that are rounded: on the way they take many times the memory of the result
_NUM_EXPONENTS = 255  # 255 itself means NaN.
_BIAS = 127
# e2m1's largest number is 6 = 1.5 * 2^2.
_MAX_EXPONENT = 2
# The middles between neighbours of 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def quantize_torch(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales, as in `four_bit`, of a weight `[..., N, K]` of any float dtype.

    A scale is the power of two that the specification prescribes: that of a group's largest magnitude, divided by 4.
    Numbers are rounded to nearest, ties to even; those above 6 become 6.
    """
    rows = weight.reshape(-1, weight.shape[-1])
    parts = [_quantize_rows(part) for part in rows.split(max(1, _NUMBERS_AT_ONCE // weight.shape[-1]))]
    values, scales = (torch.cat(each).unflatten(0, weight.shape[:-1]) for each in zip(*parts, strict=True))
    return values, scales


def _quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    # frexp's mantissa is in [0.5, 1).
    exponent = (torch.frexp(largest).exponent - 1 - _MAX_EXPONENT + _BIAS).clamp(0, _NUM_EXPONENTS - 1)
    scaled = torch.ldexp(groups.double(), (_BIAS - exponent).unsqueeze(-1)).float()
    middles = torch.tensor(_MIDDLES, device=weight.device)
    magnitude = scaled.abs().contiguous()
    # A middle belongs to the even code beside it: it is rounded up from an odd one.
    below, up_to = torch.bucketize(magnitude, middles), torch.bucketize(magnitude, middles, right=True)
    codes = torch.where(below % 2 == 0, below, up_to) + 8 * torch.signbit(scaled)
    return pack_torch(codes.to(torch.uint8).flatten(-2)), exponent.to(torch.uint8)


def pack_pairs(pairs: Tensor) -> Tensor:
    """Values, as in `four_bit`, of bytes `[..., K / 2]` as checkpoints have them: byte i holds column 2 i
    in its low half, and column 2 i + 1 in its high half."""
    return pack_torch(torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2))
