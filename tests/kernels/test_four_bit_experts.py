"""Experts of weights in 4 bits against their plain-torch twins, on odd sizes."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from four_bit_weights import make_four_bit
from kernel_harness import HALF, assert_refused, hold

from nanovllm.kernels.experts import four_bit_experts as tiles
from nanovllm.kernels.experts import four_bit_experts_gemv as gemv
from nanovllm.kernels.experts import mxfp4_experts_gemv as plain_gemv
from nanovllm.kernels.experts.experts import add_pairs, experts_torch, route_torch, sort_by_expert
from nanovllm.kernels.matmul.four_bit import FourBit, dequantize_torch
from nanovllm.kernels.matmul.four_bit_tiles import arrange
from nanovllm.kernels.silu_and_mul import SWIGLU, Activation, gated_torch

# Hidden numbers, the experts' results and their sum are rounded: relative to the result's norm.
DTYPE, MAX_DISTANCE = HALF, torch.finfo(HALF).eps


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

    def hold(self, kernel, rounded: bool) -> None:
        """rounded: whether weights are rounded before they are multiplied."""

        def product(weight: FourBit, bias):
            dense = dequantize_torch(weight)
            dense = dense.to(DTYPE).float() if rounded else dense
            return lambda x, expert: x.float() @ dense[expert].t() + (0 if bias is None else bias[expert])

        products = [product(*each) for each in zip(self.weights, self.biases, strict=True)]

        def twin(x, out):
            total = experts_torch(x, self.experts, self.shares, self.num_experts, *products, self.activation)
            out.copy_(out.float() + total if self.add else torch.where((self.lens > 0)[:, None], total, out.float()))

        hold(kernel, twin, (self.x, self.out), written=(1,), close=MAX_DISTANCE)


# kind, tokens, experts, experts of a token, hidden and intermediate size, group, whether the sum is added: columns past
# the last tile and chunk, a number of experts that is no power of two, several groups in a chunk.
GEMV_CASES = [
    (("symmetric", 3, 5, 2, 96, 64, 32, True), 2),
    (("zeros", 2, 8, 2, 128, 64, 128, False), 8),
    (("e2m1", 1, 6, 3, 96, 96, 32, True), 4),
]


@pytest.mark.parametrize(("case", "num_warps"), GEMV_CASES)
def test_few_tokens(case, num_warps, device):
    layer, config = Layer(*case, device), gemv.FourBitExpertsConfig(16, num_warps, 3)
    (gate_up, down), (bias, down_bias) = layer.weights, layer.biases

    def kernel(x, out):
        hidden = gemv.gate_up(x, None, 0.0, layer.experts, gate_up, bias, config, layer.activation)
        gemv.down(hidden, layer.experts, layer.shares, down, down_bias, out, layer.add, config)

    layer.hold(kernel, rounded=False)


# Several tiles of K, the last one not whole; two rows of a program beyond the last one; experts of another rank.
@pytest.mark.parametrize(("k_tile", "top_k", "is_shard"), [(64, 3, False), (128, 2, True)])
def test_few_tokens_on_plain_cores(k_tile, top_k, is_shard, device):
    layer = Layer("e2m1", 3, 6, top_k, 96, 160, 32, True, device)
    (gate_up, down), (bias, down_bias) = layer.weights, layer.biases
    if is_shard:
        layer.experts[0, 0] = layer.num_experts
    config = plain_gemv.Mxfp4ExpertsConfig(64 if is_shard else 32, k_tile, 4)

    def kernel(x, out):
        hidden = plain_gemv.gate_up(x, None, 0.0, layer.experts, gate_up, bias, config, layer.activation)
        shares = layer.experts, layer.shares
        plain_gemv.down(hidden, *shares, down, down_bias, out, layer.add, config, is_shard)

    layer.hold(kernel, rounded=False)


# A scale of any exponent, and numbers of x of any size up to 2^63: what the kernel multiplies by is exact.
@pytest.mark.parametrize("exponent", [-60, 0, 60])
def test_sizes_of_scales_and_numbers_on_plain_cores(exponent, device):
    num_experts, N, K = 2, 16, 64
    weight = make_four_bit("e2m1", (num_experts, 2 * N, K), 32, torch.bfloat16, device)
    weight = weight._replace(scale=torch.full_like(weight.scale, 127 - exponent))
    x = torch.randn(1, K, device=device).mul(2.0**exponent).bfloat16()
    experts = torch.tensor([[1, 0]], dtype=torch.int16, device=device)
    config = plain_gemv.Mxfp4ExpertsConfig(16, 32, 1)
    found = plain_gemv.gate_up(x, None, 0.0, experts, weight, None, config)
    expected = torch.stack([x[0].double() @ dequantize_torch(weight)[e].double().t() for e in (1, 0)])
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(found.float(), gated_torch(expected.float(), SWIGLU), atol=eps, rtol=eps)


def test_norm_on_plain_cores(device):
    weight = make_four_bit("e2m1", (2, 64, 96), 32, DTYPE, device)
    x, norm_weight = torch.randn(2, 96, device=device).bfloat16() * 3, torch.rand(96, device=device).bfloat16()
    experts = torch.tensor([[1], [0]], dtype=torch.int16, device=device)
    config = plain_gemv.Mxfp4ExpertsConfig(16, 64, 2)
    found = plain_gemv.gate_up(x, norm_weight, 1e-6, experts, weight, None, config)
    normed = F.rms_norm(x.float(), (96,), norm_weight.float(), 1e-6)
    expected = torch.stack([normed[i] @ dequantize_torch(weight)[1 - i].t() for i in range(2)])
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(found.float(), gated_torch(expected, SWIGLU), atol=eps, rtol=eps)


TILE_CASES = [
    (("symmetric", 17, 5, 2, 96, 32, 32, True), (16, 32, 64, 2, 3)),
    (("zeros", 7, 4, 2, 128, 64, 128, False), (16, 32, 256, 2, 3)),
    (("e2m1", 3, 6, 2, 96, 96, 32, True), None),
]


@pytest.mark.parametrize(("case", "constants"), TILE_CASES)
def test_tiles(case, constants, device):
    layer = Layer(*case, device)
    config = None if constants is None else tiles.FourBitExpertTiles(*constants)
    (gate_up, down), (bias, down_bias) = layer.weights, layer.biases
    order, starts = sort_by_expert(layer.experts, layer.num_experts)

    def kernel(x, out):
        hidden = tiles.gate_up(arrange.twin(x), order, starts, gate_up, bias, config, layer.activation)
        y = tiles.down(hidden, order, starts, layer.shares, down, down_bias, config)
        add_pairs(y, out, layer.add, layer.lens)

    layer.hold(kernel, rounded=True)


def test_wrong_arguments_are_named(device):
    layer = Layer("symmetric", 2, 4, 2, 64, 32, 32, False, device)
    x, experts, shares, out = layer.x, layer.experts, layer.shares, layer.out
    (gate_up, down), config = layer.weights, gemv.FourBitExpertsConfig(16, 2, 3)
    hidden = x.new_zeros(4, 32)
    given = {"x": x, "norm_weight": None, "eps": 0.0, "experts": experts, "weight": gate_up, "bias": None}
    wrong = {"x": x[:, :32], "experts": experts.t(), "bias": x}
    assert_refused(gemv.gate_up, given | {"config": config}, wrong)
    assert_refused(gemv.gate_up, given | {"config": config, "x": x.half()}, {"norm_weight": x[0]})
    given = {"x": hidden, "experts": experts, "weights": shares, "weight": down, "bias": None, "out": out, "add": True}
    assert_refused(gemv.down, given | {"config": config}, {"weights": shares.half(), "out": out[:1]})
    plain = {"config": plain_gemv.Mxfp4ExpertsConfig(16, 32, 1)}
    e2m1 = make_four_bit("e2m1", (4, 64, 64), 32, DTYPE, device), make_four_bit("e2m1", (4, 64, 32), 32, DTYPE, device)
    assert_refused(plain_gemv.down, given | plain | {"weight": e2m1[1]}, {"weight": down, "out": out[:1]})
    given = {"x": x, "norm_weight": None, "eps": 0.0, "experts": experts, "weight": e2m1[0], "bias": None}
    assert_refused(plain_gemv.gate_up, given | plain, {"weight": gate_up, "x": x[:, :32]})
    order, starts = sort_by_expert(experts, 4)
    given = {"x": x, "order": order, "starts": starts, "weight": gate_up, "bias": None, "config": None}
    assert_refused(tiles.gate_up, given, {"x": x[:, :32], "bias": x})
