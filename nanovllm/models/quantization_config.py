"""What a checkpoint's quantization_config says of its weights and KV cache."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.layers.formats.all_formats import DECLARED
from nanovllm.layers.formats.format import WeightFormat
from nanovllm.layers.formats.fp8 import is_e4m3
from nanovllm.utils.checks import one_line, quoted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Parts of a model that are never quantized, and those of a vision tower, which is not read. Others that a checkpoint
# leaves unquantized do not load.
_UNQUANTIZED = re.compile(
    r"(^|[.*:^])(lm_head|embed_tokens|[a-z_]*norm|mlp\.gate|gate|router|router\.proj|shared_expert_gate|conv1d"
    r"|in_proj_(a|b|ba))(\.\*)?\$?$"
)
_UNREAD = re.compile(
    r"(^|[.*:^])(vision_tower|audio_tower|embed_vision|embed_audio|multi_modal_projector|visual|mtp)([.*$]|$)"
)


class Quantization(NamedTuple):
    """
    Attributes:
        weights: the format of the linear layers; None if they are not quantized.
        has_kv_cache_scheme: whether it is made for an fp8 KV cache, and should have its scales.
    """

    weights: WeightFormat | None = None
    has_kv_cache_scheme: bool = False


def read_quantization(settings: Any, where: str) -> Quantization:
    """What a quantization_config says. Raises ValueError, beginning with `where`, if we do not have it."""
    try:
        return _read(settings if isinstance(settings, Mapping) else settings.to_dict(), where)
    except (AttributeError, TypeError) as error:  # A value of another type than the formats have there.
        raise ValueError(f"{where}: cannot be used: {one_line(error)}; use the unquantized checkpoint") from error


def _read(settings: Mapping, where: str) -> Quantization:
    method: Any = settings.get("quant_method")
    method = getattr(method, "value", method)  # transformers' own is an enumeration.
    scheme = settings.get("kv_cache_scheme")
    if scheme and not is_e4m3(scheme):
        raise ValueError(
            f"{where}: kv_cache_scheme={quoted(scheme)}: must have type 'float' and num_bits 8, or be left out"
        )
    if method == "compressed-tensors" and scheme and not settings.get("config_groups"):
        return Quantization(None, True)
    try:
        format = next(filter(None, (cls.declared(method, settings) for cls in DECLARED)), None)
    except ValueError as error:
        raise ValueError(f"{where} with quant_method {quoted(method)}: {error}") from None
    if format is None:
        raise ValueError(
            f"{where} with quant_method {quoted(method)}: these settings are not supported. Checkpoints load in "
            "bfloat16, float16 and float32, in fp8 as quant_method 'fp8' with weight_block_size [128, 128] and "
            "dynamic activations, or null, or as compressed-tensors' FP8_DYNAMIC, in MXFP4 as quant_method 'mxfp4' or "
            "as compressed-tensors' mxfp4-pack-quantized without input_activations, and in int4 as quant_method 'awq' "
            "or 'gptq' or as compressed-tensors' pack-quantized; use the unquantized checkpoint, perhaps with "
            "quantization='fp8' or 'int4'"
        )
    if settings.get("transform_config"):  # Weights that were rotated: without the transforms the results are wrong.
        raise ValueError(f"{where}: transform_config is not supported; use a checkpoint without transforms")
    if format.experts_only:
        return Quantization(format, bool(scheme))
    ignored = format.ignored_key
    if isinstance(settings.get(ignored), str):
        raise TypeError(f"{ignored} must be a list of names, not a text")
    left_out = map(str, settings.get(ignored) or ())
    others = [name for name in left_out if not _UNQUANTIZED.search(name) and not _UNREAD.search(name)]
    if others:
        raise ValueError(
            f"{where}: {ignored} names {quoted(others[0])}: linear layers must all be quantized, except the head"
        )
    return Quantization(format, bool(scheme))


def checkpoint_quantization(hf_config: "PreTrainedConfig") -> Quantization:
    """What the configuration of a model says of its checkpoint."""
    settings = getattr(hf_config, "quantization_config", None)
    return read_quantization(settings, "quantization_config") if settings else Quantization()
