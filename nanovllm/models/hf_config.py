"""A model's transformers configuration: read from config.json, and checked before anything is built from it."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from nanovllm.layers.rotary_embedding import rope_parameters
from nanovllm.models import model_class
from nanovllm.utils.light_imports import without_generated_docstrings
from nanovllm.utils.model_files import one_line, read_json

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
_MAX_SIZE = 2**31 - 1
_FLAGS = ("attention_bias", "tie_word_embeddings", "use_sliding_window")
_QUANTISATIONS = ("quantization_config", "compression_config")


def read_hf_config(directory: str) -> Any:
    """The transformers configuration of a model directory. Raises FileNotFoundError or ValueError, naming the file."""
    file = Path(directory, "config.json")
    if not os.path.lexists(file):
        raise FileNotFoundError(f"model={directory!r}: holds no config.json")
    content = read_json(file)
    # Before transformers does: its validators name neither the file nor what is allowed, and each version has others.
    _check_architecture(content.get("architectures"), content.get("model_type"), str(file))
    _check_values({name: value for name, value in content.items() if value is not None}, str(file))
    try:
        with without_generated_docstrings():
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(directory)
    except Exception as error:
        raise ValueError(f"{file}: cannot be used: {one_line(error)}") from error


def check_hf_config(hf_config: Any, where: str) -> None:
    """Raises ValueError, naming `where` and the field, for a configuration that no model of ours can be built from."""
    _check_architecture(getattr(hf_config, "architectures", None), getattr(hf_config, "model_type", None), where)
    names = (*_SIZES, "head_dim", "rms_norm_eps", "eos_token_id", *_FLAGS, *_QUANTISATIONS)
    fields = {name: getattr(hf_config, name, None) for name in names}
    fields = {name: value for name, value in fields.items() if value is not None}
    missing = [name for name in (*_SIZES, "rms_norm_eps") if name not in fields]
    if missing:
        raise ValueError(f"{where}: lacks {', '.join(missing)}")
    _check_values(fields, where)
    _check_heads(fields, where)
    try:
        rope = rope_parameters(hf_config)
        is_usable = all(0 < number < math.inf for number in (rope.base, rope.factor, supported_length(hf_config)))
    except Exception as error:
        raise ValueError(f"{where}: its RoPE settings cannot be used: {one_line(error)}") from error
    if not is_usable:
        raise ValueError(f"{where}: rope_theta={rope.base}, factor={rope.factor}: must be finite numbers > 0")


def supported_length(hf_config: Any) -> int:
    """Tokens of the longest sequence that the model supports: max_position_embeddings, or what RoPE scaling stretches
    the original length to."""
    limit = hf_config.max_position_embeddings
    scaling = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    original = scaling.get("original_max_position_embeddings")
    if original and scaling.get("factor"):
        limit = max(limit, int(original * scaling["factor"]))
    return limit


def get_head_dim(hf_config: Any) -> int:
    """Qwen2's configuration names no head_dim: there it is hidden_size / num_attention_heads."""
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def check_token_ids(value: Any, where: str, name: str) -> list[int]:
    """The token ids of a field that holds one, a list of them, or None. Raises ValueError for anything else."""
    token_ids = [] if value is None else value if isinstance(value, list) else [value]
    _require(all(_is_int(token, 0) for token in token_ids), where, name, value, "a token id >= 0, or a list of them")
    return token_ids


def _check_architecture(architectures: Any, model_type: Any, where: str) -> None:
    ok = architectures is None or (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    )
    _require(ok, where, "architectures", architectures, "a list of names")
    model_class(SimpleNamespace(architectures=architectures, model_type=model_type), where)


def _check_values(fields: Mapping[str, Any], where: str) -> None:
    """Check the fields that are there, whichever they are."""
    for name, value in fields.items():
        if name in _SIZES or name == "head_dim":
            _require(_is_int(value, 1) and value <= _MAX_SIZE, where, name, value, f"an integer in 1..{_MAX_SIZE}")
        elif name == "rms_norm_eps":
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            _require(is_number and 0 <= value < math.inf, where, name, value, "a finite number >= 0")
        elif name in _FLAGS:
            _require(isinstance(value, bool), where, name, value, "true or false")
        elif name == "eos_token_id":
            check_token_ids(value, where, name)
        elif name in _QUANTISATIONS and value:
            _refuse_quantised(value, where, name)


def _check_heads(fields: Mapping[str, Any], where: str) -> None:
    num_heads, num_kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    if num_heads % num_kv_heads:
        raise ValueError(f"{where}: num_key_value_heads={num_kv_heads}: must divide num_attention_heads ({num_heads})")
    if "head_dim" in fields:
        _require(fields["head_dim"] % 2 == 0, where, "head_dim", fields["head_dim"], "even")
    elif fields["hidden_size"] % (2 * num_heads):
        allowed = f"a multiple of twice num_attention_heads ({num_heads}), or head_dim be given"
        _require(False, where, "hidden_size", fields["hidden_size"], allowed)


def _refuse_quantised(settings: Any, where: str, name: str) -> NoReturn:
    method = settings.get("quant_method") if isinstance(settings, Mapping) else getattr(settings, "quant_method", None)
    method = getattr(method, "value", method)  # transformers' own is an enumeration.
    raise ValueError(
        f"{where}: {name} with quant_method {method!r}: quantised checkpoints do not load, only bfloat16, float16 and "
        "float32; use the unquantised checkpoint"
    )


def _is_int(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _require(ok: bool, where: str, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{where}: {name}={value!r}: must be {allowed}")
