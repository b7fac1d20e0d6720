"""Launch constants of the fused linear layers for small batches, swept on a GPU, against torch's unfused path.

python benchmarks/skinny_linear.py --json out.json             # Qwen3-0.6B at 1, 4 and 16 tokens, 8B at one
python benchmarks/skinny_linear.py --models 4B 8B-tp2 --tokens 1 2 --seconds 150

A case is timed as a CUDA graph of successive calls, each with weights of its own, so that L2 holds none of them when
their turn comes again. Each config is compiled by worker processes first (Triton's cache on disk hands the results
over), checked against torch, and timed as a dependent launch. The unfused path counts the kernels that a layer adds to
a step: an addition to the residual shares the launch of the norm that follows it.
"""

import argparse
import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, wait
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from gpus import require_gpus
from graph_timing import time_graph
from layer_shapes import layer_shapes, model_name

from nanovllm.kernels import skinny_linear as kernels
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.kernels.skinny_kernel import MAX_TOKENS, SkinnyConfig, choose_config

CALLS = 28
# Several times L2's 60 MB, and no more than needs to be filled.
MIN_WEIGHT_BYTES, MAX_WEIGHT_BYTES = 240 * 10**6, 1200 * 10**6
REPLAYS = 15
EPS = 1e-6


class Case(NamedTuple):
    """One layer at one batch size: the function, tokens M and its weight's [N, K]."""

    function: str
    M: int
    N: int
    K: int


FUNCTIONS = ("norm_linear", "linear_add", "norm_linear_silu", "linear_add")


def make_cases(models: list[str], tokens: list[int] | None) -> list[Case]:
    return [
        Case(function, M, N, K)
        for model in models
        for M in tokens or ((1, 4, 16) if model == "0.6B" else (1,))
        for function, (N, K) in zip(FUNCTIONS, layer_shapes(model).values(), strict=True)
    ]


def make_configs(case: Case) -> list[SkinnyConfig]:
    """A dozen or so, from four tokens on up to 52; the default first."""
    function, M, N, K = case
    padded_k = 1 << (K - 1).bit_length()
    configs = [choose_config(M, N, K, 2, function.startswith("norm"))]
    if M <= 4:
        # A tile that K is no multiple of is read in part; one that is too long for the registers has less on its way.
        for tile in (512, 1024, 2048, 4096):
            if tile <= padded_k:
                warps = {max(1, tile // 1024), tile // 512} if M == 1 else {tile // 512, min(8, tile // 256)}
                rows = (4, 8) if tile <= 1024 else (2, 4)
                configs += [SkinnyConfig(r, tile, w) for r in rows for w in sorted(warps)]
        configs += [SkinnyConfig(4, 1024, warps, prefetch=min(padded_k, 4096)) for warps in (1, 4)]
    if M >= 4:
        shapes = [(256, 2), (256, 4), (512, 4), (1024, 4), (1024, 8), *([(2048, 8)] if K >= 2048 else [])]
        for rows, (tile, warps), prefetch in product((8, 16, 32), shapes, (0, padded_k)):
            configs.append(SkinnyConfig(rows, tile, warps, True, prefetch))
    return list(dict.fromkeys(configs))


class Layer:
    """A case's tensors; `call` runs the fused function and `unfused` torch's path on the i-th weight."""

    def __init__(self, case: Case, num_weights: int):
        self.function, M, N, K = case
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.weights = [torch.randn(N, K, **bf16) * K**-0.5 for _ in range(num_weights)]
        self.x = torch.randn(M, K, **bf16)
        self.norm_weight = 1 + 0.1 * torch.randn(K, **bf16)
        self.start = torch.randn(M, N, **bf16)
        self.residual = self.start.clone()

    def call(self, i: int, config: SkinnyConfig | None) -> torch.Tensor:
        weight = self.weights[i % len(self.weights)]
        function = getattr(kernels, self.function)
        if self.function.startswith("norm"):
            return function(self.x, self.norm_weight, EPS, weight, config=config, pdl=True)
        return function(self.x, weight, self.residual, config=config, pdl=True)

    def unfused(self, i: int) -> torch.Tensor:
        x = self.x
        if self.function.startswith("norm"):
            x = rms_norm(x, self.norm_weight, EPS)
        y = F.linear(x, self.weights[i % len(self.weights)])
        return silu_and_mul(y) if self.function == "norm_linear_silu" else y

    def error(self, config: SkinnyConfig | None) -> float:
        """Largest deviation from the unfused path; results are of order one."""
        self.residual.copy_(self.start)
        actual, expected = self.call(0, config).float(), self.unfused(0).float()
        return (actual - expected - (0 if self.function.startswith("norm") else self.start.float())).abs().max().item()


def compile_config(case: Case, config: SkinnyConfig) -> None:
    """Leave the kernel in Triton's cache; what fails here will fail, and be reported, in the timing."""
    Layer(case, 1).call(0, config)


def time_calls(call, num_calls: int) -> float:
    """Microseconds a call of `call(i)`, i = 0, 1, ..., in a CUDA graph."""

    def run():
        for i in range(num_calls):
            call(i)

    return time_graph(run, num_calls, REPLAYS)


def sweep(case: Case, configs: list[SkinnyConfig]) -> dict:
    """Every config's time and the unfused path's; what fails is kept as text."""
    weight_bytes = case.N * case.K * 2
    num_weights = max(min(CALLS, MAX_WEIGHT_BYTES // weight_bytes), math.ceil(MIN_WEIGHT_BYTES / weight_bytes))
    num_calls = max(CALLS, num_weights)
    layer = Layer(case, num_weights)
    unfused = time_calls(layer.unfused, num_calls)
    results = []
    for config in configs:
        result = {"config": config._asdict()}
        try:
            result["max_error"] = layer.error(config)
            result["us"] = time_calls(lambda i, c=config: layer.call(i, c), num_calls)
            result["TB_s"] = weight_bytes / result["us"] * 1e-6
        except Exception as error:
            result["failed"] = f"{type(error).__name__}: {error}"[:300]
        results.append(result)
    return {"case": case._asdict(), "weight_bytes": weight_bytes, "unfused_us": unfused, "results": results}


def describe(swept: dict) -> str:
    """A line on a case: unfused time, the default config's, and the best three."""
    case, results = swept["case"], swept["results"]
    # An error beyond a few bf16 roundings is a wrong result.
    good = sorted((r for r in results if "us" in r and r["max_error"] < 0.1), key=lambda r: r["us"])
    head = f"{case['function']:16} M={case['M']:<2} {case['N']:>5}x{case['K']:<5} {swept['unfused_us']:7.2f}"
    default = results[0].get("us", math.nan)
    best = "".join(f"  {r['us']:7.2f} us {r['TB_s']:.2f} TB/s {tuple(r['config'].values())}" for r in good[:3])
    bad = f"  {len(results) - len(good)} failed or wrong" if len(good) < len(results) else ""
    return f"{head} | {default:7.2f} |{best}{bad}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", type=model_name, default=["0.6B", "8B"], help="0.6B ... 32B, 8B-tp2 ...")
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        choices=range(1, MAX_TOKENS + 1),
        metavar="1..16",
        help="default: 1, 4 and 16 for 0.6B, 1 for others",
    )
    parser.add_argument("--json", help="file for all results")
    parser.add_argument("--seconds", type=float, default=90, help="cases that would begin later are left out")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    args = parser.parse_args()
    require_gpus(parser)
    start = time.perf_counter()
    todo = [(case, make_configs(case)) for case in make_cases(args.models, args.tokens)]
    swept = []
    pool = ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn"))
    compiled = [pool.submit(compile_config, case, config) for case, configs in todo for config in configs]
    wait(compiled, timeout=0.7 * args.seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    print("function, tokens, weight, unfused us | default us | best three (rows, tile, warps, cores, prefetch)")
    for case, configs in todo:
        if time.perf_counter() - start > args.seconds:
            print(f"{case}: no time left")
            continue
        try:
            swept.append(sweep(case, configs))
            print(describe(swept[-1]), flush=True)
        except Exception as error:
            print(f"{case}: {type(error).__name__}: {error}", flush=True)
        torch.cuda.empty_cache()
        if args.json:
            Path(args.json).write_text(json.dumps(swept))
    print(f"done after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
