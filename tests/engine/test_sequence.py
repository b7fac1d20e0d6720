"""Sequence: its arithmetic, and what of it crosses to a worker process."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams


def test_a_new_sequence_waits_for_its_prefill():
    seq = Sequence(11, [4, 5, 6], block_size=16)
    assert seq.status is SequenceStatus.WAITING
    assert seq.is_prefilling
    assert not seq.is_finished
    assert seq.finish_reason is None
    assert (seq.seq_id, len(seq), seq.num_tokens, seq.num_prompt_tokens, seq.last_token) == (11, 3, 3, 3, 6)
    assert (seq.num_cached_tokens, seq.num_scheduled_tokens, seq.num_completion_tokens) == (0, 0, 0)
    assert seq.block_table == []


@pytest.mark.parametrize(
    ("status", "finished"),
    [(SequenceStatus.WAITING, False), (SequenceStatus.RUNNING, False), (SequenceStatus.FINISHED, True)],
)
def test_is_finished_follows_the_status(status, finished):
    seq = Sequence(0, [1])
    seq.status = status
    assert seq.is_finished is finished


@pytest.mark.parametrize(("given", "expected"), [(9, 9), (None, sys.maxsize)])
def test_its_limit_is_that_of_the_sampling_params(given, expected):
    assert Sequence(0, [1], SamplingParams(max_tokens=given)).max_tokens == expected


@pytest.mark.parametrize(("own", "expected"), [(None, 77), (0, 0), (5, 5)])
def test_the_engines_seed_serves_only_where_the_request_has_none(own, expected):
    assert Sequence(0, [1], SamplingParams(seed=own), seed=77).seed == expected


@given(
    prompt=st.lists(st.integers(0, 200_000), min_size=1, max_size=40),
    completion=st.lists(st.integers(0, 200_000), max_size=40),
    block_size=st.integers(1, 20),
)
def test_counts_and_blocks_follow_from_the_tokens(prompt, completion, block_size):
    seq = Sequence(0, prompt, block_size=block_size)
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
    assert [seq.block(i).tolist() for i in range(seq.num_blocks)] == blocks


def test_a_token_that_is_still_being_sampled_counts_and_is_filled_in():
    seq = Sequence(0, [1, 2, 3], block_size=3)
    assert seq.pending_row == -1
    seq.append_pending(5)
    assert (seq.pending_row, seq.num_tokens, seq.num_completion_tokens, seq.num_blocks) == (5, 4, 1, 2)
    seq.resolve_pending(77)
    assert (seq.pending_row, seq.num_tokens, seq.last_token, seq.token_ids) == (-1, 4, 77, [1, 2, 3, 77])


@pytest.mark.parametrize("i", [-1, 3, 100])
def test_a_block_outside_the_sequence_is_an_index_error(i):
    with pytest.raises(IndexError, match=rf"{i}\b.*3"):
        Sequence(0, list(range(33)), block_size=16).block(i)


def test_token_lists_are_copies():
    prompt = [1, 2, 3]
    seq = Sequence(0, prompt, block_size=2)
    prompt[0] = 99
    for handed_out in (seq.token_ids, seq.prompt_token_ids, seq.completion_token_ids, seq.block(0)):
        handed_out.append(99)
        handed_out[0] = 99
    assert seq.token_ids == [1, 2, 3]


def test_repr_names_the_sequence_and_its_state():
    text = repr(Sequence(41, [1, 2, 3]))
    assert "41" in text
    assert "WAITING" in text
