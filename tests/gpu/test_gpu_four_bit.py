"""Products of weights in 4 bits on a GPU: decoded in registers, against their plain-torch twins."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from four_bit_weights import KINDS, distance, make_four_bit
from products import problem

from nanovllm.kernels.experts import (
    four_bit_experts,
    four_bit_experts_gemv,
    four_bit_experts_hopper,
    mxfp4_experts_gemv,
)
from nanovllm.kernels.experts.experts import add_pairs, experts_torch, route, sort_by_expert
from nanovllm.kernels.matmul.four_bit import FourBit, dequantize_torch
from nanovllm.kernels.matmul.four_bit_gemv import FourBitGemvConfig, four_bit_gemv
from nanovllm.kernels.matmul.four_bit_hopper import FourBitHopperConfig, can_multiply, four_bit_hopper
from nanovllm.kernels.matmul.four_bit_tiles import (
    FourBitTileConfig,
    arrange,
    arrange_pairs,
    four_bit_tiles,
    rms_norm_arrange,
    silu_and_mul_arrange,
)
from nanovllm.kernels.matmul.int4_gemv import Int4GemvConfig, int4_gemv
from nanovllm.kernels.matmul.split_k import make_arrivals
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.silu_and_mul import Activation, silu_and_mul
from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.all_formats import QUANTIZATIONS
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.candidates import make_candidates
from nanovllm.layers.matmul.table import package_table

pytestmark = pytest.mark.gpu
DTYPES = torch.bfloat16, torch.float16
MAX_DISTANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3}  # roundings of the result and of norms
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
# Compiling a kernel takes a second.
groups = pytest.mark.parametrize(
    ("dtype", "group"), [(DTYPES[0], 32), (DTYPES[0], 128), (DTYPES[1], 64), (DTYPES[1], 4096)]
)


@pytest.fixture(scope="module")
def arrivals() -> torch.Tensor:
    return make_arrivals("cuda")


@dtypes
@kinds
def test_every_number_is_decoded_exactly(kind, dtype, arrivals):
    """A product with the identity is the weight."""
    K = 256
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(16 * K // 2 // 256).view(16, K // 2)
    weight = make_four_bit(kind, (16, K), 32, dtype, "cuda")._replace(values=codes)
    expected = dequantize_torch(weight).to(dtype).t()
    x = torch.eye(K, device="cuda", dtype=dtype)
    found = x.new_empty(K, 16)
    for start in range(0, K, 8):
        part = slice(start, start + 8)
        four_bit_gemv(x[part], weight, found[part], None, FourBitGemvConfig(16, 1, 2, 3), None)
    assert torch.equal(found, expected)
    four_bit_tiles(arrange(x), weight, found, None, FourBitTileConfig(64, 64, 128, 1, 4, 3), None)
    assert torch.equal(found, expected)


@groups
@kinds
def test_gemv(group, kind, dtype, arrivals):
    K = 4096
    for (N, rows, splits, num_warps), num_tokens in product(((6144, 64, 1, 4), (331, 32, 2, 8)), (1, 3, 8)):
        weight = make_four_bit(kind, (N, K), group, dtype, "cuda")
        config = FourBitGemvConfig(rows, splits, num_warps, 3)
        if num_tokens > config.max_tokens(weight):
            continue
        x, y = (torch.randn(num_tokens, size, device="cuda").to(dtype) for size in (K, N))
        expected = y.float() + x.float() @ dequantize_torch(weight).t()
        four_bit_gemv(x, weight, y, None, config, arrivals, add=True, pdl=True)
        assert distance(y, expected) < MAX_DISTANCE[dtype]
    assert not arrivals.any()


@kinds
def test_gemv_with_norm_and_activation(kind, arrivals):
    """x is far from order one."""
    K, N = 4096, 1024
    weight = make_four_bit(kind, (2 * N, K), 128, torch.bfloat16, "cuda")
    x = (20 * torch.randn(4, K, device="cuda") + 5).bfloat16()
    norm = torch.rand(K, device="cuda").bfloat16() + 0.5
    normed = rms_norm.twin(x, norm, 1e-6).float()
    expected = silu_and_mul.twin((normed @ dequantize_torch(weight).t()).bfloat16())
    config = FourBitGemvConfig(32, 2, 4, 4)
    for num_tokens in (4, 1):
        y = x.new_empty(num_tokens, N)
        options = {"norm_weight": norm, "eps": 1e-6, "silu": True, "pdl": True}
        four_bit_gemv(x[:num_tokens], weight, y, None, config, arrivals, **options)
        # The twin rounds the norm, the kernel x times its weight.
        assert distance(y, expected[:num_tokens].float()) < 0.01


@pytest.mark.parametrize("kind", ["symmetric", "zeros"])
@groups
def test_int4_gemv(kind, dtype, group):
    K = 4096
    for N, num_tokens, *constants in ((331, 1, 8, 2048, 4), (331, 4, 4, 512, 1), (6144, 2, 16, 1024, 2)):
        weight = make_four_bit(kind, (2 * N, K), group, dtype, "cuda")
        x, norm = torch.randn(num_tokens, K, device="cuda").to(dtype), torch.rand(K, device="cuda") + 0.5
        y = x.new_empty(num_tokens, N)
        value = rms_norm.twin(x.float(), norm, 1e-6)
        expected = silu_and_mul.twin((value @ dequantize_torch(weight).t()).to(dtype)).float()
        config = Int4GemvConfig(*constants)
        for _ in range(2):
            int4_gemv(x, weight, y, None, config, norm_weight=norm, eps=1e-6, silu=True, pdl=True)
        assert distance(y, expected) < 2 * MAX_DISTANCE[dtype]  # of two roundings


@groups
@kinds
def test_tiles(group, kind, dtype, arrivals):
    K = 4096
    for N, num_tokens, *constants in (
        (331, 16, 64, 16, 256, 2, 4, 4),
        (331, 50, 128, 64, 128, 4, 4, 3),
        (6144, 300, 128, 128, 128, 1, 8, 4),
        (331, 1, 64, 16, 512, 2, 4, 3, 1024),
        (331, 9, 128, 16, 512, 4, 8, 4, 1024),
    ):
        weight = make_four_bit(kind, (N, K), group, dtype, "cuda")
        x, y = (torch.randn(num_tokens, size, device="cuda").to(dtype) for size in (K, N))
        expected = y.float() + x.float() @ dequantize_torch(weight).to(dtype).float().t()
        config = FourBitTileConfig(*constants).fitted(x.device)
        assert config is not None
        four_bit_tiles(arrange(x), weight, y, None, config, arrivals, add=True, pdl=True)
        assert distance(y, expected) < MAX_DISTANCE[dtype]
    assert not arrivals.any()


# Tokens, rows, columns, constants, what is fused: each number of tokens, rows and tokens past the last, several tiles
# of a program, tiles whose columns several programs share, as a whole and in part.
HOPPER_CASES = [
    ("symmetric", DTYPES[0], 9, 331, 512, (128, 16, True, 8), "add"),
    ("zeros", DTYPES[1], 50, 331, 4096, (256, 64, True, 6), "bias"),
    ("symmetric", DTYPES[1], 100, 4096, 768, (128, 128, True, 5), "add"),
    ("zeros", DTYPES[0], 128, 4096, 4096, (256, 128, False, 3), "bias"),
    ("symmetric", DTYPES[0], 300, 6144, 4096, (128, 128, False, 4), ""),
    ("zeros", DTYPES[0], 200, 4096, 256, (128, 256, False, 2), "add"),
    ("symmetric", DTYPES[1], 20, 40000, 1024, (128, 32, True, 8), ""),
]
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not is_hopper, reason="needs Hopper's tensor cores")


@on_hopper
@pytest.mark.parametrize(("kind", "dtype", "M", "N", "K", "constants", "fused"), HOPPER_CASES)
def test_hopper(kind, dtype, M, N, K, constants, fused, arrivals):
    """Into rows side by side, and into some that are no multiples of 16 bytes, inside longer ones."""
    weight = make_four_bit(kind, (N, K), 128, dtype, "cuda")
    x, wide = (torch.randn(M, size, device="cuda").to(dtype) for size in (K, N + 11))
    bias = torch.randn(N, device="cuda") if fused == "bias" else None
    config = FourBitHopperConfig(*constants).fitted(x.device)
    assert config is not None
    for y in (wide[:, :N].contiguous(), wide[:, 3 : N + 3]):
        expected = x.float() @ dequantize_torch(weight).to(dtype).float().t()
        expected += y.float() if fused == "add" else 0 if bias is None else bias
        before = wide.clone()
        four_bit_hopper(arrange(x), weight, y, bias, config, arrivals, add=fused == "add", pdl=True)
        assert distance(y, expected) < MAX_DISTANCE[dtype]
        assert torch.equal(wide[:, :3], before[:, :3])
        assert torch.equal(wide[:, N + 3 :], before[:, N + 3 :])
    assert not arrivals.any()


@on_hopper
@pytest.mark.parametrize(("kind", "dtype"), [("symmetric", DTYPES[0]), ("zeros", DTYPES[1])])
def test_every_number_is_decoded_exactly_on_hopper(kind, dtype):
    K = 256
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(K // 2).view(K, K // 2)
    weight = make_four_bit(kind, (K, K), 128, dtype, "cuda")._replace(values=codes)
    x = torch.eye(K, device="cuda", dtype=dtype)
    found = x.new_empty(K, K)
    four_bit_hopper(arrange(x), weight, found, None, FourBitHopperConfig(128, 64, False, 2), None)
    assert torch.equal(found, dequantize_torch(weight).to(dtype).t())


@on_hopper
def test_repeated_launches_on_hopper_give_equal_bits(arrivals):
    """The parts of a tile are added in the order of their columns, not in that in which they come."""
    weight = make_four_bit("symmetric", (4096, 4096), 128, torch.bfloat16, "cuda")
    x = arrange(torch.randn(64, 4096, device="cuda").bfloat16())
    results = [x.new_empty(64, 4096) for _ in range(20)]
    for y in results:
        four_bit_hopper(x, weight, y, None, FourBitHopperConfig(128, 64, True, 6), arrivals, pdl=True)
    assert all(torch.equal(y, results[0]) for y in results)


@on_hopper
def test_what_hopper_cannot_multiply():
    for kind, K, group in (("e2m1", 256, 128), ("symmetric", 256, 64), ("symmetric", 384, 128)):
        weight = make_four_bit(kind, (128, K), group, torch.bfloat16, "cuda")
        assert not can_multiply(weight, torch.bfloat16)
        x = torch.zeros(16, K, device="cuda", dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"^weight must have integers"):
            four_bit_hopper(x, weight, x.new_empty(16, 128), None, FourBitHopperConfig(128, 16, False, 4), None)


def table_cases():
    """(key, tokens, candidate, constants) of every choice for linear layers of 4 bits."""
    for key, row in package_table("NVIDIA H200").rows.items():
        is_linear = key.operation in ("linear", "linear_silu", "linear_add") and key.phase == "decode"
        if key.format in ("int4", "mxfp4") and is_linear:
            for bound, choices in zip(row.bounds, row.choices, strict=True):
                yield from ((key, bound, *choice) for choice in choices)


@pytest.mark.parametrize(("key", "num_tokens", "name", "constants"), [*table_cases()])
def test_what_the_table_names(key, num_tokens, name, constants):
    """With the norm, the activation or the sum."""
    device = torch.device("cuda", 0)
    weight = QUANTIZATIONS[key.format].quantize(torch.randn(key.N, key.K, device=device) * key.K**-0.5, torch.bfloat16)
    x, out = (torch.randn(num_tokens, size, device=device).bfloat16() for size in (key.K, key.N))
    adds = key.operation == "linear_add"
    norm = RMSNorm(key.K).to(device, torch.bfloat16).requires_grad_(False)
    asked = problem(key.operation, x if adds else Normed(x, norm), weight, out=out.clone() if adds else None)
    value = x if adds else rms_norm.twin(x, norm.weight, norm.eps)
    expected = value.float() @ weight.format.dequantized(weight).float().t() + (out.float() if adds else 0)
    if key.operation == "linear_silu":
        expected = silu_and_mul.twin(expected.bfloat16()).float()
    candidate = {each.name: each for each in make_candidates(device)}[name]
    if not candidate.supports(asked.key, weight):
        pytest.skip("this card has no such kernel")
    found = candidate.launch(asked, candidate.fitted(weight, constants))
    assert distance(found.value() if isinstance(found, Gated) else found, expected) < 0.01


def test_arranged_norms_and_activations():
    x = torch.randn(5, 2 * 12288, device="cuda").bfloat16()
    norm = torch.rand(4096, device="cuda").bfloat16()
    half, hidden = x[:, :12288], x[:, :4096]
    for found, expected in (
        (arrange(half), half),
        (rms_norm_arrange(hidden, norm, 1e-6), rms_norm.twin(hidden, norm, 1e-6)),
        (silu_and_mul_arrange(x), silu_and_mul.twin(x)),
    ):
        K = expected.shape[1]
        ordered = expected.reshape(5, -1, 2, 8, 2).permute(0, 4, 2, 1, 3).reshape(5, K)
        torch.testing.assert_close(found, ordered, rtol=1e-2, atol=1e-3)


def test_repeated_launches_give_equal_bits(arrivals):
    weight = make_four_bit("symmetric", (4096, 4096), 128, torch.bfloat16, "cuda")
    x = torch.randn(4, 4096, device="cuda").bfloat16()

    def run(weight: FourBit) -> torch.Tensor:
        y = x.new_empty(4, 4096)
        four_bit_gemv(x, weight, y, None, FourBitGemvConfig(64, 4, 4, 4), arrivals, pdl=True)
        return y

    first = run(weight)
    assert all(torch.equal(run(weight), first) for _ in range(20))


@pytest.mark.parametrize(
    ("kind", "num_experts", "top_k", "hidden", "intermediate", "group"),
    [("symmetric", 128, 8, 2048, 768, 128), ("e2m1", 32, 4, 2880, 2880, 32), ("zeros", 16, 2, 1024, 512, 64)],
)
def test_experts(kind, num_experts, top_k, hidden, intermediate, group):
    dtype = torch.bfloat16
    gate_up = make_four_bit(kind, (num_experts, 2 * intermediate, hidden), group, dtype, "cuda")
    down = make_four_bit(kind, (num_experts, hidden, intermediate), group, dtype, "cuda")
    biases = [torch.randn(weight.shape[:2], device="cuda").to(dtype) for weight in (gate_up, down)]
    dense = [dequantize_torch(weight) for weight in (gate_up, down)]
    norm = torch.rand(hidden, device="cuda").to(dtype) + 0.5
    for num_tokens in (1, 5, 200):
        x, out = (torch.randn(num_tokens, hidden, device="cuda").to(dtype) for _ in range(2))
        lens = torch.ones(num_tokens, dtype=torch.int32, device="cuda")
        lens[3:4] = 0
        experts, shares = route(torch.randn(num_tokens, num_experts, device="cuda"), top_k, True, lens)
        products = (
            lambda x, i, w=weight, b=bias: x.float() @ w[i].t() + b[i].float()
            for weight, bias in zip(dense, biases, strict=True)
        )
        normed = rms_norm.twin(x, norm, 1e-6)
        expected = out.float() + experts_torch(normed, experts, shares, num_experts, *products)
        if num_tokens <= four_bit_experts_gemv.MAX_TOKENS:
            configs = [four_bit_experts_gemv.FourBitExpertsConfig(32, num_warps, 3) for num_warps in (4, 8)]
            hidden_values = four_bit_experts_gemv.gate_up(x, norm, 1e-6, experts, gate_up, biases[0], configs[0])
            options = experts, shares, down, biases[1], out.clone(), True, configs[1]
            assert distance(four_bit_experts_gemv.down(hidden_values, *options), expected) < 0.01
        if kind == "e2m1" and num_tokens <= four_bit_experts_gemv.MAX_TOKENS:
            configs = [mxfp4_experts_gemv.Mxfp4ExpertsConfig(*each) for each in ((8, 1024, 2), (4, 512, 4))]
            hidden_values = mxfp4_experts_gemv.gate_up(x, norm, 1e-6, experts, gate_up, biases[0], configs[0])
            options = experts, shares, down, biases[1], out.clone(), True, configs[1]
            assert distance(mxfp4_experts_gemv.down(hidden_values, *options), expected) < 0.01
        order, starts = sort_by_expert(experts, num_experts)
        arranged = rms_norm_arrange(x, norm, 1e-6)
        hidden_values = four_bit_experts.gate_up(arranged, order, starts, gate_up, biases[0], None)
        y = four_bit_experts.down(hidden_values, order, starts, shares, down, biases[1], None)
        assert distance(add_pairs(y, out, True, lens), expected) < 0.01


# num_tokens, num_experts, top_k, hidden and intermediate size, constants of gate_up and of down: an expert without
# tokens, tiles of both widths and several of an expert, rows and columns past the last tile, half of a last step.
HOPPER_EXPERT_CASES = [
    (3, 32, 4, 2880, 2880, (16, 16, 64, 4), (32, 16, 128, 3)),
    (200, 32, 4, 2880, 2880, (64, 32, 128, 6), (32, 16, 64, 8)),
    (700, 8, 3, 640, 448, (128, 64, 64, 5), (128, 32, 128, 4)),
    (129, 5, 1, 128, 64, (64, 16, 128, 2), (64, 32, 64, 3)),
]


@on_hopper
@pytest.mark.parametrize("case", HOPPER_EXPERT_CASES, ids=[str(case[0]) for case in HOPPER_EXPERT_CASES])
def test_experts_on_hopper(case):
    """Against the tiles of `four_bit_experts`, of which the test above is."""
    num_tokens, num_experts, top_k, hidden, intermediate, first, second = case
    gate_up = make_four_bit("e2m1", (num_experts, 2 * intermediate, hidden), 32, torch.bfloat16, "cuda")
    down = make_four_bit("e2m1", (num_experts, hidden, intermediate), 32, torch.bfloat16, "cuda")
    biases = [torch.randn(weight.shape[:2], device="cuda").bfloat16() for weight in (gate_up, down)]
    activation = Activation(alpha=1.702, limit=1.5)
    x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
    lens = torch.ones(num_tokens, dtype=torch.int32, device="cuda")
    lens[1:2] = 0
    logits = torch.randn(num_tokens, num_experts, device="cuda")
    logits[:, 0] -= 100  # no token's expert
    experts, shares = route(logits, top_k, True, lens)
    order, starts = sort_by_expert(experts, num_experts)
    end = int(starts[-1])
    configs = [four_bit_experts_hopper.FourBitExpertsHopperConfig(*each).fitted(x.device) for each in (first, second)]
    hidden_values = four_bit_experts_hopper.gate_up(
        arrange_pairs(x, order, top_k), starts, gate_up, biases[0], configs[0], activation
    )
    expected = four_bit_experts.gate_up(arrange(x), order, starts, gate_up, biases[0], None, activation)
    assert distance(hidden_values[:end], expected[:end]) < 0.01
    y = four_bit_experts_hopper.down(expected, order, starts, shares, down, biases[1], configs[1])
    expected = four_bit_experts.down(expected, order, starts, shares, down, biases[1], None)
    pairs = order[:end].long()
    assert distance(y.flatten(0, 1)[pairs], expected.flatten(0, 1)[pairs]) < 0.01


@on_hopper
def test_every_e2m1_number_is_decoded_exactly_on_hopper():
    K = 128
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(K // 2).view(1, 2 * K, K // 2)
    scale = torch.tensor([127 - 40, 127, 127 + 20, 127 + 60], dtype=torch.uint8, device="cuda").repeat(1, 2 * K, 1)
    weight = FourBit(codes, scale)
    assert four_bit_experts_hopper.can_multiply(weight, torch.bfloat16)
    config = four_bit_experts_hopper.FourBitExpertsHopperConfig(128, 64, 64, 2)
    x = arrange(torch.eye(K, device="cuda", dtype=torch.bfloat16))
    order = torch.arange(K, dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, K], dtype=torch.int32, device="cuda")
    shares = torch.ones(K, 1, device="cuda")
    found = four_bit_experts_hopper.down(x, order, starts, shares, weight, None, config)[:, 0]
    assert torch.equal(found, dequantize_torch(weight)[0].bfloat16().t())


@on_hopper
def test_what_experts_on_hopper_cannot_multiply():
    config = four_bit_experts_hopper.FourBitExpertsHopperConfig(16, 16, 64, 4)
    starts = torch.zeros(3, dtype=torch.int32, device="cuda")
    for kind, K, dtype in (("symmetric", 128, torch.bfloat16), ("e2m1", 96, torch.bfloat16), ("e2m1", 128, torch.half)):
        weight = make_four_bit(kind, (2, 128, K), 32, dtype, "cuda")
        assert not four_bit_experts_hopper.can_multiply(weight, dtype)
        with pytest.raises(ValueError, match=r"^weight must have e2m1 numbers"):
            four_bit_experts_hopper.gate_up(torch.zeros(4, K, dtype=dtype, device="cuda"), starts, weight, None, config)
