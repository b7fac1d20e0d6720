"""Launch constants of the linear layers for decode batches, swept on a GPU against cuBLAS.

python benchmarks/decode_linear.py --json out.json             # the sweep, then whole layers with its best constants
python benchmarks/decode_linear.py --layer --shapes 0.6B 8B    # only the layers, with what choose_config picks

A case is timed as a CUDA graph of successive calls, each with weights of its own, so that L2 holds none of them when
their turn comes again. Before each product stands an rms_norm of its input, as in a layer, on either side of the
comparison: with programmatic dependent launch the product begins while the norm still runs. cuBLAS's side counts the
activation's launch and adds to the residual in the product's. Each config is compiled by worker processes first
(Triton's cache on disk hands the results over) and checked against torch in float32. Of more than 64 tokens only those
products are swept that the engine gives to these kernels. `8B-tp2` is what one of two GPUs multiplies, without the
sums over both.
"""

import argparse
import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from decode_layers import EPS, REPLAYS, time_layers
from gpus import require_gpus
from graph_timing import time_graph
from layer_shapes import layer_shapes, model_name

from nanovllm.kernels.decode_linear import linear, linear_add, linear_silu
from nanovllm.kernels.decode_linear_kernel import (
    MAX_TOKENS,
    TILE_TOKENS,
    DecodeLinearConfig,
    choose_config,
    make_arrivals,
)
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.decode_linear import most_tokens

# Several times L2's 60 MB, in at least so many weights.
MIN_WEIGHT_BYTES, MIN_WEIGHTS = 240 * 10**6, 8
# Of results of order one, in a few bfloat16 roundings: more is a wrong result.
MAX_ERROR = 0.06


class Case(NamedTuple):
    """One product at one batch size: its model, its name, tokens M and its weight's [N, K]."""

    model: str
    name: str
    M: int
    N: int
    K: int


def make_configs(case: Case) -> list[DecodeLinearConfig]:
    """A handful or two, of two tiles of tokens four dozen, the default first. Stages of about 100 KiB let the next
    launch's programs in beside them."""
    default, C = choose_config(case.N, case.K, math.ceil(case.M / TILE_TOKENS)), DecodeLinearConfig
    if case.M > TILE_TOKENS:
        configs = [
            C(rows, tile_k, splits, stages // (2 * (TILE_TOKENS + rows) * tile_k))
            for rows in (16, 32, 64)
            for tile_k in (64, 128)
            for splits in (1, 2, 4, 8)
            for stages in (98304, 160 * 1024)
        ]
    elif case.model == "0.6B":
        configs = [
            default._replace(num_stages=4),
            default._replace(num_stages=6),
            default._replace(prefetch=1024 - default.prefetch),
            C(16, 256, default.splits // 2 or 1, num_stages=4),
            C(64, 128, default.splits, num_stages=3),
        ]
    else:
        few_rows = case.N <= 8192
        configs = [
            C(rows, tile_k, splits, 98304 // (2 * (TILE_TOKENS + rows) * tile_k), 0)
            for rows in (32, 64, 128)
            for tile_k in (64, 128)
            for splits in ((1, 2, 4) if few_rows else (1,))
        ]
    return list(dict.fromkeys([default, *configs]))


class Layer:
    """A case's tensors; `call` runs our functions and `cublas` torch's path on the i-th weight."""

    def __init__(self, case: Case, num_weights: int):
        _, self.name, M, N, K = case
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.weights = [torch.randn(N, K, **bf16) * K**-0.5 for _ in range(num_weights)]
        self.x = torch.randn(M, K, **bf16)
        self.norm_weight = 1 + 0.1 * torch.randn(K, **bf16)
        self.start = torch.randn(M, N, **bf16) if self.name.endswith("add") else None
        self.residual = self.start.clone() if self.start is not None else None
        self.arrivals = make_arrivals("cuda")

    def norm(self) -> torch.Tensor:
        return rms_norm(self.x, self.norm_weight, EPS)

    def call(self, i: int, config: DecodeLinearConfig | None) -> torch.Tensor:
        x, weight = self.norm(), self.weights[i % len(self.weights)]
        options = {"config": config, "arrivals": self.arrivals, "pdl": True}
        if self.residual is not None:
            return linear_add(x, weight, self.residual, **options)
        return linear_silu(x, weight, **options) if self.name.endswith("silu") else linear(x, weight, **options)

    def cublas(self, i: int) -> torch.Tensor:
        x, weight = self.norm(), self.weights[i % len(self.weights)]
        if self.residual is not None:
            return self.residual.addmm_(x, weight.t())
        y = F.linear(x, weight)
        return silu_and_mul(y) if self.name.endswith("silu") else y

    def error(self, config: DecodeLinearConfig | None) -> float:
        """Largest deviation from float32, over what a value of that size may be rounded by."""
        expected = F.linear(self.norm().float(), self.weights[0].float())
        if self.name.endswith("silu"):
            gate, up = expected.chunk(2, -1)
            expected = F.silu(gate) * up
        if self.residual is not None:
            self.residual.copy_(self.start)
            expected += self.start.float()
        actual = self.call(0, config).float()
        return ((actual - expected).abs() / expected.abs().clamp(min=1.0)).max().item()


def compile_config(case: Case, config: DecodeLinearConfig) -> None:
    """Leave the kernel in Triton's cache; what fails here will fail, and be reported, in the timing."""
    Layer(case, 1).call(0, config)


def time_calls(call, num_calls: int) -> float:
    """Microseconds a call of `call(i)`, i = 0, 1, ..., in a CUDA graph."""

    def run():
        for i in range(num_calls):
            call(i)

    return time_graph(run, num_calls, REPLAYS)


def sweep(case: Case, configs: list[DecodeLinearConfig]) -> dict:
    """Every config's time, cuBLAS's and that of the norm alone; what fails is kept as text."""
    weight_bytes = case.N * case.K * 2
    num_calls = max(MIN_WEIGHTS, math.ceil(MIN_WEIGHT_BYTES / weight_bytes))
    layer = Layer(case, num_calls)
    swept = {
        "case": case._asdict(),
        "norm_us": time_calls(lambda i: layer.norm(), num_calls),
        "cublas_us": time_calls(layer.cublas, num_calls),
        "results": [],
    }
    for config in configs:
        result = {"config": config._asdict()}
        try:
            result["max_error"] = layer.error(config)
            result["us"] = time_calls(lambda i, c=config: layer.call(i, c), num_calls)
        except Exception as error:
            result["failed"] = f"{type(error).__name__}: {error}"[:300]
        swept["results"].append(result)
    return swept


def rank(swept: dict) -> list[dict]:
    """The results that are right, the fastest first."""
    return sorted((r for r in swept["results"] if "us" in r and r["max_error"] < MAX_ERROR), key=lambda r: r["us"])


def describe(swept: dict) -> str:
    """A line on a case: the norm's time alone, cuBLAS's, the default config's, and the best three."""
    case, results, good = swept["case"], swept["results"], rank(swept)
    head = f"{case['model']:6} {case['name']:12} {case['M']:>3} {swept['norm_us']:5.2f} {swept['cublas_us']:6.2f}"
    best = "".join(f"  {r['us']:5.2f} {','.join(map(str, r['config'].values()))}" for r in good[:3])
    bad = "".join(
        f"\n    {','.join(map(str, r['config'].values()))}: {r.get('failed') or r['max_error']}"
        for r in results
        if r not in good
    )
    return f"{head} {results[0].get('us', math.nan):6.2f} |{best}{bad}"


def compile_all(todo: dict[Case, list[DecodeLinearConfig]], num_workers: int, seconds: float) -> None:
    start = time.perf_counter()
    # The kernel depends neither on the number of tokens nor, but for being a multiple of 16, on that of rows.
    variants = {(case.name.split()[-1], case.K, config): case for case, configs in todo.items() for config in configs}
    pool = ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn"))
    compiled = [pool.submit(compile_config, case, config) for (_, _, config), case in variants.items()]
    wait(compiled, timeout=seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"compiled {len(variants)} in {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=model_name, default=["0.6B"], help="0.6B ... 32B, 8B-tp2 ...")
    parser.add_argument(
        "--tokens", nargs="+", type=int, choices=range(1, MAX_TOKENS + 1), metavar="1..128", default=[32, 64]
    )
    parser.add_argument("--json", help="file for all results")
    parser.add_argument("--layer", action="store_true", help="no sweep: whole layers with the default constants")
    parser.add_argument("--seconds", type=float, default=35, help="cases that would begin later are left out")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    args = parser.parse_args()
    require_gpus(parser)
    start = time.perf_counter()
    # Batch sizes before products: what is left out for want of time leaves whole layers behind.
    cases = [
        Case(model, name, M, *NK)
        for M in args.tokens
        for model in args.shapes
        for name, NK in layer_shapes(model).items()
        if most_tokens(NK[0]) >= M
    ]
    todo = {case: make_configs(case)[: 1 if args.layer else None] for case in cases}
    compile_all(todo, args.workers, 0.6 * args.seconds)
    found = {"cases": [], "layers": []}
    best = {}
    if not args.layer:
        print("model, product, tokens, norm us, with it: cuBLAS us, default us | best three us, config", flush=True)
        for case, configs in todo.items():
            if time.perf_counter() - start > args.seconds:
                print(f"{case}: no time left")
                continue
            try:
                found["cases"].append(sweep(case, configs))
                print(describe(found["cases"][-1]), flush=True)
                best[case] = DecodeLinearConfig(**rank(found["cases"][-1])[0]["config"])
            except Exception as error:
                print(f"{case}: {type(error).__name__}: {error}", flush=True)
            torch.cuda.empty_cache()
    for model in args.shapes:
        of_model = {
            M: {case.name: config for case, config in best.items() if (case.model, case.M) == (model, M)}
            for M in args.tokens
        }
        found["layers"] += time_layers(model, args.tokens, of_model)
        torch.cuda.empty_cache()
    if args.json:
        Path(args.json).write_text(json.dumps(found))
    print(f"done after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
