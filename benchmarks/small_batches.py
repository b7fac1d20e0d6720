"""Decode steps of few sequences, by the skinny kernels and by the layers of larger batches. Which of them a step takes
is `Qwen3Model._takes_skinny`'s to say.

    python benchmarks/small_batches.py --models Qwen3-0.6B Qwen3-8B --json out.json
    python benchmarks/small_batches.py --models Qwen3-8B --tensor-parallel-size 2 --paths skinny

Microseconds a step, contexts of 500 tokens and a few more: the time of a generate() call, less that of one with fewer
tokens, over the steps between the two; median of several. Random weights.
"""

import argparse
import json
import time
from pathlib import Path
from random import Random
from statistics import median

import torch
from gpus import require_gpus

from nanovllm import LLM, SamplingParams
from nanovllm.models.qwen3 import Qwen3Model

PROMPT_TOKENS = 500
STEPS = 64
PASSES = 3
PATHS = {"by rule": None, "skinny": True, "ordinary": False}

# Workers run this file too, with the caller's command line, so they take the same path as rank 0.
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--models", nargs="+", default=["Qwen3-0.6B"], help="published shapes")
parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS), help="with several GPUs one a call")
parser.add_argument("--tensor-parallel-size", type=int, default=1)
parser.add_argument("--json")


def take(path: str) -> None:
    """Have every model made from now on take this path wherever it has the choice."""
    if PATHS[path] is not None:
        Qwen3Model._takes_skinny = lambda self, num_tokens: PATHS[path]


def step_micros(llm: LLM, batch: int) -> float:
    rng = Random(batch)
    micros = []
    for _ in range(PASSES):
        prompts = [[rng.randint(0, 10000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        seconds = []
        # The first call leaves the prompts in the prefix cache, so that both of the others find them there.
        for max_tokens in (1, STEPS // 4, STEPS + STEPS // 4):
            params = SamplingParams(temperature=0.6, max_tokens=max_tokens, ignore_eos=True)
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
        micros.append(1e6 * (seconds[2] - seconds[1]) / STEPS)
    return median(micros)


def main() -> None:
    args = parser.parse_args()
    require_gpus(parser, args.tensor_parallel_size)
    if args.tensor_parallel_size > 1 and len(args.paths) > 1:
        parser.error("--paths: with several GPUs one a call, which the workers take too")
    original = Qwen3Model._takes_skinny
    rows = []
    for model in args.models:
        for path in args.paths:
            Qwen3Model._takes_skinny = original
            take(path)
            options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024}
            with LLM(model, tensor_parallel_size=args.tensor_parallel_size, **options) as llm:
                steps = {batch: step_micros(llm, batch) for batch in args.batches}
            rows.append({"model": model, "path": path, "step_us": steps})
            print(f"{model:12s} {path:9s}", "  ".join(f"{n}: {us:6.0f}" for n, us in steps.items()), flush=True)
            torch.cuda.empty_cache()
    if args.json:
        Path(args.json).write_text(json.dumps({"tensor_parallel_size": args.tensor_parallel_size, "rows": rows}))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    take(parser.parse_args().paths[0])
