"""How long do the thresholds of top-k, top-p and min-p take over Qwen3's vocabulary?

    python benchmarks/sampling_thresholds.py --json out.json [--batches 1,256] [--settings k20p95,p95]

Prints microseconds a call in a CUDA graph for each batch and setting, beside those of `logits.amax(-1)`, which like
the thresholds must read all logits once.
"""

import argparse
import json
from pathlib import Path
from statistics import median

import torch
from required_gpus import require_gpus

from nanovllm.kernels.sampling.sampling_thresholds import sampling_thresholds

VOCAB_SIZE = 151_936
BATCHES = (1, 16, 64, 256, 512)
# name: (temperature, top_k, top_p, min_p, flat)
SETTINGS = {
    "k20p95": (0.6, 20, 0.95, 0.0, False),
    "k20": (0.6, 20, 1.0, 0.0, False),
    "minp": (0.6, 0, 1.0, 0.05, False),
    "p95": (0.6, 0, 0.95, 0.0, False),
    "p95 T=1": (1.0, 0, 0.95, 0.0, False),
    "k1000p95": (0.6, 1000, 0.95, 0.0, False),
    "k20p95 flat": (0.6, 20, 0.95, 0.0, True),
    "p95 flat": (0.6, 0, 0.95, 0.0, True),
    "off": (0.6, 0, 1.0, 0.0, False),
}
ROTATED_BYTES = 200e6  # over the L2's 50 MB
ROUNDS = 20


def make_logits(batch: int, flat: bool) -> list[torch.Tensor]:
    """Tensors that do not fit the L2 together: peaked as a trained model's, or flat as an untrained one's."""
    torch.manual_seed(batch)
    tensors = []
    for _ in range(max(3, min(64, round(ROTATED_BYTES / (batch * VOCAB_SIZE * 2))))):
        logits = torch.randn(batch, VOCAB_SIZE, device="cuda") * (0.02 if flat else 3.0)
        if not flat:
            columns = torch.randint(VOCAB_SIZE, (batch, 8), device="cuda")
            logits.scatter_(1, columns, 14.0 + 3.0 * torch.randn(batch, 8, device="cuda"))
        tensors.append(logits.bfloat16())
    return tensors


def seconds_a_call(call, tensors: list[torch.Tensor]) -> float:
    for logits in tensors[:3]:
        call(logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for logits in tensors:
            call(logits)
    graph.replay()
    seconds = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / len(tensors))
    return median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--json")
    args = parser.parse_args()
    require_gpus(parser)
    results = []
    for batch in map(int, args.batches.split(",")):
        for flat in (False, True):
            names = [name for name in args.settings.split(",") if SETTINGS[name][4] == flat]
            if not names:
                continue
            tensors = make_logits(batch, flat)
            read = seconds_a_call(lambda logits: logits.amax(-1), tensors)
            print(f"batch {batch}{', flat' if flat else ''}: amax {read * 1e6:.1f} us", flush=True)
            for name in names:
                temperature, k, p, min_p, _ = SETTINGS[name]
                rest = (
                    torch.full((batch,), temperature, device="cuda"),
                    torch.full((batch,), k, dtype=torch.int32, device="cuda"),
                    torch.full((batch,), p, device="cuda"),
                    torch.full((batch,), min_p, device="cuda"),
                )
                row = {"batch": batch, "setting": name, "amax": read}
                row["kept"] = (
                    (tensors[0] >= sampling_thresholds(tensors[0], *rest).unsqueeze(1)).sum(1).float().mean().item()
                )
                row["seconds"] = seconds_a_call(lambda logits, rest=rest: sampling_thresholds(logits, *rest), tensors)
                print(f"  {name:12} {row['seconds'] * 1e6:8.1f} us  keeps {row['kept']:.0f}")
                results.append(row)
            del tensors
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
