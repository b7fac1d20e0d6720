"""The weights that a layer of Qwen3's published models multiplies with."""

from argparse import ArgumentTypeError

from nanovllm.models.presets import PRESET_NAMES, preset_config

QKV, OUT, GATE_UP, DOWN = "qkv", "o add", "gate_up silu", "down add"


def layer_shapes(model: str) -> dict[str, tuple[int, int]]:
    """Weights [N, K] of one layer of "0.6B", "8B" and so on, or of "8B-tp2", what one of two GPUs has of them."""
    name, _, num_gpus = model.partition("-tp")
    config, size = preset_config(f"Qwen3-{name}"), int(num_gpus or 1)
    hidden, intermediate = config.hidden_size, config.intermediate_size // size
    q, kv = (n * config.head_dim // size for n in (config.num_attention_heads, config.num_key_value_heads))
    return {
        QKV: (q + 2 * kv, hidden),
        OUT: (hidden, q),
        GATE_UP: (2 * intermediate, hidden),
        DOWN: (hidden, intermediate),
    }


def model_name(name: str) -> str:
    """argparse's type for what `layer_shapes` takes."""
    try:
        layer_shapes(name)
    except (KeyError, ValueError, ZeroDivisionError):
        sizes = ", ".join(preset.removeprefix("Qwen3-") for preset in PRESET_NAMES)
        raise ArgumentTypeError(f"{name!r}: must be one of {sizes}, or with several GPUs 8B-tp2 and so on") from None
    return name
