"""How many rows a step has: two settings of the table, by the shape and format of a layer's gate and up projection.

- "mixed_step_rows": {shape: rows of a mixed step}; 0 where mixed steps gain nothing.
- "padding": {shape: {most sequences: [rows, candidate]}}. A decode step of up to so many sequences is padded to these
  rows, if this candidate computes its products; [] pads nothing.
"""

import math
from collections.abc import Callable
from typing import Any

from nanovllm.layers.matmul.table import Row, Table, speed_name


def shape_name(weight: Any) -> str:
    """weight: a tensor `[N, K]` or `[num_experts, N, K]`, or a weight in fp8: "12288x2048 bfloat16"."""
    return f"{'x'.join(map(str, weight.shape))} {speed_name(weight.dtype)}"


def mixed_step_rows(table: Table, weight: Any) -> int:
    """That of this shape, otherwise of the nearest one in the same format; 0 if there is none."""
    rows, name = table.settings.get("mixed_step_rows", {}), shape_name(weight)
    sizes, format = _parsed(name)
    others = {other: _parsed(other) for other in rows}
    distances = {
        other: sum(abs(math.log2(size / other_size)) for size, other_size in zip(sizes, other_sizes, strict=True))
        for other, (other_sizes, other_format) in others.items()
        if other_format == format
    }
    return rows.get(name, rows.get(min(distances, key=distances.__getitem__, default=name), 0))


def padded_rows(table: Table, weight: Any, num_seqs: int, serves: Callable[[str, Any], bool]) -> int:
    """The rows of a decode step of num_seqs, padding included. A shape without a setting pads nothing. serves: of a
    candidate's name and this weight, whether it can compute the products."""
    buckets = table.settings.get("padding", {}).get(shape_name(weight))
    if not buckets:
        return num_seqs
    found = Row({int(bound): [padding] for bound, padding in buckets.items()})[num_seqs][0]
    return max(found[0], num_seqs) if found and serves(found[1], weight) else num_seqs


def _parsed(name: str) -> tuple[tuple[int, int, int], str]:
    """(num_experts, N, K), the first 1 without experts; and the format."""
    shape, format = name.split(" ")
    sizes = [int(size) for size in shape.split("x")]
    num_experts, N, K = [1, *sizes][-3:]
    return (num_experts, N, K), format
