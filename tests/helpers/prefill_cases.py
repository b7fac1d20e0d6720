"""Prefills for the tests of attention's kernels, and what these are held to."""

import math
from dataclasses import dataclass

import torch
from decode_cases import TOLERANCE
from kernel_harness import poisoned_memory

from nanovllm.kernels.attention.paged_prefill import paged_prefill
from nanovllm.layers.backends.torch_backend import prefill_attention_torch

LARGEST_TILE = 128  # of keys


@dataclass
class Case:
    """A batch: what the functions take, and each sequence's own queries, keys and values for the reference."""

    arguments: dict
    sequences: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def cu_seqlens(lens, device):
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def make_case(lens, num_heads, num_kv_heads, head_dim, block_size, paged, dtype, device, seed, window=None) -> Case:
    """Sequences of (cached, new) tokens. Every value that no query attends to is NaN: free slots, blocks, q's
    neighbours, and what lies before all windows by a tile or more.

    With pages, sequences of a cached block or more share their first block.
    """
    generator = torch.Generator().manual_seed(seed)
    lens_q, lens_k = [new for _, new in lens], [cached + new for cached, new in lens]

    def poisoned(tokens, heads):
        fused = torch.full((tokens, heads + 3, head_dim), float("nan"), dtype=dtype, device=device)
        fused[:, 1 : heads + 1] = torch.randn(tokens, heads, head_dim, generator=generator).to(device, dtype)
        return fused[:, 1 : heads + 1]

    q = poisoned(sum(lens_q), num_heads)
    k, v = (poisoned(sum(lens_k), num_kv_heads) for _ in range(2))
    sharers = [i for i, (cached, _) in enumerate(lens) if cached >= block_size] if paged else []
    k_seqs, v_seqs = list(k.split(lens_k)), list(v.split(lens_k))
    if window is not None:
        for (cached, _), k_seq, v_seq in zip(lens, k_seqs, v_seqs, strict=True):
            unseen = max(0, cached + 1 - window) // LARGEST_TILE * LARGEST_TILE
            k_seq[:unseen] = v_seq[:unseen] = float("nan")
    for i in sharers[1:]:
        k_seqs[i][:block_size], v_seqs[i][:block_size] = (
            k_seqs[sharers[0]][:block_size],
            v_seqs[sharers[0]][:block_size],
        )

    needed = [-(-len_k // block_size) for len_k in lens_k]
    num_blocks = sum(needed) + 2
    free = torch.randperm(num_blocks, generator=generator).tolist()
    k_cache, v_cache = torch.full(
        (2, num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype, device=device
    ).unbind(0)
    tables = torch.full((len(lens), max(needed) + 1), -1, dtype=torch.int32)
    for i, len_k in enumerate(lens_k):
        tables[i, : needed[i]] = torch.tensor([free.pop() for _ in range(needed[i])], dtype=torch.int32)
        if i in sharers:
            tables[i, 0] = tables[sharers[0], 0]
        positions = torch.arange(len_k)
        slots = tables[i, positions // block_size].long() * block_size + positions % block_size
        k_cache.flatten(0, 1)[slots] = k_seqs[i]
        v_cache.flatten(0, 1)[slots] = v_seqs[i]

    arguments = {
        "q": q,
        "k": None if paged else k,
        "v": None if paged else v,
        "k_cache": k_cache if paged else None,
        "v_cache": v_cache if paged else None,
        "cu_seqlens_q": cu_seqlens(lens_q, device),
        "cu_seqlens_k": cu_seqlens(lens_k, device),
        "max_seqlen_q": max(lens_q),
        "block_tables": tables.to(device) if paged else None,
        "scale": head_dim**-0.5,
        "window": window,
    }
    return Case(arguments, list(zip(q.split(lens_q), k_seqs, v_seqs, strict=True)))


def dense_attention(q, k, v, scale, window, sinks=None):
    """The definition, in float64: [len_q, heads, dim] over [len_k, kv_heads, dim], bottom-right causal."""
    unseen = 0 if window is None else max(0, len(k) - len(q) + 1 - window)
    k, v = k[unseen:], v[unseen:]
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().cpu() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    len_q, len_k = scores.shape[1:]
    distance = torch.arange(len_q)[:, None] + len_k - len_q - torch.arange(len_k)
    visible = (distance >= 0) & (distance < (window or math.inf))
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().cpu()[:, None, None].expand(-1, len_q, 1)), dim=-1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., :len_k], v)


def check(case: Case):
    dtype = case.arguments["q"].dtype
    options = case.arguments["scale"], case.arguments["window"], case.arguments.get("sinks")
    expected = torch.cat([dense_attention(*sequence, *options) for sequence in case.sequences])
    functions = [prefill_attention_torch, paged_prefill]
    if dtype == torch.bfloat16 and not torch.cuda.is_available():
        functions.remove(paged_prefill)  # Triton's interpreter multiplies bfloat16 as if it were integers
    for function in functions:
        with poisoned_memory():
            out = function(**case.arguments)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double().cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
