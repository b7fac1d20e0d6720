"""Whole layers of a decode step without their attention, by cuBLAS and by the kernels for decode batches, on a GPU."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from graph_timing import time_graph
from layer_shapes import DOWN, GATE_UP, OUT, QKV, layer_shapes

from nanovllm.kernels.decode_linear import linear, linear_add, linear_silu
from nanovllm.kernels.decode_linear_kernel import DecodeLinearConfig, make_arrivals
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.decode_linear import most_tokens

NUM_LAYERS = 28
REPLAYS = 15
EPS = 1e-6

# What multiplies, by the names of the products: OUT and DOWN as product(x, weight, residual), which is overwritten, the
# others as product(x, weight), whose result is taken.
Products = dict[str, Callable]


class Layers:
    """Layers without their attention, of which the query rows of the first product stand for the outcome."""

    def __init__(self, shapes: dict[str, tuple[int, int]], max_tokens: int, num_layers: int = NUM_LAYERS):
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.layers = [
            {name: torch.randn(N, K, **bf16) * K**-0.5 for name, (N, K) in shapes.items()} for _ in range(num_layers)
        ]
        hidden_size, self.q_size = shapes[OUT]
        self.norm_weight = 1 + 0.1 * torch.randn(hidden_size, **bf16)
        self.start = torch.randn(max_tokens, hidden_size, **bf16)
        self.arrivals = make_arrivals("cuda")

    def run(self, residual: torch.Tensor, products: Products) -> None:
        """All layers; the residual is overwritten."""
        for weights in self.layers:
            y = products[QKV](rms_norm(residual, self.norm_weight, EPS), weights[QKV])
            products[OUT](y[:, : self.q_size], weights[OUT], residual)
            y = products[GATE_UP](rms_norm(residual, self.norm_weight, EPS), weights[GATE_UP])
            products[DOWN](y, weights[DOWN], residual)

    def by_ours(
        self, names: set[str], configs: dict[str, DecodeLinearConfig] | None = None, pdl: bool = True
    ) -> Products:
        """Those of these names by our kernels, with these constants or the default ones, the others by cuBLAS."""
        ours = {QKV: linear, OUT: linear_add, GATE_UP: linear_silu, DOWN: linear_add}
        options = {"arrivals": self.arrivals, "pdl": pdl}
        configs = configs or {}
        return BY_CUBLAS | {name: partial(ours[name], config=configs.get(name), **options) for name in names}


def _add_by_cublas(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual.addmm_(x, weight.t())


BY_CUBLAS: Products = {
    QKV: F.linear,
    OUT: _add_by_cublas,
    GATE_UP: lambda x, weight: silu_and_mul(F.linear(x, weight)),
    DOWN: _add_by_cublas,
}


def time_layers(model: str, tokens: list[int], best: dict[int, dict[str, DecodeLinearConfig]]) -> list[dict]:
    """A model's layers at each number of tokens: microseconds each by cuBLAS, and with our kernels where they take so
    many, by `best` (tokens to name to constants) or the default, with dependent launches and without; whether these two
    give the same bits, and how far cuBLAS's results are, relative to their norm."""
    shapes = layer_shapes(model)
    layers = Layers(shapes, max(tokens))
    rows = []
    for M in tokens:
        names = {name for name, (N, _) in shapes.items() if most_tokens(N) >= M}
        ours, ordinary = (layers.by_ours(names, best.get(M), pdl) for pdl in (True, False))
        residual = layers.start[:M].clone()
        results = []
        for products in (BY_CUBLAS, ordinary, ours):
            residual.copy_(layers.start[:M])
            layers.run(residual, products)
            results.append(residual.float())
        row = {
            "model": model,
            "M": M,
            "same_bits": torch.equal(results[1], results[2]),
            "distance": ((results[0] - results[2]).norm() / results[0].norm()).item(),
            "cublas_us": time_graph(partial(layers.run, residual, BY_CUBLAS), NUM_LAYERS, REPLAYS),
            "ordinary_us": time_graph(partial(layers.run, residual, ordinary), NUM_LAYERS, REPLAYS),
            "dependent_us": time_graph(partial(layers.run, residual, ours), NUM_LAYERS, REPLAYS),
        }
        rows.append(row)
        figures = "  ".join(f"{name} {value:.4g}" for name, value in row.items() if name != "model")
        print(f"layer of {model:6} {figures}", flush=True)
    return rows
