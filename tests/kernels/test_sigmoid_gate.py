"""The gate on a layer's output: kernel against twin."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.sigmoid_gate import sigmoid_gate

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("num_tokens", "width", "is_one"), [(3, 48, False), (2, 1100, True), (1, 1, True), (0, 8, False)]
)
def test_kernel_equals_twin(num_tokens, width, is_one, dtype, device):
    rows = torch.randn(num_tokens, 2 * width + 3, device=device).to(dtype)
    x, gate = rows[:, :width], rows[:, width + 3 : width + 4 if is_one else 2 * width + 3]
    values, gates = x.float().clone(), gate.float().clone()
    expected = sigmoid_gate.twin(x.clone(), gate)
    torch.testing.assert_close(expected, (values * gates.sigmoid()).to(dtype))
    untouched = rows[:, width:].clone()
    assert sigmoid_gate.kernel(x, gate) is x
    torch.testing.assert_close(x, expected, rtol=TOLERANCE[dtype], atol=1e-6)
    assert torch.equal(rows[:, width:], untouched)
    torch.testing.assert_close(sigmoid_gate(values.to(dtype), gate), expected, rtol=TOLERANCE[dtype], atol=1e-6)


def test_other_shapes_are_refused(device):
    x = torch.zeros(2, 8, device=device)
    for gate in (torch.zeros(2, 4, device=device), torch.zeros(1, 8, device=device)):
        with pytest.raises(ValueError, match="gate must be"):
            sigmoid_gate.kernel(x, gate)
    with pytest.raises(ValueError, match="contiguous rows"):
        sigmoid_gate.kernel(x, torch.zeros(8, 2, device=device).t())
