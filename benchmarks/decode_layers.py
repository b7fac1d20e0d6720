"""Whole layers of a decode step without their attention, by cuBLAS and by the kernels for decode batches, on a GPU."""

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


class Layers:
    """28 layers without their attention, of which the query rows of the first product stand for the outcome."""

    def __init__(self, shapes: dict[str, tuple[int, int]], max_tokens: int):
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.layers = [
            {name: torch.randn(N, K, **bf16) * K**-0.5 for name, (N, K) in shapes.items()} for _ in range(NUM_LAYERS)
        ]
        hidden_size, self.q_size = shapes[OUT]
        self.norm_weight = 1 + 0.1 * torch.randn(hidden_size, **bf16)
        self.start = torch.randn(max_tokens, hidden_size, **bf16)
        self.arrivals = make_arrivals("cuda")

    def run(
        self,
        residual: torch.Tensor,
        names: set[str] = frozenset(),
        configs: dict[str, DecodeLinearConfig] | None = None,
        pdl: bool = True,
    ) -> None:
        """All layers, the products of these names by our kernels with these constants or the default ones, the others
        by cuBLAS."""
        options = {name: {"config": (configs or {}).get(name), "arrivals": self.arrivals, "pdl": pdl} for name in names}
        for qkv, o, gate_up, down in map(dict.values, self.layers):
            x = rms_norm(residual, self.norm_weight, EPS)
            y = linear(x, qkv, **options[QKV]) if QKV in names else F.linear(x, qkv)
            self._add(residual, y[:, : self.q_size], o, options.get(OUT))
            x = rms_norm(residual, self.norm_weight, EPS)
            y = linear_silu(x, gate_up, **options[GATE_UP]) if GATE_UP in names else silu_and_mul(F.linear(x, gate_up))
            self._add(residual, y, down, options.get(DOWN))

    @staticmethod
    def _add(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, options: dict | None) -> None:
        if options is None:
            residual.addmm_(x, weight.t())
        else:
            linear_add(x, weight, residual, **options)


def time_layers(model: str, tokens: list[int], best: dict[int, dict[str, DecodeLinearConfig]]) -> list[dict]:
    """A model's layers at each number of tokens: microseconds each by cuBLAS, and with our kernels where they take so
    many, by `best` (tokens to name to constants) or the default, with dependent launches and without; whether these two
    give the same bits, and how far cuBLAS's results are, relative to their norm."""
    shapes = layer_shapes(model)
    layers = Layers(shapes, max(tokens))
    rows = []
    for M in tokens:
        names = {name for name, (N, _) in shapes.items() if most_tokens(N) >= M}
        ours = partial(layers.run, names=names, configs=best.get(M))
        residual = layers.start[:M].clone()
        results = []
        for run in (layers.run, partial(ours, pdl=False), ours):
            residual.copy_(layers.start[:M])
            run(residual)
            results.append(residual.float())
        row = {
            "model": model,
            "M": M,
            "same_bits": torch.equal(results[1], results[2]),
            "distance": ((results[0] - results[2]).norm() / results[0].norm()).item(),
            "cublas_us": time_graph(partial(layers.run, residual), NUM_LAYERS, REPLAYS),
            "ordinary_us": time_graph(partial(ours, residual, pdl=False), NUM_LAYERS, REPLAYS),
            "dependent_us": time_graph(partial(ours, residual), NUM_LAYERS, REPLAYS),
        }
        rows.append(row)
        figures = "  ".join(f"{name} {value:.4g}" for name, value in row.items() if name != "model")
        print(f"layer of {model:6} {figures}", flush=True)
    return rows
