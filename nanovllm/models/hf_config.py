"""A model's transformers configuration: read from config.json, and checked before anything is built from it."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.layers.rope_parameters import RopeParameters, rope_parameters, rope_settings
from nanovllm.models.model_files import read_json
from nanovllm.models.other_formats import other_format
from nanovllm.models.quantization_config import read_quantization
from nanovllm.models.registry import find_architecture, model_class
from nanovllm.utils.checks import is_int, is_number, one_line, quoted, require

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Fields = Mapping[str, Any]  # of a configuration, not checked yet

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
_FLAGS = (
    "attention_bias",
    "attention_out_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "use_sliding_window",
    "norm_topk_prob",
)
_GLOBAL = ("global_head_dim", "num_global_key_value_heads")  # of layers without a window
_SIZES = ("head_dim", "sliding_window", *_GLOBAL)
_PATTERN = "sliding_window_pattern"
_OF_LAYERS = ("gemma4_text", "gemma4_unified_text")  # types of models whose layers differ in these sizes
_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_ACTIVATION = ("swiglu_alpha", "swiglu_limit")
_POSITIVE_NUMBERS = (
    *("final_logit_softcapping", "query_pre_attn_scalar", "rope_local_base_freq"),
    *(*_FACTORS, *_ACTIVATION),
)
_KINDS = ("full_attention", "sliding_attention", "linear_attention")  # of layers, in layer_types
_LAYERS = ("max_window_layers", "mlp_only_layers", "no_rope_layers")
_QUANTIZATIONS = ("quantization_config", "compression_config")
_CHUNKS = "dual_chunk_attention_config"
_OPTIONAL = ("eos_token_id", *_FLAGS, *_SIZES, _PATTERN, *_POSITIVE_NUMBERS, *_LAYERS, *_QUANTIZATIONS, _CHUNKS)
_MAX_SIZE = 2**31 - 1
_MAX_LAYERS = 1024  # The deepest published model has 126.
# Keys that change what a decoder computes, with the value that changes nothing, as null does. A family reads some of
# them (`DecoderForCausalLM.switches`); the others are refused.
_SWITCHES: dict[str, bool | float | str | None] = {
    "attention_bias": False,
    "attention_out_bias": False,
    "attn_output_gate": True,  # only Qwen3.5's configurations have the key
    "mlp_bias": False,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "qkv_bias": False,
    "o_bias": False,
    "hidden_act": "silu",
    "sliding_window": None,
    "use_sliding_window": False,
    "use_bidirectional_attention": False,  # null in newer configurations
    "is_causal": True,
    "attention_chunk_size": None,
    "llama_4_scaling_beta": None,
    "no_rope_layers": None,
    "partial_rotary_factor": 1.0,
    "qk_layernorm": False,
    "use_qk_norm": False,
    "clip_qkv": None,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "num_experts": None,
    "num_local_experts": None,
    "swiglu_alpha": None,
    "swiglu_limit": None,
}


def read_hf_config(directory: str) -> "PreTrainedConfig":
    """The transformers configuration of a model directory. Raises FileNotFoundError or ValueError, naming the file."""
    file = Path(directory, "config.json")
    if not os.path.lexists(file):
        raise FileNotFoundError(f"model={quoted(directory)}: holds no config.json{other_format(directory)}")
    content = read_json(file)
    # Before transformers checks it: its messages name neither the file nor what is allowed, and differ by version.
    try:
        _check_architecture(content.get("architectures"), content.get("model_type"), str(file))
    except ValueError as error:
        raise ValueError(f"{error}{other_format(directory)}") from None
    for part in (content, content.get("text_config")):
        if isinstance(part, dict):
            _check_values(part, str(file))
    try:
        from transformers import AutoConfig

        complete = with_layer_types(content)
        if complete != content:
            read = AutoConfig.for_model(**complete)
        else:
            # False, because None asks on standard input whether to run code of the checkpoint.
            read = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        return text_config(read, content)
    except Exception as error:
        code, model_type = content.get("auto_map"), content.get("model_type")
        reason = one_line(error)
        if code and "trust_remote_code" in reason:  # an option that we do not have
            reason = (
                f"auto_map names code of the checkpoint, {quoted(code)}, which is never run, and transformers has no "
                f"class of its own that reads model_type {quoted(model_type)}"
            )
        raise ValueError(f"{file}: cannot be used: {reason}") from error


def with_layer_types(content: Fields) -> dict[str, Any]:
    """A config.json's content with `layer_types`, if a text such as "LLLG" says which layers have a window:
    transformers does not read the text."""
    pattern, kinds = content.get(_PATTERN), content.get("layer_types")
    if not isinstance(pattern, str) or kinds:
        return dict(content)
    has_window = content.get("sliding_window", "the family's") is not None
    are_local = local_layers(SimpleNamespace(**content))
    kinds = ["sliding_attention" if has_window and is_local else "full_attention" for is_local in are_local]
    return {**content, "layer_types": kinds}


def text_config(read: "PreTrainedConfig", content: Fields) -> "PreTrainedConfig":
    """The configuration of the text model, which may be a part of a larger one. Then its attribute `vision` is what
    `VisionSpec` reads. read: transformers' of the content of config.json."""
    from transformers import __version__

    config = _text_config(read)
    # Towers are those of transformers 5. Without one, the text model is loaded alone.
    if isinstance(content.get("vision_config"), dict) and not __version__.startswith("4."):
        # In plain values, because a worker gets it.
        config.vision = {name: value for name, value in read.to_dict().items() if name != "text_config"}
    # Some say it of the text model alone. `model_check` looks for a head that is another matrix.
    text = content.get("text_config")
    if isinstance(text, dict) and text.get("tie_word_embeddings") is True:
        config.tie_word_embeddings = True
    return config


def _text_config(config: "PreTrainedConfig") -> "PreTrainedConfig":
    text = getattr(config, "text_config", None)
    if text is None:
        return plain_config(config)
    text.architectures = config.architectures
    for name in ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings"):
        if vars(config).get(name) is not None:
            setattr(text, name, vars(config)[name])
    return plain_config(text)


def plain_config(config: "PreTrainedConfig") -> "PreTrainedConfig":
    """The configuration with plain attributes. Where head_dim and num_key_value_heads differ between layers,
    transformers 5 keeps a configuration for each layer, and none of the sizes for all. Then the result has those of the
    layers with a window under these names, and the others' under the names of `_GLOBAL`, as in published checkpoints.
    Raises ValueError if more differs."""
    if config.model_type not in _OF_LAYERS:
        return config
    content = config.to_dict()
    of_layers = content.pop("per_layer_config", None) or {}
    content |= {"global_head_dim": content["head_dim"], "num_global_key_value_heads": content["num_key_value_heads"]}
    kinds = content["layer_types"]
    full = {layer for layer, kind in enumerate(kinds) if kind == "full_attention"}
    sizes = [dict(of_layer) for of_layer in of_layers.values()]
    is_right = not of_layers or (set(map(int, of_layers)) == full and all(x == sizes[0] for x in sizes))
    is_right = is_right and all(set(of_layer) <= {"head_dim", "num_key_value_heads"} for of_layer in sizes)
    allowed = "head_dim and num_key_value_heads alone, the same for all layers of full_attention"
    require("per_layer_config", of_layers, is_right, allowed)
    if sizes:
        content["global_head_dim"] = sizes[0].get("head_dim", content["head_dim"])
        content["num_global_key_value_heads"] = sizes[0].get("num_key_value_heads", content["num_key_value_heads"])
    from transformers import PreTrainedConfig

    return PreTrainedConfig(**content)


def check_hf_config(hf_config: "PreTrainedConfig", where: str) -> None:
    """Raises ValueError, naming `where` and the field, for a configuration that none of our models can be built from.
    Where every layer has experts and a shared one, intermediate_size becomes that one's."""
    _check_architecture(getattr(hf_config, "architectures", None), getattr(hf_config, "model_type", None), where)
    if getattr(hf_config, "intermediate_size", None) is None and hasattr(hf_config, "shared_expert_intermediate_size"):
        hf_config.intermediate_size = hf_config.shared_expert_intermediate_size
    fields: Fields = {name: getattr(hf_config, name, None) for name in (*_REQUIRED, *_OPTIONAL)}
    missing = [name for name in _REQUIRED if fields[name] is None]
    if missing:
        raise ValueError(f"{where}: lacks {', '.join(missing)}")
    _check_values(fields, where)
    num_heads, num_kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    if num_heads % num_kv_heads:
        raise ValueError(f"{where}: num_key_value_heads={num_kv_heads}: must divide num_attention_heads ({num_heads})")
    _check_global_heads(fields, where)
    if fields["head_dim"] is not None:
        require(f"{where}: head_dim", fields["head_dim"], fields["head_dim"] % 2 == 0, "even")
    else:
        allowed = f"a multiple of twice num_attention_heads ({num_heads}), or head_dim be given"
        require(f"{where}: hidden_size", fields["hidden_size"], fields["hidden_size"] % (2 * num_heads) == 0, allowed)
    family = model_class(hf_config)
    try:
        spec = family.checked_spec(hf_config)
        for rope in filter(None, dict.fromkeys(spec.ropes)):
            for length in (0, supported_length(hf_config)):  # LongRoPE has factors for each.
                with torch.device("meta"):  # A wrong head_dim may be of gigabytes.
                    rope.inverse_frequencies(get_head_dim(hf_config), length)
            if not all(0 < number < math.inf for number in (rope.base, rope.factor, supported_length(hf_config))):
                raise ValueError(f"rope_theta={rope.base}, factor={rope.factor}: must be finite numbers > 0")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except (TypeError, AttributeError, ArithmeticError) as error:  # All other fields are checked.
        raise ValueError(f"{where}: cannot be used: {one_line(error)}") from error


def _check_global_heads(fields: Fields, where: str) -> None:
    """Those of layers without a window, where they differ."""
    head_dim, num_kv_heads = (fields[name] for name in _GLOBAL)
    require(f"{where}: global_head_dim", head_dim, not (head_dim or 0) % 2, "even")
    is_divisor = num_kv_heads is None or fields["num_attention_heads"] % num_kv_heads == 0
    allowed = f"a divisor of num_attention_heads ({fields['num_attention_heads']})"
    require(f"{where}: num_global_key_value_heads", num_kv_heads, is_divisor, allowed)


def supported_length(hf_config: "PreTrainedConfig") -> int:
    """Tokens of the longest sequence that the model supports: max_position_embeddings, or the length that YaRN extends
    the original one to. Dual chunk attention (An et al. 2024) is ordinary attention for one chunk, and we have no
    other."""
    limit = hf_config.max_position_embeddings
    scaling = rope_settings(hf_config)
    original = scaling.get("original_max_position_embeddings")
    if "yarn" in (scaling.get("rope_type"), scaling.get("type")) and original and scaling.get("factor"):
        limit = max(limit, int(original * scaling["factor"]))
    chunks = getattr(hf_config, _CHUNKS, None)
    return min(limit, chunks["chunk_size"] - chunks["local_size"]) if chunks else limit


def check_switches(hf_config: "PreTrainedConfig", read: frozenset[str]) -> None:
    """Raises ValueError, naming the key, if a configuration sets one of `_SWITCHES` that its family does not read."""
    for name, neutral in _SWITCHES.items():
        value = rope_settings(hf_config).get(name, getattr(hf_config, name, None))
        if name not in read and value is not None and value != neutral:
            raise ValueError(f"{name}={quoted(value)}: is not supported for {hf_config.model_type}")
    if "layer_types" in read:  # The family checks them itself.
        return
    kinds = set(getattr(hf_config, "layer_types", None) or ()) - {"full_attention"}
    if "sliding_window" in read:
        kinds.discard("sliding_attention")
    if kinds:
        supported = "full_attention" + (" and sliding_attention" if "sliding_window" in read else "")
        raise ValueError(f"layer_types={sorted(kinds)}: supported for {hf_config.model_type} are {supported}")
    if "sliding_window" in read and getattr(hf_config, "sliding_window", None) is not None:
        _check_window_keys(hf_config, read)


def _check_window_keys(hf_config: "PreTrainedConfig", read: frozenset[str]) -> None:
    """Raises ValueError, naming the key, if a configuration with a window says which layers have it by a key that its
    family does not read: transformers ignores such a key."""
    names = ["use_sliding_window"]
    if not getattr(hf_config, "layer_types", None):
        names += ["max_window_layers", _PATTERN]
    for name in names:
        value = getattr(hf_config, name, None)
        if name not in read and value is not None:
            remedy = "remove it or sliding_window"
            raise ValueError(f"{name}={quoted(value)}: is not supported for {hf_config.model_type}: {remedy}")


def rope_of_layers(hf_config: "PreTrainedConfig") -> tuple[RopeParameters | None, ...]:
    """The same RoPE for each layer: `DecoderSpec.ropes` of most families."""
    return (rope_parameters(hf_config),) * hf_config.num_hidden_layers


def windows_of_layers(hf_config: "PreTrainedConfig") -> tuple[int | None, ...]:
    """Each layer's sliding window: the number of keys that a token sees, its own included; None for all."""
    window = getattr(hf_config, "sliding_window", None)
    is_off = getattr(hf_config, "use_sliding_window", True) is False
    kinds = getattr(hf_config, "layer_types", None) or ()
    if window is not None and is_off and "sliding_attention" in kinds:  # In transformers that depends on the back end.
        raise ValueError("use_sliding_window=False: contradicts layer_types, which names layers with a sliding window")
    if window is None or is_off:
        return (None,) * hf_config.num_hidden_layers
    return tuple(window if is_local else None for is_local in local_layers(hf_config))


def local_layers(hf_config: "PreTrainedConfig | SimpleNamespace") -> list[bool]:
    """Which layers have the configured `sliding_window`. Transformers 5 lists `layer_types`. In 4 every n-th layer is a
    global one (`sliding_window_pattern`), or the first ones are (`max_window_layers`). EXAONE 4 may have a text as the
    pattern: in "LLLG" each of "LLL" stands for a layer with the window. The last layer has none."""
    num_layers = hf_config.num_hidden_layers
    layers = range(num_layers)
    kinds = getattr(hf_config, "layer_types", None)
    pattern = getattr(hf_config, _PATTERN, None)
    if kinds:
        allowed = f"a list of {num_layers} kinds, one for each of num_hidden_layers"
        require("layer_types", kinds, len(kinds) >= num_layers, allowed)
        return [kind == "sliding_attention" for kind in kinds[:num_layers]]
    if isinstance(pattern, str):
        return [pattern[layer % len(pattern)] == "L" and layer < num_layers - 1 for layer in layers]
    if pattern:
        return [(layer + 1) % pattern != 0 for layer in layers]
    num_global = getattr(hf_config, "max_window_layers", None) or 0
    return [layer >= num_global for layer in layers]


def get_head_dim(hf_config: "PreTrainedConfig") -> int:
    """Qwen2's configuration names no head_dim: there it is hidden_size / num_attention_heads."""
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def check_token_ids(value: Any, where: str, name: str) -> list[int]:
    """The token ids of a field that holds one, a list of them, or None. Raises ValueError for anything else."""
    token_ids = [] if value is None else value if isinstance(value, list) else [value]
    are_ids = all(is_int(token, 0) for token in token_ids)
    require(f"{where}: {name}", value, are_ids, "a token id >= 0, or a list of them")
    return token_ids


def _check_architecture(architectures: Any, model_type: Any, where: str) -> None:
    is_list = isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    require(f"{where}: architectures", architectures, architectures is None or is_list, "a list of names")
    find_architecture(architectures, model_type, where)


def _check_values(fields: Fields, where: str) -> None:
    """Check those fields that are present and not None."""
    for name, value in fields.items():
        field = f"{where}: {name}"
        if value is None:
            continue
        if name == "rms_norm_eps":
            require(field, value, is_number(value) and 0 <= value < math.inf, "a finite number >= 0")
        elif name == "num_hidden_layers":
            require(field, value, is_int(value, 1, _MAX_LAYERS), f"an integer in 1..{_MAX_LAYERS}")
        elif name in (*_REQUIRED, *_SIZES):
            require(field, value, is_int(value, 1, _MAX_SIZE), f"an integer in 1..{_MAX_SIZE}")
        elif name in _POSITIVE_NUMBERS:
            require(field, value, is_number(value) and 0 < value < math.inf, "a finite number > 0")
        elif name in _FLAGS:
            require(field, value, isinstance(value, bool), "true or false")
        elif name == "no_rope_layers":
            num_layers = fields.get("num_hidden_layers") or 0
            is_long_enough = isinstance(value, list) and len(value) >= num_layers
            require(field, value, is_long_enough, f"a list of {num_layers} flags, one for each of num_hidden_layers")
        elif name == _PATTERN:
            is_text = isinstance(value, str) and value != "" and set(value) <= set("LG")
            least = 0 if fields.get("sliding_window") is None else 1  # 0 is what transformers writes for EXAONE 4.
            allowed = f"an integer in 1..{_MAX_SIZE}, or a text of L and G"
            require(field, value, is_text or is_int(value, least, _MAX_SIZE), allowed)
        elif name == "max_window_layers":
            require(field, value, is_int(value, 0), "an integer >= 0")
        elif name == "mlp_only_layers":
            are_layers = isinstance(value, list) and all(is_int(layer, 0) for layer in value)
            require(field, value, are_layers, "a list of layers, counted from 0")
        elif name == "layer_types":
            are_kinds = isinstance(value, list) and all(kind in _KINDS for kind in value)
            require(field, value, are_kinds, f"a list of {', '.join(_KINDS)}")
        elif name == "per_layer_config" and value and fields.get("model_type") not in _OF_LAYERS:
            raise ValueError(
                f"{field}={quoted(value)}: is not supported: all layers must have the same sizes and switches"
            )
        elif name == "eos_token_id":
            check_token_ids(value, where, name)
        elif name == _CHUNKS and value:
            sizes: list[Any] = [None]
            if isinstance(value, dict):
                sizes = [value.get(key) for key in ("chunk_size", "local_size")]
            are_sizes = all(is_int(size, 0) for size in sizes) and sizes[0] > sizes[1]
            require(field, value, are_sizes, "an object with a chunk_size and a smaller local_size")
        elif name == "quantization_config" and value:
            read_quantization(value, field)
        elif name == "compression_config" and value:
            raise ValueError(f"{field}: is of an older compressed-tensors; use a checkpoint with quantization_config")
