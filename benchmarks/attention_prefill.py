"""How fast is prefill attention by flash-attn 2, flash-attn-4 and our kernel, and which of its tiles are best?

    python benchmarks/attention_prefill.py --json out.json

Qwen3-0.6B's heads: 16 query heads, 8 KV heads, head_dim 128, bfloat16. Then those of Gemma 4 26B-A4B, with a window and
without, and of Qwen3.5-9B, which have no tiles to choose. Prints TFLOP/s. A query counts 4 * head_dim FLOPs for each
key that it attends to.
"""

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from required_gpus import require_gpus

from nanovllm.kernels.attention import paged_prefill as kernel
from nanovllm.kernels.attention.paged_prefill import PrefillTiles, paged_prefill
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.backends.flash_attn4 import FlashAttn4, load_flash_attn4
from nanovllm.utils.context import Context

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 256
COPIES = 3  # inputs to rotate over, so that none is in the L2 cache from the call before
SWEEP = [
    PrefillTiles(rows, keys, warps, stages)
    for rows, keys, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
    if warps == 4 or (rows == 128 and keys < 128)
]


class Shape(NamedTuple):
    num_seqs: int
    new: int
    cached: int = 0
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    window: int | None = None

    @property
    def name(self) -> str:
        lengths = f"{self.num_seqs}x{self.new}" + (f" over {self.cached}" if self.cached else "")
        heads = f", {self.heads}/{self.kv_heads}x{self.head_dim}" if self.head_dim != HEAD_DIM else ""
        return lengths + heads + (f", window {self.window}" if self.window else "")

    @property
    def flops(self) -> int:
        keys = sum(min(self.window or i + 1, i + 1) for i in range(self.cached, self.cached + self.new))
        return self.num_seqs * 4 * self.heads * self.head_dim * keys


SHAPES = [Shape(8, 2000), Shape(30, 550), Shape(4, 4000), Shape(128, 100), Shape(8, 512, cached=2048)]
SHAPES += [Shape(200, 80), Shape(64, 250), Shape(40, 400), Shape(200, 64, cached=2048), Shape(200, 80, cached=256)]
WIDE = [
    Shape(*lengths, **heads)
    for heads in (
        {"heads": 16, "kv_heads": 8, "head_dim": 256, "window": 1024},
        {"heads": 16, "kv_heads": 2, "head_dim": 512},
        {"heads": 16, "kv_heads": 4, "head_dim": 256},
    )
    for lengths in ((8, 2000), (64, 250), (4, 2000, 2000))
]
TINY = [Shape(2, 100), Shape(2, 100, cached=256)]  # for compiling the kernel without and with pages


class Batch(NamedTuple):
    """One prefill's inputs, laid out as the engine lays them out."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor | None
    v_cache: torch.Tensor | None
    context: Context
    window: int | None = None

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5


def make_batch(shape: Shape) -> Batch:
    """Random inputs; q, k and v are views of one fused [tokens, heads + 2 kv_heads, head_dim] tensor."""
    num_seqs, new, cached, heads, kv_heads, head_dim, window = shape
    device = torch.device("cuda")
    qkv = torch.randn(num_seqs * new, heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16, device=device)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    cu_seqlens_q, cu_seqlens_k = (
        torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * length for length in (new, cached + new)
    )
    k_cache = v_cache = tables = None
    if cached:
        blocks = -(-(cached + new) // BLOCK_SIZE)
        pages = torch.randn(2, num_seqs * blocks, BLOCK_SIZE, kv_heads, head_dim, dtype=torch.bfloat16, device=device)
        k_cache, v_cache = pages.unbind(0)
        tables = torch.randperm(num_seqs * blocks, device=device).view(num_seqs, blocks).int()
    context = Context(True, cu_seqlens_q, cu_seqlens_k, new, cached + new, block_tables=tables)
    return Batch(q, k, v, k_cache, v_cache, context, window)


def triton_prefill(batch: Batch) -> torch.Tensor:
    c = batch.context
    lengths = c.cu_seqlens_q, c.cu_seqlens_k, c.max_seqlen_q
    return paged_prefill(*batch[:5], *lengths, c.block_tables, batch.scale, batch.window)


def flash_attn2() -> Callable[[Batch], torch.Tensor] | None:
    """flash-attn 2's prefill, None where the package is missing."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None

    def prefill(batch: Batch) -> torch.Tensor:
        c = batch.context
        k, v = (batch.k, batch.v) if c.block_tables is None else (batch.k_cache, batch.v_cache)
        return flash_attn_varlen_func(
            batch.q, k, v, c.cu_seqlens_q, c.cu_seqlens_k, c.max_seqlen_q, c.max_seqlen_k,
            softmax_scale=batch.scale, causal=True, block_table=c.block_tables,
            window_size=(-1, -1) if batch.window is None else (batch.window - 1, 0),
        )  # fmt: skip

    return prefill


def flash_attn4() -> Callable[[Batch], torch.Tensor] | None:
    """flash-attn-4's prefill, None where it cannot be used. Prints what the import and the compiling took."""
    start = time.perf_counter()
    package = load_flash_attn4(torch.bfloat16, HEAD_DIM, torch.device("cuda", torch.cuda.current_device()))
    if package is None:
        return None
    loaded = time.perf_counter()
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.bfloat16, torch.device("cuda"))
    for i in range(package.NUM_KERNELS):
        package.load(shape, i)
    torch.cuda.synchronize()
    print(f"flash-attn-4: import {loaded - start:.1f} s, first calls {time.perf_counter() - loaded:.1f} s")
    return lambda batch: run_flash_attn4(package, batch)


def run_flash_attn4(package: FlashAttn4, batch: Batch) -> torch.Tensor:
    out = package.prefill(*batch[:6], batch.scale)
    if out is None:
        raise RuntimeError("flash-attn-4 failed: see the warning above")
    return out


def with_half_blocks(batch: Batch) -> Batch:
    """The same cache as blocks of 128, which flash-attn-4 loads with the bulk copy engine on Hopper."""
    tables = batch.context.block_tables
    halves = torch.stack([2 * tables, 2 * tables + 1], dim=-1).flatten(1)
    k_cache, v_cache = (cache.view(-1, BLOCK_SIZE // 2, KV_HEADS, HEAD_DIM) for cache in (batch.k_cache, batch.v_cache))
    c = batch.context
    context = Context(True, c.cu_seqlens_q, c.cu_seqlens_k, c.max_seqlen_q, c.max_seqlen_k, block_tables=halves)
    return Batch(batch.q, batch.k, batch.v, k_cache, v_cache, context)


def measure(prefill: Callable[[Batch], torch.Tensor], batches: list[Batch], repeats: int) -> tuple[float, float]:
    """Median seconds of a call on the GPU, and on the host.

    The GPU is kept busy while the host queues the calls, so that a slow launch does not count as a slow kernel.
    """
    calls = 2 * len(batches)
    gpu, host = [], []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # about 2 ms
        start.record()
        begin = time.perf_counter()
        for i in range(calls):
            prefill(batches[i % len(batches)])
        host.append((time.perf_counter() - begin) / calls)
        end.record()
        end.synchronize()
        gpu.append(start.elapsed_time(end) / 1e3 / calls)
    return median(gpu[1:]), median(host[1:])  # the first round warms up


def compile_tiles(tiles: PrefillTiles) -> str | None:
    """Compile our kernel with these tiles into Triton's cache on the disk; what went wrong, or None."""
    kernel.choose_tiles = lambda *_: tiles
    try:
        for shape in TINY:
            triton_prefill(make_batch(shape))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def compare(batches: dict[Shape, list[Batch]]) -> list[dict]:
    """One row for each implementation and shape."""
    fa4 = flash_attn4()
    implementations = {
        "flash-attn 2": flash_attn2(),
        "flash-attn-4": fa4,
        "flash-attn-4, blocks of 128": fa4,
        "triton": triton_prefill,
    }
    rows = []
    for name, prefill in implementations.items():
        if prefill is None:
            print(f"{name}: not usable here")
            continue
        for shape, own in batches.items():
            if name.startswith("flash-attn-4") and shape.head_dim != HEAD_DIM:
                continue
            if name.endswith("128"):
                if not shape.cached:
                    continue
                own = [with_half_blocks(batch) for batch in own]
            try:
                difference = (prefill(own[0]).float() - triton_prefill(batches[shape][0]).float()).abs().max().item()
                seconds, host = measure(prefill, own, repeats=7)
            except Exception as error:
                print(f"{name}, {shape.name}: {type(error).__name__}: {error}")
                continue
            rows.append(
                {
                    "implementation": name,
                    "shape": shape.name,
                    "tflops": shape.flops / seconds / 1e12,
                    "us": seconds * 1e6,
                    "host_us": host * 1e6,
                    "difference": difference,
                }
            )
    return rows


def sweep(batches: dict[Shape, list[Batch]]) -> list[dict]:
    """TFLOP/s of our kernel at each shape, by its tiles; fastest at the first shape first."""
    with ProcessPoolExecutor(12, get_context("spawn")) as pool:
        errors = list(pool.map(compile_tiles, SWEEP))
    rows = []
    default = kernel.choose_tiles
    try:
        for tiles, error in zip(SWEEP, errors, strict=True):
            row = {"tiles": tiles._asdict(), "error": error, "tflops": {}}
            kernel.choose_tiles = lambda *_, tiles=tiles: tiles
            if error is None:
                for shape, own in batches.items():
                    seconds, _ = measure(triton_prefill, own, repeats=3)
                    row["tflops"][shape.name] = shape.flops / seconds / 1e12
            rows.append(row)
    finally:
        kernel.choose_tiles = default
    return sorted(rows, key=lambda row: -row["tflops"].get(SHAPES[0].name, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--no-sweep", action="store_true", help="leave the Triton kernel's tiles alone")
    args = parser.parse_args()
    require_gpus(parser)

    torch.manual_seed(0)
    with torch.inference_mode():
        batches = {shape: [make_batch(shape) for _ in range(COPIES)] for shape in SHAPES}
        wide = {shape: [make_batch(shape) for _ in range(COPIES)] for shape in WIDE}
        results = {"implementations": compare(batches | wide), "tiles": []}
        print(f"{'':28} {'shape':>36} {'TFLOP/s':>8} {'us':>8} {'host us':>8} {'|diff|':>8}")
        for row in results["implementations"]:
            print(
                f"{row['implementation']:28} {row['shape']:>36} {row['tflops']:8.0f} {row['us']:8.0f} "
                f"{row['host_us']:8.0f} {row['difference']:8.4f}"
            )
        if not args.no_sweep:
            results["tiles"] = sweep(batches)
            print("\nTriton, TFLOP/s\nrows keys warps stages " + "".join(f"{shape.name:>16}" for shape in SHAPES))
            for row in results["tiles"]:
                rates = "".join(f"{rate:16.0f}" for rate in row["tflops"].values())
                print("{:4} {:4} {:5} {:6} ".format(*row["tiles"].values()), rates or f" {row['error'][:60]}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
