"""Penalties: which logits they leave alone. (What they compute is in test_logit_edits.py, with extreme numbers.)"""

import torch

from nanovllm.layers.sampling.penalties import IN_PROMPT, apply_penalties


def test_logits_of_tokens_that_nobody_holds_are_the_very_same(device):
    logits = torch.randn(5, 4100, device=device)[:, :4097] * 4
    state = torch.randint(4, (7, 4097), dtype=torch.int32, device=device)
    state *= torch.rand(state.shape, device=device) < 0.3
    state += (torch.rand(state.shape, device=device) < 0.2) * IN_PROMPT
    rows, state_rows = torch.tensor([4, 0, 2], device=device), torch.tensor([6, 1, 3], device=device)
    presence, frequency, repetition = torch.rand(3, 3, device=device) + 1.5
    before = logits.clone()
    apply_penalties(logits, rows, state.int(), state_rows, presence, frequency, repetition)
    untouched = torch.ones_like(logits, dtype=torch.bool)
    untouched[rows] = state[state_rows] == 0
    assert torch.equal(logits[untouched], before[untouched])
    assert (logits[~untouched] != before[~untouched]).all()


def test_no_penalized_rows_change_nothing(device):
    logits = torch.randn(2, 9, device=device)
    nobody, none = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device)
    before = logits.clone()
    apply_penalties(logits, nobody, torch.zeros(0, 9, dtype=torch.int32, device=device), nobody, none, none, none)
    assert torch.equal(logits, before)
