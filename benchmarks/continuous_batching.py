"""Is this engine faster than transformers' continuous batching (`generate_batch`) on a GPU? Both run in one process.

    python benchmarks/continuous_batching.py                           # Qwen3-0.6B's shape, random weights, no network
    python benchmarks/continuous_batching.py Qwen3-8B --workload bench single --passes 1

The workloads are those of `nanovllm bench`: the same prompts, as many new tokens, the same temperature, and no end
before them. transformers runs first and gives its memory back, then the engine. Models are loaded and graphs captured
before the clock starts. MODEL is one of nanovllm's presets, whose weights are random, or a checkpoint's directory.

`generate_batch` knows one length for all requests. So they are given to its manager, which it runs too, each with its
own, and with the hints of the workload that `generate_batch` gives.

benchmarks/cpu.py compares both on a CPU.
"""

import argparse
import gc
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.bench.workloads import TEMPERATURE, WORKLOADS, Workload
from nanovllm.models.presets import PRESET_NAMES, preset_config

NO_TOKEN = -1  # as the end-of-sequence token: no completion ends before its length


class ContinuousBatching:
    """transformers' manager of continuous batching, at work in a thread of its own."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    def complete(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Completions of these prompts with these numbers of tokens, in order. Raises RuntimeError if one fails."""
        ids = [
            self.manager.add_request(prompt, max_new_tokens=length, eos_token_id=NO_TOKEN)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        found: dict[str, list[int]] = {}
        while len(found) < len(ids):
            result = self.manager.get_result(timeout=1)
            if result is None:
                if not self.manager.is_running():
                    raise RuntimeError("transformers' thread has ended before its requests")
            elif result.error is not None:
                raise RuntimeError(f"transformers: {result.error}")
            elif result.is_finished():
                found[result.request_id] = result.generated_tokens
        return [found[request_id] for request_id in ids]


@contextmanager
def continuous_batching(
    model: Any, prompts: list[list[int]], lengths: list[int], temperature: float = 0.0, **options: Any
) -> Iterator[ContinuousBatching]:
    """A manager that is ready for a workload like this one. Temperature 0 is greedy. The options are transformers'
    ContinuousBatchingConfig's."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    settings = GenerationConfig(max_new_tokens=max(lengths), eos_token_id=NO_TOKEN, pad_token_id=0, **sampling)
    hints = WorkloadHints(max(map(len, prompts)), max(lengths), len(prompts))
    config = ContinuousBatchingConfig(**options)
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=config, workload_hints=hints
    ) as manager:
        yield ContinuousBatching(manager)


def summarize(seconds: list[float], outputs: list[int]) -> dict[str, Any]:
    return {"seconds": seconds, "tokens_per_second": round(sum(outputs) / median(seconds), 1)}


def run_transformers(model: Any, workload: Workload, passes: int) -> dict[str, Any]:
    prompts, outputs = workload.draw(0, model.config.vocab_size)
    seconds = []
    with continuous_batching(model, prompts, outputs, TEMPERATURE) as batching:
        batching.complete(prompts[:8], [4] * len(prompts[:8]))
        for index in range(passes):
            # Pass 1 and later: pass 0 begins as the warm-up did, and would find its keys.
            prompts, outputs = workload.draw(index + 1, model.config.vocab_size)
            begin = time.perf_counter()
            completions = batching.complete(prompts, outputs)
            seconds.append(time.perf_counter() - begin)
            if [len(completion) for completion in completions] != outputs:
                raise RuntimeError("transformers' completions do not have the lengths of the workload")
        attention = model.config._attn_implementation
    return summarize(seconds, outputs) | {"attention": attention}


def run_nanovllm(llm: LLM, workload: Workload, passes: int) -> dict[str, Any]:
    vocab_size = llm.config.hf_config.vocab_size
    prompts, outputs = workload.draw(0, vocab_size)
    llm.generate(prompts[:8], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    seconds = []
    for index in range(passes):
        prompts, outputs = workload.draw(index + 1, vocab_size)
        params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in outputs]
        begin = time.perf_counter()
        completions = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
        if [len(completion["token_ids"]) for completion in completions] != outputs:
            raise RuntimeError("nanovllm's completions do not have the lengths of the workload")
    return summarize(seconds, outputs)


def load(name: str, dtype: str, device: str, attention: str | None) -> Any:
    options = {"dtype": getattr(torch, dtype)} | ({"attn_implementation": attention} if attention else {})
    if name not in PRESET_NAMES:
        return AutoModelForCausalLM.from_pretrained(name, **options).to(device).eval()
    with torch.device(device):
        return AutoModelForCausalLM.from_config(preset_config(name), **options).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="Qwen3-0.6B", help="default: Qwen3-0.6B")
    parser.add_argument("--workload", choices=list(WORKLOADS), nargs="+", default=["bench", "single"])
    parser.add_argument("--passes", type=int, default=3, help="of each engine (default: 3)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--attention", help="of transformers, such as sdpa or flash_attention_2; default: its own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures in a file")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    device_name = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else args.device
    versions = {each.__name__: each.__version__ for each in (torch, transformers, nanovllm)}

    results: dict[str, dict[str, Any]] = {name: {} for name in args.workload}
    model = load(args.model, args.dtype, args.device, args.attention)
    for name in args.workload:
        results[name]["transformers"] = run_transformers(model, WORKLOADS[name], args.passes)
    attention = results[args.workload[0]]["transformers"]["attention"]
    del model
    gc.collect()
    if args.device.startswith("cuda"):
        torch.cuda.empty_cache()

    dummy = {"load_format": "dummy"} if args.model in PRESET_NAMES else {}
    options: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "skip_tokenizer_init": True} | dummy
    with LLM(args.model, use_tqdm=False, **options) as llm:
        for name in args.workload:
            results[name]["nanovllm"] = run_nanovllm(llm, WORKLOADS[name], args.passes)

    print(f"{args.model}, {args.dtype}, {device_name}, {versions}, attention of transformers: {attention}")
    print(f"Output tokens a second, medians of {args.passes} passes")
    print("| workload | transformers, continuous batching | nanovllm | times as fast |\n| --- | --- | --- | --- |")
    for name, of_name in results.items():
        theirs, ours = (of_name[engine]["tokens_per_second"] for engine in ("transformers", "nanovllm"))
        print(f"| {name} | {theirs:,.0f} | {ours:,.0f} | {ours / theirs:.2f} |")
    if args.json:
        report = {"model": args.model, "dtype": args.dtype, "device": device_name, "versions": versions}
        args.json.write_text(json.dumps(report | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
