"""Attention by our own Triton kernels, over any block size that is a power of two from 16, and over fp8 caches."""

import numpy as np
import torch

from nanovllm.kernels.attention.decode_plan import (
    GROUP_PIECE_FIELDS,
    PIECE_FIELDS,
    DecodeWorkspace,
    RowGroups,
    is_of_groups,
    most_group_rows,
    plan_decode,
    plan_groups,
)
from nanovllm.kernels.attention.paged_decode import has_tma, paged_decode
from nanovllm.kernels.attention.paged_prefill import paged_prefill
from nanovllm.layers.backends.decode_constants import DecodeConstants
from nanovllm.layers.backends.gpu_backend import GpuBackend
from nanovllm.layers.matmul.table import load_table

_MAX_HEAD_DIM = 512


class TritonBackend(GpuBackend):
    """Our own kernels: float32, bfloat16 and float16. Its decode reads a plan of the step (see `decode_plan`), one for
    each window that a layer has. Speculative steps have plans of groups."""

    name = "triton"

    @classmethod
    def obstacle(cls, shape):
        obstacle = super().obstacle(shape)
        if obstacle is None and shape.head_dim > _MAX_HEAD_DIM:
            return f"head_dim {shape.head_dim} is more than {_MAX_HEAD_DIM}"
        return obstacle

    def prepare(self, shape, windows, sizes, table):
        super().prepare(shape, windows, sizes, table)
        self._windows, self._max_rows, self._num_kv_heads = list(windows), sizes.max_rows, shape.num_kv_heads
        self.constants = DecodeConstants(table, shape.head_dim, shape.dtype, shape.cache_dtype or shape.dtype)
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        num_pieces = self.constants.num_pieces(sizes.max_rows, shape.num_kv_heads)
        self._group_rows = most_group_rows(sizes.max_group_rows, *heads, shape.dtype.itemsize)
        self.shares_reads = self._group_rows > 1
        self.workspace = DecodeWorkspace(sizes.max_rows, *heads, shape.device, num_pieces, self._group_rows)

    def layout(self):
        num_windows, num_pieces = len(self._windows), self.constants.num_pieces(self._max_rows, self._num_kv_heads)
        layout = {"decode_plans": ((num_windows, num_pieces, PIECE_FIELDS), np.int32)}
        if self.shares_reads:
            layout["group_plans"] = ((num_windows, num_pieces, GROUP_PIECE_FIELDS), np.int32)
        return layout

    def host_arrays(self, arrays, num_rows):
        name, num_pieces = self._plans("group_rows" in arrays), self.constants.num_pieces(num_rows, self._num_kv_heads)
        plans, context_lens = arrays[name][:, :num_pieces], arrays["context_lens"][:num_rows]
        if name == "group_plans":
            groups = RowGroups.of(arrays["group_rows"][:num_rows], self._group_rows)
            num_groups = len(groups.first_row)
            # Spare programs as for num_groups rows: a group reads what a row reads, and its splits leave more results.
            spare = self.constants.num_pieces(num_groups, self._num_kv_heads) - num_groups
            for window, plan in zip(self._windows, plans, strict=True):
                plan_groups(context_lens, groups, plan, min(spare, num_pieces - num_rows), window)
        else:
            for window, plan in zip(self._windows, plans, strict=True):
                plan_decode(context_lens, plan, window)
        return {name: plans}

    def arguments(self, arrays, num_rows, shares_reads=False):
        """{a layer's window: its plan, int32 [num_pieces, PIECE_FIELDS], or GROUP_PIECE_FIELDS in a speculative
        step}."""
        num_pieces = self.constants.num_pieces(num_rows, self._num_kv_heads)
        return dict(zip(self._windows, arrays[self._plans(shares_reads)][:, :num_pieces], strict=True))

    def _plans(self, shares_reads: bool) -> str:
        """The name of a step's plans in its arrays."""
        return "group_plans" if shares_reads and self.shares_reads else "decode_plans"

    def own_prefill(self, layer, q, k, v, context):
        lengths = context.cu_seqlens_q, context.cu_seqlens_k, context.max_seqlen_q
        options = context.block_tables, layer.scale, layer.window, layer.kv_scales, layer.sinks
        return paged_prefill(q, k, v, layer.k_cache, layer.v_cache, *lengths, *options)

    def decode(self, layer, q, context):
        if context.attention is None:
            return self._decode_by_hand(layer, q, context)
        caches, tables, plan = (layer.k_cache, layer.v_cache), context.block_tables, context.attention[layer.window]
        _, block_size, num_kv_heads, head_dim = layer.k_cache.shape
        tma = has_tma(head_dim, block_size, q.element_size(), q.device)
        options = {"windowed": layer.window is not None, "kv_scales": layer.kv_scales, "sinks": layer.sinks}
        if is_of_groups(plan):
            options["group_rows"] = self._group_rows
            heads = q.shape[1], num_kv_heads
            config = self.constants.group_config(len(q), *heads, tma, self._group_rows)
        else:
            config = self.constants.config(len(q), num_kv_heads, tma)
        return paged_decode(q, *caches, tables, layer.scale, plan, self.workspace, config, pdl=True, **options)

    def _decode_by_hand(self, layer, q, context):
        """With a plan and a workspace for this call alone. The plan needs the lengths on the host."""
        (num_rows, num_heads, head_dim), cache = q.shape, layer.k_cache
        block_size, num_kv_heads = cache.shape[1:3]
        constants = DecodeConstants(load_table(q.device), head_dim, q.dtype, cache.dtype)
        plan = np.zeros((constants.num_pieces(num_rows, num_kv_heads), PIECE_FIELDS), np.int32)
        plan_decode(context.context_lens.cpu().numpy(), plan, layer.window)
        workspace = DecodeWorkspace(num_rows, num_heads, num_kv_heads, head_dim, q.device, len(plan))
        tma = has_tma(head_dim, block_size, q.element_size(), q.device)
        config = constants.config(num_rows, num_kv_heads, tma)
        step = context.block_tables, layer.scale, torch.from_numpy(plan).to(q.device), workspace, config
        options = {"windowed": layer.window is not None, "kv_scales": layer.kv_scales, "sinks": layer.sinks}
        return paged_decode(q, cache, layer.v_cache, *step, **options)
