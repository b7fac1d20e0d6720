"""How fast does decode attention read the KV cache, and which launch constants are best?

    python benchmarks/attention_decode.py --json out.json [--sweep] [--fp8] [--heads 16 --kv-heads 8]

One layer with head_dim 128 in bfloat16 (with --fp8 over a cache of float8_e4m3fn) and blocks of 256 tokens. Prints
TB/s: the bytes of all keys and values over the time of a call in a CUDA graph. Compares our kernel with flash-attn 2,
where that is installed. With --sweep it also times other launch constants and numbers of programs.
"""

import argparse
import json
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import torch
from gpus import require_gpus
from graph_timing import time_graph

from nanovllm.kernels.decode_plan import PIECE_FIELDS, DecodeConfig, DecodeWorkspace, plan_decode
from nanovllm.kernels.paged_decode import has_tma, paged_decode
from nanovllm.layers.decode_constants import DecodeConstants
from nanovllm.tuning.table import load_table

HEAD_DIM, BLOCK_SIZE = 128, 256
HEADS, KV_HEADS = 16, 8  # Qwen3-0.6B's
SHAPES = [(256, 100, 2048), (128, 2000, 4000), (64, 100, 2048), (512, 32, 256), (16, 500, 1024), (1, 600, 600)]
SHAPES += [(512, 100, 130), (256, 590, 610), (128, 100, 2048), (64, 590, 700), (32, 100, 2048), (8, 600, 1200)]
CACHES = 3
CALLS = 12  # in one graph
REPLAYS = 15
# Tile, warps and stages. Asking for keys early is for dependent launches, and there are none here.
SWEEP_CONFIGS = [
    *((64, 4, 2), (64, 4, 3), (64, 4, 4), (32, 2, 3), (32, 2, 4), (32, 4, 3), (32, 1, 4), (16, 1, 3)),
    # By the tensor memory accelerator.
    *((tile, warps, stages, False, True) for tile in (32, 64) for warps in (1, 2) for stages in (3, 4)),
]
SWEEP_SPARE = (165, 264, 330, 528, 660, 1056)


class Case:
    """One batch over three caches of its own."""

    def __init__(self, batch: int, low: int, high: int, num_heads: int, num_kv_heads: int, is_fp8: bool):
        rng = Random(batch)
        self.lens = [rng.randint(low, high) for _ in range(batch)]
        blocks = [-(-n // BLOCK_SIZE) for n in self.lens]
        ids = list(range(sum(blocks)))
        rng.shuffle(ids)
        tables = torch.full((batch, 4096 // BLOCK_SIZE), -1, dtype=torch.int32)
        for i, n in enumerate(blocks):
            tables[i, :n] = torch.tensor([ids.pop() for _ in range(n)], dtype=torch.int32)
        self.tables = tables.cuda()
        self.context_lens = torch.tensor(self.lens, dtype=torch.int32).cuda()
        shape = (CACHES, 2, sum(blocks), BLOCK_SIZE, num_kv_heads, HEAD_DIM)
        self.caches = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.kv_scales = None
        if is_fp8:
            self.caches = self.caches.to(torch.float8_e4m3fn)
            self.kv_scales = torch.ones(2, num_kv_heads, device="cuda")
        self.q = torch.randn(batch, num_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.num_kv_heads = num_kv_heads
        self.bytes = sum(self.lens) * 2 * num_kv_heads * HEAD_DIM * self.caches.itemsize

    def time(self, attend, num_warm_replays: int = 10) -> float:
        """Seconds a call; attend(k_cache, v_cache)."""

        def run():
            for i in range(CALLS):
                attend(*self.caches[i % CACHES])

        return time_graph(run, CALLS, REPLAYS, num_warm_replays) / 1e6


def ours(case: Case, spare: int | None, config: DecodeConfig | None):
    (batch, num_heads, _), num_kv_heads = case.q.shape, case.num_kv_heads
    device = case.q.device
    constants = DecodeConstants(load_table(device))
    num_pieces = batch + -(-spare // num_kv_heads) if spare else constants.num_pieces(batch, num_kv_heads)
    tma = has_tma(HEAD_DIM, BLOCK_SIZE, 2, device)
    config = config or constants.config(batch, num_kv_heads, HEAD_DIM, 2, tma)
    items = np.empty((num_pieces, PIECE_FIELDS), np.int32)
    plan_decode(np.array(case.lens), items)
    plan = torch.from_numpy(items).to("cuda")
    workspace = DecodeWorkspace(batch, num_heads, num_kv_heads, HEAD_DIM, "cuda", num_pieces)

    def attend(k, v):
        options = {"kv_scales": case.kv_scales}
        paged_decode(case.q, k, v, case.tables, HEAD_DIM**-0.5, plan, workspace, config, **options)

    return attend


def flash_attn_2(case: Case):
    from flash_attn import flash_attn_with_kvcache

    def attend(k, v):
        flash_attn_with_kvcache(
            case.q.unsqueeze(1), k, v, cache_seqlens=case.context_lens, block_table=case.tables, causal=True
        )

    return attend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="a KV cache of 8 bits")
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument(
        "--kv-heads", type=int, default=KV_HEADS, help="of one GPU: 4 for Qwen3-8B over two, with 16 heads"
    )
    parser.add_argument("--json")
    args = parser.parse_args()
    require_gpus(parser)
    results = []
    for batch, low, high in SHAPES:
        case = Case(batch, low, high, args.heads, args.kv_heads, args.fp8)
        variants = {"ours": ours(case, None, None)}
        if find_spec("flash_attn_2_cuda") and not args.fp8:  # flash-attn-4 lies in the same folder
            variants["flash-attn 2"] = flash_attn_2(case)
        if args.sweep:
            for spare, config in product(SWEEP_SPARE, SWEEP_CONFIGS):
                variants[f"spare {spare} {config}"] = ours(case, spare, DecodeConfig(*config))
        # The clocks take a while to rise: without this, whatever is timed first looks 7 % slower.
        case.time(variants["ours"], num_warm_replays=150)
        row = {"batch": batch, "low": low, "high": high, "seconds": {}}
        for name, attend in variants.items():
            try:
                row["seconds"][name] = case.time(attend)
            except Exception as error:  # one that does not fit must not end the sweep
                print(name, type(error).__name__, str(error)[:80])
        results.append(row)
        print(f"batch {batch}, {low}..{high}:")
        best = sorted(row["seconds"], key=row["seconds"].get)
        for name in [*dict.fromkeys(["ours", "flash-attn 2", *best[:12]])]:
            if name in row["seconds"]:
                t = row["seconds"][name]
                print(f"  {case.bytes / t / 1e12:5.2f} TB/s  {t * 1e6:8.1f} us  {name}")
        del case
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
