"""A request whose logits hold NaN or infinity ends as an error that says so, and nobody else's result changes."""

import logging
import math

import pytest
import torch
from checkpoints import (
    VOCAB_SIZE,
    assert_idle,
    complete,
    complete_by_steps,
    edit_tensors,
    generate,
    greedy,
    make_checkpoint,
    make_llm,
)

from nanovllm import SamplingParams

# The first token of two shards, where a lookup that multiplies by 0 would spread what is not a number; and one more.
BAD_TOKENS = (0, 192, 300)
HEALTHY = [[5, 6, 7], [8] * 20, [9, 10] * 10]


def sampled(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "max_tokens": 12, "ignore_eos": True, "seed": 3} | fields)


PARAMS = {
    "greedy": greedy(12),
    "sampled": sampled(),
    "truncated": sampled(top_k=20, top_p=0.95, min_p=0.01),
    "penalized": sampled(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    "logprobs": sampled(temperature=0, logprobs=3, prompt_logprobs=1),
    "min_tokens": sampled(min_tokens=4, ignore_eos=False, max_tokens=5),
}


def spoil(name: str, rows, value: float = math.nan):
    """An edit of a checkpoint that puts the value into some rows of a tensor."""
    return lambda tensors: tensors[name].index_fill_(0, torch.tensor(rows), value)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Sound except for the embeddings of BAD_TOKENS, which its head never chooses."""
    path = make_checkpoint(tmp_path_factory.mktemp("bad-tokens"), tokenizer=True)
    edit_tensors(path, spoil("model.embed_tokens.weight", BAD_TOKENS))
    edit_tensors(path, spoil("lm_head.weight", BAD_TOKENS, 0.0))
    return path


ENGINES = {
    "overlapped": {},
    "one by one": {"overlap_steps": False},
    "in chunks": {"max_num_batched_tokens": 8, "num_kvcache_blocks": 9},
    "mixed steps": {"mixed_step_rows": 16},
    "two ranks": {"tensor_parallel_size": 2},
}


@pytest.fixture(scope="module", params=ENGINES)
def shared_llm(request, path):
    options = {"skip_tokenizer_init": False, "max_model_len": 100} | ENGINES[request.param]
    with make_llm(path, seed=1, **options) as llm:
        yield llm


def assert_failed(output, position: int | None = None) -> None:
    assert output["finish_reason"] == "error"
    assert "NaN or infinity" in output["error"]
    assert "dtype='float32'" in output["error"]
    assert output["stop_reason"] is None
    assert -1 not in output["token_ids"]
    if position is not None:
        assert f"position {position} " in output["error"]


@pytest.mark.parametrize("kinds", [["greedy"], list(PARAMS)], ids=["greedy", "all kinds"])
def test_only_requests_that_meet_it_fail(llm, kinds):
    params = [PARAMS[kind] for kind in kinds for _ in HEALTHY]
    healthy = HEALTHY * len(kinds)
    expected = generate(llm, healthy, params)
    bad = [[BAD_TOKENS[0]], [*HEALTHY[1], BAD_TOKENS[1]], [1, BAD_TOKENS[2], 2]] * len(kinds)
    prompts = [prompt for pair in zip(bad, healthy, strict=True) for prompt in pair]
    outputs = generate(llm, prompts, [each for each in params for _ in range(2)])
    assert_idle(llm)
    for output, prompt, each in zip(outputs[::2], bad, params, strict=True):
        assert_failed(output, len(prompt))
        no_logprobs = None if each.logprobs is None else []
        assert (output["token_ids"], output["text"], output["logprobs"]) == ([], "", no_logprobs)
        assert output["metrics"]["time_to_first_token"] is None
    for output, sound in zip(outputs[1::2], expected, strict=True):
        assert "error" not in output
        assert output["finish_reason"] == sound["finish_reason"]
        assert output["token_ids"] == sound["token_ids"]
        for found, known in zip(output["logprobs"] or [], sound["logprobs"] or [], strict=True):
            assert found == pytest.approx(known, abs=1e-5)
    assert complete(llm, healthy, params) == [sound["token_ids"] for sound in expected]


def test_streams_iterables_and_steps_by_hand(llm):
    prompts = [HEALTHY[0], [3, BAD_TOKENS[1]], HEALTHY[2]]
    expected = complete(llm, [HEALTHY[0], HEALTHY[2]], greedy(6))
    tokens, last = {}, {}
    for delta in llm.stream(prompts, greedy(6)):
        assert delta["index"] not in last
        assert ("error" in delta) == (delta["finish_reason"] == "error")
        tokens.setdefault(delta["index"], []).extend(delta["token_ids"])
        if delta["finish_reason"]:
            last[delta["index"]] = delta
    assert tokens == {0: expected[0], 1: [], 2: expected[1]}
    assert [last[i]["finish_reason"] for i in range(3)] == ["length", "error", "length"]
    assert_failed(last[1] | {"token_ids": tokens[1]}, 2)
    results = dict(llm.generate_iter(prompts, greedy(6)))
    assert_failed(results[1], 2)
    assert [results[0]["token_ids"], results[2]["token_ids"]] == expected
    assert complete_by_steps(llm, prompts, greedy(6))[0] == [expected[0], [], expected[1]]


def test_a_score_is_a_number_or_an_error(llm):
    prompts, completions = [[1, 2], [3], [4, 5]], [[6], [7, 8], [9]]
    expected = llm.score(prompts, completions, use_tqdm=False)
    for bad_prompts, bad_completions in (
        ([[1, 2], [BAD_TOKENS[0]], [4, 5]], completions),
        (prompts, [[6], [7, BAD_TOKENS[2]], [9]]),
    ):
        with pytest.raises(RuntimeError, match=r"^prompts\[1\]: cannot be scored: .*NaN or infinity"):
            llm.score(bad_prompts, bad_completions, use_tqdm=False)
        assert_idle(llm)
    again = llm.score(prompts, completions, use_tqdm=False)
    assert [score["total"] for score in again] == [pytest.approx(score["total"], abs=1e-5) for score in expected]


def test_nobody_shares_the_blocks_of_a_failed_request(llm):
    beginning = [11] * 16
    prompt = [*beginning, BAD_TOKENS[2], *[12] * 40]
    complete(llm, [[*beginning, 1]], greedy(1))
    (output,) = generate(llm, [prompt], greedy(4))
    assert_failed(output)
    (again,) = generate(llm, [prompt], greedy(4))
    assert_failed(again)
    assert again["num_cached_tokens"] == 0


def bad_after(path, llm_options, prompt, params):
    """Spoil the embedding of a token in the middle of a prompt's completion: tokens before it, and the engine."""
    with make_llm(path, **llm_options) as llm:
        (tokens,) = complete(llm, [prompt], params)
    index = next(i for i in range(3, len(tokens)) if tokens[i] not in tokens[:i])
    edit_tensors(path, spoil("model.embed_tokens.weight", [tokens[index]]))
    return tokens[: index + 1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["greedy", "logprobs"])
def test_a_completion_keeps_what_came_before(tmp_path, overlap, kind):
    path = make_checkpoint(tmp_path, tokenizer=True)
    prompt, params = [5, 6, 7], PARAMS[kind]
    options = {"skip_tokenizer_init": False, "overlap_steps": overlap}
    tokens = bad_after(path, options, prompt, params)
    with make_llm(path, **options) as llm:
        before = llm.stats()["generated_tokens"]
        output, other = generate(llm, [prompt, [8]], [params, greedy(2)])
        assert_failed(output, len(prompt) + len(tokens))
        assert output["token_ids"] == tokens
        assert output["text"] == llm.tokenizer.decode(tokens)
        assert output["logprobs"] is None or [next(iter(each)) for each in output["logprobs"]] == tokens
        # The last token that it may have is the one that it has not.
        (cut,) = generate(llm, [prompt], greedy(len(tokens) + 1))
        assert_failed(cut)
        assert cut["token_ids"] == tokens
        (whole,) = generate(llm, [prompt], greedy(len(tokens)))
        assert (whole["finish_reason"], whole["token_ids"]) == ("length", tokens)
        assert llm.stats()["generated_tokens"] - before == 3 * len(tokens) + len(other["token_ids"])
        assert_idle(llm)


def test_samples_fail_one_by_one(tmp_path):
    """Of many samples some draw the token that spoils them."""
    path = make_checkpoint(tmp_path, tokenizer=True)
    with make_llm(path) as llm:
        (output,) = generate(llm, [[1, 2]], sampled(n=6, max_tokens=6))
    samples = [sample["token_ids"] for sample in output["samples"]]
    bad = next(t for t in samples[1][:5] if sum(t in tokens[:5] for tokens in samples) < 6)
    edit_tensors(path, spoil("model.embed_tokens.weight", [bad]))
    with make_llm(path) as llm:
        (output,) = generate(llm, [[1, 2]], sampled(n=6, max_tokens=6))
        for sample, tokens in zip(output["samples"], samples, strict=True):
            if bad in tokens[:5]:
                assert_failed(sample)
                assert sample["token_ids"] == tokens[: tokens.index(bad) + 1]
            else:
                assert (sample["finish_reason"], sample["token_ids"]) == ("length", tokens)
                assert "error" not in sample
        assert output.get("error") == output["samples"][0].get("error")
        assert_idle(llm)


@pytest.mark.parametrize(
    ("tensor", "rows", "value"),
    [
        ("model.layers.1.mlp.down_proj.weight", [3], math.nan),
        ("model.layers.0.self_attn.v_proj.weight", [0], math.inf),
        ("model.norm.weight", [5], math.nan),
        ("lm_head.weight", [VOCAB_SIZE - 1], math.nan),
        ("lm_head.weight", [17], math.inf),
    ],
)
def test_damaged_weights(tmp_path, caplog, tensor, rows, value):
    path = make_checkpoint(tmp_path, tokenizer=True)
    edit_tensors(path, spoil(tensor, rows, value))
    with make_llm(path, skip_tokenizer_init=False) as llm, caplog.at_level(logging.WARNING):
        for params in PARAMS.values():
            for output in generate(llm, HEALTHY, params):
                assert_failed(output)
                assert output["token_ids"] == []
        with pytest.raises(RuntimeError, match="cannot be scored"):
            llm.score([[1]], [[2]], use_tqdm=False)
        assert_idle(llm)
    assert len([record for record in caplog.records if "NaN" in record.getMessage()]) == 1


def test_no_token_left_is_not_blamed_on_the_weights(llm):
    everything = range(VOCAB_SIZE)
    with pytest.raises(ValueError, match=r"^sampling_params\[0\]: min_tokens=5: no token is left to draw"):
        llm.generate([[5, 6]], greedy(9, min_tokens=5, stop_token_ids=everything), use_tqdm=False)
    assert_idle(llm)
    # Two bad words of two tokens: after one of these tokens, neither may follow, and all others are ends.
    a, b = (llm.tokenizer.encode(letter)[0] for letter in "ab")
    ends = [token for token in everything if token not in (a, b)]
    params = greedy(9, min_tokens=5, stop_token_ids=ends, bad_words=["aa", "ab", "ba", "bb"])
    (output,) = llm.generate([[5, 6]], params, use_tqdm=False)
    assert (output["finish_reason"], len(output["token_ids"])) == ("error", 1)
    assert output["error"].startswith("no token is left to draw: bad_words and min_tokens")
    assert_idle(llm)
