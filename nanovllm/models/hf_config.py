"""A model's transformers configuration: read from config.json, and checked before anything is built from it."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.layers.rotary_embedding import rope_parameters
from nanovllm.models.registry import find_architecture
from nanovllm.utils.checks import is_int, is_number, require
from nanovllm.utils.light_imports import without_generated_docstrings
from nanovllm.utils.model_files import one_line, read_json

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
_FLAGS = ("attention_bias", "tie_word_embeddings", "use_sliding_window")
_QUANTISATIONS = ("quantization_config", "compression_config")
_OPTIONAL = ("head_dim", "eos_token_id", *_FLAGS, *_QUANTISATIONS)
_MAX_SIZE = 2**31 - 1


def read_hf_config(directory: str) -> Any:
    """The transformers configuration of a model directory. Raises FileNotFoundError or ValueError, naming the file."""
    file = Path(directory, "config.json")
    if not os.path.lexists(file):
        raise FileNotFoundError(f"model={directory!r}: holds no config.json")
    content = read_json(file)
    # Before transformers checks it: its messages name neither the file nor what is allowed, and differ by version.
    _check_architecture(content.get("architectures"), content.get("model_type"), str(file))
    _check_values(content, str(file))
    try:
        with without_generated_docstrings():
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(directory)
    except Exception as error:
        raise ValueError(f"{file}: cannot be used: {one_line(error)}") from error


def check_hf_config(hf_config: Any, where: str) -> None:
    """Raises ValueError, naming `where` and the field, for a configuration that none of our models can be built
    from."""
    _check_architecture(getattr(hf_config, "architectures", None), getattr(hf_config, "model_type", None), where)
    fields = {name: getattr(hf_config, name, None) for name in (*_REQUIRED, *_OPTIONAL)}
    missing = [name for name in _REQUIRED if fields[name] is None]
    if missing:
        raise ValueError(f"{where}: lacks {', '.join(missing)}")
    _check_values(fields, where)
    num_heads, num_kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    if num_heads % num_kv_heads:
        raise ValueError(f"{where}: num_key_value_heads={num_kv_heads}: must divide num_attention_heads ({num_heads})")
    if fields["head_dim"] is not None:
        require(f"{where}: head_dim", fields["head_dim"], fields["head_dim"] % 2 == 0, "even")
    else:
        allowed = f"a multiple of twice num_attention_heads ({num_heads}), or head_dim be given"
        require(f"{where}: hidden_size", fields["hidden_size"], fields["hidden_size"] % (2 * num_heads) == 0, allowed)
    try:
        rope = rope_parameters(hf_config)
        is_usable = all(0 < number < math.inf for number in (rope.base, rope.factor, supported_length(hf_config)))
    except Exception as error:
        raise ValueError(f"{where}: its RoPE settings cannot be used: {one_line(error)}") from error
    if not is_usable:
        raise ValueError(f"{where}: rope_theta={rope.base}, factor={rope.factor}: must be finite numbers > 0")


def supported_length(hf_config: Any) -> int:
    """Tokens of the longest sequence that the model supports: max_position_embeddings, or the length that RoPE scaling
    extends the original one to."""
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
    are_ids = all(is_int(token, 0) for token in token_ids)
    require(f"{where}: {name}", value, are_ids, "a token id >= 0, or a list of them")
    return token_ids


def _check_architecture(architectures: Any, model_type: Any, where: str) -> None:
    is_list = isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    require(f"{where}: architectures", architectures, architectures is None or is_list, "a list of names")
    find_architecture(architectures, model_type, where)


def _check_values(fields: Mapping[str, Any], where: str) -> None:
    """Check those fields that are present and not None."""
    for name, value in fields.items():
        field = f"{where}: {name}"
        if value is None:
            continue
        if name == "rms_norm_eps":
            require(field, value, is_number(value) and 0 <= value < math.inf, "a finite number >= 0")
        elif name in _REQUIRED or name == "head_dim":
            require(field, value, is_int(value, 1, _MAX_SIZE), f"an integer in 1..{_MAX_SIZE}")
        elif name in _FLAGS:
            require(field, value, isinstance(value, bool), "true or false")
        elif name == "eos_token_id":
            check_token_ids(value, where, name)
        elif name in _QUANTISATIONS and value:
            method = value.get("quant_method") if isinstance(value, Mapping) else getattr(value, "quant_method", None)
            method = getattr(method, "value", method)  # transformers' own is an enumeration.
            raise ValueError(
                f"{field} with quant_method {method!r}: quantised checkpoints do not load, only bfloat16, float16 and "
                "float32; use the unquantised checkpoint"
            )
