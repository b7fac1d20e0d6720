"""How fast are products of weights in 4 bits beside bfloat16 and the floor, and with which constants?

    python benchmarks/products_4bit.py --json out.json
    python benchmarks/products_4bit.py --products 8B --tokens 1 16 --seconds 60 --json out.json
    python benchmarks/products_4bit.py --format mxfp4 --products gpt-oss --json out.json

Each product is timed with what stands before and after it in a layer: the norm of q, k, v and of gate and up, the
activation of gate and up, the sum with the residual stream of o, down and experts. A candidate that leaves the
activation to the next product's first launch is timed without it there, and with such a launch before down. Launches
are captured in a graph, over several weights that are together larger than the L2 cache. A result that is not the
default candidate's is named with its distance instead of a time. bfloat16 is cuBLAS, and for experts our tiles.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from graph_timing import time_graph
from required_gpus import require_gpus
from torch import Tensor

from nanovllm.kernels.launch import compile_ahead
from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.all_formats import QUANTIZATIONS
from nanovllm.layers.formats.format import Weight, WeightFormat
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates import make_candidates
from nanovllm.layers.matmul.problem import ExpertsProblem, Problem
from nanovllm.layers.matmul.table import Key


class Product(NamedTuple):
    operation: str
    N: int  # of experts the rows of gate and up
    K: int
    experts: int = 1
    top_k: int = 1


PRODUCTS = {
    "8B qkv": Product("linear", 6144, 4096),
    "8B o": Product("linear_add", 4096, 4096),
    "8B gate_up": Product("linear_silu", 24576, 4096),
    "8B down": Product("linear_add", 4096, 12288),
    "0.6B qkv": Product("linear", 4096, 1024),
    "0.6B o": Product("linear_add", 1024, 2048),
    "0.6B gate_up": Product("linear_silu", 6144, 1024),
    "0.6B down": Product("linear_add", 1024, 3072),
    "30B-A3B experts": Product("experts", 1536, 2048, 128, 8),
    "gpt-oss-20b experts": Product("experts", 5760, 2880, 32, 4),
}
TOKENS = (1, 4, 16, 64, 256, 2048)
PREFILL = 2048  # tokens from which on a step is a prefill
WEIGHT_BYTES = 160 * 10**6  # together more than three times the L2 cache
MAX_WEIGHTS = 48
MAX_DISTANCE = 0.02


class Case(NamedTuple):
    """A product of some tokens. Its problems have a weight each."""

    problems: list[Any]
    num_bytes: float  # that a product reads and writes at least

    def launches(self, candidate: Candidate, constants: tuple) -> list[Callable[[], Any]]:
        """One for each weight. A norm is computed in each. What they add up stays out of `result`."""
        out = self.problems[0].out
        out = None if out is None else out.clone()
        problems = [problem._replace(out=out) for problem in self.problems]
        return [lambda problem=problem: candidate.launch(_afresh(problem), constants) for problem in problems]

    def result(self, candidate: Candidate, constants: tuple) -> Tensor:
        """Of the first weight, in float32."""
        problem = _afresh(self.problems[0])
        out = None if problem.out is None else problem.out.clone()
        found: Any = candidate.launch(problem._replace(out=out), constants)
        return (found.value() if isinstance(found, Gated) else found).float()


def _afresh(problem: Any) -> Any:
    """With a norm that has not been computed."""
    x = problem.x
    return problem._replace(x=Normed(x.residual, x._norm)) if isinstance(x, Normed) else problem


def make_weights(product: Product, format: WeightFormat, device: torch.device) -> list[tuple[Weight, ...]]:
    """Several times the weight, or gate and up and then down of experts."""
    _, N, K, experts, _ = product
    shapes = [(experts, N, K), (experts, K, N // 2)] if experts > 1 else [(N, K)]

    def weights() -> tuple[Weight, ...]:
        drawn = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in shapes)
        return tuple(format.quantize(each * each.shape[-1] ** -0.5, torch.bfloat16) for each in drawn)

    count = min(MAX_WEIGHTS, -(-WEIGHT_BYTES // sum(map(num_bytes, weights()))))
    return [weights() for _ in range(count)]


def num_bytes(weight: Weight) -> int:
    tensors = (getattr(weight, name, None) for name in ("values", "scale", "zero"))
    return sum(each.numel() * each.element_size() for each in tensors if each is not None)


def make_case(product: Product, weights: list[tuple[Weight, ...]], num_tokens: int, device: torch.device) -> Case:
    operation, N, K, experts, top_k = product
    generator = torch.Generator(device).manual_seed(num_tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

    x: Any = random(num_tokens, K)
    if operation != "linear_add":
        norm = RMSNorm(K).to(device, torch.bfloat16).requires_grad_(False)
        x = Normed(x, norm)
    key = Key.of(operation, num_tokens >= PREFILL, weights[0][0])
    activations = 2 * num_tokens * (K + N // (2 if operation == "linear_silu" else 1))
    if operation != "experts":
        out = random(num_tokens, N) if operation == "linear_add" else None
        problems = [Problem(key, x, weight, None, out) for (weight,) in weights]
        return Case(problems, num_bytes(weights[0][0]) + activations)
    out, logits = random(num_tokens, K), random(num_tokens, experts)
    lens = None if key.phase == "prefill" else torch.ones(num_tokens, dtype=torch.int32, device=device)
    problems = [
        ExpertsProblem(key, x, logits, gate_up, down, top_k, True, out, True, lens) for gate_up, down in weights
    ]
    share = len(logits.topk(top_k).indices.unique()) / experts
    return Case(problems, share * sum(map(num_bytes, weights[0])) + 4 * num_tokens * K)


def micros(launches: list[Callable[[], Any]]) -> float:
    return time_graph(lambda: [launch() for launch in launches], len(launches), 5)


def bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, read and write both counted."""
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / time_graph(lambda: target.copy_(source), 1, 5) * 1e6


class Trials:
    """What is tried for the products of a format."""

    def __init__(self, device: torch.device, format: WeightFormat):
        self.device, self.format = device, format
        self.candidates = make_candidates(device)
        self._count = torch.cuda.get_device_properties(device).multi_processor_count

    def default(self, key: Key) -> Candidate:
        return next(each for each in self.candidates if each.is_default and each.is_for(key))

    def of(self, product: Product, case: Case, num_tokens: int) -> Iterator[tuple[Candidate, tuple]]:
        """Candidates with their constants, the default first."""
        problem = case.problems[0]
        yield self.default(problem.key), ()
        for candidate in self.candidates:
            if not candidate.supports(problem.key, problem.weight):
                continue
            for constants in candidate.challengers(problem.key, num_tokens, product.top_k, self._count):
                fitted = candidate.fitted(problem.weight, tuple(constants))
                if fitted is not None and (fitted or not candidate.is_default):
                    yield candidate, fitted


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="int4", choices=list(QUANTIZATIONS))
    parser.add_argument("--products", nargs="+", default=["8B", "0.6B"], help="beginnings of their names")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--seconds", type=float, default=110, help="after so many no further constants are tried")
    parser.add_argument("--json")
    args = parser.parse_args()
    require_gpus(parser)
    start = time.perf_counter()
    device = torch.device("cuda")
    rate = bandwidth(device)
    card = torch.cuda.get_device_properties(device).name
    print(f"{card}, {rate / 1e12:.2f} TB/s, {args.format}")
    torch.manual_seed(0)
    trials, plain = Trials(device, QUANTIZATIONS[args.format]), Unquantized()
    products = {name: each for name, each in PRODUCTS.items() if name.startswith(tuple(args.products))}
    weights_of = {name: make_weights(product, trials.format, device) for name, product in products.items()}

    with compile_ahead():
        for name, product in products.items():
            for num_tokens in args.tokens:
                case = make_case(product, weights_of[name], num_tokens, device)
                for candidate, constants in trials.of(product, case, num_tokens):
                    with suppress(Exception):  # Its first launch will say so.
                        case.launches(candidate, constants)[0]()
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)

    results: dict[str, Any] = {"card": card, "bandwidth": rate, "format": args.format, "products": {}}
    for name, product in products.items():
        plain_weights = make_weights(product, plain, device)
        for num_tokens in args.tokens:
            case = make_case(product, weights_of[name], num_tokens, device)
            plain_case = make_case(product, plain_weights, num_tokens, device)
            baseline = trials.default(plain_case.problems[0].key)
            found: dict[str, Any] = {
                "bfloat16": micros(plain_case.launches(baseline, ())),
                "floor": case.num_bytes / rate * 1e6,
                "trials": [],
            }
            expected: Tensor | None = None
            for candidate, constants in trials.of(product, case, num_tokens):
                entry = [candidate.name, constants]
                if time.perf_counter() - start > args.seconds:
                    found["trials"].append([*entry, None, "no time left"])
                    continue
                try:
                    result = case.result(candidate, constants)
                    expected = result if expected is None else expected
                    far = ((result - expected).norm() / expected.norm()).item()
                    is_right = far <= MAX_DISTANCE
                    entry += [micros(case.launches(candidate, constants)) if is_right else None, f"distance {far:.3g}"]
                except Exception as error:  # These constants are not for this card.
                    entry += [None, f"{type(error).__name__}: {str(error)[:200]}"]
                found["trials"].append(entry)
            results["products"][f"{name} x {num_tokens}"] = found
            print(f"{name:18} x {num_tokens:4}  floor {found['floor']:7.2f}  bfloat16 {found['bfloat16']:7.2f}", end="")
            for candidate_name in dict.fromkeys(each[0] for each in found["trials"]):
                timed = [each for each in found["trials"] if each[0] == candidate_name and each[2] is not None]
                if timed:
                    best = min(timed, key=lambda each: each[2])
                    print(f"  {candidate_name} {best[2]:.2f} {list(best[1]) or ''}", end="")
            bad = [each for each in found["trials"] if each[2] is None and each[3] != "no time left"]
            print(f"  ({len(found['trials'])} tried, {len(bad)} failed{': ' + bad[0][3] if bad else ''})", flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(results, indent=1))
        del plain_weights
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
