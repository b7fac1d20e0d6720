"""Speculation: the same text with proposals as without, whatever is proposed and asked for."""

import math
from array import array

import pytest
from checkpoints import VOCAB_SIZE, assert_idle, make_llm
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import Replay

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.engine.features.speculation import speculative_scheduler, suffix_index
from nanovllm.engine.features.speculation.budget import Acceptance, Pace, Record, StepTimes, choose_counts
from nanovllm.engine.features.speculation.suffix_index import GRAM, MAX_MATCH, Proposal, SuffixIndex, SuffixProposer
from nanovllm.engine.sequence import Sequence

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]
WAYS = [
    {"temperature": 0},
    {},
    {"seed": 11, "n": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"logprobs": 0},
    {"logprobs": 3, "prompt_logprobs": 1, "logprob_token_ids": [4, 9]},
    {"logit_bias": {3: 5.0, 7: -2.0}, "allowed_token_ids": list(range(200))},
    {"bad_words": ["a", "is a", "the"], "min_tokens": 12},
    {"stop": ["e", "ro"], "min_tokens": 3},
    {"stop": ["s"], "include_stop_str_in_output": True},
    {"stop_token_ids": list(range(0, VOCAB_SIZE, 9))},
    {"structured_outputs": StructuredOutputsParams(regex="(ab|cde){1,9}x")},
    {"structured_outputs": StructuredOutputsParams(choice=["a block of rows", "a table of blocks", "slots"])},
    {"max_tokens": 1},
    {"max_tokens": None},
]


@pytest.fixture(scope="module")
def plain(path):
    with make_llm(path, skip_tokenizer_init=False, max_model_len=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def speculative(path):
    with make_llm(path, skip_tokenizer_init=False, max_model_len=64, speculation="suffix") as llm:
        yield llm


def all_counts(chances: list[list[float]], num_seqs: int, pace: Pace) -> list[int]:
    """Instead of `choose_counts`: steps try all that is proposed."""
    return [len(each) for each in chances]


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(speculative_scheduler, "choose_counts", all_counts)
    monkeypatch.setattr(speculative_scheduler, "_MAX_LOOKING_SHARE", math.inf)  # on a busy machine too


def params(ways: list[dict]) -> list[SamplingParams]:
    return [SamplingParams(**{"max_tokens": 24, "seed": i} | way) for i, way in enumerate(ways)]


def answers(llm: LLM, ways: list[dict]) -> list[dict]:
    results = llm.generate([[*PROMPT, i] for i in range(len(ways))], params(ways), use_tqdm=False)
    assert_idle(llm)
    return without_metrics(results)


def without_metrics(value):
    """Results without what they say of their time, also of each sample."""
    if isinstance(value, list):
        return [without_metrics(each) for each in value]
    if isinstance(value, dict):
        return {key: without_metrics(each) for key, each in value.items() if key != "metrics"}
    return value


def samples(results: list[dict]) -> dict[tuple[int, int], list[int]]:
    return {
        (i, j): each["token_ids"]
        for i, result in enumerate(results)
        for j, each in enumerate(result.get("samples", [result]))
    }


# So far apart may two log-probabilities of this checkpoint be: twice its `Reference.rounding`. Its longest sums have 96
# products, and its logits a deviation of 1.5.
ROUNDING = 2 * (4 * 96 * 2**-24 * (12 * 2) ** 0.5 * 1.5)


def within_rounding(value):
    """To compare results with: each log-probability equals those that other numbers of rows give."""
    if isinstance(value, dict):
        return {key: within_rounding(each) for key, each in value.items()}
    if isinstance(value, list):
        return [within_rounding(each) for each in value]
    return pytest.approx(value, rel=0, abs=ROUNDING) if isinstance(value, float) else value


@settings(max_examples=12)
@given(
    st.lists(st.sampled_from(WAYS), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.booleans(),
)
def test_the_text_is_the_same_with_proposals(plain, speculative, ways, wrong, overlaps):
    expected = answers(plain, ways)
    scheduler = speculative.scheduler
    speculative.config.overlap_steps = overlaps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "proposer", Replay(samples(expected), wrong, VOCAB_SIZE))
        patch.setattr(speculative_scheduler, "choose_counts", all_counts)
        patch.setattr(speculative_scheduler, "_MAX_LOOKING_SHARE", math.inf)
        found = answers(speculative, ways)
    speculative.config.overlap_steps = True
    assert found == within_rounding(expected)


def test_accepted_tokens_save_steps(plain, speculative, always, monkeypatch):
    expected = answers(plain, [{"temperature": 0}])
    before = speculative.stats()
    monkeypatch.setattr(speculative.scheduler, "proposer", Replay(samples(expected), 0.0, VOCAB_SIZE))
    assert answers(speculative, [{"temperature": 0}]) == within_rounding(expected)
    after = speculative.stats()
    assert after["generated_tokens"] - before["generated_tokens"] == 24
    assert after["steps"] - before["steps"] < 16
    accepted = after["accepted_tokens"] - before["accepted_tokens"]
    assert 8 <= accepted <= after["proposed_tokens"] - before["proposed_tokens"]


def test_samples_of_one_prompt_propose_each_others_tokens(path):
    """The second of two equal requests has the first one's answer to go by."""
    with make_llm(path, max_model_len=64, speculation="suffix", max_num_seqs=1) as llm:
        llm.scheduler._pace = Pace(StepTimes([1, 2, 4, 8], [1.0] * 4))
        for _ in range(2):
            before = llm.stats()["steps"]
            llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
            num_steps = llm.stats()["steps"] - before
        assert num_steps < 20


def test_samples_of_the_prompts_that_finished_last_are_kept(monkeypatch):
    monkeypatch.setattr(suffix_index, "_MAX_TOKENS", 40)
    proposer, answer = SuffixProposer(), list(range(100, 112))

    def sample(seq_id: int, first: int, tokens: list[int]) -> Sequence:
        seq = Sequence([first, 50])
        seq.seq_id = seq_id
        for token in tokens:
            seq.append_token(token)
        return seq

    for first in (1, 2, 3):
        proposer.finish(sample(first, first, answer))
    found = [proposer.propose(sample(10 + first, first, answer[:3]), 5, 4) for first in (1, 2, 3)]
    assert found[0] is None
    assert [each.tokens for each in found[1:]] == [answer[3:7]] * 2


def test_a_full_cache_preempts_as_without_proposals(path, always):
    """Proposals take no block from another sequence, and sequences that are preempted go on."""
    options = {"max_model_len": 128, "kvcache_block_size": 16, "num_kvcache_blocks": 9, "skip_tokenizer_init": False}
    ways = [{"max_tokens": 60}] * 3
    with make_llm(path, **options) as llm:
        expected = answers(llm, ways)
    with make_llm(path, speculation="suffix", **options) as llm:
        llm.scheduler.proposer = Replay(samples(expected), 0.1, VOCAB_SIZE)
        assert answers(llm, ways) == expected
        assert llm.stats()["preemptions"] > 0


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2}, {"kv_cache_dtype": "fp8"}, {"mixed_step_rows": 16}, {"enable_prefix_caching": False}],
    ids=lambda options: next(iter(options)),
)
def test_with_other_options_of_the_engine(path, always, options):
    options = {"skip_tokenizer_init": False, "max_model_len": 64, "max_num_seqs": 4} | options
    ways = [{"temperature": 0}, {}, {"n": 2}, {"repetition_penalty": 1.2}, {"max_tokens": 5}, {"logprobs": 1}]
    with make_llm(path, **options) as llm:
        expected = answers(llm, ways)
    with make_llm(path, speculation="suffix", **options) as llm:
        llm.scheduler.proposer = Replay(samples(expected), 0.2, VOCAB_SIZE)
        assert answers(llm, ways) == within_rounding(expected)
        assert llm.stats()["accepted_tokens"] > 20


def test_streams_have_every_token_once(plain, speculative, always, monkeypatch):
    expected = answers(plain, [{"stop": ["e"], "min_tokens": 9}])
    monkeypatch.setattr(speculative.scheduler, "proposer", Replay(samples(expected), 0.1, VOCAB_SIZE))
    deltas = list(speculative.stream([*PROMPT, 0], params([{"stop": ["e"], "min_tokens": 9}])[0]))
    assert [token for delta in deltas for token in delta["token_ids"]] == expected[0]["token_ids"]
    assert "".join(delta["text"] for delta in deltas) == expected[0]["text"]
    assert deltas[-1]["finish_reason"] == expected[0]["finish_reason"]


def test_a_request_that_is_aborted_while_its_proposals_are_computed(speculative, always, monkeypatch):
    """A step with proposals is launched behind a prefill whose only sequence ends with it."""
    monkeypatch.setattr(speculative.scheduler, "_may_pay", lambda seqs: False)
    completion = {(0, 0): list(range(40))}
    monkeypatch.setattr(speculative.scheduler, "proposer", Replay(completion, 0.0, VOCAB_SIZE))
    for num_steps in range(1, 9):
        first = speculative.add_request(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
        for _ in range(num_steps):
            speculative.step()
        speculative.add_request(PROMPT, SamplingParams(max_tokens=1))
        speculative.step()
        speculative.step()
        if speculative._in_flight.proposed:
            break
        speculative.abort_request()
    assert speculative._in_flight.proposed
    speculative.abort_request(first)
    while not speculative.is_finished():
        speculative.step()
    assert_idle(speculative)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "draft"}, "speculation='draft'.*suffix"),
        ({"speculation": True}, "speculation=True"),
        ({"speculation": "suffix", "max_speculative_tokens": 0}, "max_speculative_tokens=0"),
        ({"speculation": "suffix", "max_speculative_tokens": 16}, "max_speculative_tokens=16"),
    ],
)
def test_wrong_options(path, options, message):
    with pytest.raises(ValueError, match=message):
        make_llm(path, **options)


# -- what is proposed --------------------------------------------------------------------------------------------------


def longest_repetition(text: list[int]) -> tuple[int, set[int]]:
    """(length, tokens that followed) of the longest end of a text that occurs before, found by looking everywhere."""
    for length in range(min(MAX_MATCH, len(text) - 1), GRAM - 1, -1):
        ends = [i for i in range(length, len(text)) if text[i - length : i] == text[-length:]]
        if ends:
            return length, {text[i] for i in ends}
    return 0, set()


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 9))
def test_what_followed_the_longest_repetition_is_proposed(text, num_tokens):
    index, tokens = SuffixIndex(array("i")), array("i")
    index.tokens = tokens
    for length in range(len(text) + 1):
        tokens.extend(text[len(tokens) : length])
        index.extend(length)
        found, (match, followers) = index.propose(tokens, length, num_tokens), longest_repetition(text[:length])
        if found is None:
            assert match == 0
            continue
        assert len(found.tokens) == num_tokens
        if length <= GRAM + 8:  # Of longer texts only the newest places are compared.
            assert found.match == match
            assert found.tokens[0] in followers


def test_a_text_that_repeats_itself_goes_on_as_it_does():
    tokens = array("i", [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3])
    index = SuffixIndex(tokens)
    index.extend(len(tokens))
    assert index.propose(tokens, len(tokens), 7) == Proposal([4, 1, 2, 3, 4, 1, 2], 7, 1)


# -- how many of them are tried ----------------------------------------------------------------------------------------


def pace(seconds: list[float]) -> Pace:
    return Pace(StepTimes([1 << i for i in range(len(seconds))], seconds))


def test_as_many_as_give_the_most_tokens_a_second():
    likely, unlikely = [0.9, 0.8, 0.7], [0.2, 0.1]
    flat, steep = [1.0] * 4, [1.0, 2.0, 4.0, 8.0]
    assert choose_counts([likely], 1, pace(flat)) == [3]
    assert choose_counts([likely], 1, pace(steep)) == [0]
    assert choose_counts([likely], 1, pace([1.0, 1.1, 9.0, 9.0])) == [1]
    assert choose_counts([likely, unlikely], 2, pace(flat)) == [3, 2]
    assert choose_counts([unlikely, likely], 2, pace([1.0, 1.0, 1.1, 9.0])) == [0, 2]
    assert choose_counts([[], []], 2, pace(flat)) == [0, 0]
    assert choose_counts([likely] * 8, 8, pace(flat)) == [0] * 8  # No step has more rows.
    assert sum(choose_counts([[0.5, 0.5], [0.5, 0.5]], 1, pace([1.0, 1.0, 1.0, 9.0]))) == 3


def test_a_sequence_that_accepts_nothing_is_tried_less():
    acceptance, modest, good = Acceptance(), Record(), Record()
    proposal = Proposal([1, 2, 3], GRAM, 0)
    before = acceptance.chances(proposal, modest)
    assert before == sorted(before, reverse=True)
    for _ in range(5):
        acceptance.learn(proposal, modest, 0, 1)
        acceptance.learn(proposal, good, 3, 3)
    assert acceptance.chances(proposal, modest)[0] < 0.5 < acceptance.chances(proposal, good)[0]


def test_a_pause_says_nothing_of_other_steps():
    times = pace([0.01, 0.01])
    for _ in range(20):
        times.learn(1, True, 0.012)
    assert times.seconds(1, True) == pytest.approx(0.012, abs=5e-4)
    times.learn(1, True, 10.0)
    assert times.seconds(1, True) < 0.015
