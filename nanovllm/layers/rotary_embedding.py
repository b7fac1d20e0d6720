"""Rotary position embedding (Su et al. 2021): the scaling that a checkpoint asks for, and the rotation."""

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

SUPPORTED_TYPES = ("default", "linear", "yarn")


@dataclass(frozen=True)
class RopeParameters:
    """How positions become angles; the fields of a Hugging Face rope configuration under their own names."""

    base: float = 10000.0  # theta of the paper: dimension pair i turns at base ** (-2i / head_dim) radians a position
    type: str = "default"  # or "linear" (Chen et al. 2023, position interpolation) or "yarn" (Peng et al. 2023)
    factor: float = 1.0  # how many times longer than the trained context positions may get (linear and yarn)
    # Only yarn has the others.
    original_max_position_embeddings: int | None = None  # the trained context in tokens
    beta_fast: float = 32.0  # pairs that turn more often than this within the trained context stay as they are
    beta_slow: float = 1.0  # pairs that turn less often than this within the trained context are fully interpolated
    attention_factor: float | None = None  # multiplies cos and sin; None derives it from factor and the mscales
    mscale: float | None = None  # weight of the numerator of the derived attention factor
    mscale_all_dim: float | None = None  # weight of its denominator
    truncate: bool = True  # whether the ends of the ramp are rounded outwards to whole pairs

    def __post_init__(self) -> None:
        if self.type not in SUPPORTED_TYPES:
            supported = ", ".join(SUPPORTED_TYPES)
            raise ValueError(f"rope type {self.type!r} is not supported; supported: {supported}")
        if self.factor <= 0:
            raise ValueError(f"rope factor must be positive, not {self.factor}")
        if self.type == "yarn" and not self.original_max_position_embeddings:
            raise ValueError("rope type 'yarn' needs original_max_position_embeddings")

    @property
    def attention_scaling(self) -> float:
        """The factor of cos and sin: 1, except that yarn sets the attention's temperature by it."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            numerator = _yarn_magnitude(self.factor, self.mscale)
            return numerator / _yarn_magnitude(self.factor, self.mscale_all_dim)
        return _yarn_magnitude(self.factor, 1.0)

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Radians a position for each pair of dimensions: float32 `[head_dim / 2]`."""
        period = self.base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.type == "default":
            return 1.0 / period
        if self.type == "linear":
            return 1.0 / period / self.factor
        start, end = self._yarn_ramp(head_dim)
        pair = torch.arange(head_dim // 2, dtype=torch.float32, device=period.device)
        kept = 1.0 - ((pair - start) / (end - start)).clamp(0.0, 1.0)
        return 1.0 / (self.factor * period) * (1.0 - kept) + 1.0 / period * kept

    def _yarn_ramp(self, head_dim: int) -> tuple[float, float]:
        """The pairs between which yarn changes from the trained frequency to the interpolated one."""

        def pair_turning(times: float) -> float:
            period = self.original_max_position_embeddings / (2 * math.pi * times)
            return head_dim * math.log(period) / (2 * math.log(self.base))

        start, end = pair_turning(self.beta_fast), pair_turning(self.beta_slow)
        if self.truncate:
            start, end = math.floor(start), math.ceil(end)
        start, end = max(start, 0), min(end, head_dim - 1)
        # As in transformers, a ramp without width becomes a steep one, to avoid dividing by zero.
        return start, end if end != start else end + 0.001


def _yarn_magnitude(factor: float, weight: float) -> float:
    """Equation 22 of the yarn paper, with DeepSeek's weight of the logarithm."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def rope_parameters(hf_config: Any) -> RopeParameters:
    """The rope settings of a transformers configuration: of 4.51 (`rope_theta`, `rope_scaling` with "rope_type" or
    "type") or 5.x (`rope_parameters`).

    Raises ValueError for a type other than those supported, a partial rotation, settings by kind of layer, or a missing
    factor.
    """
    settings = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    if any(isinstance(value, dict) for value in settings.values()):
        raise ValueError(f"rope settings by kind of layer are not supported: {', '.join(settings)}")

    # Some writers store unused settings as null, which is the same as absent.
    settings = {name: value for name, value in settings.items() if value is not None}
    base = float(settings.pop("rope_theta", None) or getattr(hf_config, "rope_theta", None) or 10000.0)
    old_name = settings.pop("type", "default")
    rope_type = settings.pop("rope_type", old_name)
    partial = settings.pop("partial_rotary_factor", getattr(hf_config, "partial_rotary_factor", None))
    if partial not in (None, 1):
        raise ValueError(f"partial_rotary_factor {partial} is not supported: only whole heads are rotated")
    if rope_type not in ("linear", "yarn"):
        return RopeParameters(base=base, type=rope_type)

    if rope_type == "yarn":
        trained = getattr(hf_config, "original_max_position_embeddings", None)
        trained = trained or settings.get("original_max_position_embeddings")
        trained = trained or hf_config.max_position_embeddings
        settings["original_max_position_embeddings"] = trained
        settings.setdefault("factor", hf_config.max_position_embeddings / trained)
        # In transformers zero means "not set" here.
        settings["beta_fast"] = settings.get("beta_fast") or 32.0
        settings["beta_slow"] = settings.get("beta_slow") or 1.0
    elif "factor" not in settings:
        raise ValueError(f"rope type {rope_type!r} needs a factor")

    known = RopeParameters.__dataclass_fields__
    unknown = [name for name in settings if name not in known]
    if unknown:
        logger.warning("rope type %r has no use for %s: ignored", rope_type, ", ".join(unknown))
    return RopeParameters(
        base=base, type=rope_type, **{name: value for name, value in settings.items() if name in known}
    )


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + head_dim / 2) of each head of x `[num_tokens, heads, head_dim]`, in float32, rounded
    once. cos, sin: float32 `[num_tokens, head_dim / 2]`."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Half-split rotary embedding with a precomputed table; one instance serves all layers.

    Args:
        head_dim: even, or ValueError is raised.
        max_position: positions in the table; every position looked up must be below it.
        rope: the checkpoint's settings, from `rope_parameters`.

    Attributes:
        cos_sin_cache: float32 `[max_position, head_dim]`, each position's cosines and then its sines.
    """

    cos_sin_cache: Tensor

    def __init__(self, head_dim: int, max_position: int, rope: RopeParameters) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even to be rotated in pairs, not {head_dim}")
        positions = torch.arange(max_position, dtype=torch.float32)
        angles = torch.outer(positions, rope.inverse_frequencies(head_dim))
        cache = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_scaling
        self.register_buffer("cos_sin_cache", cache, persistent=False)

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q `[num_tokens, num_heads, head_dim]` and k `[num_tokens, num_kv_heads, head_dim]`, rotated, in new tensors.
        positions: int32 or int64 `[num_tokens]`, each below max_position."""
        cos, sin = self.cos_sin_cache[positions].chunk(2, dim=-1)
        return apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)


def get_rope(head_dim: int, max_position: int, hf_config: Any) -> RotaryEmbedding:
    """The rotary embedding that a transformers configuration asks for, over `max_position` positions. Raises ValueError
    as `rope_parameters` and `RotaryEmbedding`."""
    return RotaryEmbedding(head_dim, max_position, rope_parameters(hf_config))
