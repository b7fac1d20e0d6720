"""Attention in plain torch that gives a token the same bits in each step: of `deterministic=True` on a CPU."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.backends.torch_backend import KEYS_UNIT, TorchBackend, attend_with_sinks, gather

SCORES_AT_ONCE = 2**21  # numbers of a mask
_ALIGNMENT = 64  # bytes, of the keys of a row: libraries may sum other addresses in another order


class FixedOrderTorchBackend(TorchBackend):
    """Each token of a prefill is computed as the row of a decode step is (`DecodePlan`): by one product with its own
    keys, padded to a number that follows from its position. So a prefill, a chunk of one, a mixed step and a decode
    step sum the same numbers in the same order. Everything is float32, because torch multiplies bfloat16 in a way that
    depends on the batch where a CPU has AMX. One thread computes it: for one query a head the order depends on threads.
    """

    name = "fixed_order"
    is_batch_invariant = True

    @classmethod
    def obstacle(cls, shape):
        return None if shape.device.type == "cpu" else "needs a CPU"

    def prepare(self, shape, windows, sizes, table):
        cache_dtype = shape.cache_dtype or shape.dtype
        super().prepare(shape._replace(dtype=torch.float32, cache_dtype=cache_dtype), windows, sizes, table)

    def decode(self, layer, q, context):
        return super().decode(layer, q.float(), context).to(q.dtype)

    def prefill(self, layer, q, k, v, context):
        out = q.new_empty(q.shape)
        starts_q, starts_k = context.cu_seqlens_q.tolist(), context.cu_seqlens_k.tolist()
        for seq, (start, end) in enumerate(pairwise(starts_q)):
            if start == end:
                continue
            num_keys = starts_k[seq + 1] - starts_k[seq]
            first = 0 if layer.window is None else max(0, num_keys - (end - start) + 1 - layer.window)
            groups = list(query_groups(num_keys - (end - start), num_keys, layer.window))
            end_of_keys = max(group.first_key + group.num_queries - 1 + group.width for group in groups) - first
            shape = max(end_of_keys, num_keys - first), *k.shape[1:]
            keys, values = torch.zeros(shape), torch.zeros(shape)  # Padding is masked, but must be finite.
            if context.block_tables is None:
                new = slice(starts_k[seq] + first, starts_k[seq + 1])
                cached = k[new], v[new]
            else:
                cached = self._cached(layer, context.block_tables[seq], first, num_keys)
            for x, some in zip((keys, values), cached, strict=True):
                x[: num_keys - first] = some
            for group in groups:
                some = slice(start + group.first_query, start + group.first_query + group.num_queries)
                out[some] = _attend(q[some], keys, values, group._replace(first_key=group.first_key - first), layer)
        return out

    @staticmethod
    def _cached(layer, block_table: Tensor, first: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence from key `first` on."""
        block_size = layer.k_cache.shape[1]
        positions = torch.arange(first, num_keys)
        slots = block_table.long()[positions // block_size] * block_size + positions % block_size
        scales = (None, None) if layer.kv_scales is None else layer.kv_scales
        caches = zip((layer.k_cache, layer.v_cache), scales, strict=True)
        keys, values = (gather(cache, slots, scale, torch.float32) for cache, scale in caches)
        return keys, values


class QueryGroup(NamedTuple):
    """Queries of a sequence that follow each other and are padded to equally many keys."""

    first_query: int  # among the sequence's queries
    num_queries: int
    num_keys: int  # of the first query, without padding
    width: int  # keys of each, padding included
    first_key: int  # of the first query's keys
    slides: bool  # whether each query's keys begin one key later, and are equally many; else each has one more


def padded(num_keys: int) -> int:
    """The keys to which `DecodePlan` pads a row."""
    unit = max(KEYS_UNIT, 1 << max(0, num_keys.bit_length() - 3))
    return -(-num_keys // unit) * unit


def query_groups(num_cached: int, num_keys: int, window: int | None) -> Iterator[QueryGroup]:
    """Groups of the queries at positions num_cached to num_keys - 1, which see the keys up to their own, at most a
    window of them. A group's mask is not too large."""
    query = num_cached
    while query < num_keys:
        seen = query + 1
        if window is not None and seen > window:
            group = QueryGroup(query - num_cached, num_keys - query, window, padded(window), seen - window, True)
        else:
            width = padded(seen)
            last = min(num_keys, width if window is None else min(width, window))
            group = QueryGroup(query - num_cached, last - query, seen, width, 0, False)
        group = group._replace(num_queries=min(group.num_queries, max(1, SCORES_AT_ONCE // group.width)))
        yield group
        query += group.num_queries


def _attend(q: Tensor, keys: Tensor, values: Tensor, group: QueryGroup, layer) -> Tensor:
    """Attention of a group's queries `[num_queries, num_heads, head_dim]` to keys `[any, num_kv_heads, head_dim]`."""
    _, num_kv_heads, head_dim = keys.shape
    step = num_kv_heads * head_dim if group.slides else 0
    size, strides = (group.num_queries, group.width, num_kv_heads, head_dim), (step, *keys.stride())
    begin = group.first_key * num_kv_heads * head_dim
    keys, values = (x.as_strided(size, strides, begin) for x in (keys, values))
    if group.slides and num_kv_heads * head_dim * keys.itemsize % _ALIGNMENT:
        keys, values = keys.contiguous(), values.contiguous()
    ends = group.num_keys + (0 if group.slides else 1) * np.arange(group.num_queries)[:, None]
    mask = torch.from_numpy(np.where(np.arange(group.width) < ends, np.float32(0), np.float32(-np.inf))[:, None, None])
    return attend_rows(q, keys, values, mask, layer)


def attend_rows(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, layer) -> Tensor:
    """Attention of queries `[num_queries, num_heads, head_dim]`, each to its own keys, `[num_queries, num_keys,
    num_kv_heads, head_dim]` in float32, by a product of its own. mask: float32 `[num_queries, 1, 1, num_keys]`, added
    to the scores."""
    num_queries, _, num_kv_heads, head_dim = keys.shape
    queries = q.float().reshape(num_queries, num_kv_heads, -1, head_dim)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if layer.sinks is None:
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=layer.scale)
    else:
        of_heads = layer.sinks.view(num_kv_heads, -1, 1)
        attended = attend_with_sinks(queries, keys, values, mask, of_heads, layer.scale)
    return attended.reshape(q.shape).to(q.dtype)
