"""Tiles of quack-kernels' products, swept on a GPU against what a layer takes without it.

python benchmarks/quack_products.py decode --models 0.6B 8B --tokens 128 256 --json out.json
python benchmarks/quack_products.py prefill --models 0.6B 8B --json out.json

`decode` times whole layers without their attention in a CUDA graph, because launches overlap: as they are without
quack-kernels, then with one of the four products by each of the tiles, with all four by their best ones, and as the
engine has them (which pads 65 to 127 sequences to 128, and so on). `prefill` multiplies 16,000 tokens for 0.1 s by
each tile, three rounds in turn, so that the card is at its power limit as it is in the workload; what stands for the
activation without quack-kernels is our kernel or two launches, as in a layer. `decode --in-a-row` repeats each graph
for half a second, which takes large models to that limit as well (needs nvidia-ml-py). Every result is compared with
cuBLAS's. Compiling takes two to four seconds a tile, once; XDG_CACHE_HOME says where it is kept.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from decode_layers import Layers, Products
from gpus import require_gpus
from graph_timing import time_graph
from in_a_row import Card, in_a_row
from layer_shapes import DOWN, GATE_UP, OUT, QKV, layer_shapes, model_name

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.product import add_product, product, product_silu
from nanovllm.layers.quack import Quack, Tile, load_quack
from nanovllm.layers.quack_tiles import Kind, padded_batch

KINDS = {QKV: Kind.LINEAR, OUT: Kind.ADD, GATE_UP: Kind.SILU, DOWN: Kind.ADD}
# SwiGLU's tiles are whole multiples of 32 columns. More than 128 tokens a program are for batches of more.
DECODE_TILES = {
    Kind.LINEAR: [
        *((64, columns) for columns in (32, 48, 64, 96, 128)),
        *((128, columns) for columns in (32, 48, 64, 96, 128)),
        (256, 64),
        *((128, columns, (2, 1)) for columns in (64, 96)),
    ],
    Kind.SILU: [
        *((64, columns) for columns in (64, 96, 128, 192)),
        *((128, columns) for columns in (64, 96, 128, 192)),
        *((256, columns) for columns in (96, 192)),
        *((128, columns, (2, 1)) for columns in (96, 192)),
    ],
    Kind.ADD: [
        *((64, columns) for columns in (16, 32, 48, 64)),
        *((128, columns) for columns in (16, 32, 64)),
        (128, 32, (2, 1)),
    ],
}
PREFILL_TILES = [
    *((128, columns, cluster, True) for columns in (128, 192) for cluster in ((1, 2), (2, 1))),
    (128, 160, (2, 1), True),
    (192, 128, (1, 2), True),
    *((256, 128, cluster) for cluster in ((1, 2), (2, 1))),
    *((256, 192, cluster) for cluster in ((1, 1), (1, 2), (2, 1))),
    *((128, 256, cluster) for cluster in ((1, 2), (2, 1))),
]
PREFILL_TOKENS = 16000
SECONDS, ROUNDS = 0.1, 3
MIN_WEIGHT_BYTES = 300 * 10**6  # several times L2's 60 MB
REPLAYS = 12
MAX_DISTANCE = 0.03  # of bfloat16 results, relative to their norm, after several layers


def name_of(tile: Tile) -> str:
    return f"{tile.tokens}x{tile.columns}/{tile.cluster[0]}x{tile.cluster[1]}{'p' if tile.pingpong else ''}"


def by_engine(layers: Layers, quack: Quack | None) -> Products:
    """As the engine multiplies, with quack-kernels or without."""

    def silu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = product_silu(x, weight, layers.arrivals, quack)
        return SiluAndMul()(F.linear(x, weight)) if y is None else y

    def add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return add_product(residual, x, weight, arrivals=layers.arrivals, quack=quack)

    return {QKV: partial(product, arrivals=layers.arrivals, quack=quack), OUT: add, GATE_UP: silu, DOWN: add}


def outcome(layers: Layers, num_tokens: int, products: Products) -> torch.Tensor:
    residual = layers.start[:num_tokens].clone()
    layers.run(residual, products)
    return residual.float()


def time_layer(
    layers: Layers,
    num_tokens: int,
    products: Products,
    expected: torch.Tensor | None = None,
    card: Card | None = None,
) -> float:
    """Microseconds, with `card` for half a second in a row. Raises ArithmeticError where the outcome is not `expected`,
    if that is given."""
    if expected is not None:
        distance = ((outcome(layers, num_tokens, products) - expected).norm() / expected.norm()).item()
        if not distance < MAX_DISTANCE:
            raise ArithmeticError(f"results are {distance:.3f} of their norm away from cuBLAS's")
    residual = layers.start[:num_tokens].clone()
    torch.cuda.synchronize()
    run = partial(layers.run, residual, products)
    return in_a_row(card, run, len(layers.layers)).us if card else time_graph(run, len(layers.layers), REPLAYS)


@cache
def the_package() -> Quack | None:
    return load_quack(torch.bfloat16, torch.device("cuda", torch.cuda.current_device()), decodes=True)


def by_quack(kind: Kind, tile: Tile) -> Callable:
    """As `Quack`'s, but a failure of the package ends the script."""
    quack = the_package()
    launch = {Kind.LINEAR: quack.linear, Kind.SILU: quack.linear_silu, Kind.ADD: quack.linear_add}[kind]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        y = launch(*tensors, tile)
        if y is None:
            raise RuntimeError(f"{kind} in tiles {name_of(tile)} failed")
        return y

    return run


def sweep_decode(model: str, tokens: list[int], deadline: float, card: Card | None) -> list[dict]:
    shapes, quack = layer_shapes(model), the_package()
    rows_in_use = [padded_batch(n, *shapes[GATE_UP], quack.num_multiprocessors) for n in tokens]
    num_layers = max(6, -(-MIN_WEIGHT_BYTES // sum(2 * N * K for N, K in shapes.values())))
    layers = Layers(shapes, max(rows_in_use), num_layers)
    without, in_use = by_engine(layers, None), by_engine(layers, quack)
    rows = []
    for num_tokens, padded in zip(tokens, rows_in_use, strict=True):
        expected = outcome(layers, num_tokens, without)
        time_layer(layers, num_tokens, without)  # until the clocks are up
        base, best, names = time_layer(layers, num_tokens, without, card=card), dict(without), {}
        for name, kind in KINDS.items():
            times = {}
            for tile in (Tile(*options) for options in DECODE_TILES[kind]):
                if (tile.tokens > 128 >= num_tokens) or (tile.tokens > 64 >= num_tokens) or time.time() > deadline:
                    continue
                products = without | {name: by_quack(kind, tile)}
                times[tile] = time_layer(layers, num_tokens, products, expected, card)
            if not times:
                continue
            order = sorted(times, key=times.get)
            if times[order[0]] < base:
                best[name], names[name] = by_quack(kind, order[0]), name_of(order[0])
            gains = {name_of(tile): round(base - times[tile], 2) for tile in order}
            rows.append({"model": model, "tokens": num_tokens, "product": name, "layer_us": base, "gain_us": gains})
            first = " ".join(f"{tile} {gain:+.2f}" for tile, gain in list(gains.items())[:6])
            print(f"{model} {num_tokens:4} {name:12} {first}", flush=True)
        together = time_layer(layers, num_tokens, best, expected, card)
        as_used = time_layer(layers, padded, in_use, outcome(layers, padded, without), card)
        row = {"model": model, "tokens": num_tokens, "layer_us": base, "best_us": together, "tiles": names}
        rows.append(row | {"in_use_us": as_used, "rows_in_use": padded})
        figures = f"{base:.2f} us, with the best {together:.2f} {names}, as in use {as_used:.2f} ({padded} rows)"
        print(f"{model} {num_tokens:4} a layer {figures}", flush=True)
    return rows


def sweep_prefill(model: str) -> list[dict]:
    shapes, rows = layer_shapes(model), []
    without = by_engine(Layers(shapes, max_tokens=1, num_layers=1), None)
    for name, (N, K) in shapes.items():
        kind = KINDS[name]
        x = torch.randn(PREFILL_TOKENS, K, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * K**-0.5
        residual = torch.zeros(PREFILL_TOKENS, N, device="cuda", dtype=torch.bfloat16)
        inputs = (x, weight, residual) if kind is Kind.ADD else (x, weight)
        runs = {"without": partial(without[name], *inputs)}
        for options in PREFILL_TILES:
            tile = Tile(*options)
            if kind is not Kind.SILU or tile.tokens != 192:
                runs[name_of(tile)] = partial(by_quack(kind, tile), *inputs)
        expected = None
        for run in runs.values():
            residual.zero_()
            y = run().float()
            expected = y if expected is None else expected
            if not (y - expected).norm() < 1e-2 * expected.norm():
                raise ArithmeticError(f"{model} {name}: results differ")
        micros = {tile: [] for tile in runs}
        for _ in range(ROUNDS):
            for tile, run in runs.items():
                count = max(2, int(SECONDS * 5e14 / (2 * PREFILL_TOKENS * N * K)))
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                residual.zero_()
                start.record()
                for _ in range(count):
                    run()
                end.record()
                end.synchronize()
                micros[tile].append(1e3 * start.elapsed_time(end) / count)
        result = {tile: median(values) for tile, values in micros.items()}
        rows.append({"model": model, "product": name, "us": result})
        order = sorted(result, key=result.get)
        print(f"{model} {name:12}", *(f"{tile} {result[tile]:.0f}" for tile in order), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["decode", "prefill"])
    parser.add_argument("--models", nargs="+", type=model_name, default=["0.6B", "1.7B", "4B", "8B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 96, 128, 192, 256, 384, 512])
    parser.add_argument("--seconds", type=float, default=300, help="begin no tile of a decode sweep after so long")
    parser.add_argument("--in-a-row", action="store_true", help="decode: each for half a second, at the power limit")
    parser.add_argument("--json")
    args = parser.parse_args()
    require_gpus(parser)
    if the_package() is None:
        parser.error("needs quack-kernels and a Hopper GPU: pip install 'nanovllm[flash-attn-4]'")
    torch.manual_seed(0)
    if args.in_a_row and args.what == "prefill":
        parser.error("--in-a-row is for decode: prefill repeats its products anyway")
    rows, deadline, card = [], time.time() + args.seconds, Card() if args.in_a_row else None
    for model in args.models:
        rows += sweep_decode(model, args.tokens, deadline, card) if args.what == "decode" else sweep_prefill(model)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
