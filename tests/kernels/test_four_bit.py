"""Products of weights in 4 bits against their plain-torch twins, on odd sizes."""

import pytest
import torch

pytest.importorskip("triton")

from four_bit_weights import distance, make_four_bit
from kernel_harness import HALF, assert_refused, hold, nightly

from nanovllm.kernels.matmul import four_bit_tiles as tiles
from nanovllm.kernels.matmul.four_bit import FourBit, codes_torch, dequantize_torch
from nanovllm.kernels.matmul.four_bit_gemv import FourBitGemvConfig, four_bit_gemv
from nanovllm.kernels.matmul.four_bit_tiles import FourBitTileConfig, arrange, four_bit_tiles
from nanovllm.kernels.matmul.int4_gemv import Int4GemvConfig, int4_gemv
from nanovllm.kernels.matmul.split_k import make_arrivals
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul

# One rounding of the result, relative to its norm.
DTYPE, MAX_DISTANCE = HALF, torch.finfo(HALF).eps / 2
GEMV, TILES = FourBitGemvConfig(16, 1, 2, 3), FourBitTileConfig(16, 16, 64, 1, 2, 3)


def test_columns_of_a_unit_are_halves_of_its_bytes():
    values = torch.arange(16).repeat(2)[None].byte()
    values[:, 16:] += 16 * 5
    codes = codes_torch(values)[0]
    assert codes.tolist() == [*range(16), *[0] * 16, *range(16), *[5] * 16]


def test_numbers_are_those_of_their_definitions():
    values = (torch.arange(16) + 16 * torch.arange(16).flip(0)).byte()[None]
    scale, zero = torch.tensor([[0.5]]), torch.tensor([[3]], dtype=torch.uint8)
    assert dequantize_torch(FourBit(values, scale))[0, :16].tolist() == [(q - 8) / 2 for q in range(16)]
    assert dequantize_torch(FourBit(values, scale, zero))[0, 16:].tolist() == [(q - 3) / 2 for q in reversed(range(16))]
    e2m1 = dequantize_torch(FourBit(values, torch.tensor([[130]], dtype=torch.uint8)))[0, :16]
    magnitudes = [0.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0]
    assert e2m1.tolist() == magnitudes + [-each for each in magnitudes]


# kind, tokens, N, K, group, constants, what is fused: the smallest, rows and columns past the last tile, groups within
# and beyond a chunk, all columns in one group, splits of which the last is short.
GEMV_CASES = [
    ("symmetric", 1, 1, 32, 32, GEMV, ""),
    ("symmetric", 3, 37, 576, 64, GEMV._replace(splits=2), "silu"),
    ("symmetric", 16, 20, 416, 416, GEMV._replace(splits=4, num_warps=1), "add"),
    ("zeros", 2, 40, 1024, 512, GEMV._replace(rows=32, num_warps=4), "bias"),
    ("zeros", 5, 18, 160, 32, GEMV, "silu"),
    ("e2m1", 1, 34, 288, 32, GEMV._replace(splits=2), "add"),
    ("e2m1", 4, 17, 128, 32, GEMV, ""),
]


def hold_product(launch, kind, M, N, K, group, fused, device, prepare=lambda x: x, is_rounded=False):
    """launch(x, weight, y, bias, arrivals, **options). prepare: of x. is_rounded: whether the weights are, before they
    are multiplied."""
    torch.manual_seed(N)
    is_silu = fused == "silu"
    weight = make_four_bit(kind, (2 * N if is_silu else N, K), group, DTYPE, device)
    x, y = (torch.randn(M, width, device=device).to(DTYPE) for width in (K, N))
    bias = torch.randn(N, device=device) if fused == "bias" else None
    factors = torch.rand(K, device=device) + 0.5 if fused == "norm" else None
    options = {} if is_rounded else {"silu": is_silu}
    options |= {"norm_weight": factors, "eps": 1e-6} if fused == "norm" else {}
    arrivals = make_arrivals(device)

    def twin(x, y):
        value = x.float() if factors is None else rms_norm.twin(x.float(), factors, 1e-6)
        dense = dequantize_torch(weight)
        expected = value @ (dense.to(DTYPE).float() if is_rounded else dense).t()
        expected += y.float() if fused == "add" else 0 if bias is None else bias
        y.copy_(silu_and_mul.twin(expected.to(DTYPE)) if is_silu else expected)

    def kernel(x, y):
        launch(prepare(x), weight, y, bias, arrivals, add=fused == "add", **options)

    hold(kernel, twin, (x, y), written=(1,), close=MAX_DISTANCE)
    assert not arrivals.any()


@pytest.mark.parametrize(("kind", "M", "N", "K", "group", "config", "fused"), GEMV_CASES)
def test_gemv(kind, M, N, K, group, config, fused, device):
    def launch(x, weight, y, bias, arrivals, **options):
        four_bit_gemv(x, weight, y, bias, config, arrivals, **options)

    hold_product(launch, kind, M, N, K, group, fused, device)


# kind, tokens, N, K, group, constants, what is fused: fewer pairs of words than threads, several tiles of which the
# last is short, rows and tokens past the last, groups within and beyond a tile.
INT4_CASES = [
    ("symmetric", 1, 7, 32, 32, (2, 512, 1), ""),
    ("symmetric", 3, 37, 576, 64, (8, 512, 1), "silu"),
    ("symmetric", 4, 20, 416, 416, (4, 128, 2), "add"),
    ("symmetric", 1, 21, 1056, 32, (16, 512, 1), "norm"),
    ("zeros", 2, 40, 1024, 512, (8, 1024, 2), "bias"),
    ("zeros", 1, 18, 160, 32, (2, 64, 1), "silu"),
    ("zeros", 2, 6, 2080, 2080, (4, 1024, 2), "norm"),
]


@pytest.mark.parametrize(("kind", "M", "N", "K", "group", "constants", "fused"), INT4_CASES)
def test_int4_gemv(kind, M, N, K, group, constants, fused, device):
    """Offsets are subtracted from sums, so that a single result near zero would be less exact."""

    def launch(x, weight, y, bias, arrivals, **options):
        int4_gemv(x, weight, y, bias, Int4GemvConfig(*constants), **options)

    hold_product(launch, kind, M, N, K, group, fused, device)


def test_int4_gemv_refuses_what_it_cannot_multiply(device):
    integers, e2m1 = (make_four_bit(kind, (4, 64), 32, DTYPE, device) for kind in ("symmetric", "e2m1"))
    x, y, config = torch.randn(5, 64).to(DTYPE), torch.zeros(5, 4).to(DTYPE), Int4GemvConfig(2, 64, 1)
    with pytest.raises(ValueError, match=r"^x must be \[1..4, 64\]"):
        int4_gemv(x, integers, y, None, config)
    with pytest.raises(ValueError, match=r"^weight must have integers"):
        int4_gemv(x[:1], e2m1, y[:1], None, config)
    with pytest.raises(ValueError, match=r"^norm_weight must be"):
        int4_gemv(x[:1], integers, y[:1], None, config, norm_weight=torch.ones(63))


@pytest.mark.parametrize(("M", "K"), [(1, 1056), (3, 256), *nightly((1, 4224), (3, 4224), (1, 256), (3, 1056))])
def test_gemv_with_the_norm(M, K, device):
    """Beside the product of what the norm's weight has multiplied: Triton's interpreter multiplies bfloat16 wrongly,
    but equally."""
    weight = make_four_bit("symmetric", (32, K), 32, torch.bfloat16, device)
    x, factors = (3 * torch.randn(M, K, device=device)).bfloat16(), (torch.rand(K, device=device) + 0.5).bfloat16()
    found, product = x.new_empty(M, 32), x.new_empty(M, 32)
    config = FourBitGemvConfig(16, 1, 2, 3)
    four_bit_gemv(x, weight, found, None, config, None, norm_weight=factors, eps=1e-6)
    four_bit_gemv((x.float() * factors.float()).bfloat16(), weight, product, None, config, None)
    expected = product.float() * (x.float().square().mean(1, keepdim=True) + 1e-6).rsqrt()
    for row, expected_row in zip(found, expected, strict=True):
        assert distance(row, expected_row) < 8e-3


TILE_CASES = [
    ("symmetric", 1, 1, 32, 32, TILES, "bias"),
    ("symmetric", 35, 37, 576, 64, TILES._replace(tile_k=128, splits=2), "add"),
    ("symmetric", 16, 20, 416, 416, TILES._replace(tile_k=256), "bias"),
    ("zeros", 20, 40, 1024, 512, TILES._replace(rows=32, tokens=32, splits=4), "add"),
    ("zeros", 5, 18, 160, 32, TILES._replace(tile_k=128), "bias"),
    ("e2m1", 17, 34, 288, 32, TILES._replace(splits=2), "add"),
]


@pytest.mark.parametrize(("kind", "M", "N", "K", "group", "config", "fused"), TILE_CASES)
def test_tiles(kind, M, N, K, group, config, fused, device):
    def launch(x, weight, y, bias, arrivals, **options):
        four_bit_tiles(x, weight, y, bias, config, arrivals, **options)

    hold_product(launch, kind, M, N, K, group, fused, device, prepare=arrange.twin, is_rounded=True)


@pytest.mark.parametrize("K", [32, 96, 1056])
def test_arranged_inputs(K, device):
    x, weight = torch.randn(3, 2 * K, device=device).to(DTYPE), torch.rand(K, device=device)
    half = x[:, :K]
    assert torch.equal(arrange.kernel(half), arrange.twin(half))
    normed = tiles.rms_norm_arrange.kernel(half, weight, 1e-6)
    torch.testing.assert_close(normed, arrange.twin(rms_norm.twin(half, weight, 1e-6)), rtol=2e-2, atol=1e-3)
    gated = tiles.silu_and_mul_arrange.kernel(x)
    torch.testing.assert_close(gated, arrange.twin(silu_and_mul.twin(x)), rtol=2e-2, atol=1e-3)
    order = torch.tensor([4, 1, 0, 5, 2, 3, 3], dtype=torch.int32, device=device)
    pairs = tiles.arrange_pairs.kernel(half, order, 2)
    assert torch.equal(pairs, arrange.twin(half)[[2, 0, 0, 2, 1, 1, 1]])
    assert torch.equal(pairs, tiles.arrange_pairs.twin(half, order, 2))
    if device == "cpu":
        assert torch.equal(tiles.arrange(half), arrange.twin(half))


def test_parts_of_a_word_meet_their_columns(device):
    """What `arrange` puts side by side are the columns of one place in words."""
    codes = codes_torch(torch.randint(0, 256, (1, 64), dtype=torch.uint8))
    values = torch.stack([codes.unflatten(-1, (-1, 2, 16))[..., i, :] for i in (0, 1)])
    words = (values[0] | values[1] << 4).flatten().view(torch.int16).int() & 0xFFFF
    places = torch.stack([words >> 4 * place & 15 for place in range(4)]).flatten()
    assert arrange.twin(codes).flatten().tolist() == places.tolist()


def test_wrong_arguments_are_named(device):
    weight = make_four_bit("symmetric", (16, 256), 128, DTYPE, device)
    x, y = torch.zeros(1, 256, device=device, dtype=DTYPE), torch.zeros(1, 16, device=device, dtype=DTYPE)
    given = {"x": x, "weight": weight, "y": y, "bias": None, "config": GEMV, "arrivals": None}
    wrong = {"x": x.float(), "bias": x[0], "y": y.t(), "norm_weight": x[0, :8]}
    wrong |= {"weight": weight._replace(values=weight.values[:, ::2])}
    assert_refused(four_bit_gemv, given, wrong)
    for name, part in (("scale", weight.scale[:, :1].expand(16, 3)), ("zero", weight.scale)):
        with pytest.raises(ValueError, match=f"^{name} must"):
            four_bit_gemv(**given | {"weight": weight._replace(**{name: part})})
    too_many = torch.zeros(33, 256, device=device, dtype=DTYPE)
    assert GEMV.max_tokens(weight) == 32
    with pytest.raises(ValueError, match=r"^x must be \[1\.\.32, 256\]"):
        four_bit_gemv(too_many, weight, y, None, GEMV, None)
    with pytest.raises(ValueError, match=r"^x must be"):
        four_bit_tiles(x[:, :32], weight, y, None, TILES, None)
