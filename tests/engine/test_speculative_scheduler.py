"""What the scheduler makes of a step with proposed tokens, without a model."""

import time
from types import SimpleNamespace

import pytest
from schedulers import EOS, SIZE, add

from nanovllm.engine.features.speculation import speculative_scheduler
from nanovllm.engine.features.speculation.budget import StepTimes
from nanovllm.engine.features.speculation.speculative_scheduler import SpeculativeScheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step

REPEATED = [10, 11, 12, 13, 14, 15]
PROMPT = [*REPEATED, 10]  # After a further 11, these follow: 12, 13, ...


@pytest.fixture
def scheduler(monkeypatch):
    """Steps try all that is proposed, up to four tokens a sequence."""
    monkeypatch.setattr(
        speculative_scheduler, "choose_counts", lambda chances, num_seqs, pace: [len(each) for each in chances]
    )
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 100, "supported_model_len": None}
    options |= {"kvcache_block_size": SIZE, "eos": [EOS], "enable_prefix_caching": False, "overlap_steps": False}
    config = SimpleNamespace(**options, max_speculative_tokens=4, num_kvcache_blocks=100)
    return SpeculativeScheduler(config, StepTimes([1, 16], [1.0, 1.0]))


def begin(scheduler, *seqs: Sequence) -> Step:
    """Prefill, in which all sample 11. Returns the next step, which has proposals."""
    step = scheduler.schedule()
    assert step.seqs == list(seqs)
    scheduler.advance(step)
    assert scheduler.record(step, [11] * len(seqs)) == []
    step = scheduler.schedule()
    scheduler.advance(step)
    return step


def test_each_sequence_gets_the_right_tokens_and_the_one_after_them(scheduler):
    seqs = [add(scheduler, PROMPT) for _ in range(3)]
    step = begin(scheduler, *seqs)
    assert step.proposed == [[12, 13, 14, 15]] * 3
    # All four are right; the first two; none.
    drawn = [[12, 13, 14, 15, 70], [12, 13, 71, 15, 72], [73, 13, 14, 15, 74]]
    assert scheduler.record(step, [token for tokens in drawn for token in tokens]) == []
    expected = [[11, 12, 13, 14, 15, 70], [11, 12, 13, 71], [11, 73]]
    assert [seq.completion_token_ids for seq in seqs] == expected
    assert [seq.num_cached_tokens for seq in seqs] == [seq.num_tokens - 1 for seq in seqs]
    assert (scheduler.num_proposed_tokens, scheduler.num_accepted_tokens) == (12, 6)
    assert scheduler.num_generated_tokens == sum(map(len, expected))
    assert step.num_tokens == -9


@pytest.mark.parametrize("place", range(5))
def test_nothing_follows_an_end(scheduler, place):
    """Also where it is one of the right tokens, and where it is the one after them."""
    seq, other = add(scheduler, [EOS if token == 12 + place else token for token in PROMPT]), add(scheduler, PROMPT)
    step = begin(scheduler, seq, other)
    own, _ = step.proposed
    right = [12, 13, 14, 15, 70][:place]
    drawn = [*right, EOS, *own[place + 1 :], 99][: len(own) + 1]
    assert scheduler.record(step, [*drawn, 12, 71, 14, 15, 72]) == [seq]
    assert (seq.completion_token_ids, seq.completion.finish_reason) == ([11, *right, EOS], "stop")
    assert other.completion_token_ids == [11, 12, 71]
    assert list(scheduler.running) == [other]
    scheduler.abort()
    assert not scheduler.block_manager.used_block_ids


@pytest.mark.parametrize("max_tokens", range(2, 8))
def test_no_token_is_proposed_that_the_length_leaves_no_room_for(scheduler, max_tokens):
    seq = add(scheduler, PROMPT, max_tokens=max_tokens)
    step = begin(scheduler, seq)
    count = min(4, max_tokens - 2)
    assert step.proposed == ([[12, 13, 14, 15][:count]] if count else [])
    finished = scheduler.record(step, [*[12, 13, 14, 15][:count], 70])
    assert seq.completion_token_ids == [11, *[12, 13, 14, 15][:count], 70]
    assert finished == ([seq] if count == max_tokens - 2 else [])
    assert seq.completion.finish_reason == ("length" if finished else None)


def test_samples_propose_what_one_of_them_said_and_no_more(scheduler):
    """What comes after the end of a sample's text is another's. Its last token is not known yet when its length ends
    it."""
    first = add(scheduler, [20, 21], max_tokens=3)
    step = begin(scheduler, first)
    for token in (12, 13):
        scheduler.record(step, [token])
        if token == 12:
            step = scheduler.schedule()
            scheduler.advance(step)
    assert first.completion_token_ids == [11, 12, 13]
    second = add(scheduler, [20, 21], max_tokens=9)
    assert begin(scheduler, second).proposed == [[12]]


def test_a_pause_of_the_machine_while_it_looks_does_not_put_off_the_next_look(scheduler, monkeypatch):
    """It looks as often as its own time allows. The steps take a second each here, and a look far less than 1 % of
    that, whatever else runs."""
    add(scheduler, [10, 20, 30], max_tokens=20)
    looks = []

    def propose(*of_sequence):
        looks.append(of_sequence)
        time.sleep(0.1)

    monkeypatch.setattr(scheduler.proposer, "propose", propose)
    num_looks = 0
    for token in range(40, 50):
        step = scheduler.schedule()
        looks.clear()
        scheduler.advance(step)  # It looks whether the next step should wait for this one's token.
        num_looks += len(looks)
        scheduler.record(step, [token])
    assert num_looks >= 5
