"""What `deterministic=True` can promise: the one place that refuses, by name, what it cannot.

Each choice of the engine says whether a row's bits are independent of the other rows: `is_batch_invariant` of a
candidate for products, an attention back end and a feature. The rest computes each row by itself: norms,
RoPE, activations, logits, log-probabilities and the sampler. docs/deterministic.md lists who keeps which promise.
"""

from typing import Any

from torch import nn

from nanovllm.layers.experts.experts import ExpertsLinear
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.matmul.candidates.fixed_order import QUANTIZED
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.matmul.table import Key
from nanovllm.utils.checks import require


def check_deterministic(config: Any) -> None:
    """Raises ValueError, naming the option, the back end or the format, if a choice of this engine is not known to be
    batch-invariant. config: a `Config` whose device, dtype and formats are resolved."""

    def refuse(name: str, value: object, is_right: bool, allowed: str) -> None:
        require(name, value, is_right, f"{allowed} with deterministic=True")

    refuse("plain", config.plain, not config.plain, "False")
    found = config.attention_backend
    refuse("attention_backend", found, found == "auto", "'auto', which takes the batch-invariant one,")
    format = config.weight_format
    if format is not None and format.name not in QUANTIZED:
        raise ValueError(
            f"quantization: products of weights in {format.kind or format.name} are not batch-invariant; use "
            "unquantized weights with deterministic=True"
        )
    for feature in config.features:
        refuse(
            "features",
            type(feature).__name__,
            getattr(feature, "is_batch_invariant", False),
            "of features with is_batch_invariant=True",
        )


def check_layers(model: nn.Module, matmul: Matmul) -> None:
    """Raises ValueError if the model has layers of whose products no order can be promised on this machine."""
    for module in model.modules():
        if isinstance(module, (LinearBase, ExpertsLinear)) and module.format.name in QUANTIZED:
            operation = "experts" if isinstance(module, ExpertsLinear) else "linear"
            matmul.row(Key.of(operation, True, module.matrix), module.matrix)  # A trial of its shape, if it is new.
