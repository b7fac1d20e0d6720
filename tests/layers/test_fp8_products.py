"""Products of fp8 weights as a GPU computes them, on a CPU: which kernel gets what, and that the results are those of
plain torch."""

import pytest
import torch
from linear_inputs import round_to_e4m3_exactly

pytest.importorskip("triton")

from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.matmul.split_k import split_k
from nanovllm.kernels.silu_and_mul import silu_and_mul_torch
from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.quantization import (
    Fp8Format,
    Fp8Weight,
    Quantized,
    fp8_product_torch,
    quantize_input_torch,
)
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul import fp8_products, kernel_matmul
from nanovllm.layers.matmul.fp8_products import compute_fp8, fp8_product
from nanovllm.layers.matmul.kernel_matmul import SplitK
from nanovllm.layers.matmul.matmul import Problem

in_blocks = pytest.mark.parametrize("in_blocks", [False, True], ids=["channels", "blocks"])
CONSTANTS = (64, 128, 2, 4, 0, 32, 4)


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    """CPU tensors count as a Hopper's: Triton's interpreter runs the kernels. torch's product is a stand-in that takes
    what cuBLAS takes."""
    if torch.cuda.is_available():
        pytest.skip("the kernels would be compiled for a GPU")
    monkeypatch.setattr(kernel_matmul, "use_kernels", lambda x: True)
    monkeypatch.setattr(GpuFacts, "is_hopper", True)
    monkeypatch.setattr(kernel_matmul, "has_pdl", lambda device: True)
    monkeypatch.setattr(fp8_products, "use_kernels", lambda x: True)
    monkeypatch.setattr(Fp8Weight, "is_cuda", True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    round_to_e4m3_exactly(monkeypatch)


def scaled_mm(x, weight, scale_a, scale_b, out_dtype, use_fast_accum):
    num_rows, K = x.shape
    if scale_a.shape[1] > 1:
        assert num_rows % 4 == 0
        assert K % 512 == 0
        assert scale_a.stride() == (1, num_rows)
    format = Fp8Format(is_blocked=scale_a.shape[1] > 1)
    return fp8_product_torch(Quantized(x, scale_a), Fp8Weight(weight.t(), scale_b.t(), format, out_dtype))


def make_weight(N, K, in_blocks, dtype=torch.float16) -> Fp8Weight:
    format = Fp8Format(is_blocked=in_blocks)
    return Fp8Weight(*format.quantize(torch.randn(N, K) / K**0.5), format, dtype)


def close(found, expected):
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected.float(), atol=4e-3, rtol=4e-3)


@in_blocks
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 6])
@pytest.mark.parametrize(("N", "K"), [(256, 512), (256, 384), (128, 128)])
def test_products_that_cublas_has_and_others(N, K, num_tokens, in_blocks):
    weight, x = make_weight(N, K, in_blocks), torch.randn(num_tokens, K).half()
    found = fp8_product(x, weight)
    assert found.shape == (num_tokens, N)
    close(found, fp8_product_torch(quantize_input_torch(x, weight.format), weight))


def test_our_kernel_computes_what_cublas_has_not(monkeypatch):
    calls = []
    monkeypatch.setattr(
        fp8_products, "split_k", lambda *args, **options: calls.append(args) or split_k(*args, **options)
    )
    for N, K, is_blocked, is_ours in ((128, 384, True, True), (128, 512, True, False), (128, 384, False, False)):
        fp8_product(torch.randn(3, K).half(), make_weight(N, K, is_blocked))
        assert bool(calls) == is_ours
        calls.clear()


@in_blocks
@pytest.mark.parametrize("operation", ["linear", "linear_silu", "linear_add"])
@pytest.mark.parametrize("num_tokens", [7, 40])
def test_the_split_k_candidate_rounds_as_torch_does(operation, num_tokens, in_blocks):
    """The norm, or the activation, is computed with the quantization."""
    N, K = 256, 512
    weight, x = make_weight(N, K, in_blocks), torch.randn(num_tokens, K).half()
    out = torch.randn(num_tokens, N).half() if operation == "linear_add" else None
    bias = None if operation == "linear_silu" else torch.randn(N).half()
    inputs = [x, Normed(x, RMSNorm(K).half()), Gated(torch.cat([x, x.flip(1)], dim=1))]
    for given in inputs:
        problem = Problem(operation, given, weight, bias, out)
        again = problem._replace(out=None if out is None else out.clone())
        candidate = SplitK(torch.device("cpu"))
        assert candidate.supports(problem)
        expected = compute_fp8(again)
        if isinstance(expected, Gated):
            expected = silu_and_mul_torch(expected.gate_up)
        found = candidate.launch(problem, CONSTANTS)
        assert out is None or found is out
        torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)


def test_what_the_candidate_supports():
    def supports(N=8, K=32, num_tokens=5000, dtype=torch.bfloat16):
        x = torch.zeros(num_tokens, K, dtype=dtype)
        return SplitK(x.device).supports(Problem("linear", x, make_weight(N, K, False, dtype)))

    assert supports()
    assert supports(N=20000)
    assert not supports(K=40)
    assert not supports(dtype=torch.float32)
