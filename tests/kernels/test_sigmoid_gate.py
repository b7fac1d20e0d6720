"""The gate on a layer's output: kernel against twin."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import DTYPES, assert_refused, hold, rounding

from nanovllm.kernels.sigmoid_gate import sigmoid_gate


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width", "gates"), [(3, 48, 48), (2, 1100, 1), (1, 1, 1), (0, 8, 8)])
def test_kernel_equals_twin(num_tokens, width, gates, dtype, device):
    x, gate = (torch.randn(num_tokens, n, device=device).to(dtype) for n in (width, gates))
    hold(sigmoid_gate.kernel, sigmoid_gate.twin, (x, gate), rows=(1,), written=(0,), close=rounding(dtype, terms=0))
    found = sigmoid_gate.twin(x.clone(), gate).float()
    torch.testing.assert_close(found, x.float() * gate.float().sigmoid(), **rounding(dtype, terms=0))


def test_other_shapes_are_refused(device):
    x = torch.zeros(2, 8, device=device)
    wrong = [torch.zeros(2, 4, device=device), torch.zeros(1, 8, device=device)]
    assert_refused(sigmoid_gate.kernel, {"x": x, "gate": x}, {"gate": wrong})
    with pytest.raises(ValueError, match="contiguous rows"):
        sigmoid_gate.kernel(x, torch.zeros(8, 2, device=device).t())
