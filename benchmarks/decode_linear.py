"""Launch constants of the linear layers for decode batches, swept on a GPU for Qwen3-0.6B's shapes, against cuBLAS.

python benchmarks/decode_linear.py --json out.json     # the sweep, then whole layers with its best constants
python benchmarks/decode_linear.py --layer             # only the layers, with the constants that choose_config picks

A case is timed as a CUDA graph of successive calls, each with weights of its own, so that L2 holds none of them when
their turn comes again. Before each product stands an rms_norm of its input, as in a layer, on either side of the
comparison: with programmatic dependent launch the product begins while the norm still runs. cuBLAS's side counts the
activation's launch and adds to the residual in the product's. Each config is compiled by worker processes first
(Triton's cache on disk hands the results over) and checked against torch in float32.
"""

import argparse
import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels.decode_linear import linear, linear_add, linear_silu
from nanovllm.kernels.decode_linear_kernel import DecodeLinearConfig, choose_config, make_arrivals
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul

TOKENS = (32, 64, 96, 128, 192, 256)
HIDDEN, INTERMEDIATE, QKV, Q = 1024, 3072, 4096, 2048
NUM_LAYERS = 28
# Several times L2's 60 MB.
MIN_WEIGHT_BYTES = 240 * 10**6
REPLAYS = 15
EPS = 1e-6
# Of results of order one, in a few bfloat16 roundings: more is a wrong result.
MAX_ERROR = 0.06


class Case(NamedTuple):
    """One product at one batch size: its name, tokens M and its weight's [N, K]."""

    name: str
    M: int
    N: int
    K: int


SHAPES = {
    "qkv": (QKV, HIDDEN),
    "o add": (HIDDEN, Q),
    "gate_up silu": (2 * INTERMEDIATE, HIDDEN),
    "down add": (HIDDEN, INTERMEDIATE),
}


def make_cases() -> list[Case]:
    return [Case(name, M, *shape) for name, shape in SHAPES.items() for M in TOKENS]


def make_configs(case: Case) -> list[DecodeLinearConfig]:
    """A dozen or so, the default first. Stages of about 100 KiB let the next launch's programs in beside them."""
    C, (_, M, N, K) = DecodeLinearConfig, case
    if N > HIDDEN:
        configs = [
            C(64, 64, 64, num_stages=6),
            C(64, 64, 128, num_stages=3),
            C(64, 64, 128, num_stages=3, prefetch=1024),
            C(64, 64, 128, num_stages=3, prefetch=0),
            C(64, 32, 128, num_stages=4),
        ]
        if M <= 64:
            configs += [
                C(32, 32, 128, num_stages=5),
                C(32, 32, 256, num_stages=4),
                C(32, 64, 128, num_stages=4),
                C(64, 32, 256, num_stages=4),
                C(64, 64, 128, splits=2),
                C(64, 32, 128, num_stages=6, prefetch=1024),
            ]
        else:
            configs += [
                C(64, 64, 128, num_stages=6),
                C(64, 128, 64, num_stages=4),
                C(64, 128, 64, num_warps=8, num_stages=4),
                C(128, 32, 128, num_stages=3),
                C(128, 64, 64, num_stages=4),
                C(128, 64, 64, num_warps=8, num_stages=4),
                C(128, 64, 128, num_warps=8, num_stages=4),
                C(128, 128, 64, splits=2, num_warps=8, num_stages=4),
                C(128, 128, 64, num_warps=8, num_stages=6),
            ]
    else:
        configs = [
            C(64, 64, 128, splits=4),
            C(64, 64, 128, splits=4, prefetch=512),
            C(64, 64, 128, splits=4, prefetch=0),
            C(64, 32, 128, splits=2, num_stages=4),
            C(64, 32, 128, splits=4, num_stages=4),
            C(64, 16, 128, num_stages=4),
        ]
        if M <= 64:
            configs += [
                C(32, 16, 256, num_stages=4),
                C(32, 32, 128, splits=2, num_stages=5),
                C(32, 32, 128, splits=4, num_stages=5),
                C(32, 64, 128, splits=4, num_stages=4),
                C(64, 16, 128, splits=2, num_stages=4),
                C(64, 16, 256, num_stages=4),
                C(64, 64, 128, splits=8),
            ]
        else:
            configs += [
                C(32, 32, 128, num_stages=5),
                C(64, 32, 128, num_stages=6),
                C(64, 64, 128, splits=2),
                C(64, 64, 64, splits=4, num_stages=6),
                C(128, 32, 128, splits=2, num_stages=3),
                C(128, 32, 64, splits=4, num_stages=5),
                C(128, 64, 64, splits=4, num_warps=8, num_stages=4),
                C(128, 64, 64, splits=8, num_warps=8, num_stages=4),
            ]
    return list(dict.fromkeys([choose_config(M, N, K), *configs]))


class Layer:
    """A case's tensors; `call` runs our functions and `cublas` torch's path on the i-th weight."""

    def __init__(self, case: Case, num_weights: int):
        self.name, M, N, K = case
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


class Model:
    """28 layers without their attention, of which the query rows of the first product stand for the outcome."""

    def __init__(self):
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.layers = [
            {name: torch.randn(N, K, **bf16) * K**-0.5 for name, (N, K) in SHAPES.items()} for _ in range(NUM_LAYERS)
        ]
        self.norm_weight = 1 + 0.1 * torch.randn(HIDDEN, **bf16)
        self.start = torch.randn(max(TOKENS), HIDDEN, **bf16)
        self.arrivals = make_arrivals("cuda")

    def cublas(self, residual: torch.Tensor) -> None:
        for qkv, o, gate_up, down in map(dict.values, self.layers):
            y = F.linear(rms_norm(residual, self.norm_weight, EPS), qkv)
            residual.addmm_(y[:, :Q], o.t())
            y = silu_and_mul(F.linear(rms_norm(residual, self.norm_weight, EPS), gate_up))
            residual.addmm_(y, down.t())

    def ours(self, residual: torch.Tensor, configs: dict[str, DecodeLinearConfig], pdl: bool = True) -> None:
        options = {name: {"config": configs.get(name), "arrivals": self.arrivals, "pdl": pdl} for name in SHAPES}
        for qkv, o, gate_up, down in map(dict.values, self.layers):
            y = linear(rms_norm(residual, self.norm_weight, EPS), qkv, **options["qkv"])
            linear_add(y[:, :Q], o, residual, **options["o add"])
            y = linear_silu(rms_norm(residual, self.norm_weight, EPS), gate_up, **options["gate_up silu"])
            linear_add(y, down, residual, **options["down add"])


def compile_config(case: Case, config: DecodeLinearConfig) -> None:
    """Leave the kernel in Triton's cache; what fails here will fail, and be reported, in the timing."""
    Layer(case, 1).call(0, config)


def time_graph(run, num_calls: int) -> float:
    """Microseconds a call in `run`, which makes num_calls of them, as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    graph.replay()
    micros = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        micros.append(1e3 * start.elapsed_time(end) / num_calls)
    return median(micros)


def time_calls(call, num_calls: int) -> float:
    """Microseconds a call of `call(i)`, i = 0, 1, ..., in a CUDA graph."""

    def run():
        for i in range(num_calls):
            call(i)

    return time_graph(run, num_calls)


def sweep(case: Case, configs: list[DecodeLinearConfig]) -> dict:
    """Every config's time, cuBLAS's and that of the norm alone; what fails is kept as text."""
    weight_bytes = case.N * case.K * 2
    num_calls = max(NUM_LAYERS, math.ceil(MIN_WEIGHT_BYTES / weight_bytes))
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
    head = f"{case['name']:12} {case['M']:>3} {swept['norm_us']:5.2f} {swept['cublas_us']:6.2f}"
    best = "".join(f"  {r['us']:5.2f} {','.join(map(str, r['config'].values()))}" for r in good[:3])
    bad = "".join(
        f"\n    {','.join(map(str, r['config'].values()))}: {r.get('failed') or r['max_error']}"
        for r in results
        if r not in good
    )
    return f"{head} {results[0].get('us', math.nan):6.2f} |{best}{bad}"


def time_layers(best: dict[Case, DecodeLinearConfig]) -> list[dict]:
    """Whole layers: microseconds each by cuBLAS, by our functions with `best` or the default constants, with dependent
    launches and without; whether these two give the same bits, and how far cuBLAS's results are, relative to their
    norm."""
    model = Model()
    rows = []
    for M in TOKENS:
        configs = {case.name: config for case, config in best.items() if case.M == M}
        residual = model.start[:M].clone()
        results = []
        for run in (
            model.cublas,
            partial(model.ours, configs=configs, pdl=False),
            partial(model.ours, configs=configs),
        ):
            residual.copy_(model.start[:M])
            run(residual)
            results.append(residual.float())
        row = {
            "M": M,
            "same_bits": torch.equal(results[1], results[2]),
            "distance": ((results[0] - results[2]).norm() / results[0].norm()).item(),
            "cublas_us": time_graph(lambda r=residual: model.cublas(r), NUM_LAYERS),
            "ordinary_us": time_graph(lambda r=residual, c=configs: model.ours(r, c, pdl=False), NUM_LAYERS),
            "dependent_us": time_graph(lambda r=residual, c=configs: model.ours(r, c), NUM_LAYERS),
        }
        rows.append(row)
        print("layer  " + "  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for all results")
    parser.add_argument("--layer", action="store_true", help="no sweep: whole layers with the default constants")
    parser.add_argument("--seconds", type=float, default=90, help="cases that would begin later are left out")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    args = parser.parse_args()
    start = time.perf_counter()
    todo = {case: [choose_config(*case[1:])] if args.layer else make_configs(case) for case in make_cases()}
    # The kernel doesn't depend on the number of tokens.
    variants = {(case.name, config): case for case, configs in todo.items() for config in configs}
    pool = ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn"))
    compiled = [pool.submit(compile_config, case, config) for (_, config), case in variants.items()]
    wait(compiled, timeout=0.6 * args.seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"compiled {len(variants)} after {time.perf_counter() - start:.0f} s", flush=True)
    found = {"cases": [], "layers": []}
    best = {}
    if not args.layer:
        print("product, tokens, norm us, with it: cuBLAS us, default us | best three us, config", flush=True)
        # Batch sizes before products: what is left out for want of time leaves whole layers behind.
        for case in sorted(todo, key=lambda case: case.M):
            if time.perf_counter() - start > args.seconds:
                print(f"{case}: no time left")
                continue
            try:
                found["cases"].append(sweep(case, todo[case]))
                print(describe(found["cases"][-1]), flush=True)
                best[case] = DecodeLinearConfig(**rank(found["cases"][-1])[0]["config"])
            except Exception as error:
                print(f"{case}: {type(error).__name__}: {error}", flush=True)
            torch.cuda.empty_cache()
    found["layers"] = time_layers(best)
    if args.json:
        Path(args.json).write_text(json.dumps(found))
    print(f"done after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
