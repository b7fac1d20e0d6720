"""Weights of 4 bits as floats: the kernel against its twin."""

import pytest
import torch

pytest.importorskip("triton")

from four_bit_weights import make_four_bit

from nanovllm.kernels.matmul.dequantize_four_bit import dequantize
from nanovllm.kernels.matmul.four_bit import FourBit, dequantize_torch


@pytest.mark.parametrize(
    ("kind", "shape", "group"),
    [("symmetric", (3, 5, 96), 96), ("zeros", (130, 256), 64), ("e2m1", (2, 7, 160), 32), ("e2m1", (1, 32), 32)],
)
def test_kernel_equals_its_twin(kind, shape, group, device):
    weight = make_four_bit(kind, shape, group, torch.float16, device)
    assert torch.equal(dequantize.kernel(weight, torch.float32), dequantize_torch(weight))
    assert torch.equal(dequantize.kernel(weight, torch.float16), dequantize_torch(weight).half())


def test_every_e2m1_number_and_scale(device):
    values = torch.arange(16, dtype=torch.uint8, device=device).repeat(255, 1)
    scale = torch.arange(255, dtype=torch.uint8, device=device)[:, None]
    weight = FourBit(values, scale)
    assert torch.equal(dequantize.kernel(weight, torch.float32), dequantize_torch(weight))


def test_wrong_arguments(device):
    weight = make_four_bit("e2m1", (4, 64), 32, torch.float16, device)
    with pytest.raises(ValueError, match="weight must be contiguous"):
        dequantize.kernel(weight._replace(values=weight.values.t().contiguous().t()), torch.float32)
