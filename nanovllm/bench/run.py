"""The published benchmark, and the other workloads of workloads.py.

nanovllm bench                                             # ~/huggingface/Qwen3-0.6B, or its shape without files
nanovllm bench Qwen3-8B --load-format dummy --workload prefill --passes 3 --json out.json
"""

import gc
import json
import os
import platform
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.bench.floor import Ceilings, ModelSize, floor_seconds, measure_ceilings, multiplies_in_fp8
from nanovllm.bench.workloads import WORKLOADS
from nanovllm.layers.formats.format import WeightFormat
from nanovllm.utils.optional_packages import installed_versions

DEFAULT_MODEL = "~/huggingface/Qwen3-0.6B"
PACKAGES = ("triton", "flash-attn", "flash-attn-4", "quack-kernels")  # that speed depends on


def check_lengths(workloads: list[str], longest: int) -> None:
    """Raises ValueError where a workload has longer sequences than the engine: completions would be cut short."""
    for name in workloads:
        prompts, outputs = WORKLOADS[name].draw(0)
        needed = max(len(prompt) + output for prompt, output in zip(prompts, outputs, strict=True))
        if needed > longest:
            raise ValueError(
                f"--workload {name}: has sequences of {needed} tokens, and the engine's longest are {longest}: raise "
                "--max-model-len or --num-kvcache-blocks, or take a model that supports them"
            )


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


def run_bench(
    model: str | None,
    workloads: list[str] | None,
    num_passes: int,
    sampling: dict[str, Any],
    given_ceilings: dict[str, float | None],
    engine: dict[str, Any],
    file: Path | None = None,
) -> None:
    """Run workloads, and print how fast they were.

    Args:
        model: a directory, a hub id or a published shape; None: DEFAULT_MODEL, or its shape with random weights.
        workloads: names of WORKLOADS; None: bench, and without a GPU laptop.
        num_passes: of each workload; the median counts.
        sampling: options of SamplingParams.
        given_ceilings: of the hardware: bandwidth in TB/s, flops and fp8_flops in TFLOP/s; None: measured.
        engine: options of LLM.
        file: where all figures go, as JSON.

    Raises what LLM does, and ValueError where a workload's sequences are longer than the engine's.
    """
    if workloads is None:
        on_gpu = torch.cuda.is_available() and engine["device"] != "cpu"
        workloads = ["bench" if on_gpu else "laptop"]
        if not on_gpu:
            print("No GPU: running the workload 'laptop', which ends in about a minute on two cores.", flush=True)
    if model is None:
        model = DEFAULT_MODEL
        if not Path(DEFAULT_MODEL).expanduser().is_dir():
            model, engine = "Qwen3-0.6B", engine | {"load_format": "dummy"}
            print(f"{DEFAULT_MODEL} is not there: running the same shape with random weights.", flush=True)
    start = time.perf_counter()
    max_num_seqs = max(WORKLOADS[name].max_num_seqs for name in workloads)
    with LLM(model, **engine, max_num_seqs=max_num_seqs, seed=0, skip_tokenizer_init=True) as llm:
        startup = time.perf_counter() - start
        check_lengths(workloads, llm.scheduler.max_seq_len)
        print(f"Start-up: {startup:.1f} s", flush=True)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)  # warm-up
        passes: dict[str, list[dict]] = {name: [] for name in workloads}
        for name in workloads:
            for index in range(num_passes):
                passes[name].append(run_pass(llm, WORKLOADS[name], index, sampling))
                seconds, throughput = passes[name][-1]["seconds"], passes[name][-1]["throughput"]
                print(f"{name}, pass {index}: {seconds:.3f} s, {throughput:.1f} tok/s", flush=True)

        config, device = llm.config, llm.model_runner.device
        dtype, weight_format = config.dtype, config.weight_format
        size = ModelSize.of(config.hf_config, dtype, weight_format, config.kv_cache_dtype, config.state_dtype)
        options = {"model": model, "workload": workloads, "passes": num_passes}
        report: dict[str, Any] = {
            "options": options | sampling | given_ceilings | engine,
            "device": llm.model_runner.device_name,
            "engine": {
                "max_num_seqs": config.max_num_seqs,
                "max_num_batched_tokens": config.max_num_batched_tokens,
                "mixed_step_rows": llm.model_runner.mixed_step_rows,
                "num_kvcache_blocks": config.num_kvcache_blocks,
            },
            "host": {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
            "packages": dict.fromkeys(PACKAGES) | installed_versions(*PACKAGES),
            "startup_seconds": startup,
            "workloads": {},
        }
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        ceilings = find_ceilings(given_ceilings, device, dtype, weight_format)
    report |= ceilings._asdict()
    num_gpus = config.tensor_parallel_size * config.data_parallel_size
    for name in workloads:
        report["workloads"][name] = summarize(name, passes[name], size, ceilings, num_gpus)
        print(f"{name}: {WORKLOADS[name].stresses}; {report['device']}; median of {num_passes}")
        print_summary(report["workloads"][name], ceilings)
    if file:
        file.write_text(json.dumps(report, indent=1))


def find_ceilings(
    given: dict[str, float | None], device: torch.device, dtype: torch.dtype, weight_format: WeightFormat | None
) -> Ceilings:
    """Those that were given, and the others measured."""
    layer_flops = given["fp8_flops" if multiplies_in_fp8(weight_format) else "flops"]
    known: list[Any] = [each and each * 1e12 for each in (given["bandwidth"], given["flops"], layer_flops)]
    measured = known if all(known) else measure_ceilings(device, dtype, weight_format)
    return Ceilings(*(mine or its for mine, its in zip(known, measured, strict=True)))


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
