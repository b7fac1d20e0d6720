"""What does each part of the fast engine gain? The plain Qwen3 with the simple loop, then one part more a row.

    python benchmarks/ladder.py --model Qwen3-0.6B --workload bench many single prefill --passes 3 --json out.json

Random weights, one GPU. Each row is an engine of its own, in a process of its own. docs/performance.md shows a table.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from required_gpus import require_gpus

from nanovllm import LLM, SamplingParams
from nanovllm.bench.run import run_pass
from nanovllm.bench.workloads import WORKLOADS
from nanovllm.engine.start import build
from nanovllm.layers.matmul.table import Table, load_table

SIMPLE = {"overlap_steps": False, "mixed_step_rows": 0}
# Name -> the engine's options, and whether products are chosen by the table of measurements; otherwise cuBLAS has all.
RUNGS: dict[str, tuple[dict, bool]] = {
    "plain": ({"plain": True}, False),
    "fused kernels": (SIMPLE, False),
    "measured products": (SIMPLE, True),
    "overlapped steps": ({"mixed_step_rows": 0}, True),
    "mixed steps": ({}, True),
}


def without_rows(device: torch.device) -> Table:
    return Table(settings=load_table(device).settings)


def measure(model: str, rung: str, workloads: list[str], num_passes: int) -> dict[str, list[float]]:
    """{workload: seconds of each pass}."""
    options, is_measured = RUNGS[rung]
    sizes = {"max_num_seqs": max(WORKLOADS[name].max_num_seqs for name in workloads)}
    with patch.object(build, "load_table", load_table if is_measured else without_rows):
        llm = LLM(model, load_format="dummy", seed=0, skip_tokenizer_init=True, **sizes, **options)
    found: dict[str, list[float]] = {}
    with llm:
        for name in workloads:
            sampling = {"temperature": 0.6}
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
            passes = [run_pass(llm, WORKLOADS[name], i, sampling) for i in range(num_passes)]
            found[name] = [each["seconds"] for each in passes]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-0.6B")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["bench", "many", "single", "prefill"])
    parser.add_argument("--passes", type=int, default=3, help="the median is reported")
    parser.add_argument("--rung", choices=RUNGS, nargs="+", default=list(RUNGS))
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args()
    require_gpus(parser)
    if len(args.rung) == 1:
        found = measure(args.model, args.rung[0], args.workload, args.passes)
        if args.json:
            args.json.write_text(json.dumps(found))
        return
    results = {}
    print(f"{'':20}", *(f"{name:>12}" for name in args.workload))
    for rung in args.rung:
        part = Path(f"{args.json or 'ladder.json'}.part")
        command = [sys.executable, __file__, "--model", args.model, "--passes", str(args.passes), "--rung", rung]
        subprocess.run([*command, "--workload", *args.workload, "--json", str(part)], check=True)
        results[rung] = json.loads(part.read_text())
        part.unlink()
        figures = []
        for name, seconds in results[rung].items():
            tokens = sum(WORKLOADS[name].draw(0)[1])
            is_time = name == "prefill"
            figures.append(f"{median(seconds):10.3f} s" if is_time else f"{tokens / median(seconds):12,.0f}")
        print(f"{rung:20}", *figures, flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
