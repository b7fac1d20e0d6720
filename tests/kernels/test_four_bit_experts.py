"""Experts of weights in 4 bits against their plain-torch twins, on odd sizes."""

import pytest
import torch

pytest.importorskip("triton")

from four_bit_weights import distance, make_four_bit

from nanovllm.kernels.experts import four_bit_experts as tiles
from nanovllm.kernels.experts import four_bit_experts_gemv as gemv
from nanovllm.kernels.experts.experts import add_pairs, experts_torch, route_torch, sort_by_expert
from nanovllm.kernels.matmul.four_bit import FourBit, dequantize_torch
from nanovllm.kernels.matmul.four_bit_tiles import arrange
from nanovllm.kernels.silu_and_mul import SWIGLU, Activation

# Triton's interpreter multiplies bfloat16 wrongly. Three roundings, relative to the result's norm.
DTYPE, MAX_DISTANCE = (torch.bfloat16, 8e-3) if torch.cuda.is_available() else (torch.float16, 1e-3)


class Layer:
    """Random experts, and what they give for some tokens, of which the second is padding."""

    def __init__(self, kind, num_tokens, num_experts, top_k, hidden, intermediate, group, add, device, has_bias=True):
        shapes = (num_experts, 2 * intermediate, hidden), (num_experts, hidden, intermediate)
        self.weights = [
            make_four_bit(kind, shape, group if shape[2] % group == 0 else shape[2], DTYPE, device) for shape in shapes
        ]
        self.biases = [torch.randn(shape[:2], device=device) if has_bias else None for shape in shapes]
        self.x, self.out = (torch.randn(num_tokens, hidden, device=device).to(DTYPE) for _ in range(2))
        self.lens = torch.ones(num_tokens, dtype=torch.int32, device=device)
        self.lens[1:2] = 0
        logits = torch.randn(num_tokens, num_experts, device=device)
        self.num_experts, self.add = num_experts, add
        self.activation = Activation(alpha=1.702, limit=1.5) if kind == "e2m1" else SWIGLU  # as in gpt-oss
        self.experts, self.shares = route_torch(logits, top_k, True, self.lens)

    def expected(self, rounded: bool) -> torch.Tensor:
        """rounded: whether weights are rounded before they are multiplied."""

        def product(weight: FourBit, bias):
            dense = dequantize_torch(weight)
            dense = dense.to(DTYPE).float() if rounded else dense
            return lambda x, expert: x.float() @ dense[expert].t() + (0 if bias is None else bias[expert])

        products = (product(*each) for each in zip(self.weights, self.biases, strict=True))
        total = experts_torch(self.x, self.experts, self.shares, self.num_experts, *products, self.activation)
        before = self.out.float()
        return before + total if self.add else torch.where((self.lens > 0)[:, None], total, before)


# kind, tokens, experts, experts of a token, hidden and intermediate size, group, whether the sum is added: columns past
# the last tile and chunk, a number of experts that is no power of two, several groups in a chunk.
GEMV_CASES = [
    (("symmetric", 3, 5, 2, 160, 96, 32, True), 2),
    (("zeros", 2, 8, 4, 256, 128, 128, False), 8),
    (("e2m1", 1, 6, 3, 96, 288, 32, True), 4),
]


@pytest.mark.parametrize(("case", "num_warps"), GEMV_CASES)
def test_few_tokens(case, num_warps, device):
    layer, config = Layer(*case, device), gemv.FourBitExpertsConfig(16, num_warps, 3)
    expected = layer.expected(rounded=False)
    (gate_up, down), (bias, down_bias) = layer.weights, layer.biases
    hidden = gemv.gate_up(layer.x, None, 0.0, layer.experts, gate_up, bias, config, layer.activation)
    found = gemv.down(hidden, layer.experts, layer.shares, down, down_bias, layer.out, layer.add, config)
    assert distance(found, expected) < MAX_DISTANCE


TILE_CASES = [
    (("symmetric", 30, 5, 2, 160, 96, 32, True), (16, 16, 64, 2, 3)),
    (("zeros", 7, 8, 4, 256, 128, 128, False), (16, 32, 256, 2, 3)),
    (("e2m1", 3, 6, 3, 96, 288, 32, True), None),
]


@pytest.mark.parametrize(("case", "constants"), TILE_CASES)
def test_tiles(case, constants, device):
    layer = Layer(*case, device)
    config = None if constants is None else tiles.FourBitExpertTiles(*constants)
    expected = layer.expected(rounded=True)
    (gate_up, down), (bias, down_bias) = layer.weights, layer.biases
    order, starts = sort_by_expert(layer.experts, layer.num_experts)
    hidden = tiles.gate_up(arrange.twin(layer.x), order, starts, gate_up, bias, config, layer.activation)
    y = tiles.down(hidden, order, starts, layer.shares, down, down_bias, config)
    found = add_pairs(y, layer.out, layer.add, layer.lens)
    assert distance(found, expected) < MAX_DISTANCE


def test_wrong_arguments_are_named(device):
    layer = Layer("symmetric", 2, 4, 2, 64, 32, 32, False, device)
    x, experts, shares, out = layer.x, layer.experts, layer.shares, layer.out
    (gate_up, down), config = layer.weights, gemv.FourBitExpertsConfig(16, 2, 3)
    hidden = x.new_zeros(4, 32)
    for name, call in {
        "x": lambda: gemv.gate_up(x[:, :32], None, 0.0, experts, gate_up, None, config),
        "experts": lambda: gemv.gate_up(x, None, 0.0, experts.t(), gate_up, None, config),
        "norm_weight": lambda: gemv.gate_up(x.half(), x[0], 0.0, experts, gate_up, None, config),
        "bias": lambda: gemv.gate_up(x, None, 0.0, experts, gate_up, x, config),
        "weights": lambda: gemv.down(hidden, experts, shares.half(), down, None, out, True, config),
        "out": lambda: gemv.down(hidden, experts, shares, down, None, out[:1], True, config),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} must"):
            call()
    order, starts = sort_by_expert(experts, 4)
    for name, call in {
        "x": lambda: tiles.gate_up(x[:, :32], order, starts, gate_up, None, None),
        "bias": lambda: tiles.gate_up(x, order, starts, gate_up, x, None),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} must"):
            call()
