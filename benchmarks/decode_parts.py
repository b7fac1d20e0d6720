"""What the parts of a decode step cost where they are: the step's time with all of them, and with some left out.

    python benchmarks/decode_parts.py --model Qwen3-0.6B --shapes 64x600 128x600 256x600 --json out.json

Microseconds a replay of the step's CUDA graph with the same inputs, median of several. What a step without a part
computes means nothing. Kernels overlap, so that a part can cost less than its kernel's own time. With few sequences the
norms are parts of the products, and cannot be left out. Random weights.
"""

import argparse
import json
from pathlib import Path
from random import Random
from statistics import median

import torch
from gpus import require_gpus

import nanovllm.layers.layernorm as norms
import nanovllm.models.qwen3 as qwen3
from nanovllm import LLM, SamplingParams
from nanovllm.layers.attention import Attention
from nanovllm.utils.context import get_context

SHAPES = ["64x600", "128x600", "256x600", "512x100"]
ROUNDS, REPLAYS = 5, 20
ROPE, NORM, ATTENTION = "norm, RoPE and cache write", "other norms", "attention"
LEFT_OUT = [(), (ROPE,), (NORM,), (ROPE, NORM), (ATTENTION,), (ROPE, NORM, ATTENTION)]

_rope, _norm, _attend = qwen3.qk_norm_rope_store, norms.rms_norm, Attention.forward


def leave_out(parts: tuple[str, ...]) -> None:
    """Have the engines made from now on decode without these."""

    def rope(*args, **options):
        if get_context().is_prefill:
            _rope(*args, **options)

    def norm(x, weight, eps):
        return _norm(x, weight, eps) if get_context().is_prefill else x

    def attend(self, q, k, v, context):
        return _attend(self, q, k, v, context) if context.is_prefill else q

    qwen3.qk_norm_rope_store = rope if ROPE in parts else _rope
    norms.rms_norm = norm if NORM in parts else _norm
    Attention.forward = attend if ATTENTION in parts else _attend


def step_micros(llm: LLM, batch: int, context: int) -> float:
    rng = Random(batch)
    for _ in range(batch):
        prompt = [rng.randint(0, 10000) for _ in range(context)]
        llm.add_request(prompt, SamplingParams(temperature=0.6, max_tokens=2, ignore_eos=True))
    while llm.scheduler.waiting:
        llm.step()
    runner = llm.model_runner
    if len(llm.scheduler.running) != batch:
        raise RuntimeError(f"{batch} sequences of {context} tokens do not run at once")
    size = runner.graphs.padded(batch)
    runner.prepare_decode(list(llm.scheduler.running), runner.decode_inputs.padded[size])
    micros = []
    for _ in range(ROUNDS + 1):  # the first one until the clocks are up
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPLAYS):
            runner.graphs.replay(size)
        end.record()
        end.synchronize()
        micros.append(1e3 * start.elapsed_time(end) / REPLAYS)
    llm.abort_request()
    return median(micros[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-0.6B", help="a published shape")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="BATCHxCONTEXT")
    parser.add_argument("--json")
    args = parser.parse_args()
    require_gpus(parser)
    rows = []
    for parts in LEFT_OUT:
        leave_out(parts)
        with LLM(args.model, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096) as llm:
            micros = {shape: step_micros(llm, *map(int, shape.split("x"))) for shape in args.shapes}
        rows.append({"model": args.model, "without": parts, "us": micros})
        name = f"without {' and '.join(parts)}" if parts else "all of it"
        print(f"{name:70}", *(f"{shape} {us:.0f}" for shape, us in micros.items()), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
