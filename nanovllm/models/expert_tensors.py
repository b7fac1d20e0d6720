"""Tensors of checkpoints that hold a matrix, or a bias, of each expert of a layer."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nanovllm.kernels.matmul.four_bit import UNIT
from nanovllm.kernels.matmul.linear_checks import BLOCK
from nanovllm.layers.formats.parameters import Slice

Content = Tensor | Slice
_SCALES = "_scale_inv"  # of blocks in fp8

# A tensor's name, and the tensor or safetensors slice -> the parts that it consists of, by the names that they would
# have as tensors of their own. Empty for a tensor that is no such one.
Splitter = Callable[[str, Content], "dict[str, ExpertPart]"]


class ExpertPart:
    """Some rows of one expert in a tensor of all experts: `[num_rows, columns]`, or `[num_rows]` of biases. It is read
    like a safetensors slice, as far as it is asked for.

    The tensor is `[num_experts, rows, columns]`, perhaps with the columns in groups of bytes, `[num_experts, rows,
    groups, bytes]`, or transposed, `[num_experts, columns, rows]`.
    """

    def __init__(
        self, content: Any, expert: int, first: int, num_rows: int, step: int = 1, is_transposed: bool = False
    ):
        """The rows are first, first + step, ..."""
        self._content, self._expert, self._first, self._num_rows = content, expert, first, num_rows
        self._step, self._is_transposed = step, is_transposed

    def __getitem__(self, index: Any) -> Tensor:
        rows, *others = index if isinstance(index, tuple) else (index,)
        start, stop, _ = slice(None).indices(self._num_rows) if rows is ... else rows.indices(self._num_rows)
        first = self._first + start * self._step
        span = slice(first, first + max(0, (stop - start - 1) * self._step + 1))
        if self._is_transposed:
            columns = others[0] if others else slice(None)
            return self._content[self._expert, columns, span][:, :: self._step].t()
        if len(shape_of(self._content)) < 4:
            index = (self._expert, span, *others)
            return self._content[index][:: self._step]
        found = self._content[self._expert, span][:: self._step].flatten(1)
        return found[:, others[0]] if others else found

    def get_shape(self) -> list[int]:
        _, *sizes = shape_of(self._content)
        if self._is_transposed:
            return [self._num_rows, sizes[0]]
        if len(sizes) == 3:
            return [self._num_rows, sizes[1] * sizes[2]]
        return [self._num_rows, *sizes[1:]]

    def get_dtype(self) -> str:
        return self._content.get_dtype()


def shape_of(content: Content) -> list[int]:
    """Of a tensor or a safetensors slice."""
    return list(content.shape) if isinstance(content, Tensor) else content.get_shape()


def stacked_experts(name: str, content: Content, hidden_size: int | None = None) -> dict[str, ExpertPart]:
    """As transformers 5 holds them in memory: gate_up_proj `[num_experts, 2 * intermediate_size, hidden_size]`, of each
    expert the gate's rows and then up's, and down_proj `[num_experts, hidden_size, intermediate_size]`. In fp8 with
    scales of blocks, gate_up_proj_scale_inv and down_proj_scale_inv have a number for each block of 128 x 128.

    hidden_size: for a family whose checkpoints have all of them transposed (Qwen3-VL). Tensors that have the shape
    above are read as they are."""
    folder, _, kind = name.rpartition(".")
    shape, stem = shape_of(content), kind.removesuffix(_SCALES)
    if not folder.endswith(".experts") or len(shape) != 3 or stem not in ("gate_up_proj", "down_proj"):
        return {}
    num_experts, *sizes = shape
    projections, hidden_dim = (["down_proj"], 0) if stem == "down_proj" else (["gate_proj", "up_proj"], 1)
    parameter = "weight" if kind == stem else "weight" + _SCALES
    if hidden_size is not None and kind != stem:
        hidden_size = -(-hidden_size // BLOCK)
    is_transposed = hidden_size is not None and sizes[hidden_dim] != hidden_size
    count = sizes[1 if is_transposed else 0] // len(projections)
    return {
        f"{folder}.{expert}.{projection}.{parameter}": ExpertPart(
            content, expert, i * count, count, is_transposed=is_transposed
        )
        for expert in range(num_experts)
        for i, projection in enumerate(projections)
    }


# What of an expert has these endings: its parameter, the tensor's dimensions, and whether they are transposed.
_ENDINGS = {
    "": ("weight", 3, True),
    "_bias": ("bias", 2, False),
    "_blocks": ("weight_packed", 4, False),
    "_scales": ("weight_scale", 3, False),
}


def interleaved_experts(name: str, content: Content) -> dict[str, ExpertPart]:
    """As gpt-oss's checkpoints have them: gate and up take turns among the rows. Floats are transposed: gate_up_proj
    `[num_experts, hidden_size, 2 * intermediate_size]`. MXFP4 is not: gate_up_proj_blocks, of bytes `[num_experts, 2 *
    intermediate_size, hidden_size / 32, 16]`, and gate_up_proj_scales. Biases are gate_up_proj_bias."""
    folder, _, kind = name.rpartition(".")
    shape = shape_of(content)
    for stem, projections in {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}.items():
        parameter, num_dims, is_transposed = _ENDINGS.get(kind.removeprefix(stem), ("", 0, False))
        is_block = num_dims < 4 or shape[-1] == UNIT // 2
        if not (folder.endswith(".experts") and kind.startswith(stem) and len(shape) == num_dims and is_block):
            continue
        step = len(projections)
        num_rows = shape[2 if is_transposed else 1] // step
        return {
            f"{folder}.{expert}.{projection}.{parameter}": ExpertPart(content, expert, i, num_rows, step, is_transposed)
            for expert in range(shape[0])
            for i, projection in enumerate(projections)
        }
    return {}
