"""The gate/up projection with SwiGLU inside against the two steps that it stands for."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton.tools.tensor_descriptor")

from kernel_harness import DTYPES, rounding

from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.matmul.linear_silu import can_fuse, linear_silu
from nanovllm.kernels.silu_and_mul import silu_and_mul


def random_case(num_tokens, K, intermediate, dtype, device):
    x = torch.randn(num_tokens, K, device=device).to(dtype)
    return x, (torch.randn(2 * intermediate, K, device=device) * K**-0.5).to(dtype)


def check(x, weight):
    expected = silu_and_mul.twin(F.linear(x.float(), weight.float()))
    torch.testing.assert_close(linear_silu(x, weight).float(), expected, **rounding(x.dtype, 1, x.shape[1]))


@pytest.mark.parametrize(("num_tokens", "K", "intermediate"), [(0, 64, 128), (1, 64, 128), (130, 192, 256)])
@pytest.mark.parametrize("dtype", DTYPES[1:] if torch.cuda.is_available() else DTYPES[:2])
def test_kernel_equals_the_two_steps(num_tokens, K, intermediate, dtype, device):
    check(*random_case(num_tokens, K, intermediate, dtype, device))


def test_what_it_cannot_address_is_refused(device):
    x, weight = random_case(4, 64, 128, torch.bfloat16, device)
    for bad_x, bad_weight in ((x[:, :32], weight), (x, weight[:200]), (x.half(), weight)):
        with pytest.raises(ValueError, match="multiple of 64"):
            linear_silu(bad_x, bad_weight)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [2048, 2049, 5000, 16384])
@pytest.mark.parametrize(("K", "intermediate"), [(1024, 3072), (2048, 6144)])
def test_shapes_of_the_published_models(num_tokens, K, intermediate):
    x, weight = random_case(num_tokens, K, intermediate, torch.bfloat16, "cuda")
    assert can_fuse(weight) == GpuFacts.of(weight.device).is_hopper
    check(x, weight)
