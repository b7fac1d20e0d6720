"""The published benchmark, and the other workloads of workloads.py.

nanovllm bench                                             # ~/huggingface/Qwen3-0.6B, or its shape without files
nanovllm bench --model Qwen3-8B --load-format dummy --workload prefill --passes 3 --json out.json
"""

import argparse
import gc
import json
import logging
import math
import os
import platform
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.bench.floor import Ceilings, ModelSize, floor_seconds, measure_ceilings
from nanovllm.bench.workloads import TEMPERATURE, WORKLOADS
from nanovllm.engine_options import EngineOptions
from nanovllm.layers.formats.format import WeightFormat
from nanovllm.models.presets import PRESET_NAMES
from nanovllm.utils.command_options import add_options
from nanovllm.utils.optional_packages import installed_versions

DEFAULT_MODEL = "~/huggingface/Qwen3-0.6B"
ENGINE_OPTIONS = (
    *("load_format", "quantization", "tensor_parallel_size", "data_parallel_size", "enforce_eager"),
    *("attention_backend", "dtype"),
    *("kv_cache_dtype", "device", "max_model_len", "max_num_batched_tokens", "mixed_step_rows", "num_kvcache_blocks"),
    *("state_dtype", "speculation", "max_speculative_tokens", "enable_prefix_caching", "overlap_steps", "plain"),
)
PACKAGES = ("triton", "flash-attn", "flash-attn-4", "quack-kernels")  # that speed depends on


def parse_args(arguments: Sequence[str] | None, prog: str | None) -> argparse.Namespace:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, formatter_class=style)
    add = parser.add_argument
    add("--model", help=f"a directory, a hub id, or with dummy weights one of {', '.join(PRESET_NAMES)}")
    add("--workload", choices=WORKLOADS, nargs="+", help="one or more; default: bench, without a GPU laptop")
    add("--temperature", type=float, default=TEMPERATURE)
    add("--top-k", type=int, default=0, help="0: all tokens")
    add("--top-p", type=float, default=1.0)
    add("--passes", type=int, default=1, help="the median is reported")
    add_options(parser, EngineOptions, ENGINE_OPTIONS, has_defaults=True)
    add("--bandwidth", type=float, metavar="TB/s", help="copy bandwidth for the floor; measured unless given")
    add("--flops", type=float, metavar="TFLOP/s", help="matrix rate for the floor; measured unless given")
    add("--fp8-flops", type=float, metavar="TFLOP/s", help="that of the layers' products with weights in fp8")
    add("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args(arguments)
    check_args(parser, args)
    on_gpu = torch.cuda.is_available() and args.device != "cpu"
    if args.workload is None:
        args.workload = ["bench" if on_gpu else "laptop"]
        if not on_gpu:
            print("No GPU: running the workload 'laptop', which ends in about a minute on two cores.")
    if args.model is None:
        args.model = DEFAULT_MODEL
        if not Path(DEFAULT_MODEL).expanduser().is_dir():
            args.model, args.load_format = "Qwen3-0.6B", "dummy"
            print(f"{DEFAULT_MODEL} is not there: running the same shape with random weights.")
    return args


def check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program where an argument would fail after minutes of work. (Of the engine's options LLM does so.)"""
    if args.passes < 1:
        parser.error(f"--passes {args.passes}: must be 1 or more")
    for name in ("bandwidth", "flops", "fp8_flops"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} {value}: must be a number > 0")
    try:
        SamplingParams(**sampling_options(args))
    except ValueError as error:
        parser.error(str(error))
    if args.workload is not None:
        args.workload = list(dict.fromkeys(args.workload))
    if args.json is not None:
        file = Path(args.json).expanduser()
        try:
            # As it will be written, but without a trace: an older file keeps its content until then.
            exists = file.exists()
            file.open("a").close()
            if not exists:
                file.unlink()
        except (OSError, ValueError) as error:
            parser.error(f"--json {args.json}: cannot be written: {getattr(error, 'strerror', None) or error}")
        args.json = file


def check_lengths(workloads: list[str], longest: int) -> None:
    """Ends the program where a workload has longer sequences than the engine: completions would be cut short."""
    for name in workloads:
        prompts, outputs = WORKLOADS[name].draw(0)
        needed = max(len(prompt) + output for prompt, output in zip(prompts, outputs, strict=True))
        if needed > longest:
            raise SystemExit(
                f"--workload {name}: has sequences of {needed} tokens, and the engine's longest are {longest}: raise "
                "--max-model-len or --num-kvcache-blocks, or take a model that supports them"
            )


def sampling_options(args: argparse.Namespace) -> dict:
    return {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}


def run_pass(llm: LLM, workload, index: int, sampling: dict) -> dict:
    """One pass: fresh prompts, wall-clock seconds from the first request to the last result."""
    prompts, outputs = workload.draw(index, llm.config.hf_config.vocab_size)
    params = [SamplingParams(**sampling, ignore_eos=True, max_tokens=n) for n in outputs]
    gc.collect()
    start = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(result["token_ids"]) for result in results)
    if tokens != sum(outputs):
        raise RuntimeError(f"generated {tokens} tokens where the workload asks for {sum(outputs)}")
    return {"tokens": tokens, "seconds": seconds, "throughput": tokens / seconds}


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """arguments, prog: those of the process by default."""
    args = parse_args(arguments, prog)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for noisy in ("httpx", "huggingface_hub", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    start = time.perf_counter()
    try:
        llm = LLM(
            args.model,
            **{name: getattr(args, name) for name in ENGINE_OPTIONS},
            max_num_seqs=max(WORKLOADS[name].max_num_seqs for name in args.workload),
            seed=0,
            skip_tokenizer_init=True,
        )
    except (ValueError, FileNotFoundError, MemoryError) as error:
        raise SystemExit(str(error)) from error
    startup = time.perf_counter() - start
    check_lengths(args.workload, llm.scheduler.max_seq_len)
    print(f"Start-up: {startup:.1f} s")

    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)  # warm-up
    sampling = sampling_options(args)
    passes: dict[str, list[dict]] = {name: [] for name in args.workload}
    for name in args.workload:
        for index in range(args.passes):
            passes[name].append(run_pass(llm, WORKLOADS[name], index, sampling))
            seconds, throughput = passes[name][-1]["seconds"], passes[name][-1]["throughput"]
            print(f"{name}, pass {index}: {seconds:.3f} s, {throughput:.1f} tok/s", flush=True)

    dtype, weight_format, device = llm.config.dtype, llm.config.weight_format, llm.model_runner.device
    size = ModelSize.of(llm.config.hf_config, dtype, weight_format, llm.config.kv_cache_dtype, llm.config.state_dtype)
    report: dict[str, Any] = {
        "options": {name: value for name, value in vars(args).items() if name != "json"},
        "device": llm.model_runner.device_name,
        "engine": {
            "max_num_seqs": llm.config.max_num_seqs,
            "max_num_batched_tokens": llm.config.max_num_batched_tokens,
            "mixed_step_rows": llm.model_runner.mixed_step_rows,
            "num_kvcache_blocks": llm.config.num_kvcache_blocks,
        },
        "host": {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "packages": dict.fromkeys(PACKAGES) | installed_versions(*PACKAGES),
        "startup_seconds": startup,
        "workloads": {},
    }
    llm.exit()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        ceilings = find_ceilings(args, device, dtype, weight_format)
    report |= ceilings._asdict()
    num_gpus = args.tensor_parallel_size * args.data_parallel_size
    for name in args.workload:
        report["workloads"][name] = summarize(name, passes[name], size, ceilings, num_gpus)
        print(f"{name}: {WORKLOADS[name].stresses}; {report['device']}; median of {args.passes}")
        print_summary(report["workloads"][name], ceilings)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


def find_ceilings(
    args: argparse.Namespace, device: torch.device, dtype: torch.dtype, weight_format: WeightFormat | None
) -> Ceilings:
    """Those that were given, and the others measured."""
    layer_flops = args.flops if weight_format is None else args.fp8_flops
    given = [each and each * 1e12 for each in (args.bandwidth, args.flops, layer_flops)]
    measured = given if all(given) else measure_ceilings(device, dtype, weight_format)
    return Ceilings(*(mine or its for mine, its in zip(given, measured, strict=True)))


def summarize(name: str, passes: list[dict], size: ModelSize, ceilings: Ceilings, num_gpus: int) -> dict:
    prompts, outputs = WORKLOADS[name].draw(0)
    prompt_lens = [len(prompt) for prompt in prompts]
    floor = floor_seconds(size, ceilings, prompt_lens, outputs, WORKLOADS[name].shared, num_gpus)
    seconds, tokens = median(p["seconds"] for p in passes), passes[0]["tokens"]
    return {
        "passes": passes,
        "tokens": tokens,
        "seconds": seconds,
        "throughput": tokens / seconds,
        "floor_seconds": floor,
        "share_of_floor": floor / seconds,
    }


def print_summary(s: dict, ceilings: Ceilings) -> None:
    print(f"Total: {s['tokens']}tok, Time: {s['seconds']:.2f}s, Throughput: {s['throughput']:.2f}tok/s")
    print(
        f"Floor: {s['floor_seconds']:.3f}s ({ceilings.bandwidth / 1e12:.3g} TB/s, "
        f"{ceilings.layer_flops / 1e12:.3g} TFLOP/s); share of the floor reached: {s['share_of_floor']:.3f}"
    )
