"""Kernels that quantize inputs, and linear layers with weights in e4m3, against their plain-torch twins."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import HALF, apart, hold, nightly, rounding
from linear_inputs import round_to_e4m3_exactly
from products import FP8, dequantized, quantized

from nanovllm.kernels.linear_attention.gated_norm import gated_rms_norm
from nanovllm.kernels.matmul import fp8
from nanovllm.kernels.matmul.fp8 import E4M3, dequantize_torch, quantize
from nanovllm.kernels.matmul.gemv import GemvConfig, gemv
from nanovllm.kernels.matmul.split_k import SplitKConfig, make_arrivals, split_k
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.sigmoid_gate import sigmoid_gate
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.formats.format import Weight

EPS = 1e-6
in_groups = pytest.mark.parametrize("in_groups", [False, True], ids=["tokens", "groups"])
# Triton's interpreter truncates to bfloat16 and multiplies it wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def exact_e4m3(monkeypatch):
    round_to_e4m3_exactly(monkeypatch)


def assert_quantized(found, expected, places: int = 0):
    """Scales are equal but for their last bits. places: how many values may be the next e4m3 number, because what was
    rounded is a rounding apart."""
    (values, scale), (expected_values, expected_scale) = found, expected
    torch.testing.assert_close(scale, expected_scale, atol=0, rtol=2e-3 if places else 0, equal_nan=True)
    ours, theirs = values.view(torch.uint8).int(), expected_values.view(torch.uint8).int()
    assert (ours - theirs).abs().max() <= (1 if places else 0)
    assert (ours != theirs).sum() <= places


def wide_rows(num_tokens, K, dtype, device):
    """Magnitudes from the smallest to the largest; one row is zero."""
    x = apart(torch.randn(num_tokens, K, device=device).to(dtype))
    x *= torch.logspace(-3, 2, num_tokens, device=device)[:, None].to(dtype)
    x[num_tokens // 2] = 0
    return x


@in_groups
@dtypes
@pytest.mark.parametrize(("num_tokens", "K"), [(1, 128), (5, 384), (3, 5120)])
def test_rows_are_quantized_as_by_the_twin(num_tokens, K, dtype, in_groups, device):
    x = wide_rows(num_tokens, K, dtype, device)
    found = fp8.quantize.kernel(x, in_groups)
    assert_quantized(found, quantize.twin(x, in_groups))
    assert found[1].stride(0) == 1  # as cuBLAS needs the scales of groups


@in_groups
@dtypes
def test_many_short_rows_are_quantized_as_by_the_twin(dtype, in_groups, device, monkeypatch):
    """Several by a program, the last of which has too few."""
    monkeypatch.setattr(fp8, "_MANY_ROWS", 21)
    x = wide_rows(21, 384, dtype, device)
    assert_quantized(fp8.quantize.kernel(x, in_groups), quantize.twin(x, in_groups))


@in_groups
def test_numbers_next_to_zero_are_zeros(in_groups, device):
    """The inverse of their scale would be infinite, and infinity times a zero beside them is NaN."""
    x = torch.tensor([1e-44, 1e-40, 1e-38, 1e-36, 1e-33], device=device)[:, None].repeat(1, 128)
    x[:, ::2] = 0
    expected = quantize.twin(x, in_groups)
    assert_quantized(fp8.quantize.kernel(x, in_groups), expected)
    torch.testing.assert_close(dequantize_torch(*expected), x, atol=1e-34, rtol=1 / 16)
    of_bfloat16 = quantize.twin(x.bfloat16(), in_groups)
    torch.testing.assert_close(dequantize_torch(*of_bfloat16), x, atol=1e-34, rtol=1 / 16)


@in_groups
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 4), (4, 4), (7, 8)])
def test_rows_up_to_a_multiple(num_tokens, num_rows, in_groups, device):
    """As cuBLAS needs them."""
    x = wide_rows(num_tokens, 256, torch.float16, device)
    gate_up, weight = torch.cat([x, x], dim=1), torch.ones(256, dtype=torch.float16, device=device)
    found = fp8.quantize.kernel(x, in_groups, 4)
    assert_quantized([each[:num_tokens] for each in found], quantize.twin(x, in_groups))
    others = (
        fp8.rms_norm_quantize.kernel(x, weight, EPS, in_groups, 4),
        fp8.silu_and_mul_quantize.kernel(gate_up, in_groups, 4),
    )
    for values, scale in (found, *others):
        assert values.shape == (num_rows, 256)
        assert scale.shape == (num_rows, 2 if in_groups else 1)
        assert scale.stride() == ((1, num_rows) if in_groups else (1, 1))


def test_any_width_of_a_token(device):
    x = wide_rows(4, 77, torch.float32, device)
    assert_quantized(fp8.quantize.kernel(x, False), quantize.twin(x, False))
    with pytest.raises(ValueError, match="multiple of 128 columns"):
        fp8.quantize.kernel(x, True)


@in_groups
@dtypes
def test_norm_and_activation_before_it(dtype, in_groups, device):
    x = wide_rows(7, 384, dtype, device)
    weight = (1 + 0.1 * torch.randn(384, device=device)).to(dtype)
    places = 7 * 384 // 100
    expected = quantize.twin(rms_norm.twin(x, weight, EPS), in_groups)
    assert_quantized(fp8.rms_norm_quantize.kernel(x, weight, EPS, in_groups), expected, places)
    gate_up = torch.cat([x, x.flip(0)], dim=1)
    expected = quantize.twin(silu_and_mul.twin(gate_up), in_groups)
    assert_quantized(fp8.silu_and_mul_quantize.kernel(gate_up, in_groups), expected, places)


@in_groups
@dtypes
def test_a_norm_is_kept_beside_its_quantized_numbers(dtype, in_groups, device):
    x, weight = wide_rows(5, 384, dtype, device), torch.ones(384, dtype=dtype, device=device)
    kept, alone = torch.empty_like(x), fp8.rms_norm_quantize.kernel(x, weight, EPS, in_groups)
    assert_quantized(fp8.rms_norm_quantize.kernel(x, weight, EPS, in_groups, 1, kept), alone)
    torch.testing.assert_close(kept, rms_norm.twin(x, weight, EPS), **rounding(dtype, 2))
    first, addend = x.clone(), torch.randn(5, 400, device=device).to(dtype)[:, 5:389]
    found = fp8.rms_norm_quantize.kernel(first, weight, EPS, in_groups, 1, None, addend)
    torch.testing.assert_close(first, x + addend, **rounding(dtype, 1))
    assert_quantized(found, fp8.rms_norm_quantize.kernel(first, weight, EPS, in_groups))
    with pytest.raises(ValueError, match="addend must be"):
        fp8.rms_norm_quantize.kernel(x, weight, EPS, in_groups, 1, None, addend[:3])
    with pytest.raises(ValueError, match="normed must be a contiguous"):
        fp8.rms_norm_quantize.kernel(x, weight, EPS, in_groups, 1, kept[:, :128])


@in_groups
@dtypes
def test_gates_before_it(dtype, in_groups, device):
    """Those of attention and of linear attention, slices of wider tensors; and one number for each token."""
    x, wide = wide_rows(7, 384, dtype, device), torch.randn(7, 500, device=device).to(dtype)
    gate, of_token, weight = wide[:, 100:484], wide[:, 3:4], 1 + 0.1 * torch.randn(128, device=device)
    places = 7 * 384 // 100
    expected = quantize.twin(sigmoid_gate.twin(x.clone(), gate), in_groups)
    assert_quantized(fp8.sigmoid_gate_quantize.kernel(x, gate, in_groups), expected, places)
    expected = quantize.twin(gated_rms_norm.twin(x.clone(), gate, weight, EPS), in_groups)
    assert_quantized(fp8.gated_rms_norm_quantize.kernel(x, gate, weight, EPS, in_groups), expected, places)
    gate_up = torch.cat([x, x.flip(0)], dim=1)
    expected = fp8.silu_and_mul_quantize.twin(gate_up, in_groups, 1, of_token)
    found = fp8.silu_and_mul_quantize.kernel(gate_up, in_groups, 1, of_token)
    torch.testing.assert_close(found[1], expected[1], atol=0, rtol=8e-3)
    whole = dequantize_torch(*quantize.twin(silu_and_mul.twin(gate_up), in_groups)) * of_token.float().sigmoid()
    torch.testing.assert_close(dequantize_torch(*found), whole, atol=1e-30, rtol=1 / 8)
    for wrong in (gate[:, :128], gate[:5]):
        with pytest.raises(ValueError, match="gate must be"):
            fp8.sigmoid_gate_quantize.kernel(x, wrong, in_groups)
        with pytest.raises(ValueError, match="gate must be"):
            fp8.silu_and_mul_quantize.kernel(gate_up, in_groups, 1, wrong)


def test_what_is_not_finite_stays_so(device):
    x = torch.ones(3, 128, device=device)
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    values, scale = fp8.quantize.kernel(x, False)
    is_finite = (values.float() * scale).isfinite().all(1)
    assert is_finite.tolist() == [False, False, True]
    assert dequantize_torch(*quantize.twin(x, False)).isfinite().all(1).tolist() == [False, False, True]


def make_weight(N, K, in_blocks, dtype, device) -> Weight:
    """Its channels and blocks differ in size."""
    weight = torch.randn(N, K, device=device) / K**0.5 * torch.logspace(-1, 0, N, device=device)[:, None]
    return FP8[in_blocks].quantize(weight * torch.logspace(0, -1, K, device=device), dtype)


@pytest.mark.parametrize("in_blocks", [False, True], ids=["channels", "blocks"])
def test_a_weight_is_as_near_as_its_format_allows(in_blocks):
    weight = torch.randn(256, 384) * torch.logspace(-3, 3, 256)[:, None]
    quantized = FP8[in_blocks].quantize(weight, torch.float32)
    largest = weight.abs().amax(1, keepdim=True)
    if in_blocks:
        largest = weight.view(2, 128, 3, 128).abs().amax((1, 3), keepdim=True).expand(2, 128, 3, 128).reshape(256, 384)
    # e4m3 has 3 bits after the first one; below 2^-6 its numbers are 2^-9 apart.
    bound = torch.maximum(weight.abs() * 2**-4, largest / 448 * 2**-10) * (1 + 1e-5)
    assert ((dequantized(quantized) - weight).abs() <= bound).all()
    assert quantized.values.float().abs().amax() == 448
    assert quantized.scale.shape == FP8[in_blocks].scale_shape((256, 384))


@pytest.mark.parametrize("in_blocks", [False, True], ids=["channels", "blocks"])
def test_a_product_is_as_near_as_its_format_allows(in_blocks):
    """Of float32's product of the same weights: only the input's rounding is between them."""
    x, weight = torch.randn(9, 384), make_weight(256, 384, in_blocks, torch.float32, "cpu")
    found = weight.format.linear(x, weight)
    values = dequantized(weight)
    rounding = torch.maximum(x.abs() * 2**-4, x.abs().amax(1, keepdim=True) / 448 * 2**-10)
    assert ((found - x @ values.t()).abs() <= rounding @ values.abs().t() + 1e-5).all()


CONFIG = SplitKConfig(64, 128, 1, 4, 0, 16, 4)
OPERATIONS = "linear", "linear_silu", "linear_add"
LINEARS = [
    # M, N, K, blocks, constants
    (1, 20, 384, False, GemvConfig(4, 256, 1)),
    (3, 30, 1000, False, GemvConfig(4, 1024, 2)),
    (2, 256, 384, True, GemvConfig(16, 512, 2)),
    (4, 256, 384, True, GemvConfig(32, 64, 1)),
    (1, 256, 384, False, SplitKConfig(64, 128, 1, 4, 0, 16, 4)),
    (5, 48, 208, False, SplitKConfig(64, 128, 2, 4, 512, 16, 4)),
    (17, 198, 1040, False, SplitKConfig(128, 256, 4, 3, 0, 32, 8)),
    (130, 80, 1000, False, SplitKConfig(64, 128, 2, 4, 0, 64, 4)),
    (150, 130, 256, False, SplitKConfig(128, 128, 1, 4, 0, 128, 8)),
    # The last splits have nothing to add up.
    (20, 66, 112, False, SplitKConfig(64, 64, 4, 4, 0, 32, 4)),
    (1, 128, 128, True, SplitKConfig(64, 128, 1, 4, 0, 16, 4)),
    (17, 384, 640, True, SplitKConfig(64, 128, 2, 4, 1024, 32, 4)),
    (130, 256, 384, True, SplitKConfig(128, 64, 4, 4, 0, 64, 8)),
    (150, 256, 384, True, SplitKConfig(256, 128, 2, 4, 0, 128, 8)),
]
# By default each case with one operation.
CASES = [(*case, OPERATIONS[i % 3]) for i, case in enumerate(LINEARS)]
CASES += nightly(*((*case, each) for i, case in enumerate(LINEARS) for each in OPERATIONS if each != OPERATIONS[i % 3]))


@pytest.mark.parametrize(("M", "N", "K", "in_blocks", "config", "operation"), CASES)
def test_linear_layers_with_weights_in_e4m3(M, N, K, in_blocks, config, operation, device):
    weight, bias = make_weight(N, K, in_blocks, HALF, device), torch.randn(N, device=device).to(HALF)
    x, is_silu = torch.randn(M, K, device=device).to(HALF), operation == "linear_silu"
    y = torch.randn(M, N // 2 if is_silu else N, device=device).to(HALF)
    bias = None if is_silu else bias
    options = {"weight_scale": weight.scale, "add": operation == "linear_add", "silu": is_silu}
    arrivals, is_gemv = make_arrivals(device), isinstance(config, GemvConfig)

    def kernel(x, y):
        if is_gemv:
            gemv(x, weight.values, y, bias, config, **options)
        else:
            values, scale = fp8.quantize.kernel(x, in_blocks, unit=4)
            split_k(values[:M], weight.values, y, bias, config, arrivals, x_scale=scale[:M], **options)

    def twin(x, y):
        # The GEMV kernel reads its input as it is.
        value = x.float() if is_gemv else dequantize_torch(*quantized(x, weight))
        expected = value @ dequantized(weight).t() + (0 if bias is None else bias.float())
        expected += y.float() if options["add"] else 0
        y.copy_(silu_and_mul.twin(expected.to(HALF)) if is_silu else expected)

    # Gate and up are rounded, and then the result. The interpreter multiplies e4m3's NaN as a number.
    keeps_nan = is_gemv or torch.cuda.is_available()
    hold(kernel, twin, (x, y), written=(1,), close=rounding(HALF, 3, K), keeps_nan=keeps_nan)
    assert not arrivals.any()


@pytest.mark.parametrize("in_blocks", [False, True], ids=["channels", "blocks"])
def test_with_fewer_counters_than_tiles_k_is_not_split(in_blocks, device):
    weight = make_weight(256, 512, in_blocks, torch.float16, device)
    values, scale = fp8.quantize.kernel(torch.randn(17, 512, device=device).half(), in_blocks)
    whole, split = torch.empty(2, 17, 256, dtype=torch.float16, device=device)
    options = {"x_scale": scale, "weight_scale": weight.scale}
    for y, counters in ((whole, make_arrivals(device)[:7]), (split, make_arrivals(device))):
        split_k(values, weight.values, y, None, SplitKConfig(64, 128, 4, 4, 0, 16, 4), counters, **options)
    torch.testing.assert_close(whole, split, **rounding(torch.float16, 1, 512))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(3, 1), r"weight_scale must be a contiguous float32 of one of \[\(256, 1\), \(2, 3\)\]"),
        (torch.ones(256, 1, dtype=torch.float16), "weight_scale must be a contiguous float32"),
        (None, "weight must have x's dtype torch.float16"),
    ],
)
def test_scales_that_do_not_fit(scale, message, device):
    x, weight = torch.zeros(1, 384, dtype=torch.float16, device=device), torch.zeros(256, 384, device=device).to(E4M3)
    y = torch.zeros(1, 256, dtype=torch.float16, device=device)
    scale = None if scale is None else scale.to(device)
    with pytest.raises(ValueError, match=message):
        gemv(x, weight, y, None, GemvConfig(4, 256, 1), weight_scale=scale)
    if scale is not None:
        with pytest.raises(ValueError, match=message):
            split_k(x.to(E4M3), weight, y, None, CONFIG, None, x_scale=torch.ones(1, 1), weight_scale=scale)


def test_inputs_that_do_not_fit_scales(device):
    x, weight = torch.zeros(2, 384, device=device).to(E4M3), torch.zeros(256, 384, device=device).to(E4M3)
    y = torch.zeros(2, 256, dtype=torch.float16, device=device)
    rows, blocks = (torch.ones(*shape, device=device) for shape in ((256, 1), (2, 3)))
    for scale, shape in ((rows, (2, 1)), (blocks, (2, 3))):
        for wrong in (None, torch.ones(2, 2), torch.ones(shape).half()):
            with pytest.raises(ValueError, match=r"^x_scale must be float32 \[2, [13]\]"):
                split_k(x, weight, y, None, CONFIG, None, x_scale=wrong, weight_scale=scale)
    x_scale, options = torch.ones(2, 1, device=device), {"weight_scale": rows}
    with pytest.raises(ValueError, match=r"^x must be torch.float8_e4m3fn"):
        split_k(x.half(), weight, y, None, CONFIG, None, x_scale=x_scale, **options)
    with pytest.raises(ValueError, match=r"^weight must have dtype torch.float8_e4m3fn"):
        split_k(x, weight.half(), y, None, CONFIG, None, x_scale=x_scale, **options)
    with pytest.raises(ValueError, match=r"^y must be bfloat16 or float16"):
        split_k(x, weight, y.float(), None, CONFIG, None, x_scale=x_scale, **options)
    wide, x_scale = CONFIG._replace(tile_k=256), torch.ones(2, 3, device=device)
    with pytest.raises(ValueError, match=r"^config must have a tile_k of at most 128"):
        split_k(x, weight, y, None, wide, None, x_scale=x_scale, weight_scale=blocks)
