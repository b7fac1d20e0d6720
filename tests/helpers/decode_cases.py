"""Decode steps for the tests of attention's kernels, and what these are held to."""

from functools import partial

import numpy as np
import pytest
import torch
from kernel_harness import DTYPES, poisoned_memory, rounding

from nanovllm.kernels.attention import paged_decode as kernel
from nanovllm.kernels.attention.decode_plan import (
    GROUP_PIECE_FIELDS,
    PIECE_FIELDS,
    SPLIT_UNIT,
    DecodeWorkspace,
    RowGroups,
    plan_decode,
    plan_groups,
)
from nanovllm.kernels.attention.paged_decode import TensorDescriptor, has_tma
from nanovllm.layers.backends.decode_constants import DecodeConstants
from nanovllm.layers.backends.torch_backend import decode_attention_torch
from nanovllm.layers.matmul.table import package_table


def h200(head_dim=128, dtype=torch.bfloat16, cache_dtype=None):
    """Its constants, by default for the model's dtype in the cache."""
    return DecodeConstants(package_table("NVIDIA H200"), head_dim, dtype, cache_dtype or dtype)


H200 = h200()

# Largest error against float64, relative to values of order one: scores, weights, partial results and the output are
# rounded, and sums are over a head's dimensions and hundreds of keys.
TOLERANCE = {dtype: rounding(dtype, 4, 1024)["rtol"] for dtype in DTYPES}

# Whether the kernel for Hopper runs: in the interpreter, wherever Triton has descriptors.
HAS_TMA = TensorDescriptor is not None
if HAS_TMA and torch.cuda.is_available():
    HAS_TMA = has_tma(128, 256, 2, torch.device("cuda", torch.cuda.current_device()))
needs_tma = pytest.mark.skipif(not HAS_TMA, reason="needs Hopper's tensor memory accelerator, or the interpreter")


def make_plan(context_lens, num_kv_heads, num_pieces=None, window=None):
    """The plan of a launch outside the engine."""
    items = np.empty((num_pieces or H200.num_pieces(len(context_lens), num_kv_heads), PIECE_FIELDS), np.int32)
    plan_decode(context_lens.cpu().numpy(), items, window)
    return torch.from_numpy(items).to(context_lens.device)


def make_group_plan(context_lens, group_rows, num_kv_heads, num_pieces=None, window=None, most_rows=8):
    """The same of a speculative step. group_rows: as in `RowGroups.of`, a list."""
    num_rows = len(context_lens)
    items = np.empty((num_pieces or H200.num_pieces(num_rows, num_kv_heads), GROUP_PIECE_FIELDS), np.int32)
    groups = RowGroups.of(np.array(group_rows), most_rows)
    plan_groups(context_lens.cpu().numpy(), groups, items, len(items) - num_rows, window)
    return torch.from_numpy(items).to(context_lens.device)


def make_group_case(groups, padding, num_heads, num_kv_heads, head_dim, block_size, dtype, device, seed, window=None):
    """(arguments of a speculative step, its group_rows). groups: the context length of the first row of each, and the
    number of rows, which have the same block table. padding: rows behind them."""
    lens = [context_len + row for context_len, num_rows in groups for row in range(num_rows)] + [0] * padding
    most_rows = max((num_rows for _, num_rows in groups), default=1)
    seen = window and window + most_rows - 1  # by the first row of a group
    case = make_case(lens, num_heads, num_kv_heads, head_dim, block_size, dtype, device, seed, window=seen)
    group_rows, tables = [0] * len(lens), case["block_tables"]
    first = 0
    for _, num_rows in groups:
        group_rows[first] = num_rows
        tables[first : first + num_rows] = tables[first + num_rows - 1].clone()
        first += num_rows
    return case | {"window": window}, group_rows


def make_case(lens, num_heads, num_kv_heads, head_dim, block_size, dtype, device, seed, spare_blocks=2, window=None):
    """Arguments of a decode step. Every slot that no sequence owns is NaN, and so is what lies around the queries and
    what lies before a window by a tile or more."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.full((len(lens), num_heads + 3, head_dim), float("nan"), dtype=dtype, device=device)
    fused[:, 1 : num_heads + 1] = torch.randn(len(lens), num_heads, head_dim, generator=generator).to(device, dtype)
    needed = [-(-context_len // block_size) for context_len in lens]
    num_blocks = sum(needed) + spare_blocks
    free = torch.randperm(num_blocks, generator=generator).tolist()
    k_cache, v_cache = torch.full(
        (2, num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype, device=device
    ).unbind(0)
    tables = torch.full((len(lens), max(needed) + 1), -1, dtype=torch.int32)
    for i, context_len in enumerate(lens):
        tables[i, : needed[i]] = torch.tensor([free.pop() for _ in range(needed[i])], dtype=torch.int32)
        positions = torch.arange(context_len)
        slots = tables[i, positions // block_size].long() * block_size + positions % block_size
        for cache in (k_cache, v_cache):
            rows = torch.randn(context_len, num_kv_heads, head_dim, generator=generator)
            if window is not None:
                rows[: max(0, context_len - window) // SPLIT_UNIT * SPLIT_UNIT] = float("nan")
            cache.flatten(0, 1)[slots.to(device)] = rows.to(device, dtype)
    return {
        "q": fused[:, 1 : num_heads + 1],
        "k_cache": k_cache,
        "v_cache": v_cache,
        "context_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "block_tables": tables.to(device),
        "scale": head_dim**-0.5,
        "window": window,
    }


def paged_decode(
    q,
    k_cache,
    v_cache,
    context_lens,
    block_tables,
    scale,
    window=None,
    kv_scales=None,
    sinks=None,
    plan=None,
    workspace=None,
    config=None,
    group_rows=1,
):
    """The kernel, with what the engine gives it for this batch by default."""
    (batch_size, num_heads, head_dim), (_, block_size, num_kv_heads, _) = q.shape, k_cache.shape
    if config is None:
        tma = kernel.has_tma(head_dim, block_size, q.element_size(), q.device)
        config = h200(head_dim, q.dtype, k_cache.dtype).config(batch_size, num_kv_heads, tma)
    if batch_size == 0:
        return kernel.paged_decode(q, k_cache, v_cache, block_tables, scale, plan, workspace, config)
    plan = make_plan(context_lens, num_kv_heads, window=window) if plan is None else plan
    sizes = batch_size, num_heads, num_kv_heads, head_dim, q.device, len(plan), group_rows
    workspace = workspace or DecodeWorkspace(*sizes)
    options = {"windowed": window is not None, "kv_scales": kv_scales, "sinks": sinks, "group_rows": group_rows}
    return kernel.paged_decode(q, k_cache, v_cache, block_tables, scale, plan, workspace, config, **options)


def dense_decode(q, k_cache, v_cache, context_lens, block_tables, scale, window=None, sinks=None):
    """The definition, in float64, key by key."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    block_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for i, context_len in enumerate(context_lens.tolist()):
        if context_len == 0:
            continue
        places = [divmod(position, block_size) for position in range(context_len)][-(window or context_len) :]
        k, v = (
            torch.stack([cache[block_tables[i, block], offset] for block, offset in places]).double().cpu()
            for cache in (k_cache, v_cache)
        )
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("hd,jhd->hj", q[i].double().cpu(), k) * scale
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().cpu()[:, None]), dim=1)
        weights = scores.softmax(-1)[:, : len(k)]
        out[i] = torch.einsum("hj,jhd->hd", weights, v)
    return out


def check(case, **options):
    """Hold both implementations to the definition; `options` are the kernel's own. Returns the kernel's output."""
    dtype, out = case["q"].dtype, None
    expected = dense_decode(**case)
    functions = [decode_attention_torch, partial(paged_decode, **options)]
    if dtype == torch.bfloat16 and not torch.cuda.is_available():
        functions.pop()  # Triton's interpreter multiplies bfloat16 as if it were integers
    for function in functions:
        with poisoned_memory():
            out = function(**case)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double().cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert (out[case["context_lens"] == 0] == 0).all()
    return out
