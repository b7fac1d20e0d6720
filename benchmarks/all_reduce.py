"""How long does the sum over GPUs after a layer take, by NCCL and by our kernel?

    python benchmarks/all_reduce.py --hidden 4096 --json out.json

Uses all GPUs of the machine. Prints rank 0's microseconds a call in a CUDA graph. NCCL's figure is that of all_reduce,
an addition to the residual and the norm; our kernel does all three in one launch.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing
from graph_timing import time_graph
from required_gpus import require_gpus

from nanovllm.engine.ranks.process_group import abort_group, join_group, open_store
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.layers.parallel.peer_memory import make_peers
from nanovllm.layers.parallel.residual_reducer import make_reducer
from nanovllm.layers.parallel.tensor_parallel import TensorParallel

TOKENS = (1, 4, 16, 64, 128, 256, 512, 2048, 16384)
EPS = 1e-6


def time_calls(reducer, call, num_calls: int) -> float:
    """Microseconds a call; all ranks at the same time."""

    def run():
        reducer.begin_pass(num_calls, False)
        for _ in range(num_calls):
            call()

    # The clocks take a while to rise, and the ranks to fall into step.
    return time_graph(run, num_calls, num_replays=9, num_warm_replays=20)


def measure(index: int, size: int, store_folder: str, hidden: int, results: list) -> None:
    """One rank's part; rank 0 fills `results`."""
    rank, device = index, torch.device("cuda", index)
    torch.cuda.set_device(device)
    store = open_store(store_folder)
    tp = join_group(store, rank, size, device)
    reducer = make_reducer(make_peers(rank, size, store, device), max(TOKENS), hidden, torch.bfloat16)
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    for num_tokens in TOKENS:
        residual = torch.randn(num_tokens, hidden, device=device).bfloat16()
        partial, own = reducer.partial(num_tokens).zero_(), torch.zeros_like(residual)

        def nccl(own=own, residual=residual):
            x = tp.all_reduce(own)
            rms_norm(residual.add_(x), weight, EPS)

        def ours(partial=partial, residual=residual):
            reducer.add_norm(residual, partial, weight, EPS)

        num_calls = 20 if num_tokens < 4096 else 4  # Even: two buffers take turns.
        row = {"tokens": num_tokens}
        row |= {name: time_calls(reducer, call, num_calls) for name, call in (("nccl", nccl), ("ours", ours))}
        if rank == 0:
            results.append(row)
            print(f"{num_tokens:6d} tokens: NCCL {row['nccl']:7.1f} us, ours {row['ours']:7.1f} us", flush=True)
    leave(tp, device)


def leave(tp: TensorParallel, device: torch.device) -> None:
    """Give back what NCCL holds, once no rank needs another one any more."""
    torch.cuda.synchronize(device)
    tp.store.set(f"done {tp.rank}", "")
    tp.store.wait([f"done {rank}" for rank in range(tp.size)])
    abort_group(tp).join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096, help="4096 is Qwen3-8B's")
    parser.add_argument("--json")
    args = parser.parse_args()
    require_gpus(parser, 2)
    size = torch.cuda.device_count()
    with torch.multiprocessing.Manager() as manager, tempfile.TemporaryDirectory() as store_folder:
        results = manager.list()
        torch.multiprocessing.spawn(measure, (size, store_folder, args.hidden, results), nprocs=size)
        if args.json:
            Path(args.json).write_text(json.dumps({"gpus": size, "hidden": args.hidden, "rows": list(results)}))


if __name__ == "__main__":
    main()
