"""What `deterministic=True` costs: seconds without it and with it, in turn, in one run.

    python benchmarks/deterministic.py Qwen3-0.6B --layers 4 --threads 1 --dtype float32 bfloat16    # on a CPU
    python benchmarks/deterministic.py Qwen3-8B --json out.json                                      # on a GPU

Weights are random, in a published shape. An engine without the option and one with it run the same workloads, one after
the other, `--rounds` times, because two engines of 8B parameters do not fit one card. Of each workload the quickest
pass counts. The JSON file has all passes and what the hardware allows (as `nanovllm bench` computes it).

On a GPU seconds are those of a clock, until the GPU has nothing more to do. The workloads are those of `nanovllm
bench`. On a CPU they are of the processor, which does not count what other programs do meanwhile, but adds up all
threads. Its workloads are small; `--workload` takes those of `nanovllm bench` too.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanovllm import LLM, Config, SamplingParams
from nanovllm.bench.floor import ModelSize, floor_seconds, measure_ceilings
from nanovllm.bench.workloads import WORKLOADS, Workload
from nanovllm.models.presets import preset_config

SMALL = {
    "cpu-prefill": Workload(8, (256, 256), (1, 1), "prompt processing"),
    "cpu-decode-1": Workload(1, (16, 16), (24, 24), "decoding, 1 at a time"),
    "cpu-decode-16": Workload(16, (16, 16), (16, 16), "decoding, 16 at a time"),
}
ALL = SMALL | WORKLOADS


class Defaults(NamedTuple):
    """Of what depends on the device. layers None: all."""

    workload: tuple[str, ...]
    layers: int | None
    dtype: tuple[str, ...]
    rounds: int


DEFAULTS = {
    "cpu": Defaults(tuple(SMALL), 4, ("float32", "bfloat16"), 3),
    "cuda": Defaults(("bench", "prefill"), None, ("bfloat16",), 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="Qwen3-0.6B", help="a published shape (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--workload", nargs="+", choices=ALL, metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--layers", type=int, help="default: 4 on a CPU, all on a GPU")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU (default: %(default)s)")
    parser.add_argument("--dtype", nargs="+", help="default: float32 bfloat16 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--rounds", type=int, help="engines of each kind (default: 3 on a CPU, 2 on a GPU)")
    parser.add_argument("--passes", type=int, default=1, help="of a workload in each engine (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, value in DEFAULTS[options.device]._asdict().items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if min(options.rounds, options.passes) < 1:
        parser.error("--rounds and --passes: must be 1 or more")
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"options": vars(options) | {"json": None}, "torch": torch.__version__, "dtypes": {}}
    for dtype in options.dtype:
        report["dtypes"][dtype] = measure(dtype, options)
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1))


def measure(dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of all workloads, which are printed too."""
    workloads = {name: ALL[name] for name in options.workload}
    hf_config = preset_config(options.model)
    if options.layers is not None:
        hf_config.num_hidden_layers = options.layers
        if getattr(hf_config, "layer_types", None):
            hf_config.layer_types = hf_config.layer_types[: options.layers]
    engine = {"load_format": "dummy", "hf_config": hf_config, "dtype": dtype, "device": options.device, "seed": 0}
    engine |= {"skip_tokenizer_init": True, "use_tqdm": False}
    engine["max_num_seqs"] = max(each.max_num_seqs for each in workloads.values())
    engine["max_model_len"] = max(each.shared + each.prompt[1] + each.output[1] for each in workloads.values())
    config = Config(options.model, deterministic=True, **engine)  # What is refused is refused before the first start.
    starts: dict[str, list[float]] = {"off": [], "on": []}
    passes: dict[str, dict[str, list[float]]] = {name: {"off": [], "on": []} for name in workloads}
    facts: dict[str, Any] = {}
    for turn in range(options.rounds):
        for which in starts:
            start = seconds_now(options.device)
            with LLM(options.model, deterministic=which == "on", **engine) as llm:
                starts[which].append(seconds_now(options.device) - start)
                print(f"{dtype}, {which}, start: {starts[which][-1]:.2f} s", flush=True)
                facts["device"] = llm.model_runner.device_name
                facts[which] = {
                    "num_kvcache_blocks": llm.config.num_kvcache_blocks,
                    "max_num_batched_tokens": llm.config.max_num_batched_tokens,
                    "mixed_step_rows": llm.model_runner.mixed_step_rows,
                }
                for name, workload in workloads.items():
                    warm_up(llm, workload)
                    for i in range(turn * options.passes, (turn + 1) * options.passes):
                        passes[name][which].append(run_pass(llm, workload, i, options.device))
                        print(f"{dtype}, {which}, {name}: {passes[name][which][-1]:.3f} s", flush=True)
    ceilings = measure_ceilings(torch.device(options.device), config.dtype)
    size = ModelSize.of(hf_config, config.dtype)
    report = facts | ceilings._asdict() | {"start_seconds": starts, "workloads": {}}
    print(f"{dtype}, {facts['device']}: without, with, cost")
    for name, found in passes.items():
        prompts, outputs = workloads[name].draw(0)
        floor = floor_seconds(size, ceilings, [len(each) for each in prompts], outputs, workloads[name].shared, 1)
        off, on = min(found["off"]), min(found["on"])
        report["workloads"][name] = {"passes": found, "off": off, "on": on, "cost": on / off - 1}
        report["workloads"][name] |= {"tokens": sum(outputs), "floor_seconds": floor}
        print(f"{name}: {off:.3f} s, {on:.3f} s, {on / off - 1:+.1%} (floor {floor:.3f} s)", flush=True)
    return report


def warm_up(llm: LLM, workload: Workload) -> None:
    """A few requests like those of the workload, cut short: kernels for its shapes are compiled. No pass has these
    prompts."""
    prompts, outputs = workload.draw(10**6, llm.config.hf_config.vocab_size)
    params = [SamplingParams(0.6, max_tokens=min(8, output), ignore_eos=True) for output in outputs[:16]]
    llm.generate(prompts[:16], params, use_tqdm=False)


def run_pass(llm: LLM, workload: Workload, index: int, device: str) -> float:
    """Seconds of one pass with prompts of its own."""
    prompts, outputs = workload.draw(index, llm.config.hf_config.vocab_size)
    params = [SamplingParams(0.6, max_tokens=output, ignore_eos=True) for output in outputs]
    start = seconds_now(device)
    results = llm.generate(prompts, params, use_tqdm=False)
    seconds = seconds_now(device) - start
    assert [len(result["token_ids"]) for result in results] == outputs
    return seconds


def seconds_now(device: str) -> float:
    """Of the processor on a CPU, of a clock on a GPU, when it has done all that it was given."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
