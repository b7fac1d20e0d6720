"""Weights and rows for the tests of linear layers' kernels, these as functions that return results, and their twins."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul


def make_linear(N: int, K: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight whose products with standard normal rows are of order one, and a bias."""
    weight = torch.randn(N, K, device=device) / K**0.5
    return weight.to(dtype), torch.randn(N, device=device).to(dtype)


def empty_result(x: torch.Tensor, weight: torch.Tensor, silu: bool = False) -> torch.Tensor:
    return torch.empty(len(x), len(weight) // 2 if silu else len(weight), dtype=x.dtype, device=x.device)


def round_to_e4m3_exactly(monkeypatch) -> None:
    """Triton's interpreter rounds to e4m3 wrongly; torch does it as the hardware does."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_exactly(values, source, target, rounding):
        if target != tl.float8e4nv or source != tl.float32:
            return convert(values, source, target, rounding)
        floats = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert_exactly)


def same_bits_in_a_graph(chain, start: torch.Tensor) -> None:
    """`chain(residual, pdl)` changes the residual by launches that need each other's results. Dependent launches in a
    graph must give the bits of ordinary ones, every time."""
    residual = start.clone(memory_format=torch.contiguous_format)
    torch.cuda.synchronize()
    chain(residual, False)
    expected = residual.clone()
    assert expected.isfinite().all()
    assert not torch.equal(expected, start)
    residual.copy_(start)
    chain(residual, True)
    torch.cuda.synchronize()
    assert torch.equal(residual, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        residual.copy_(start)
        chain(residual, True)
    for _ in range(50):
        graph.replay()
        assert torch.equal(residual, expected)


def gemv_norm_linear(x, norm_weight, eps, weight, bias=None, *, config, pdl=False):
    from nanovllm.kernels.matmul.gemv import gemv

    y = empty_result(x, weight)
    gemv(x, weight, y, bias, config, norm_weight=norm_weight, eps=eps, pdl=pdl)
    return y


def gemv_norm_linear_silu(x, norm_weight, eps, weight, *, config, pdl=False):
    from nanovllm.kernels.matmul.gemv import gemv

    y = empty_result(x, weight, silu=True)
    gemv(x, weight, y, None, config, norm_weight=norm_weight, eps=eps, silu=True, pdl=pdl)
    return y


def gemv_linear_add(x, weight, residual, bias=None, *, config, pdl=False):
    from nanovllm.kernels.matmul.gemv import gemv

    gemv(x, weight, residual, bias, config, add=True, pdl=pdl)
    return residual


def split_k_linear(x, weight, bias=None, out=None, *, config, arrivals=None, pdl=False):
    from nanovllm.kernels.matmul.split_k import make_arrivals, split_k

    y = empty_result(x, weight) if out is None else out
    split_k(x, weight, y, bias, config, make_arrivals(x.device) if arrivals is None else arrivals, pdl=pdl)
    return y


def split_k_linear_silu(x, weight, *, config, arrivals=None, pdl=False):
    from nanovllm.kernels.matmul.split_k import make_arrivals, split_k

    y = empty_result(x, weight, silu=True)
    arrivals = make_arrivals(x.device) if arrivals is None else arrivals
    split_k(x, weight, y, None, config, arrivals, silu=True, pdl=pdl)
    return y


def split_k_linear_add(x, weight, residual, bias=None, *, config, arrivals=None, pdl=False):
    from nanovllm.kernels.matmul.split_k import make_arrivals, split_k

    arrivals = make_arrivals(x.device) if arrivals is None else arrivals
    split_k(x, weight, residual, bias, config, arrivals, add=True, pdl=pdl)
    return residual


# The plain twins of the kernels: sums in float32, rounded where the kernels round.


def linear_torch(x, weight, bias=None):
    product = F.linear(x.float(), weight.float())
    return (product if bias is None else product + bias.float()).to(x.dtype)


def linear_silu_torch(x, weight):
    return silu_and_mul.twin(linear_torch(x, weight))


def linear_add_torch(x, weight, residual, bias=None):
    total = residual.float() + F.linear(x.float(), weight.float())
    return residual.copy_(total if bias is None else total + bias.float())


def norm_linear_torch(x, norm_weight, eps, weight, bias=None):
    return linear_torch(rms_norm.twin(x, norm_weight, eps), weight, bias)


def norm_linear_silu_torch(x, norm_weight, eps, weight):
    return linear_silu_torch(rms_norm.twin(x, norm_weight, eps), weight)
