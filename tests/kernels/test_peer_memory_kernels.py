"""What reads another rank's memory or waits for it, with all "ranks" in one process."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.parallel import all_reduce as kernels

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 64), (3, 100), (20, 256)])
def test_add_norm_arrived(num_tokens, hidden, dtype, device, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_ADD_NORM_PROGRAMS", 8)  # so that one has several tokens
    residual, first, second = torch.randn(3, num_tokens, hidden, device=device).to(dtype)
    weight = (1 + 0.3 * torch.randn(hidden, device=device)).to(dtype)
    total = residual.clone()
    norm = kernels.add_norm_torch(total, [first, second], weight, EPS)
    arrivals = torch.tensor([0, 7, 0, 0], dtype=torch.int32, device=device)
    abort = torch.zeros(1, dtype=torch.int32, device=device)
    y = kernels.add_norm_arrived(residual, first, second, weight, EPS, arrivals[1], 7, abort)
    # Triton's interpreter truncates to bfloat16 where the hardware rounds.
    loose = device == "cpu" and dtype == torch.bfloat16
    torch.testing.assert_close(residual, total, rtol=2.0**-7 if loose else 0, atol=1e-6 if loose else 0)
    tolerance = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}[dtype]
    torch.testing.assert_close(y, norm, rtol=tolerance, atol=1e-3)
    assert arrivals.tolist() == [0, 7, 0, 0], "the next sum would be taken for arrived"


def test_what_never_arrives_is_not_waited_for_once_aborted(device):
    residual, first, second = torch.randn(3, 2, 64, device=device)
    arrival = torch.zeros(1, dtype=torch.int32, device=device)
    abort = torch.ones(1, dtype=torch.int32, device=device)
    kernels.add_norm_arrived(residual, first, second, torch.ones(64, device=device), EPS, arrival, 3, abort)
