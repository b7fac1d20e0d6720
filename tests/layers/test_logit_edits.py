"""Penalties, bit masks and log-probabilities on rows of logits, by themselves."""

import math

import numpy as np
import pytest
import torch
from draws import sample_torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from nanovllm.engine.features.logits.sampling_pipeline import TokenCounts
from nanovllm.kernels.sampling.sampler import NON_FINITE
from nanovllm.kernels.sampling.sampling_thresholds import sampling_thresholds
from nanovllm.layers.sampling import logprobs
from nanovllm.layers.sampling.logprobs import token_logprobs
from nanovllm.layers.sampling.penalties import IN_PROMPT, apply_penalties
from nanovllm.layers.sampling.token_masks import apply_bitmask, forbid, num_mask_words, pack_mask, unpack_mask

VOCAB = 23
TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
tokens_of = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@given(
    st.lists(
        st.tuples(tokens_of, tokens_of, st.floats(-2, 2), st.floats(-2, 2), st.floats(0.1, 3)), min_size=1, max_size=4
    ),
    st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_penalties(requests, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(requests) + 1, VOCAB, generator=generator) * 3
    order = torch.randperm(len(requests) + 1, generator=generator)[: len(requests)]
    expected = logits.clone()
    state = torch.zeros(len(requests), VOCAB, dtype=torch.int32)
    for i, (prompt, completion, presence, frequency, repetition) in enumerate(requests):
        row = expected[order[i]].unsqueeze(0)
        if prompt or completion:
            row = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([prompt + completion]), row)
        for token in set(completion):
            row[0, token] -= presence + frequency * completion.count(token)
            state[i, token] = completion.count(token)
        state[i, list(set(prompt))] += IN_PROMPT
        expected[order[i]] = row[0]
    strengths = torch.tensor([request[2:] for request in requests]).T
    apply_penalties(logits, order, state, torch.arange(len(requests)), *strengths)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@given(
    logits=st.lists(st.floats(-1e6, 1e6, width=32), min_size=VOCAB, max_size=VOCAB),
    allowed=st.sets(st.integers(0, VOCAB - 1), min_size=1),
    temperature=st.sampled_from([0.0, TINY, 1e-30, 1.0, 1e30, HUGE]),
    repetition=st.sampled_from([TINY, 1e-20, 1.0, 1e20, HUGE]),
    additive=st.sampled_from([-2.0, 0.0, 2.0]),
    count=st.sampled_from([1, 1_000_000]),
    top_k=st.sampled_from([0, 1, 3, 2**31 - 1]),
    top_p=st.sampled_from([TINY, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, TINY, 1.0]),
)
@settings(max_examples=300)
def test_no_number_that_is_accepted_draws_a_forbidden_token(
    logits, allowed, temperature, repetition, additive, count, top_k, top_p, min_p
):
    """All tokens are penalized, and then few are left: none of them may be lost to an overflow."""
    logits, row = torch.tensor([logits]), torch.zeros(1, dtype=torch.int64)
    state = torch.full((1, VOCAB), count, dtype=torch.int32)
    apply_penalties(logits, row, state, row, *torch.tensor([[additive], [additive], [repetition]]))
    is_allowed = np.zeros(VOCAB, bool)
    is_allowed[list(allowed)] = True
    apply_bitmask(logits, row, torch.from_numpy(pack_mask(is_allowed)).unsqueeze(0))
    assert not logits.isnan().any()
    temperatures = torch.tensor([temperature])
    numbers = (torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]), torch.tensor([min_p]))
    thresholds = sampling_thresholds.twin(logits, temperatures, *numbers)
    token = sample_torch(logits, temperatures, torch.tensor([5]), torch.tensor([9]), thresholds).item()
    assert token in allowed
    if temperature <= 1e-30 and top_k <= 1:
        # Logits that a penalty has made as small as the temperature are still drawn from: this one e^100 times rarer.
        drawn, highest = logits[0, token].double(), logits.max().double()
        assert drawn == highest or highest - drawn <= 100 * temperature


@given(st.sets(st.integers(0, 99)), st.sets(st.integers(0, 99)), st.sampled_from([100, 128]))
def test_masks_on_the_host(allowed, changed, vocab_size):
    is_allowed = np.isin(np.arange(vocab_size), list(allowed))
    mask = pack_mask(is_allowed)
    assert (mask.dtype, mask.shape) == (np.int32, (num_mask_words(vocab_size),))
    assert np.array_equal(unpack_mask(mask, vocab_size), is_allowed)
    forbid(mask, changed)
    assert set(np.flatnonzero(unpack_mask(mask, vocab_size))) == allowed - changed


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 100])
def test_bitmask(vocab_size, monkeypatch):
    monkeypatch.setattr(logprobs, "_MAX_ELEMENTS", 2 * vocab_size)  # several pieces
    logits = torch.randn(7, vocab_size)
    before = logits.clone()
    rows = torch.tensor([5, 0, 3, 1, 6])
    bitmask = torch.randint(-(2**31), 2**31, (5, -(-vocab_size // 32)), dtype=torch.int32)
    apply_bitmask(logits, rows, bitmask)
    for row, mask in zip(rows.tolist(), bitmask, strict=True):
        for token in range(vocab_size):
            allowed = mask[token // 32].item() >> token % 32 & 1
            assert logits[row, token] == (before[row, token] if allowed else -math.inf)
    assert torch.equal(logits[[2, 4]], before[[2, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 1, 5, 40])
def test_token_logprobs(dtype, num_top, monkeypatch):
    monkeypatch.setattr(logprobs, "_MAX_ELEMENTS", 2 * VOCAB)
    logits = (torch.randn(7, VOCAB) * 3).to(dtype)
    logits[2, 3:] = -math.inf
    tokens = torch.randint(3, (7,))
    wanted = torch.randint(VOCAB, (7, 3))
    ids, values = token_logprobs(logits, tokens, num_top, wanted)
    assert torch.equal(ids[:, -3:], wanted)
    torch.testing.assert_close(values[:, -3:], logits.float().log_softmax(-1).gather(1, wanted))
    ids, values = token_logprobs(logits, tokens, num_top)
    expected = logits.float().log_softmax(-1)
    assert ids.shape == values.shape == (7, 1 + min(num_top, VOCAB))
    assert torch.equal(ids[:, 0], tokens)
    torch.testing.assert_close(values, expected.gather(1, ids))
    torch.testing.assert_close(values[:, 1:], expected.topk(min(num_top, VOCAB)).values)
    # A row without a token, of logits that are no numbers, leaves the others as they are.
    logits[4], tokens[4] = math.nan, NON_FINITE
    found = token_logprobs(logits, tokens, num_top)
    others = torch.arange(7) != 4
    for x, before in zip(found, (ids, values), strict=True):
        assert torch.equal(x[others], before[others])


def test_counts_are_written_anew_where_more_than_one_token_has_come():
    """As after a step that accepts several proposed tokens."""
    counts = TokenCounts(VOCAB, 4, torch.device("cpu"))
    lengths = (3, 4, 6, 7, 7, 6)
    assert [counts.assign({5: length})[1] for length in lengths] == [[False], [True], [False], [True], [False], [False]]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), min_size=1, max_size=30))
@settings(max_examples=60)
def test_token_counts_hold_what_their_owners_hold(steps):
    """Owners come and go, at most four a step; each draws a token in every step that it is in."""
    counts = TokenCounts(VOCAB, 4, torch.device("cpu"))
    tokens: dict[int, list[int]] = {}
    for step, owners in enumerate(steps):
        for owner in owners:
            tokens.setdefault(owner, [owner, owner + 1]).append((owner * 7 + step) % VOCAB)
        rows, is_current = counts.assign({owner: len(tokens[owner]) for owner in owners})
        assert len(set(rows)) == len(owners)
        for owner, row, current in zip(owners, rows, is_current, strict=True):
            if current:
                counts.advance(torch.tensor([row]), torch.tensor([tokens[owner][-1]]))
            else:
                at = torch.tensor(tokens[owner]) + row * VOCAB
                counts.write(torch.tensor([row]), at[:2], at[2:])
            expected = torch.bincount(torch.tensor(tokens[owner][2:]), minlength=VOCAB).int()
            expected[tokens[owner][:2]] += IN_PROMPT
            assert torch.equal(counts.state[row], expected)
        if step and set(owners) <= set(steps[step - 1]):
            assert all(is_current)
    assert len(counts.state) <= 4
