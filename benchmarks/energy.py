"""Joules: what decode attention, a layer's products and a workload take from the card.

python benchmarks/energy.py attention --json out.json
python benchmarks/energy.py products --model 8B --tokens 64 128 256 16000
python benchmarks/energy.py workload --model 8B --workload bench

At its power limit (700 W for an H200) a card lowers its clock, and then not time but energy counts: what takes fewer
joules is the faster one. `attention` and `products` repeat a CUDA graph for half a second, after as long to get
there, and readings of the same differ by some percent; `workload` runs the prompts with one token each, which is
their prefill, and in full. By the card's own counter of energy. Needs nvidia-ml-py.
"""

import argparse
import json
import time
from itertools import count
from math import ceil
from pathlib import Path

import torch
from attention_decode import HEAD_DIM, KV_HEADS, Case, ours
from decode_layers import Layers
from gpus import require_gpus
from in_a_row import Card, in_a_row
from layer_shapes import GATE_UP, layer_shapes, model_name
from quack_products import by_engine, the_package
from workloads import TEMPERATURE, WORKLOADS

from nanovllm import LLM, SamplingParams
from nanovllm.engine.runner.cuda_graphs import MAX_GRAPH_BATCH_SIZE
from nanovllm.kernels.decode_config import choose_config
from nanovllm.layers.quack_tiles import padded_batch
from nanovllm.utils.context import Context, step_context

# Batch, shortest and longest context, query heads; 8 KV heads.
SHAPES = [(256, 590, 610, 16), (128, 100, 1100, 16), (64, 600, 1400, 16), (128, 2000, 3500, 16), (192, 300, 1500, 32)]
NUM_LAYERS = 6
PADDING = 128  # rows, and no more
MIN_SECONDS = 3.0


def measure_attention(card: Card) -> list[dict]:
    rows = []
    for batch, low, high, num_heads in SHAPES:
        case = Case(batch, low, high, num_heads, KV_HEADS)
        without = choose_config(batch * KV_HEADS, HEAD_DIM, 2)
        for name, config in (("in use", None), ("without the memory accelerator", without)):
            attend = ours(case, None, config)

            def run(attend=attend, case=case):
                for k, v in case.caches:
                    attend(k, v)

            reading = in_a_row(card, run, len(case.caches))
            print(f"{batch} x {low}..{high}, {num_heads} heads, {name:31} {reading}", flush=True)
            shape = {"batch": batch, "low": low, "high": high, "heads": num_heads}
            rows.append({**shape, "kernel": name, **reading._asdict()})
    return rows


def measure_products(card: Card, model: str, tokens: list[int]) -> list[dict]:
    rows, quack, shapes = [], the_package(), layer_shapes(model)
    layers = Layers(shapes, max(tokens) + PADDING, NUM_LAYERS)
    products = by_engine(layers, quack)
    for n in tokens:
        is_prefill = n > MAX_GRAPH_BATCH_SIZE
        # As the engine has them: a decode step may be padded to whole tiles.
        used = n if is_prefill or quack is None else padded_batch(n, *shapes[GATE_UP], quack.num_multiprocessors)
        residual = layers.start[:used].clone()
        with step_context(Context(is_prefill=is_prefill)):
            reading = in_a_row(card, lambda residual=residual: layers.run(residual, products), NUM_LAYERS)
        print(f"{model} a layer's products and norms, {n:5} tokens in {used:5} rows {reading}", flush=True)
        rows.append({"model": model, "tokens": n, "rows": used, **reading._asdict()})
    return rows


def measure_workload(card: Card, model: str, name: str) -> list[dict]:
    """Its prefill, each request for one token, and all of it, a pass: of as many as last MIN_SECONDS, with fresh
    prompts, after one that is not counted."""
    rows, workload, index = [], WORKLOADS[name], count()
    with LLM(model, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, seed=0) as llm:

        def draw(is_prefill: bool) -> tuple[list[list[int]], list[SamplingParams]]:
            prompts, outputs = workload.draw(next(index))
            lens = [1 if is_prefill else n for n in outputs]
            return prompts, [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in lens]

        def run(passes: list[tuple]) -> float:
            """Seconds."""
            start = time.perf_counter()
            for prompts, params in passes:
                llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - start

        for part in ("prefill", "all"):
            is_prefill = part == "prefill"
            num_passes = ceil(MIN_SECONDS / run([draw(is_prefill)]))
            passes = [draw(is_prefill) for _ in range(num_passes)]
            joules = card.joules()
            seconds, joules = run(passes), card.joules() - joules
            row = {"seconds": seconds / num_passes, "joules": joules / num_passes, "watts": joules / seconds}
            print(f"{model} {name}, {part}:", " ".join(f"{key} {row[key]:.3f}" for key in row), flush=True)
            rows.append({"model": model, "workload": name, "part": part, "passes": num_passes, **row})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["attention", "products", "workload"])
    parser.add_argument("--model", default="8B", type=model_name, help="0.6B and so on")
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 128, 192, 256, 16000])
    parser.add_argument("--workload", choices=WORKLOADS, default="bench")
    parser.add_argument("--json")
    args = parser.parse_args()
    require_gpus(parser)
    card = Card()
    torch.manual_seed(0)
    if args.what == "attention":
        rows = measure_attention(card)
    elif args.what == "products":
        rows = measure_products(card, args.model, args.tokens)
    else:
        rows = measure_workload(card, f"Qwen3-{args.model}", args.workload)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
