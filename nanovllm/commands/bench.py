"""`nanovllm bench`: its options."""

import argparse
import math
from pathlib import Path
from typing import Any

from nanovllm.bench.workloads import TEMPERATURE, WORKLOADS
from nanovllm.commands.verbosity import QUIET, VERBOSE
from nanovllm.engine_options import EngineOptions
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.command_options import add_options
from nanovllm.utils.quick_exit import QuickExit

ENGINE_OPTIONS = (
    *("load_format", "quantization", "tensor_parallel_size", "data_parallel_size"),
    *("enforce_eager", "attention_backend", "dtype"),
    *("kv_cache_dtype", "device", "max_model_len", "max_num_batched_tokens", "mixed_step_rows", "num_kvcache_blocks"),
    *("state_dtype", "speculation", "max_speculative_tokens", "enable_prefix_caching", "overlap_steps", "plain"),
    "deterministic",
)


def add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure the speed on this machine",
        description="Run the published benchmark, or other workloads, and compare with what the hardware allows. "
        "Without MODEL: ~/huggingface/Qwen3-0.6B, or its shape with random weights.",
    )
    add = parser.add_argument
    help = "a directory, a hub id, or with --load-format dummy a published shape such as Qwen3-8B"
    add("model", nargs="?", metavar="MODEL", help=help)
    help = f"one or more of {', '.join(WORKLOADS)} (default: bench, without a GPU laptop)"
    add("--workload", choices=WORKLOADS, nargs="+", metavar="NAME", help=help)
    add("--temperature", type=float, default=TEMPERATURE, metavar="N", help="default: %(default)s")
    add("--top-k", type=int, default=0, metavar="N", help="0: all tokens (default: %(default)s)")
    add("--top-p", type=float, default=1.0, metavar="N", help="default: %(default)s")
    add("--passes", type=int, default=1, metavar="N", help="the median is reported (default: %(default)s)")
    add("--bandwidth", type=float, metavar="TB/s", help="copy bandwidth for the floor; measured unless given")
    add("--flops", type=float, metavar="TFLOP/s", help="matrix rate for the floor; measured unless given")
    add("--fp8-flops", type=float, metavar="TFLOP/s", help="that of the layers' products with weights in fp8")
    add("--json", metavar="FILE", help="write all figures there")
    group = parser.add_argument_group("engine (docs/reference.md)")
    add_options(group, EngineOptions, ENGINE_OPTIONS, has_defaults=True)
    parser.set_defaults(run=_bench, parser=parser, usual_verbosity=VERBOSE)


def _bench(options: argparse.Namespace) -> int:
    _check(options.parser, options)
    with QuickExit():
        from nanovllm.bench.run import run_bench

    sampling = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    ceilings = {name: getattr(options, name) for name in ("bandwidth", "flops", "fp8_flops")}
    engine = {name: getattr(options, name) for name in ENGINE_OPTIONS}
    if options.verbosity == QUIET:
        engine["use_tqdm"] = False
    run_bench(options.model, options.workload, options.passes, sampling, ceilings, engine, options.json)
    return 0


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the process where an argument would fail after minutes of work. (Of the engine's options LLM does so.)"""
    if options.passes < 1:
        parser.error(f"--passes {options.passes}: must be 1 or more")
    for name in ("bandwidth", "flops", "fp8_flops"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} {value}: must be a number > 0")
    try:
        SamplingParams(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    except ValueError as error:
        parser.error(str(error))
    if options.workload is not None:
        options.workload = list(dict.fromkeys(options.workload))
    if options.json is not None:
        file = Path(options.json).expanduser()
        try:
            # As it will be written, but without a trace: an older file keeps its content until then.
            exists = file.exists()
            file.open("a").close()
            if not exists:
                file.unlink()
        except (OSError, ValueError) as error:
            parser.error(f"--json {options.json}: cannot be written: {getattr(error, 'strerror', None) or error}")
        options.json = file
