"""Sequence: its arithmetic, and what of it crosses to a worker process."""

import pickle
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams


def test_a_new_sequence_waits_for_its_prefill():
    first, seq = Sequence([1]), Sequence([4, 5, 6])
    assert seq.status is SequenceStatus.WAITING
    assert seq.is_prefill
    assert not seq.is_finished
    assert seq.completion.finish_reason is None
    assert seq.seq_id > first.seq_id
    assert (len(seq), seq.num_tokens, seq.num_prompt_tokens, seq.last_token) == (3, 3, 3, 6)
    assert (seq.num_cached_tokens, seq.num_scheduled_tokens, seq.num_completion_tokens) == (0, 0, 0)
    assert seq.block_table == []


@pytest.mark.parametrize(
    ("status", "finished"),
    [(SequenceStatus.WAITING, False), (SequenceStatus.RUNNING, False), (SequenceStatus.FINISHED, True)],
)
def test_is_finished_follows_the_status(status, finished):
    seq = Sequence([1])
    seq.status = status
    assert seq.is_finished is finished


@pytest.mark.parametrize(("given", "expected"), [(9, 9), (None, sys.maxsize)])
def test_its_limit_is_that_of_the_sampling_params(given, expected):
    assert Sequence([1], SamplingParams(max_tokens=given)).max_tokens == expected


@pytest.mark.parametrize("own", [0, 5])
def test_a_samples_seed_goes_before_that_of_its_request(own):
    params = SamplingParams(seed=own)
    assert [Sequence([1], params).seed, Sequence([1], params, seed=0).seed, Sequence([1], params, seed=7).seed] == [
        *(own, 0, 7)
    ]


def test_without_any_seed_torch_gives_one():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        seeds = [Sequence([1]).seed for _ in range(2)]
        torch.manual_seed(1)
        assert [Sequence([1]).seed for _ in range(2)] == seeds
    assert seeds[0] != seeds[1]


@given(
    prompt=st.lists(st.integers(0, 200_000), min_size=1, max_size=40),
    completion=st.lists(st.integers(0, 200_000), max_size=40),
    block_size=st.integers(1, 20),
)
def test_counts_and_blocks_follow_from_the_tokens(prompt, completion, block_size):
    seq = Sequence(prompt)
    seq.block_size = block_size
    for token in completion:
        seq.append_token(token)
    tokens = prompt + completion
    assert seq.token_ids == tokens
    assert seq.prompt_token_ids == prompt
    assert seq.completion_token_ids == completion
    assert seq.last_token == tokens[-1]
    assert len(seq) == seq.num_tokens == len(tokens)
    assert (seq.num_prompt_tokens, seq.num_completion_tokens) == (len(prompt), len(completion))

    blocks = [tokens[i : i + block_size] for i in range(0, len(tokens), block_size)]
    assert seq.num_blocks == len(blocks)
    assert seq.last_block_num_tokens == len(blocks[-1])
    assert [seq.block(i) for i in range(seq.num_blocks)] == blocks
    assert seq[0] == tokens[0]
    assert seq[1:3] == tokens[1:3]


def test_a_token_that_is_still_being_sampled_counts_and_is_filled_in():
    seq = Sequence([1, 2, 3])
    seq.block_size = 3
    assert seq.pending_row == -1
    seq.append_pending(5)
    assert (seq.pending_row, seq.num_tokens, seq.num_completion_tokens, seq.num_blocks) == (5, 4, 1, 2)
    seq.resolve_pending(77)
    assert (seq.pending_row, seq.num_tokens, seq.last_token, seq.token_ids) == (-1, 4, 77, [1, 2, 3, 77])


def test_a_dropped_placeholder_leaves_what_was_there():
    seq = Sequence([1, 2, 3])
    seq.append_pending(5)
    for _ in range(2):  # Without a placeholder it does nothing.
        seq.drop_pending()
        assert (seq.pending_row, seq.num_tokens, seq.last_token, seq.token_ids) == (-1, 3, 3, [1, 2, 3])


@pytest.mark.parametrize("i", [-1, 3, 100])
def test_a_block_outside_the_sequence_is_an_index_error(i):
    seq = Sequence(list(range(33)))
    seq.block_size = 16
    with pytest.raises(IndexError, match=rf"{i}\b.*3"):
        seq.block(i)


def test_another_default_block_size_reaches_the_sequences_that_have_none_of_their_own(monkeypatch):
    own = Sequence(list(range(9)))
    own.block_size = 3
    monkeypatch.setattr(Sequence, "block_size", 4)
    assert [Sequence(list(range(9))).num_blocks, own.num_blocks] == [3, 3]
    monkeypatch.setattr(Sequence, "block_size", 9)
    assert [Sequence(list(range(9))).num_blocks, own.num_blocks] == [1, 3]


@pytest.mark.parametrize("is_prefill", [True, False])
def test_a_pickle_has_what_a_worker_needs_and_no_more(is_prefill):
    seq = Sequence(list(range(1000)), SamplingParams(temperature=0.3, seed=5))
    seq.append_token(77)
    seq.block_table = [4, 2, 3, 9]
    seq.num_cached_tokens, seq.num_scheduled_tokens, seq.is_prefill = 256, 700, is_prefill
    data = pickle.dumps(seq)
    copy = pickle.loads(data)
    names = ["num_tokens", "num_prompt_tokens", "num_cached_tokens", "num_scheduled_tokens", "last_token"]
    for name in [*names, "block_table", "temperature", "seed", "is_prefill", "is_plain"]:
        assert getattr(copy, name) == getattr(seq, name), name
    assert copy.token_ids == (seq.token_ids if is_prefill else [])
    assert (len(data) < 300) == (not is_prefill)


def test_what_is_handed_out_besides_the_tokens_is_a_copy():
    prompt = [1, 2, 3]
    seq = Sequence(prompt)
    seq.block_size = 2
    prompt[0] = 99
    for handed_out in (seq.prompt_token_ids, seq.completion_token_ids, seq.block(0)):
        handed_out.append(99)
        handed_out[0] = 99
    assert seq.token_ids == [1, 2, 3]


def test_repr_names_the_sequence_and_its_state():
    seq = Sequence([1, 2, 3])
    text = repr(seq)
    assert f"seq_id={seq.seq_id}" in text
    assert "WAITING" in text
