"""Attention over the paged KV cache in plain torch: the CPU's back end, and the twin that the kernels are held to."""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.attention.kv_quantization import dequantize_kv
from nanovllm.layers.backends.backend import AttentionBackend, AttentionShape

# Rows of a decode step are padded to a multiple of this many keys, and computed together if they are equally long then.
KEYS_UNIT = 32
# Keys, and as many values, that are copied from the cache at once: few enough to stay in a CPU's L2 cache until they
# are used, and not to be given back to the system after each use.
_BYTES_AT_ONCE = 2**20


class TorchBackend(AttentionBackend):
    """Plain torch, on any device: the back end for CPUs, and the twin of the others."""

    name = "torch"
    supports_cuda_graphs = False  # It reads lengths on the host.

    @classmethod
    def obstacle(cls, shape):
        return None

    def prepare(self, shape, windows, sizes, table):
        self._shape, self._windows = shape, windows

    def arguments(self, arrays, num_rows, shares_reads=False):
        """{a layer's window: its `DecodePlan`}."""
        lens, tables = (arrays[name][:num_rows].cpu().numpy() for name in ("context_lens", "block_tables"))
        return {window: DecodePlan(lens, tables, self._shape, window) for window in self._windows}

    def prefill(self, layer, q, k, v, context):
        lengths = context.cu_seqlens_q, context.cu_seqlens_k, context.max_seqlen_q
        options = context.block_tables, layer.scale, layer.window, layer.kv_scales, layer.sinks
        return prefill_attention_torch(q, k, v, layer.k_cache, layer.v_cache, *lengths, *options)

    def decode(self, layer, q, context):
        if context.attention is None:
            step = context.context_lens, context.block_tables
            options = layer.scale, layer.window, layer.kv_scales, layer.sinks
            return decode_attention_torch(q, layer.k_cache, layer.v_cache, *step, *options)
        plan = context.attention[layer.window]
        return plan.attend(q, layer.k_cache, layer.v_cache, layer.scale, layer.kv_scales, layer.sinks)


def prefill_attention_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    block_tables: torch.Tensor | None,
    scale: float,
    window: int | None = None,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a flat batch of sequences, one at a time; arguments and result as in `paged_prefill`. Only
    the kernel uses `max_seqlen_q`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for seq in range(len(starts_q) - 1):
        chunk = slice(starts_q[seq], starts_q[seq + 1])
        len_q, len_k = chunk.stop - chunk.start, starts_k[seq + 1] - starts_k[seq]
        if len_q == 0:
            continue
        num_cached = len_k - len_q
        first_key = 0 if window is None else max(0, num_cached + 1 - window)
        if block_tables is None:
            keys, values = (x[starts_k[seq] + first_key : starts_k[seq + 1]] for x in (k, v))
        else:
            positions = torch.arange(first_key, len_k, device=q.device)
            slots = block_tables[seq].long()[positions // k_cache.shape[1]] * k_cache.shape[1]
            slots += positions % k_cache.shape[1]
            keys = gather(k_cache, slots, None if kv_scales is None else kv_scales[0], q.dtype)
            values = gather(v_cache, slots, None if kv_scales is None else kv_scales[1], q.dtype)
        mask = None
        if num_cached > 0 or sinks is not None or (window is not None and window < len_k):
            # is_causal aligns the triangle at the top left; queries after a prefix need it at the bottom right.
            mask = torch.ones(len_q, len(keys), dtype=torch.bool, device=q.device).tril(num_cached - first_key)
            if window is not None:
                mask = mask.triu(num_cached - first_key + 1 - window)
        queries, keys, values = [x.transpose(0, 1).unsqueeze(0) for x in (q[chunk], keys, values)]
        if sinks is not None and mask is not None:
            of_heads = sinks.view(-1, 1, 1)
            attended = attend_with_sinks(queries, keys, values, mask, of_heads, scale, enable_gqa=True)
        else:
            options: Any = {"attn_mask": mask, "is_causal": mask is None, "scale": scale, "enable_gqa": True}
            attended = F.scaled_dot_product_attention(queries, keys, values, **options)
        out[chunk] = attended.squeeze(0).transpose(0, 1)
    return out


def attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor, scale: float, **options: bool
) -> Tensor:
    """`F.scaled_dot_product_attention` with a sink: a further key of value 0, which every query sees. All keys get a
    further dimension, of 0, and this one has 1 there and 0 elsewhere. So the query's number there decides its score.

    mask: of bool, or what is added to the scores. sinks: `[..., 1]` for q `[..., head_dim]`, broadcast.
    """
    of_queries = (sinks.float() / scale).to(q.dtype).expand(*q.shape[:-1], 1)
    k, v = F.pad(k, (0, 1, 0, 1)), F.pad(v, (0, 1, 0, 1))
    k[..., -1, -1] = 1
    seen = mask.new_full((*mask.shape[:-1], 1), True if mask.dtype == torch.bool else 0)
    mask = torch.cat((mask, seen), dim=-1)
    q = torch.cat((q, of_queries), dim=-1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, **options)[..., :-1]


def decode_attention_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None = None,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token a row to its context; arguments and result as in `paged_decode`. context_lens: int32
    `[batch_size]`, keys of each row, its own included; 0 gives zeros. window, kv_scales: as in `Attention`.

    The rest of the batch does not change a bit of a row's result, see `DecodePlan`.
    """
    (_, num_heads, head_dim), (_, block_size, num_kv_heads, _) = q.shape, k_cache.shape
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, block_size, q.dtype, q.device, k_cache.dtype)
    plan = DecodePlan(context_lens.cpu().numpy(), block_tables.cpu().numpy(), shape, window)
    return plan.attend(q, k_cache, v_cache, scale, kv_scales, sinks)


class DecodeGroup(NamedTuple):
    """Rows of a decode step that are computed together. Each has num_keys keys, padding included."""

    rows: Tensor  # int64 [num_rows]
    slots: Tensor  # int64 [num_rows * num_keys], of the keys; padding repeats the last one
    mask: Tensor  # [num_rows, 1, 1, num_keys], added to the scores: 0, or -inf for padding


class DecodePlan:
    """How the attention of a decode step is computed in a few calls, for all layers with the same window.

    Rows with about equally many keys are computed together. The number of keys that a row is padded to depends on its
    own length alone. So the order in which its scores and values are summed does not depend on the batch.
    """

    def __init__(self, context_lens: np.ndarray, tables: np.ndarray, shape: AttentionShape, window: int | None):
        """context_lens, tables: context lengths and block tables of `decode_attention_torch`, on the host."""
        block_size, device, lens = shape.block_size, shape.device, context_lens.astype(np.int64)
        cache_dtype = shape.cache_dtype or shape.dtype
        num_keys = lens if window is None else np.minimum(lens, window)
        # To a multiple of KEYS_UNIT, or of a quarter of the next lower power of two: for long rows, few numbers.
        unit = np.maximum(KEYS_UNIT, 1 << np.maximum(0, np.frexp(num_keys)[1].astype(np.int64) - 3))
        padded = -(-num_keys // unit) * unit
        bytes_per_key = shape.num_kv_heads * shape.head_dim * cache_dtype.itemsize
        self.groups: list[DecodeGroup] = []
        for width in np.unique(padded[num_keys > 0]).tolist():
            rows = np.flatnonzero(padded == width)
            offsets = np.arange(width)
            rows_at_once = max(1, _BYTES_AT_ONCE // (width * bytes_per_key))
            for start in range(0, len(rows), rows_at_once):
                part = rows[start : start + rows_at_once]
                ends = num_keys[part, None]
                positions = (lens[part, None] - ends) + np.minimum(offsets, ends - 1)
                slots = tables[part[:, None], positions // block_size] * np.int64(block_size) + positions % block_size
                mask = np.where(offsets < ends, np.float32(0), np.float32(-np.inf))[:, None, None]
                arrays = (torch.from_numpy(array).to(device) for array in (part, slots.ravel(), mask))
                group = DecodeGroup(*arrays)
                self.groups.append(group._replace(mask=group.mask.to(shape.dtype)))
        self._covers_all = bool((num_keys > 0).all())
        most = max((len(group.slots) for group in self.groups), default=0)
        sizes = most, shape.num_kv_heads, shape.head_dim
        self._keys, self._values = torch.empty(2, *sizes, dtype=cache_dtype, device=device)

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        kv_scales: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`decode_attention_torch` of one layer."""
        out = (torch.empty if self._covers_all else torch.zeros)(q.shape, dtype=q.dtype, device=q.device)
        _, _, num_kv_heads, head_dim = k_cache.shape
        for rows, slots, mask in self.groups:
            num_rows = len(rows)
            keys = gather(k_cache, slots, None if kv_scales is None else kv_scales[0], q.dtype, self._keys)
            values = gather(v_cache, slots, None if kv_scales is None else kv_scales[1], q.dtype, self._values)
            keys, values = [x.view(num_rows, -1, num_kv_heads, head_dim).transpose(1, 2) for x in (keys, values)]
            # The heads that share a KV head become its queries, which saves a copy of the keys for each of them.
            queries = q.index_select(0, rows).view(num_rows, num_kv_heads, -1, head_dim)
            if sinks is None:
                attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
            else:
                of_heads = sinks.view(num_kv_heads, -1, 1)
                attended = attend_with_sinks(queries, keys, values, mask, of_heads, scale)
            out.index_copy_(0, rows, attended.reshape(num_rows, -1, head_dim))
        return out


def gather(
    cache: Tensor, slots: Tensor, scales: Tensor | None, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Keys or values in these slots, `[num_slots, num_kv_heads, head_dim]`: in `out`, which may be longer, or new."""
    flat = cache.view(-1, *cache.shape[2:])
    if scales is not None:  # torch selects from no float8 tensors.
        flat = flat.view(torch.uint8)
        out = None if out is None else out.view(torch.uint8)
    found = torch.index_select(flat, 0, slots, out=None if out is None else out[: len(slots)])
    return found.to(dtype) if scales is None else dequantize_kv(found.view(cache.dtype), scales, dtype)
