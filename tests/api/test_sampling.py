"""What a request asks of its sampling, through the whole engine, held to transformers one token at a time."""

import dataclasses
import itertools
from array import array

import pytest
import torch
from checkpoints import (
    VOCAB_SIZE,
    Reference,
    assert_idle,
    complete,
    edit_json,
    greedy,
    make_ascii_checkpoint,
    make_checkpoint,
    make_llm,
    random_prompt,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_reference import complete_alone, run
from transformers import AutoTokenizer

from nanovllm import SamplingParams, StructuredOutputsParams
from nanovllm.engine.text.results import completion_logprobs

# One token in sixteen ends a sequence.
EOS = tuple(range(3, VOCAB_SIZE, 16))
PROMPTS = [random_prompt(length, seed=length) for length in (5, 33, 16, 40, 1, 64)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(checkpoint, Reference)."""
    path = make_checkpoint(tmp_path_factory.mktemp("sampling"))
    return path, Reference(path)


@pytest.fixture(scope="module")
def engines(base):
    """Engines that serve the same requests in different ways: {overlap_steps: LLM}."""
    with make_llm(base[0], eos=EOS) as llm, make_llm(base[0], eos=EOS, overlap_steps=False) as one_by_one:
        yield {True: llm, False: one_by_one}


params_of_any_kind = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 0.7, 1.0, 2.0]),
    max_tokens=st.integers(4, 12),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    top_k=st.sampled_from([0, 0, 1, 3, 20, 400]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.9, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.5]),
    min_tokens=st.sampled_from([0, 0, 2, 4]),
    stop_token_ids=st.sampled_from([(), (), tuple(range(0, VOCAB_SIZE, 8)), (VOCAB_SIZE - 1,)]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.5, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.7, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.6, 1.3]),
    logprobs=st.sampled_from([None, None, 0, 3]),
    logit_bias=st.sampled_from([None, None, {5: 2.5, 300: -100.0}, dict.fromkeys(range(0, VOCAB_SIZE, 7), 1.5)]),
    allowed_token_ids=st.sampled_from([None, None, range(0, VOCAB_SIZE, 5), [1, 2, 2, 310]]),
)


@given(st.lists(params_of_any_kind, min_size=1, max_size=6), st.booleans())
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mixture_of_settings(base, engines, params, overlap):
    reference = base[1]
    prompts = PROMPTS[: len(params)]
    seqs = run(engines[overlap], prompts, params)
    for seq, prompt, each in zip(seqs, prompts, params, strict=True):
        expected = complete_alone(reference, prompt, each, EOS)
        if expected is not None:
            assert seq.completion_token_ids == expected
    assert_idle(engines[overlap])


# Each of them is one that a plain draw would notice.
SETTINGS = [
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"repetition_penalty": 1.8, "temperature": 0.0},
    {"presence_penalty": 1.5, "frequency_penalty": 1.0, "top_p": 0.9},
    {},
    {"frequency_penalty": 2.0, "temperature": 0.0},
    {"min_p": 0.2, "repetition_penalty": 0.7, "temperature": 1.3},
    {"logit_bias": dict.fromkeys(range(0, VOCAB_SIZE, 9), 3.0), "repetition_penalty": 1.5},
    {"allowed_token_ids": range(1, VOCAB_SIZE, 4), "temperature": 0.0, "frequency_penalty": 1.0},
]
FIXED = [SamplingParams(max_tokens=30, ignore_eos=True, seed=2**40 + i, **each) for i, each in enumerate(SETTINGS)]


@pytest.fixture(scope="module")
def alone(base):
    """Prompts and completions of FIXED. The prompts are such that no rounding decides."""
    found = []
    for params, length in zip(FIXED, (20, 45, 16, 31, 64, 7, 25, 12), strict=True):
        seeds = itertools.count(length)
        while True:
            prompt = random_prompt(length, seed=next(seeds))
            completion = complete_alone(base[1], prompt, params)
            if completion is not None:
                break
        found.append((prompt, completion))
    return [list(each) for each in zip(*found, strict=True)]


ONE_BY_ONE, CHUNKED, FEW_BLOCKS = {"overlap_steps": False}, {"max_num_batched_tokens": 24}, {"num_kvcache_blocks": 7}


@pytest.mark.parametrize(
    "options",
    [
        *[{}, ONE_BY_ONE, CHUNKED | ONE_BY_ONE, FEW_BLOCKS, FEW_BLOCKS | ONE_BY_ONE, {"max_num_seqs": 3}],
        FEW_BLOCKS | CHUNKED | {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_however_the_steps_are_cut(base, alone, options):
    prompts, expected = alone
    with make_llm(base[0], **options) as llm:
        assert complete(llm, prompts[::-1], FIXED[::-1]) == expected[::-1]
        assert ("num_kvcache_blocks" in options) == (llm.scheduler.num_preemptions > 0)
        assert_idle(llm)


def test_plain_sequences_draw_the_same_beside_others(base):
    prompts = base[1].draw_prompts((20, 9), 20)
    plain = [greedy(20), SamplingParams(0.8, 20, ignore_eos=True, seed=7)]
    with make_llm(base[0]) as llm:
        expected = complete(llm, prompts, plain)
        assert llm.model_runner.logit_steps.pipeline is None, "a plain batch made the sampling pipeline"
        beside = complete(llm, [*prompts, PROMPTS[0]], [*plain, FIXED[2]])
        assert llm.model_runner.logit_steps.pipeline is not None
    assert beside[:2] == expected


def test_settings_without_effect_are_plain():
    for fields in ({}, {"top_k": -1}, {"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, {"n": 3}):
        assert SamplingParams(**fields).is_plain
    for fields in SETTINGS[:3]:
        assert not SamplingParams(**fields).is_plain


# -- bad words ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ascii_base(tmp_path_factory):
    """(checkpoint, Reference, tokenizer)."""
    path = make_ascii_checkpoint(tmp_path_factory.mktemp("bad-words"))
    return path, Reference(path), AutoTokenizer.from_pretrained(path)


def find_word(tokenizer, completion: list[int], size: int) -> str | None:
    """The first word of this many tokens in a completion that is tokenized as it stands there."""
    for i in range(len(completion) - size):
        word = tokenizer.decode(completion[i : i + size])
        if word.strip() == word and tokenizer.encode(word) == completion[i : i + size]:
            return word
    return None


@pytest.fixture(scope="module")
def banned(ascii_base):
    """Prompts, parameters and completions of requests whose words would come up if they were allowed."""
    _, reference, tokenizer = ascii_base
    found = []
    for i, temperature in enumerate([0.0, 0.3, 0.0, 0.4]):
        free = SamplingParams(temperature, 16, ignore_eos=True, seed=i, repetition_penalty=1.2 if i == 2 else 1.0)
        for seed in itertools.count(50 * i):
            prompt = random_prompt(20 + 7 * i, seed=seed)
            completion = complete_alone(reference, prompt, free) or []
            words = [find_word(tokenizer, completion, size) for size in (1, 2, 3)]
            if None in words:
                continue
            words = words[1:] if i % 2 else words
            token_ids = [tokenizer.encode(space + word) for word in words for space in ("", " ")]
            expected = complete_alone(reference, prompt, free, bad_words=token_ids)
            if expected is not None:
                break
        assert expected != completion
        found.append((prompt, dataclasses.replace(free, bad_words=words), expected))
    return [list(each) for each in zip(*found, strict=True)]


@pytest.mark.parametrize("options", [{}, ONE_BY_ONE, CHUNKED | {"num_kvcache_blocks": 6}], ids=str)
def test_bad_words(ascii_base, banned, options):
    prompts, params, expected = banned
    with make_llm(ascii_base[0], skip_tokenizer_init=False, **options) as llm:
        assert complete(llm, prompts, params) == expected
        beside = complete(llm, [*prompts, prompts[0]], [*params, greedy(16)])
        assert beside[:-1] == expected
        assert ("num_kvcache_blocks" in options) == (llm.scheduler.num_preemptions > 0)
        assert_idle(llm)


def test_bad_words_of_samples_and_across_the_prompt(ascii_base):
    path, reference, tokenizer = ascii_base
    for seed in itertools.count():  # until both words are tokenized as they stand there
        (prompt,) = reference.draw_prompts((12,), 8, seed)
        ((first, second, *_),) = reference.greedy([prompt], 8)
        pairs = [first, second], [prompt[-1], first]
        words = [tokenizer.decode(pair) for pair in pairs]
        if tuple(map(tokenizer.encode, words)) == pairs:
            break
    with make_llm(path, skip_tokenizer_init=False) as llm:
        params = SamplingParams(temperature=1.0, max_tokens=30, n=3, bad_words=words, seed=1, ignore_eos=True)
        for seq in run(llm, [prompt], params):
            assert (first, second) not in itertools.pairwise(seq.completion_token_ids)
        # A word is looked for in the completion, and not where the prompt ends.
        (seq,) = run(llm, [prompt], greedy(2, bad_words=words[1:]))
        assert seq.completion_token_ids == [first, second]


def test_a_bad_word_is_kept_away_after_a_space_too(path):
    with make_llm(path, skip_tokenizer_init=False) as llm:
        block, spaced = (llm.tokenizer.encode(text) for text in ("block", " block"))
        assert spaced[-len(block) :] != block
        for word in ("block", " block"):
            (seq,) = llm._sequences.make_one([1], SamplingParams(bad_words=word))
            for *beginning, last in (block, spaced):
                completion = array("i", [7, *beginning])
                found = seq.request.logit_edits.completing(completion, len(beginning))
                assert last in found if beginning else last in seq.request.logit_edits.banned


# -- tokens that may and may not be drawn -------------------------------------------------------------------------


def test_a_bias_decides(engines):
    prompt = PROMPTS[0]
    (seq,) = run(engines[True], [prompt], greedy(5, logit_bias={77: 100}))
    assert seq.completion_token_ids == [77] * 5
    (seq,) = run(engines[True], [prompt], greedy(5, logit_bias={77: 100, 78: 100}, allowed_token_ids=[9]))
    assert seq.completion_token_ids == [9] * 5


@pytest.mark.parametrize("penalty", [1.2e-38, 1e-10, 1e10, 3.4e38])
@pytest.mark.parametrize("temperature", [0, 1.2e-38, 1.0, 3.4e38])
def test_extreme_numbers_draw_allowed_tokens(engines, temperature, penalty):
    allowed = [41, 43, 300]
    unlikely = {"logit_bias": dict.fromkeys(allowed, -100)}
    fields = {"top_k": 2, "min_p": 1e-30, "top_p": 0.5, "logit_bias": {41: 100, 300: -100}}
    params = [
        SamplingParams(
            temperature, 6, ignore_eos=True, repetition_penalty=penalty, allowed_token_ids=allowed, seed=i, **each
        )
        for i, each in enumerate([unlikely, fields, fields | {"presence_penalty": -2, "frequency_penalty": 2}])
    ]
    for seq in run(engines[True], [[*allowed, 5]] * len(params), params):
        assert set(seq.completion_token_ids) <= set(allowed)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stop_token_ids": [5, VOCAB_SIZE]}, r"stop_token_ids: token id 320 is outside the vocabulary, 0\.\.319"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids: token id 320 is outside the vocabulary"),
        ({"logprobs": 0, "logprob_token_ids": [VOCAB_SIZE]}, "logprob_token_ids: token id 320 is outside the vocab"),
        ({"logit_bias": {2**31 - 1: 1}}, "logit_bias: token id 2147483647 is outside the vocabulary"),
        ({"bad_words": "a"}, r"bad_words=\('a',\): need the model's tokenizer.*skip_tokenizer_init"),
        ({"allowed_token_ids": EOS, "min_tokens": 1}, "no token is left to draw: allowed_token_ids.*min_tokens"),
    ],
)
def test_what_the_model_has_not_is_refused_by_request(engines, fields, says):
    llm = engines[True]
    with pytest.raises(ValueError, match=rf"^sampling_params\[1\]: {says}"):
        llm.generate([[1], [2]], [greedy(3), SamplingParams(**fields)], use_tqdm=False)
    assert_idle(llm)


def test_words_that_leave_nothing(path):
    with make_llm(path, skip_tokenizer_init=False) as llm:
        letters = [llm.tokenizer.encode(letter)[0] for letter in "xyz"]
        with pytest.raises(ValueError, match="no token is left to draw: allowed_token_ids, bad_words"):
            llm.add_request([1], SamplingParams(allowed_token_ids=letters, bad_words=list("xyz")))
        form = StructuredOutputsParams(regex="[xyz]+")
        with pytest.raises(ValueError, match=r"a form ends with one of the tokens \[1\], and allowed_token_ids"):
            llm.add_request([1], SamplingParams(allowed_token_ids=letters, structured_outputs=form))
        # What depends on the completion is found as it comes up: the sequence says so.
        words = [a + b for a in "xyz" for b in "xyz"]
        (seq,) = run(llm, [[1]], SamplingParams(allowed_token_ids=letters, bad_words=words))
        assert seq.completion_token_ids[0] in letters
        assert "no token is left to draw" in seq.completion.error


# -- log-probabilities --------------------------------------------------------------------------------------------


def assert_logprobs(found: dict[int, float], logits: torch.Tensor, token: int, num_top: int) -> None:
    expected = logits.log_softmax(-1)
    assert next(iter(found)) == token
    assert torch.allclose(torch.tensor(list(found.values())), expected[list(found)], atol=1e-4)
    top = expected.topk(num_top).indices.tolist()
    assert list(found)[1:] == [i for i in top if i != token]


@pytest.mark.parametrize("options", [{}, ONE_BY_ONE, CHUNKED, FEW_BLOCKS], ids=str)
def test_logprobs(base, alone, options):
    path, reference = base
    prompts, _ = alone
    prompts = [*prompts, [5]]
    # What they are sampled with does not show in the log-probabilities.
    wanted = [(0, None), (5, 3), (None, None), (20, 20), (None, 0), (1, None), (2, None), (3, None), (2, 2)]
    fields = [*SETTINGS, {}]
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, seed=i, logprobs=k, prompt_logprobs=p, **fields[i])
        for i, (k, p) in enumerate(wanted)
    ]
    with make_llm(path, **options) as llm:
        seqs = run(llm, prompts, params)
        assert ("num_kvcache_blocks" in options) == (llm.scheduler.num_preemptions > 0)
        assert_idle(llm)
    for seq, prompt, (num_top, num_prompt_top) in zip(seqs, prompts, wanted, strict=True):
        completion = seq.completion_token_ids
        assert len(completion) == 20
        if num_top is None:
            assert completion_logprobs(seq) is None
        else:
            assert len(completion_logprobs(seq)) == 20
            for found, logits, token in zip(
                completion_logprobs(seq), reference.logits(prompt, completion), completion, strict=True
            ):
                assert_logprobs(found, logits, token, num_top)
        if num_prompt_top is None:
            assert seq.completion.prompt_logprobs is None
        else:
            assert len(seq.completion.prompt_logprobs) == len(prompt)
            assert seq.completion.prompt_logprobs[0] is None
            rows = reference.logits(prompt[:1], prompt[1:])
            for found, logits, token in zip(seq.completion.prompt_logprobs[1:], rows, prompt[1:], strict=True):
                assert_logprobs(found, logits, token, num_prompt_top)


def test_prompt_logprobs_and_the_prefix_cache(base):
    prompt = random_prompt(70, seed=0)
    with make_llm(base[0]) as llm:
        (first,) = run(llm, [prompt], greedy(3, prompt_logprobs=1))
        (second,) = run(llm, [prompt], greedy(3, prompt_logprobs=1))
        (third,) = run(llm, [prompt], greedy(3))
        assert [seq.completion.num_shared_tokens for seq in (first, second, third)] == [0, 0, 64]
        assert first.completion.prompt_logprobs == second.completion.prompt_logprobs
        assert len(first.completion.prompt_logprobs) == 70
        assert_idle(llm)


STARTS = [0, 1, 2, 33, 69, 70, 999, -1, -40, -70, -999]


@pytest.mark.parametrize("options", [{}, ONE_BY_ONE, CHUNKED, {"num_kvcache_blocks": 12}], ids=str)
def test_prompt_logprobs_from_a_start_on(base, options):
    """Those of the other tokens are the same as without it, whatever the prefix cache gives."""
    prompt = random_prompt(70, seed=0)
    with make_llm(base[0], enable_prefix_caching=False) as llm:
        (whole,) = run(llm, [prompt], greedy(30, prompt_logprobs=2, logprobs=1))
    params = [greedy(30, prompt_logprobs=2, prompt_logprobs_start=start, logprobs=1) for start in STARTS]
    with make_llm(base[0], **options) as llm:
        run(llm, [prompt], greedy(1))  # The prefix cache knows it.
        for seq, start in zip(run(llm, [prompt] * len(STARTS), params), STARTS, strict=True):
            first = max(1, slice(start, None).indices(70)[0])
            assert seq.completion.prompt_logprobs[:first] == [None] * first
            assert len(seq.completion.prompt_logprobs) == 70
            for found, expected in zip(
                seq.completion.prompt_logprobs[first:], whole.completion.prompt_logprobs[first:], strict=True
            ):
                assert list(found) == list(expected)
                assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-5)
            assert seq.completion_token_ids == whole.completion_token_ids
            if "num_kvcache_blocks" not in options:
                assert seq.completion.num_shared_tokens == min(first - 1, 69) // 16 * 16
        assert ("num_kvcache_blocks" in options) == (llm.scheduler.num_preemptions > 0)
        assert_idle(llm)


# -- defaults -----------------------------------------------------------------------------------------------------


def test_default_sampling_params(tmp_path):
    path = make_checkpoint(tmp_path)
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 99}
    edit_json(path / "generation_config.json", do_sample=True, eos_token_id=7, **recommended)
    with make_llm(path) as llm:
        params = llm.get_default_sampling_params()
        assert params == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, max_tokens=99)
        assert llm.config.eos == (7,)
    assert SamplingParams.from_generation_config({"do_sample": False, "top_k": 20}).temperature == 0
    assert SamplingParams.from_generation_config({"min_p": 0.1, "top_p": None}) == SamplingParams(min_p=0.1)
    assert SamplingParams.from_generation_config({}) == SamplingParams()
    with pytest.raises(ValueError, match=r"generation_config.json: top_p=3"):
        SamplingParams.from_generation_config({"top_p": 3})
