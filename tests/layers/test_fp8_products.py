"""Products of fp8 weights as a GPU computes them, on a CPU: which kernel gets what, and that the results are those of
plain torch."""

from itertools import product

import pytest
import torch
from linear_inputs import round_to_e4m3_exactly

pytest.importorskip("triton")

from kernel_harness import launch_everywhere, nightly, rounding
from products import FP8, problem

from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.matmul.fp8 import dequantize_torch, quantize
from nanovllm.kernels.matmul.split_k import split_k
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.activation import Gated, OutputGate
from nanovllm.layers.formats import fp8
from nanovllm.layers.formats.all_formats import weight_format
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.fp8 import Fp8
from nanovllm.layers.layernorm import Normed, NormOfSum, RMSNorm
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.matmul.candidates import scaled_mm
from nanovllm.layers.matmul.candidates import split_k as split_k_candidate
from nanovllm.layers.matmul.candidates.scaled_mm import ScaledMm
from nanovllm.layers.matmul.candidates.split_k import SplitK
from nanovllm.layers.matmul.matmul import Matmul

in_blocks = pytest.mark.parametrize("in_blocks", [False, True], ids=["channels", "blocks"])
CONSTANTS = (64, 128, 2, 4, 0, 32, 4)


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    """CPU tensors count as a Hopper's: Triton's interpreter runs the kernels. torch's product is a stand-in that takes
    what cuBLAS takes."""
    launch_everywhere(monkeypatch, split_k_candidate)
    names = "quantize", "rms_norm_quantize", "silu_and_mul_quantize", "sigmoid_gate_quantize", "gated_rms_norm_quantize"
    for name in names:
        monkeypatch.setattr(fp8, name, getattr(fp8, name).kernel)
    monkeypatch.setattr(GpuFacts, "is_hopper", True)
    monkeypatch.setattr(scaled_mm, "is_on_gpu", lambda weight: True)
    monkeypatch.setattr(torch, "_scaled_mm", emulated_product)
    round_to_e4m3_exactly(monkeypatch)


def emulated_product(x, weight, scale_a, scale_b, out_dtype, use_fast_accum):
    num_rows, K = x.shape
    if scale_a.shape[1] > 1:
        assert num_rows % 4 == 0
        assert K % 512 == 0
        assert scale_a.stride() == (1, num_rows)
    return (dequantize_torch(x, scale_a) @ dequantize_torch(weight.t(), scale_b.t()).t()).to(out_dtype)


def make_weight(N, K, in_blocks, dtype=torch.float16) -> Weight:
    return FP8[in_blocks].quantize(torch.randn(N, K) / K**0.5, dtype)


def expected_product(x, weight):
    values, scale = quantize.twin(x, weight.format.is_blocked)
    return (dequantize_torch(values, scale) @ weight.format.dequantized(weight).t()).to(weight.dtype)


def close(found, expected):
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected.float(), **rounding(torch.float16, 2, 512))


@in_blocks
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 6])
@pytest.mark.parametrize(("N", "K"), [(256, 512), (256, 384), (128, 128)])
def test_products_that_cublas_has_and_others(N, K, num_tokens, in_blocks):
    weight, x = make_weight(N, K, in_blocks), torch.randn(num_tokens, K).half()
    found = scaled_mm.scaled_mm(x, weight)
    assert found.shape == (num_tokens, N)
    close(found, expected_product(x, weight))


def test_our_kernel_computes_what_cublas_has_not(monkeypatch):
    calls = []
    monkeypatch.setattr(scaled_mm, "split_k", lambda *args, **options: calls.append(args) or split_k(*args, **options))
    for N, K, is_blocked, is_ours in ((128, 384, True, True), (128, 512, True, False), (128, 384, False, False)):
        scaled_mm.scaled_mm(torch.randn(3, K).half(), make_weight(N, K, is_blocked))
        assert bool(calls) == is_ours
        calls.clear()


@pytest.mark.parametrize(
    ("operation", "in_blocks", "num_tokens"),
    [
        *(("linear", True, 40), ("linear_silu", False, 7), ("linear_add", True, 40)),
        *nightly(*product(["linear", "linear_silu", "linear_add"], [False, True], [7, 40])),
    ],
)
def test_the_split_k_candidate_rounds_as_torch_does(operation, num_tokens, in_blocks):
    """The norm, or the activation, is computed with the quantization."""
    N, K = 256, 256
    weight, x = make_weight(N, K, in_blocks), torch.randn(num_tokens, K).half()
    out = torch.randn(num_tokens, N).half() if operation == "linear_add" else None
    bias = None if operation == "linear_silu" else torch.randn(N).half()
    inputs = [x, Normed(x, RMSNorm(K).half()), Gated(torch.cat([x, x.flip(1)], dim=1))]
    for given in inputs:
        asked = problem(operation, given, weight, bias, out)
        again = asked._replace(out=None if out is None else out.clone())
        candidate = SplitK(torch.device("cpu"))
        assert candidate.supports(asked.key, weight)
        expected = ScaledMm().launch(again)
        if isinstance(expected, Gated):
            expected = silu_and_mul.twin(expected.gate_up)
        found = candidate.launch(asked, CONSTANTS)
        assert out is None or found is out
        # Of the same quantized input. Gate and up are rounded, and then the result.
        torch.testing.assert_close(found, expected, **rounding(torch.float16, 4, K))


@in_blocks
def test_inputs_are_quantized_with_what_stands_before_them(in_blocks):
    """The same numbers as of what a product in another format reads, but for roundings."""
    format, K = FP8[in_blocks], 256
    x, gate, of_token = (torch.randn(6, size).half() for size in (K, K, 1))
    weight = 1 + 0.1 * torch.randn(128)
    inputs = [
        lambda: Gated(torch.cat([x, gate], dim=1), of_token),
        lambda: OutputGate(x.clone(), gate),
        lambda: OutputGate(x.clone(), gate, weight, 1e-6),
    ]
    for make in inputs:
        assert len(make()) == 6
        found = dequantize_torch(*format.quantize_input(make()))
        torch.testing.assert_close(found, make().value().float(), rtol=1 / 14, atol=2e-3)
    computed = inputs[1]()
    value = computed.value().clone()
    assert torch.equal(computed.value(), value)
    torch.testing.assert_close(
        dequantize_torch(*format.quantize_input(computed)), value.float(), rtol=1 / 14, atol=2e-3
    )


@in_blocks
def test_a_norm_is_quantized_once_and_kept_for_others(in_blocks):
    norm, format = RMSNorm(256).half(), FP8[in_blocks]
    stream, addend = torch.randn(2, 6, 256).half()
    expected = norm(stream + addend)
    hidden = NormOfSum(stream.clone(), norm, addend)
    assert len(hidden) == 6
    hidden.is_read_again = True
    found = format.quantize_input(hidden)
    assert hidden.is_computed
    torch.testing.assert_close(hidden.value(), expected, **rounding(torch.float16, 2))
    torch.testing.assert_close(hidden.residual, stream + addend, **rounding(torch.float16))
    assert format.quantize_input(hidden) is found
    assert len(format.quantize_input(hidden, 4).values) == 8  # With rows up to a multiple, so not the same.


def test_a_sum_is_left_to_the_norm_behind_it():
    torch.manual_seed(0)
    with weight_format(Fp8()):
        layer = RowParallelLinear(128, 64, matmul=Matmul()).requires_grad_(False)
    layer.weight.data.copy_(torch.randn(64, 128))
    layer.weight_scale.data.fill_(0.1)
    x, residual = torch.randn(5, 128), torch.randn(5, 64)
    expected = residual + layer.products["linear"](x)
    for norm in (RMSNorm(64), None):
        given = residual.clone()
        hidden = layer.add(given, x, norm)
        value = hidden.value()
        assert hidden.residual is given
        assert torch.equal(given, expected)
        assert torch.equal(value, expected if norm is None else norm(expected))


def test_what_the_candidate_supports():
    def supports(N=8, K=32, dtype=torch.bfloat16):
        asked = problem("linear", torch.zeros(5000, K, dtype=dtype), make_weight(N, K, False, dtype))
        return SplitK(torch.device("cpu")).supports(asked.key, asked.weight)

    assert supports()
    assert supports(N=20000)
    assert not supports(K=40)
    assert not supports(dtype=torch.float32)
