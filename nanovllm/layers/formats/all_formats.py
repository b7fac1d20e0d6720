"""Every weight format, by the names that users, checkpoints and tables have for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from nanovllm.layers.formats.fixed_order import FixedOrder, FixedOrderReady
from nanovllm.layers.formats.format import WeightFormat
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks, Fp8Tensors
from nanovllm.layers.formats.int4 import Int4
from nanovllm.layers.formats.int4_checkpoints import AwqInt4, CompressedInt4, GptqInt4
from nanovllm.layers.formats.mxfp4 import Mxfp4
from nanovllm.layers.formats.packed import Packed
from nanovllm.layers.formats.unquantized import Unquantized

# Those that a checkpoint may declare in its config.json.
DECLARED: tuple[type[WeightFormat], ...] = (
    *(Fp8, Fp8Blocks, Fp8Tensors),
    *(CompressedInt4, AwqInt4, GptqInt4),
    Mxfp4,
)
# What LLM(quantization=...) may be: weights are quantized while they are loaded.
QUANTIZATIONS: dict[str, WeightFormat] = {"fp8": Fp8(), "int4": Int4(), "mxfp4": Mxfp4()}


def format_of_table(name: str) -> WeightFormat:
    """The format with this name in tables; unquantized ones are called by their dtype there."""
    formats: tuple[type[WeightFormat], ...] = (*DECLARED, Int4, Packed, FixedOrder, FixedOrderReady)
    return next((cls() for cls in formats if cls.name == name), Unquantized())


_weight_format: ContextVar[WeightFormat | None] = ContextVar("nanovllm_weight_format", default=None)
_unquantized_format: ContextVar[Unquantized] = ContextVar("nanovllm_unquantized_format", default=Unquantized())  # noqa: B039 (immutable)


@contextmanager
def weight_format(value: WeightFormat | None, unquantized: Unquantized | None = None) -> Iterator[None]:
    """A block in which linear layers are made with this format, as torch's default dtype is for tensors.

    Args:
        value: None for unquantized layers.
        unquantized: what those are then, and in blocks within this one; None: as before.
    """
    token = _weight_format.set(value)
    of_others = _unquantized_format.set(unquantized or _unquantized_format.get())
    try:
        yield
    finally:
        _unquantized_format.reset(of_others)
        _weight_format.reset(token)


def get_weight_format(of_experts: bool = False) -> WeightFormat:
    """The format of a layer that is made now. of_experts: whether it is of a mixture's experts."""
    format = _weight_format.get()
    return get_unquantized_format() if format is None or (format.experts_only and not of_experts) else format


def get_unquantized_format() -> WeightFormat:
    """The format of a weight that is made now and never quantized, as that of the head."""
    return _unquantized_format.get()
