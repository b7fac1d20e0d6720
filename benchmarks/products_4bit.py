"""How fast are products of weights in 4 bits beside bfloat16 and the floor, and with which constants?

    python benchmarks/products_4bit.py --json out.json
    python benchmarks/products_4bit.py --models 8B --tokens 1 16 --seconds 60 --json out.json

Weights are integers in groups of 128. Each product is timed with what stands before and after it in a layer: the norm
of q, k, v and of gate and up, the activation of gate and up, the sum of o and down with the residual stream. Launches
are captured in a graph, over several weights that are together larger than the L2 cache. A kernel whose result is not
that of the dequantized weight is named with its distance instead of a time.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpus import require_gpus
from graph_timing import time_graph
from torch import Tensor

from nanovllm.kernels.launch import compile_ahead
from nanovllm.kernels.matmul.four_bit import FourBit, dequantize_torch
from nanovllm.kernels.matmul.four_bit_gemv import FourBitGemvConfig, four_bit_gemv
from nanovllm.kernels.matmul.four_bit_tiles import (
    FourBitTileConfig,
    arrange,
    four_bit_tiles,
    rms_norm_arrange,
)
from nanovllm.kernels.matmul.split_k import make_arrivals
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul

# Name -> rows, columns, whether a norm stands before it, and SwiGLU after it.
SHAPES = {
    "8B qkv": (6144, 4096, True, False),
    "8B o": (4096, 4096, False, False),
    "8B gate_up": (24576, 4096, True, True),
    "8B down": (4096, 12288, False, False),
    "0.6B qkv": (4096, 1024, True, False),
    "0.6B o": (1024, 2048, False, False),
    "0.6B gate_up": (6144, 1024, True, True),
    "0.6B down": (1024, 3072, False, False),
}
TOKENS = (1, 4, 16, 64, 256, 2048)
GROUP = 128
EPS = 1e-6
WEIGHT_BYTES = 160 * 10**6  # together more than three times the L2 cache
MAX_WEIGHTS = 48
MAX_DISTANCE = 0.02
SHARED_BYTES = 225 * 1024


class Case(NamedTuple):
    """A product of a layer, of several weights in turn."""

    weights: list[FourBit]
    bfloat16: list[Tensor]
    x: Tensor  # [num_tokens, K]
    residual: Tensor  # [num_tokens, N]
    norm: Tensor | None
    silu: bool
    arrivals: Tensor

    def plain(self, weight: Tensor) -> Tensor:
        """As bfloat16 layers do."""
        x = self.x if self.norm is None else rms_norm(self.x, self.norm, EPS)
        if self.norm is None:
            return self.residual.addmm_(x, weight.t())
        y = F.linear(x, weight)
        return silu_and_mul(y) if self.silu else y

    def gemv(self, weight: FourBit, config: FourBitGemvConfig) -> Tensor:
        options: dict[str, Any] = {"silu": self.silu, "add": self.norm is None, "pdl": True}
        y = self.residual
        if self.norm is not None:
            y = self.x.new_empty(len(self.x), weight.shape[0] // (1 + self.silu))
            options |= {"norm_weight": self.norm, "eps": EPS}
        four_bit_gemv(self.x, weight, y, None, config, self.arrivals, **options)
        return y

    def tiles(self, weight: FourBit, config: FourBitTileConfig) -> Tensor:
        """Without the activation, which is the next product's to compute."""
        y = self.residual
        if self.norm is None:
            # As after o's attention; before down the same launch computes SwiGLU.
            x = arrange(self.x)
        else:
            x = rms_norm_arrange(self.x, self.norm, EPS)
            y = x.new_empty(len(x), weight.shape[0])
        four_bit_tiles(x, weight, y, None, config, self.arrivals, add=self.norm is None, pdl=True)
        return y


def make_weights(N: int, K: int, device: torch.device) -> list[FourBit]:
    count = min(MAX_WEIGHTS, -(-WEIGHT_BYTES // (N * K // 2)))
    return [
        FourBit(
            torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=device),
            (torch.rand(N, K // GROUP, device=device) + 0.5).mul_(0.2 * K**-0.5).bfloat16(),
        )
        for _ in range(count)
    ]


def gemv_configs(N: int, K: int, num_tokens: int, num_multiprocessors: int) -> Iterator[FourBitGemvConfig]:
    """Some programs for most multiprocessors, and two steps of each warp at least, unless K is short."""
    columns = max(8, num_tokens)
    for rows, num_warps, splits in product((16, 32, 64), (4, 8), (1, 2, 4)):
        programs = -(-N // rows) * splits
        if 2 * splits * num_warps > K // 128 and (splits > 1 or num_warps > 4):
            continue
        is_enough = programs >= 0.7 * num_multiprocessors and programs * num_warps >= 3 * num_multiprocessors
        if not is_enough or (splits > 1 and programs * num_warps > 20 * num_multiprocessors) or rows * columns > 512:
            continue
        stage = num_warps * (64 * rows + 256 * columns)
        num_stages = 4 if 4 * stage <= SHARED_BYTES // 2 else 3
        for by_sums, prefetch in ((True, 0), (True, 1024), (True, 16384), (False, 1024)):
            yield FourBitGemvConfig(rows, splits, num_warps, num_stages, by_sums, prefetch)


def tile_configs(N: int, K: int, num_tokens: int, num_multiprocessors: int) -> Iterator[FourBitTileConfig]:
    padded = max(16, 1 << (num_tokens - 1).bit_length())
    for rows, tokens, tile_k in product((64, 128), (16, 32, 64, 128, 256), (128, 256)):
        if tokens > padded or tokens < min(padded, 128) // 2 or tokens * tile_k > 256 * 128:
            continue
        tiles = -(-N // rows) * -(-num_tokens // tokens)
        for splits in (1, 2, 4, 8):
            if splits > 1 and (splits * tiles > 2.2 * num_multiprocessors or 512 * splits > K or tiles > 1024):
                continue
            if splits < 8 and 2 * splits * tiles <= num_multiprocessors and 1024 * splits <= K:
                continue  # Twice as many splits fit side by side.
            stage = rows * tile_k // 2 + tokens * tile_k * 2
            warps = {4: rows * tokens <= 128 * 128, 8: rows == 128 and tokens >= 64}
            for num_warps in (count for count, is_right in warps.items() if is_right):
                shared = SHARED_BYTES // (1 if stage * 3 > SHARED_BYTES // 2 else 2)
                if 2 * stage <= shared:
                    yield FourBitTileConfig(rows, tokens, tile_k, splits, num_warps, min(5, shared // stage))


def runs(name: str, num_tokens: int, case: Case) -> Iterator[tuple[str, tuple, Callable[[FourBit], Tensor]]]:
    """(kernel, constants, launch) that are tried for a product."""
    N, K, *_ = SHAPES[name]
    count = torch.cuda.get_device_properties(case.x.device).multi_processor_count
    if num_tokens <= 16:
        for config in gemv_configs(N, K, num_tokens, count):
            yield "gemv", config, partial(case.gemv, config=config)
    if num_tokens > 4:
        for tile in tile_configs(N, K, num_tokens, count):
            yield "tiles", tile, partial(case.tiles, config=tile)


class Expected(NamedTuple):
    """What the first weight's product is in float32."""

    before: Tensor  # the residual stream that it is added to
    result: Tensor

    @classmethod
    def of(cls, case: Case) -> "Expected":
        before = torch.randn_like(case.residual)
        x = case.x if case.norm is None else rms_norm(case.x, case.norm, EPS)
        result = x.float() @ dequantize_torch(case.weights[0]).t()
        if case.norm is None:
            result += before.float()
        if case.silu:
            gate, up = result.bfloat16().float().chunk(2, dim=-1)
            result = gate * gate.sigmoid() * up
        return cls(before, result)

    def distance(self, case: Case, launch: Callable[[FourBit], Tensor]) -> float:
        """Of a launch's result, relative to the norm."""
        case.residual.copy_(self.before)
        found = launch(case.weights[0])
        found = found if found.shape == self.result.shape else silu_and_mul(found)
        return ((found.float() - self.result).norm() / self.result.norm()).item()


def micros(launch: Callable[[Any], object], weights: list) -> float:
    return time_graph(lambda: [launch(weight) for weight in weights], len(weights), 5)


def bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, read and write both counted."""
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / time_graph(lambda: target.copy_(source), 1, 5) * 1e6


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["8B", "0.6B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--seconds", type=float, default=110, help="after so many no further constants are tried")
    parser.add_argument("--json")
    args = parser.parse_args()
    require_gpus(parser)
    start = time.perf_counter()
    device = torch.device("cuda")
    rate = bandwidth(device)
    card = torch.cuda.get_device_properties(device).name
    print(f"{card}, {rate / 1e12:.2f} TB/s")
    torch.manual_seed(0)
    arrivals = make_arrivals(device)
    names = [name for name in SHAPES if name.split()[0] in args.models]
    weights_of = {name: make_weights(*SHAPES[name][:2], device) for name in names}

    def make_case(name: str, num_tokens: int, bfloat16: list[Tensor]) -> Case:
        N, K, has_norm, silu = SHAPES[name]
        x, residual = (torch.randn(num_tokens, size, device=device).bfloat16() for size in (K, N))
        norm = (1 + 0.1 * torch.randn(K, device=device)).bfloat16() if has_norm else None
        return Case(weights_of[name], bfloat16, x, residual, norm, silu, arrivals)

    with compile_ahead():
        for name, num_tokens in product(names, args.tokens):
            case = make_case(name, num_tokens, [])
            for _, _, launch in runs(name, num_tokens, case):
                with suppress(Exception):  # Its first launch will say so.
                    launch(case.weights[0])
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)

    results: dict[str, Any] = {"card": card, "bandwidth": rate, "products": {}}
    for name in names:
        N, K, _, silu = SHAPES[name]
        bfloat16 = [dequantize_torch(weight).bfloat16() for weight in weights_of[name]]
        for num_tokens in args.tokens:
            case = make_case(name, num_tokens, bfloat16)
            weight, expected = case.weights[0], Expected.of(case)
            outputs = N // (1 + silu)
            num_bytes = weight.values.numel() + 2 * (weight.scale.numel() + num_tokens * (K + outputs))
            found: dict[str, Any] = {
                "bfloat16": micros(case.plain, bfloat16),
                "floor": num_bytes / rate * 1e6,
                "kernels": [],
            }
            for kernel, constants, launch in runs(name, num_tokens, case):
                if time.perf_counter() - start > args.seconds:
                    found["kernels"].append([kernel, constants, None, "no time left"])
                    continue
                try:
                    far = expected.distance(case, launch)
                    if not far <= MAX_DISTANCE:
                        found["kernels"].append([kernel, constants, None, f"distance {far:.3g}"])
                    else:
                        found["kernels"].append([kernel, constants, micros(launch, case.weights), far])
                except Exception as error:  # These constants are not for this card.
                    found["kernels"].append([kernel, constants, None, f"{type(error).__name__}: {str(error)[:200]}"])
            results["products"][f"{name} x {num_tokens}"] = found
            print(f"{name:13} x {num_tokens:4}  floor {found['floor']:7.2f}  bfloat16 {found['bfloat16']:7.2f}", end="")
            for kernel in ("gemv", "tiles"):
                timed = [each for each in found["kernels"] if each[0] == kernel and each[2] is not None]
                if timed:
                    best = min(timed, key=lambda each: each[2])
                    print(f"  {kernel} {best[2]:7.2f} {list(best[1])}", end="")
            bad = [each for each in found["kernels"] if each[2] is None and each[3] != "no time left"]
            print(f"  ({len(found['kernels'])} tried, {len(bad)} failed{': ' + bad[0][3] if bad else ''})", flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(results, indent=1))
        del bfloat16
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
