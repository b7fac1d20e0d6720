"""The published benchmark, and the other workloads of benchmarks/workloads.py.

    python bench.py                                            # ~/huggingface/Qwen3-0.6B, or its shape without files
    python bench.py --model Qwen3-8B --load-format dummy --workload prefill --passes 3 --json out.json
"""

import argparse
import gc
import json
import logging
import os
import platform
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

from benchmarks.floor import Ceilings, ModelSize, floor_seconds, measure_ceilings
from benchmarks.workloads import TEMPERATURE, WORKLOADS
from nanovllm import LLM, SamplingParams
from nanovllm.models.presets import PRESET_NAMES

DEFAULT_MODEL = "~/huggingface/Qwen3-0.6B"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help=f"directory, hub id, or with dummy weights one of {', '.join(PRESET_NAMES)}")
    add("--workload", choices=WORKLOADS, help="default: bench; laptop where there is no GPU")
    add("--load-format", choices=("auto", "dummy"), default="auto")
    add("--passes", type=int, default=1, help="the median is reported")
    add("--tensor-parallel-size", type=int, default=1)
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--attention-backend", choices=("auto", "flash_attn", "triton", "torch"), default="auto")
    add("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--max-model-len", type=int, default=4096)
    add("--bandwidth", type=float, metavar="TB/s", help="copy bandwidth for the floor; measured unless given")
    add("--flops", type=float, metavar="TFLOP/s", help="matrix rate for the floor; measured unless given")
    add("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    if args.passes < 1:
        parser.error(f"--passes {args.passes}: must be 1 or more")
    on_gpu = torch.cuda.is_available() and args.device != "cpu"
    if args.workload is None:
        args.workload = "bench" if on_gpu else "laptop"
        if not on_gpu:
            print("No GPU: running the workload 'laptop', which ends in about a minute on two cores.")
    if args.model is None:
        args.model = DEFAULT_MODEL
        if not Path(DEFAULT_MODEL).expanduser().is_dir():
            args.model, args.load_format = "Qwen3-0.6B", "dummy"
            print(f"{DEFAULT_MODEL} is not there: running the same shape with random weights.")
    return args


def run_pass(llm: LLM, workload, index: int) -> dict:
    """One pass: fresh prompts, wall-clock seconds from the first request to the last result."""
    prompts, outputs = workload.draw(index)
    params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in outputs]
    gc.collect()
    start = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(result["token_ids"]) for result in results)
    if tokens != sum(outputs):
        raise RuntimeError(f"generated {tokens} tokens where the workload asks for {sum(outputs)}")
    return {"tokens": tokens, "seconds": seconds, "throughput": tokens / seconds}


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for noisy in ("httpx", "huggingface_hub", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    workload = WORKLOADS[args.workload]
    start = time.perf_counter()
    llm = LLM(
        args.model,
        load_format=args.load_format,
        tensor_parallel_size=args.tensor_parallel_size,
        enforce_eager=args.enforce_eager,
        attention_backend=args.attention_backend,
        dtype=args.dtype,
        device=args.device,
        max_model_len=args.max_model_len,
        seed=0,
        skip_tokenizer_init=True,
    )
    startup = time.perf_counter() - start
    print(f"Start-up: {startup:.1f} s")

    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)  # warm-up
    passes = []
    for index in range(args.passes):
        passes.append(run_pass(llm, workload, index))
        print(f"Pass {index}: {passes[-1]['seconds']:.3f} s, {passes[-1]['throughput']:.1f} tok/s", flush=True)

    hf_config, dtype, device = llm.config.hf_config, llm.config.dtype, llm.model_runner.device
    device_name = llm.model_runner.device_name
    llm.exit()
    ceilings = None
    if args.bandwidth is None or args.flops is None:
        ceilings = measure_ceilings(device, dtype)
    bandwidth = args.bandwidth * 1e12 if args.bandwidth else ceilings.bandwidth
    flops = args.flops * 1e12 if args.flops else ceilings.flops
    prompts, outputs = workload.draw(0)
    floor = floor_seconds(
        ModelSize.of(hf_config, dtype),
        Ceilings(bandwidth, flops),
        [len(prompt) for prompt in prompts],
        outputs,
        workload.shared,
        args.tensor_parallel_size,
    )

    tokens = passes[0]["tokens"]
    seconds = median(p["seconds"] for p in passes)
    if args.json:
        report = {
            "options": vars(args),
            "device": device_name,
            "host": {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
            "flash_attn": find_spec("flash_attn") is not None,
            "startup_seconds": startup,
            "passes": passes,
            "median_seconds": seconds,
            "throughput": tokens / seconds,
            "bandwidth": bandwidth,
            "flops": flops,
            "floor_seconds": floor,
            "share_of_floor": floor / seconds,
        }
        Path(args.json).write_text(json.dumps(report, indent=1))
    print(f"{args.workload}: {workload.stresses}; {device_name}; {args.passes} passes, median below")
    print(f"Total: {tokens}tok, Time: {seconds:.2f}s, Throughput: {tokens / seconds:.2f}tok/s")
    print(
        f"Floor: {floor:.3f}s ({bandwidth / 1e12:.2f} TB/s, {flops / 1e12:.1f} TFLOP/s); "
        f"share of the floor reached: {floor / seconds:.3f}"
    )


if __name__ == "__main__":
    main()
