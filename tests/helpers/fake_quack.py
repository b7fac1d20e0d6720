"""Stands for the quack-kernels package in tests."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from nanovllm.layers.matmul.candidates.quack import Quack


class Package:
    """Stands for quack.gemm_interface.gemm_act, in plain torch."""

    def __init__(self, error: Exception | None = None):
        self.calls, self.error = [], error

    def __call__(
        self, x, weight, *, postact_out, C=None, activation=None, concat_layout=None, config, scales=None,
        cu_seqlens_m=None, A_idx=None, **options,
    ):  # fmt: skip
        assert options == {"store_preact": False, "tuned": False}
        self.calls.append(config)
        if self.error is not None:
            raise self.error
        x = x if A_idx is None else x[A_idx]
        assert (scales is not None) == (x.dtype == weight.dtype == torch.float8_e4m3fn)
        if cu_seqlens_m is None:
            y = x.float() @ weight.float()
            if scales is not None:
                y *= scales[0] * scales[1].t()
        else:
            y = x.new_zeros(len(x), weight.shape[2], dtype=torch.float32)
            for i in range(len(weight)):
                rows = slice(cu_seqlens_m[i], cu_seqlens_m[i + 1])
                y[rows] = x[rows].float() @ weight[i].float()
                if scales is not None:
                    y[rows] *= scales[0][rows] * scales[1][i].t()
        y += 0 if C is None else C.float()
        if activation is not None:
            assert (activation, concat_layout) == ("swiglu", ("B",))
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        postact_out.copy_(y)


class CpuQuack(Quack):
    """Takes what a test has: float32, on a CPU, of any shape."""

    def _takes(self, key, weight):
        return True

    def _takes_rows(self, x, weight):
        return True


def make_config(**options) -> SimpleNamespace:
    return SimpleNamespace(**options)


def tensors(num_tokens: int, N: int, K: int):
    torch.manual_seed(num_tokens)
    return torch.randn(num_tokens, K), torch.randn(N, K) * K**-0.5, torch.randn(num_tokens, N)
