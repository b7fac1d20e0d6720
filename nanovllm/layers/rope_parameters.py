"""RopeParameters: the scaling of rotary embeddings that a checkpoint asks for, and how a configuration states it."""

import logging
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.utils.checks import is_number, quoted, require

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

SUPPORTED_TYPES = ("default", "linear", "proportional", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class RopeParameters:
    """How positions become angles; the fields of a Hugging Face rope configuration under their own names.

    Types: "default" (Su et al. 2021), "linear" (Chen et al. 2023, position interpolation), "yarn" (Peng et al. 2023),
    "llama3" (the Llama 3.1 model cards), "longrope" (Ding et al. 2024) and "proportional" (Gemma 4): pairs are of the
    whole head, and the first of them turn as in the default.
    """

    base: float = 10000.0  # theta of the paper: dimension pair i turns at base ** (-2i / rotary_dim) radians a position
    type: str = "default"
    factor: float = 1.0  # how many times longer than the trained context positions may get
    original_max_position_embeddings: int = 0  # the trained context in tokens (all but linear); 0: not stated
    # Share of a head's dimensions that are rotated: the first ones; of proportional, the share of its pairs.
    partial_rotary_factor: float = 1.0
    attention_factor: float | None = None  # multiplies cos and sin (yarn and longrope); None derives it
    # Only yarn has these.
    beta_fast: float = 32.0  # pairs that turn more often than this within the trained context stay as they are
    beta_slow: float = 1.0  # pairs that turn less often than this within the trained context are fully interpolated
    mscale: float | None = None  # weight of the numerator of the derived attention factor
    mscale_all_dim: float | None = None  # weight of its denominator
    truncate: bool = True  # whether the ends of the ramp are rounded outwards to whole pairs
    # Any type may have this: how much the scores grow with the logarithm of the query's position (Llama 4's).
    llama_4_scaling_beta: float = 0.0
    # Only llama3 has these two bounds. The low one is for the slow pairs.
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    # Only longrope has these: what each pair's period is multiplied by, up to the trained context and beyond it.
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.type not in SUPPORTED_TYPES:
            supported = ", ".join(SUPPORTED_TYPES)
            raise ValueError(f"rope_type={quoted(self.type)} is not supported; supported: {supported}")
        if self.factor <= 0:
            raise ValueError(f"rope factor must be positive, not {self.factor}")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"partial_rotary_factor must be in (0, 1], not {self.partial_rotary_factor}")
        needed = {
            "yarn": ("original_max_position_embeddings",),
            "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
            "longrope": ("original_max_position_embeddings", "short_factor", "long_factor"),
        }
        for name in needed.get(self.type, ()):
            if not getattr(self, name):
                raise ValueError(f"rope_type={quoted(self.type)} needs {name}")
        if self.llama_4_scaling_beta and not self.original_max_position_embeddings:
            raise ValueError(f"llama_4_scaling_beta={self.llama_4_scaling_beta} needs original_max_position_embeddings")
        if self.type == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            bounds = f"low_freq_factor={self.low_freq_factor}, high_freq_factor={self.high_freq_factor}"
            raise ValueError(f"{bounds}: the first must be less than the second")

    @property
    def attention_scaling(self) -> float:
        """The factor of cos and sin: 1, except that yarn and longrope set the attention's temperature by it."""
        if self.type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.type == "longrope":
            return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original_max_position_embeddings))
        if self.mscale and self.mscale_all_dim:
            numerator = _yarn_magnitude(self.factor, self.mscale)
            return numerator / _yarn_magnitude(self.factor, self.mscale_all_dim)
        return _yarn_magnitude(self.factor, 1.0)

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's dimensions are rotated. Raises ValueError if they do not come in pairs."""
        size = head_dim if self.type == "proportional" else int(head_dim * self.partial_rotary_factor)
        if size < 2 or size % 2:
            share = f" ({size} of {head_dim}: partial_rotary_factor={self.partial_rotary_factor})"
            raise ValueError(
                f"head_dim must be even to be rotated in pairs, not {size}{share if size != head_dim else ''}"
            )
        return size

    def inverse_frequencies(self, head_dim: int, max_position: int = 0) -> Tensor:
        """Radians a position for each pair of dimensions: float32 `[rotary_dim / 2]`. max_position: tokens of the
        longest sequence, which only longrope asks for: all positions use long_factor if it exceeds the trained
        context."""
        dim = self.rotary_dim(head_dim)
        period = self.base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        if self.type == "default":
            return 1.0 / period
        if self.type == "linear":
            return 1.0 / period / self.factor
        if self.type == "proportional":
            is_turned = torch.arange(dim // 2, device=period.device) < int(self.partial_rotary_factor * dim // 2)
            return torch.where(is_turned, 1.0 / period / self.factor, 0.0)
        if self.type == "llama3":
            return self._llama3_frequencies(1.0 / period)
        if self.type == "longrope":
            is_long = max_position > self.original_max_position_embeddings
            name = "long_factor" if is_long else "short_factor"
            factors = torch.tensor(getattr(self, name), dtype=torch.float32)
            if len(factors) != dim // 2:
                raise ValueError(f"{name} must hold {dim // 2} numbers, one for each pair, not {len(factors)}")
            return 1.0 / (factors * period)
        start, end = self._yarn_ramp(dim)
        pair = torch.arange(dim // 2, dtype=torch.float32, device=period.device)
        kept = 1.0 - ((pair - start) / (end - start)).clamp(0.0, 1.0)
        return 1.0 / (self.factor * period) * (1.0 - kept) + 1.0 / period * kept

    def query_scales(self, max_position: int) -> Tensor | None:
        """What queries are multiplied by at each position: float32 `[max_position]`, one step up for each original
        context before it; None where that is 1 everywhere."""
        beta, trained = self.llama_4_scaling_beta, self.original_max_position_embeddings
        if not beta or not trained or max_position <= trained:
            return None
        return 1 + beta * torch.log(1 + torch.floor(torch.arange(max_position, dtype=torch.float32) / trained))

    def _llama3_frequencies(self, frequencies: Tensor) -> Tensor:
        """Fast pairs keep their frequency, slow ones are interpolated, and between them it changes linearly with the
        number of turns within the trained context."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0.0, 1.0)
        return (1.0 - kept) * frequencies / self.factor + kept * frequencies

    def _yarn_ramp(self, rotary_dim: int) -> tuple[float, float]:
        """The pairs between which yarn changes from the trained frequency to the interpolated one."""

        def pair_turning(times: float) -> float:
            period = self.original_max_position_embeddings / (2 * math.pi * times)
            return rotary_dim * math.log(period) / (2 * math.log(self.base))

        start, end = pair_turning(self.beta_fast), pair_turning(self.beta_slow)
        if self.truncate:
            start, end = math.floor(start), math.ceil(end)
        start, end = max(start, 0), min(end, rotary_dim - 1)
        # As in transformers, a ramp without width becomes a steep one, to avoid dividing by zero.
        return start, end if end != start else end + 0.001


def _yarn_magnitude(factor: float, weight: float) -> float:
    """Equation 22 of the yarn paper, with DeepSeek's weight of the logarithm."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def rope_settings(hf_config: object) -> dict[str, Any]:
    """What a configuration says of RoPE, in transformers 5 (`rope_parameters`) or 4 (`rope_scaling`). Raises ValueError
    if it is no dictionary."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(hf_config, name, None)
        if settings:
            require(name, settings, isinstance(settings, dict), "an object")
            return settings
    return {}


def rope_parameters(hf_config: "PreTrainedConfig | SimpleNamespace", layer_type: str | None = None) -> RopeParameters:
    """The rope settings of a transformers configuration: of 4.51 (`rope_theta`, `rope_scaling` with "rope_type" or
    "type") or 5.x (`rope_parameters`). layer_type: the kind of layer, where the settings differ by it.

    Raises ValueError for a type other than those supported, settings by a kind of layer that is not asked for, or a
    missing one.
    """
    settings = rope_settings(hf_config)
    if layer_type is not None and isinstance(settings.get(layer_type), dict):
        settings = settings[layer_type]
    if any(isinstance(value, dict) for value in settings.values()):
        raise ValueError(f"rope settings by kind of layer are not supported: {', '.join(settings)}")

    # Some writers store unused settings as null, which means absent. mRoPE's sections of the dimensions differ in their
    # positions in images, but not in text.
    unused = ("mrope_section", "mrope_interleaved", "max_position_embeddings")  # The last is the configuration's own.
    settings = {name: value for name, value in settings.items() if value is not None and name not in unused}
    base = settings.pop("rope_theta", getattr(hf_config, "rope_theta", None))
    base = 10000.0 if base is None else base
    require("rope_theta", base, is_number(base), "a number")
    old_name = settings.pop("type", "default")
    rope_type = settings.pop("rope_type", old_name)
    partial = settings.pop("partial_rotary_factor", getattr(hf_config, "partial_rotary_factor", None))
    partial = 1.0 if partial is None else float(partial)
    if rope_type == "su":  # the first name of longrope, in early checkpoints
        rope_type = "longrope"
    if rope_type == "default" or rope_type not in SUPPORTED_TYPES:
        names = "llama_4_scaling_beta", "original_max_position_embeddings"
        of_queries: dict[str, Any] = {name: settings.get(name, 0) for name in names} if names[0] in settings else {}
        return RopeParameters(float(base), rope_type, partial_rotary_factor=partial, **of_queries)

    if rope_type in ("yarn", "longrope"):
        trained = getattr(hf_config, "original_max_position_embeddings", None)
        trained = trained or settings.get("original_max_position_embeddings")
        trained = trained or hf_config.max_position_embeddings
        settings["original_max_position_embeddings"] = trained
        settings.setdefault("factor", hf_config.max_position_embeddings / trained)
        # In transformers zero means "not set" here.
        settings["beta_fast"] = settings.get("beta_fast") or 32.0
        settings["beta_slow"] = settings.get("beta_slow") or 1.0
    elif rope_type != "proportional" and "factor" not in settings:
        raise ValueError(f"rope_type={quoted(rope_type)} needs a factor")
    for name in ("short_factor", "long_factor"):
        factors = settings.get(name, ())
        are_positive = isinstance(factors, list | tuple) and all(is_number(factor) and factor > 0 for factor in factors)
        require(name, factors, are_positive, "a list of numbers > 0")
        settings[name] = tuple(map(float, factors))

    known = RopeParameters.__dataclass_fields__
    unknown = [name for name in settings if name not in known]
    if unknown:
        logger.warning("rope type %r has no use for %s: ignored", rope_type, ", ".join(unknown))
    fields = {name: value for name, value in settings.items() if name in known}
    return RopeParameters(float(base), rope_type, partial_rotary_factor=partial, **fields)
