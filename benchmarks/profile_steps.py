"""Where does the time of a step go? GPU time by kernel, for given batch sizes and context lengths.

    python benchmarks/profile_steps.py --model Qwen3-0.6B --shapes 256x600 1x600 --prefill 8x2000 --json out.json

Also prints the wall-clock time of a step and how long the GPU was busy.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median

import torch
from required_gpus import require_gpus
from torch.autograd.profiler import DeviceType
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams
from nanovllm.layers.formats.all_formats import QUANTIZATIONS

STEPS = 40
PROFILED_STEPS = 10


def profile_shape(llm: LLM, batch: int, context: int) -> dict:
    """Steps of `batch` sequences of about `context` tokens: {wall_ms, gpu_busy_ms, kernels: [...], timeline: [...]}."""
    rng = Random(batch * 10007 + context)
    params = SamplingParams(temperature=0.6, max_tokens=STEPS + PROFILED_STEPS + 20, ignore_eos=True)
    for _ in range(batch):
        llm.add_request([rng.randint(0, 10000) for _ in range(context)], params)
    while llm.scheduler.waiting:
        llm.step()
    for _ in range(5):
        llm.step()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        llm.step()
        seconds.append(time.perf_counter() - start)
    result = {"batch": batch, "context": context, "wall_ms": 1e3 * median(seconds)}
    result |= profile_steps(llm.step, PROFILED_STEPS)
    while not llm.is_finished():
        llm.step()
    return result


def profile_prefill(llm: LLM, batch: int, length: int) -> dict:
    """One step that prefills `batch` prompts of `length` tokens: as profile_shape."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    rng = Random(length)

    def prefill():
        for _ in range(batch):
            llm.add_request([rng.randint(0, 10000) for _ in range(length)], params)
        llm.step()

    prefill()
    for _ in range(batch):
        llm.add_request([rng.randint(0, 10000) for _ in range(length)], params)
    start = time.perf_counter()
    llm.step()
    result = {"batch": batch, "prompt": length, "wall_ms": 1e3 * (time.perf_counter() - start)}
    return result | profile_steps(prefill, 3)


def profile_steps(step: Callable, count: int) -> dict:
    """GPU time of `count` calls of a step: {gpu_busy_ms, kernels, timeline_us}, a step each. A kernel's own time has in
    it what a dependent launch waits beside the one before."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    micros, counts, spans = defaultdict(float), defaultdict(int), []
    for event in prof.events():
        if event.device_type == DeviceType.CUDA:
            micros[event.name] += event.time_range.elapsed_us() / count
            counts[event.name] += 1
            spans.append((event.time_range.start, event.time_range.end, event.name[:60]))
    spans.sort()
    origin = spans[0][0]
    busy, reached = 0.0, origin
    for start, end, _ in spans:  # those of dependent launches overlap
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    kernels = sorted(micros, key=micros.get, reverse=True)
    return {
        "gpu_busy_ms": busy / count / 1e3,
        "kernels": [
            {"name": name[:100], "us_a_step": micros[name], "launches_a_step": counts[name] / count} for name in kernels
        ],
        # Three steps are enough for a picture.
        "timeline_us": [(s - origin, e - origin, n) for s, e, n in spans[: 3 * len(spans) // count]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-0.6B")
    parser.add_argument("--shapes", nargs="*", default=["256x600", "512x100", "64x600", "1x600"], help="BATCHxCONTEXT")
    parser.add_argument("--prefill", nargs="*", default=[], help="PROMPTSxTOKENS")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="rank 0 is what the profile shows")
    parser.add_argument("--quantization", choices=list(QUANTIZATIONS))
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"])
    parser.add_argument("--state-dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--json")
    args = parser.parse_args()
    require_gpus(parser)
    results = []
    names = ("attention_backend", "tensor_parallel_size", "quantization", "kv_cache_dtype", "state_dtype")
    options = {name: getattr(args, name) for name in names}
    with LLM(args.model, load_format="dummy", skip_tokenizer_init=True, seed=0, **options) as llm:
        jobs = [(profile_shape, shape) for shape in args.shapes] + [(profile_prefill, s) for s in args.prefill]
        for job, shape in jobs:
            results.append(job(llm, *map(int, shape.split("x"))))
            r = results[-1]
            print(f"{shape}: {r['wall_ms']:.3f} ms a step, GPU busy {r['gpu_busy_ms']:.3f} ms")
            for k in r["kernels"][:14]:
                print(f"  {k['us_a_step']:9.1f} us  {k['launches_a_step']:6.1f} launches  {k['name'][:90]}")
    if args.json:
        Path(args.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
