"""What a checkpoint's quantization_config says of its weights and KV cache."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.layers.formats.all_formats import DECLARED
from nanovllm.layers.formats.compressed_tensors import METHOD, described, is_e4m3
from nanovllm.layers.formats.format import WeightFormat
from nanovllm.utils.checks import one_line, quoted, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Parts of a model that are never quantized, and those of a vision tower, which is not read. Others that a checkpoint
# leaves unquantized do not load.
_UNQUANTIZED = re.compile(
    r"(^|[.*])(lm_head|embed_tokens|[a-z_]*norm|gate|router|router\.proj|shared_expert_gate|conv1d|in_proj_(a|b|ba))$"
)
_UNREAD = re.compile(
    r"(^|[.*])(vision_tower|vision_model|audio_tower|embed_vision|embed_audio|multi_modal_projector|visual|mtp)([.*]|$)"
)
# Where config.json lists the modules that are not in the format: in most methods under the last of these names.
_LEFT_OUT = {METHOD: "ignore", "mxfp4": "ignore", "gptq": "dynamic"}
_FP8_WORDS = ("fmt", "activation_scheme", "weight_block_size", "scale_fmt")


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
        words = described(settings) if method == METHOD else ""
        if method == "fp8":
            words = ", ".join(f"{name}={settings[name]!r}" for name in _FP8_WORDS if name in settings)
        raise ValueError(
            f"{where} with quant_method {quoted(method)}: these settings are not supported"
            f"{words and ': '}{shortened(words)}. Checkpoints load in "
            "bfloat16, float16 and float32, in fp8 as quant_method 'fp8' with weight_block_size [128, 128] and "
            "dynamic activations, or null, or as compressed-tensors' FP8_DYNAMIC, FP8 or FP8_BLOCK, in MXFP4 as "
            "quant_method 'mxfp4' or as compressed-tensors' mxfp4-pack-quantized without input_activations, and in "
            "int4 as quant_method 'awq' or 'gptq' or as compressed-tensors' pack-quantized; use the unquantized "
            "checkpoint, perhaps with quantization='fp8' or 'int4'"
        )
    if settings.get("transform_config"):  # Weights that were rotated: without the transforms the results are wrong.
        raise ValueError(f"{where}: transform_config is not supported; use a checkpoint without transforms")
    if format.experts_only:
        return Quantization(format, bool(scheme))
    ignored = _LEFT_OUT.get(str(method), "modules_to_not_convert")
    if isinstance(settings.get(ignored), str):
        raise TypeError(f"{ignored} must be a list of names, not a text")
    left_out = map(str, settings.get(ignored) or ())
    others = [name for name in left_out if not all(map(_is_left_out, _plain_names(name)))]
    if others:
        raise ValueError(
            f"{where}: {ignored} names {quoted(others[0])}: linear layers must all be quantized, except the head"
        )
    return Quantization(format, bool(scheme))


def _is_left_out(name: str) -> bool:
    return bool(_UNQUANTIZED.search(name) or _UNREAD.search(name))


def _plain_names(pattern: str) -> list[str]:
    """What a name or a regular expression of a list of modules names, without what such expressions have in common:
    `re:` or `-:` before, a point that is escaped, `.*` or `$` behind, one group of alternatives."""
    name = re.sub(r"^(re:|[-+]:)?\^?", "", pattern).replace("\\.", ".").replace("[.]", ".")
    group = re.search(r"\((?:\?:)?([\w|]+)\)", name)
    names = [name[: group.start()] + each + name[group.end() :] for each in group[1].split("|")] if group else [name]
    return [re.sub(r"(\.\*|\.|\*|\$)+$", "", each) for each in names]


def checkpoint_quantization(hf_config: "PreTrainedConfig") -> Quantization:
    """What the configuration of a model says of its checkpoint."""
    settings = getattr(hf_config, "quantization_config", None)
    return read_quantization(settings, "quantization_config") if settings else Quantization()
