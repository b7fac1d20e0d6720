"""The penalties' kernel against its plain-torch twin."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels import penalties as kernels
from nanovllm.layers.penalties import IN_PROMPT, MAX_LOGIT, apply_penalties_torch


@pytest.mark.parametrize(("batch", "vocab_size"), [(1, 1), (3, 7), (5, 4097), (9, 8192)])
def test_kernel_equals_twin(batch, vocab_size, device):
    logits = torch.randn(batch, vocab_size + 3, device=device)[:, :vocab_size] * 4
    logits[0, 0] = -torch.inf
    num = max(1, batch - 2)
    state = torch.randint(4, (num + 2, vocab_size), dtype=torch.int32, device=device)
    state *= torch.rand(state.shape, device=device) < 0.3
    state += (torch.rand(state.shape, device=device) < 0.2) * IN_PROMPT
    rows = torch.randperm(batch, device=device)[:num]
    state_rows = torch.randperm(num + 2, device=device)[:num]
    strengths = torch.rand(2, num, device=device) * 4 - 2
    repetition = torch.rand(num, device=device) + 0.5
    found, expected = logits.clone(), logits.clone()
    kernels.apply_penalties(found, rows, state.int(), state_rows, *strengths, repetition, IN_PROMPT, MAX_LOGIT)
    apply_penalties_torch(expected, rows, state.int(), state_rows, *strengths, repetition)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    # Logits of tokens that nobody holds are the very same.
    untouched = torch.ones_like(logits, dtype=torch.bool)
    untouched[rows] = state[state_rows] == 0
    assert torch.equal(found[untouched], logits[untouched])


def test_extreme_numbers(device):
    """What is finite stays so, and what is not stays what it is."""
    values = [0.0, -0.0, 1.0, -1.0, 1e-30, -1e30, 3e38, torch.inf, -torch.inf, torch.nan]
    logits = torch.tensor([values] * 4, device=device)
    rows = torch.arange(4, device=device)
    state = torch.full(logits.shape, 1_000_000, dtype=torch.int32, device=device)
    strengths = torch.tensor([[-2.0, 2, 0, 2], [-2.0, 2, 0, 2]], device=device)
    repetition = torch.tensor([1.2e-38, 1.2e-38, 3.4e38, 3.4e38], device=device)
    found, expected = logits.clone(), logits.clone()
    kernels.apply_penalties(found, rows, state, rows, *strengths, repetition, IN_PROMPT, MAX_LOGIT)
    apply_penalties_torch(expected, rows, state, rows, *strengths, repetition)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(found.isfinite(), logits.isfinite())
    assert found[logits.isfinite()].abs().max() <= MAX_LOGIT


def test_no_rows(device):
    logits = torch.randn(2, 9, device=device)
    nobody, none = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device)
    state = torch.zeros(0, 9, dtype=torch.int32, device=device)
    before = logits.clone()
    kernels.apply_penalties(logits, nobody, state, nobody, none, none, none, IN_PROMPT, MAX_LOGIT)
    assert torch.equal(logits, before)
