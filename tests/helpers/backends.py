"""Back ends of attention, prepared as an engine does."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nanovllm.layers.backends.backend import AttentionBackend, AttentionShape, StepSizes
from nanovllm.layers.backends.triton_backend import TritonBackend
from nanovllm.layers.matmul.table import package_table
from nanovllm.utils.context import Context

H200_TABLE = package_table("NVIDIA H200")


def prepare(
    backend: Any, shape: AttentionShape, windows: Sequence[int | None], max_rows: int, max_group_rows: int = 1
) -> Any:
    """For decode steps of up to max_rows rows, without flash-attn-4. Returns the back end."""
    sizes = StepSizes(0, 1, max_rows, num_layer_params=1, max_group_rows=max_group_rows)
    backend.prepare(shape, windows, sizes, H200_TABLE)
    return backend


def planning_backend(max_rows: int, num_kv_heads: int, windows: Sequence[int | None] = (None,)) -> TritonBackend:
    """One with arrays of its own, which need no GPU."""
    shape = AttentionShape(16, num_kv_heads, 16, 256, torch.bfloat16, torch.device("cpu"))
    return prepare(TritonBackend(), shape, windows, max_rows)


def decode_context(
    backend: AttentionBackend,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    slot_mapping: torch.Tensor | None = None,
    group_rows: Sequence[int] | None = None,
) -> Context:
    """Of a decode step, with what the back end needs of it. group_rows: of a speculative step."""
    num_rows, device = len(context_lens), context_lens.device
    host = {name: torch.zeros(shape).numpy().astype(dtype) for name, (shape, dtype) in backend.layout().items()}
    host |= {"context_lens": context_lens.cpu().numpy(), "block_tables": block_tables.cpu().numpy()}
    if group_rows is not None:
        host["group_rows"] = np.array(group_rows, np.int32)
    backend.host_arrays(host, num_rows)
    arrays = {name: torch.from_numpy(values).to(device) for name, values in host.items()}
    attention = backend.arguments(arrays, num_rows, shares_reads=group_rows is not None)
    return Context(context_lens=context_lens, block_tables=block_tables, slot_mapping=slot_mapping, attention=attention)
