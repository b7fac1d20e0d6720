"""Log-probabilities are the model's own: those of a prompt, of each sample's tokens, and of what is scored."""

import pytest
import torch
from checkpoints import both_ways, generate, greedy, make_ascii_checkpoint, make_llm, random_prompt

from nanovllm import SamplingParams

shared_llm = both_ways()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_ascii_checkpoint(tmp_path_factory.mktemp("logprobs"))


def test_score_is_the_models_own_log_probability(llm, reference):
    prompts = [random_prompt(40, seed=1), "the table"]
    completions = [random_prompt(5, seed=2), " of blocks"]
    for _ in range(2):  # the second time the prefix cache knows the prompts
        scores = llm.score(prompts, completions, use_tqdm=False)
        for prompt, completion, score in zip(prompts, completions, scores, strict=True):
            prompt, completion = (
                x if isinstance(x, list) else llm.tokenizer(x)["input_ids"] for x in (prompt, completion)
            )
            logits = reference.logits(prompt, completion)
            expected = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            assert score["token_ids"] == completion
            torch.testing.assert_close(torch.tensor(score["logprobs"]), expected, atol=1e-4, rtol=1e-4)
            assert score["total"] == pytest.approx(sum(score["logprobs"]))
    with pytest.raises(ValueError, match="completions: 1 of them for 2 prompts"):
        llm.score(prompts, completions[:1])
    with pytest.raises(ValueError, match=r"completions\[1\]: is empty"):
        llm.score(prompts, [[1], ""])


def test_prompts_that_are_scored_come_from_the_prefix_cache(path, reference):
    context, completions = random_prompt(100, seed=5), [random_prompt(n, seed=n) for n in (1, 2, 7, 20)]
    expected = [
        reference.logits(context, tokens).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        for tokens in completions
    ]
    for options in ({}, {"max_num_batched_tokens": 32}):
        with make_llm(path, **options) as llm:
            scores = llm.score([context] * 4, completions, use_tqdm=False)
            assert llm.stats()["prefix_cache_hits"] >= 2 * 96
            for score, logprobs in zip(scores, expected, strict=True):
                torch.testing.assert_close(torch.tensor(score["logprobs"]), logprobs, atol=1e-4, rtol=1e-4)


def test_a_score_of_the_longest_pair_and_of_one_longer(path):
    with make_llm(path, max_model_len=50) as llm:
        (score,) = llm.score([random_prompt(40, seed=0)], [random_prompt(9, seed=1)], use_tqdm=False)
        assert len(score["logprobs"]) == 9
        with pytest.raises(ValueError, match=r"completions\[1\]: has 50 tokens with its prompt; 49 are possible"):
            llm.score([[1], random_prompt(40, seed=0)], [[2], random_prompt(10, seed=1)], use_tqdm=False)


def assert_own_logprobs(reference, prompt: list[int], sample: dict) -> None:
    """One entry for each of the sample's tokens, the model's own; the token first."""
    tokens, logprobs = sample["token_ids"], sample["logprobs"]
    assert [next(iter(each)) for each in logprobs] == tokens
    if tokens:
        expected = reference.logits(prompt, tokens).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        found = torch.tensor([each[token] for each, token in zip(logprobs, tokens, strict=True)])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_each_sample_has_its_own_logprobs(llm, reference):
    prompt = random_prompt(20, seed=4)
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=3, n=3, top_k=50, logprobs=1, prompt_logprobs=0)
    (output,) = generate(llm, [prompt], params)
    assert len({tuple(sample["token_ids"]) for sample in output["samples"]}) == 3
    for sample in output["samples"]:
        assert len(sample["token_ids"]) == 6
        assert_own_logprobs(reference, prompt, sample)
    assert len(output["prompt_logprobs"]) == 20
    assert [next(iter(each)) for each in output["prompt_logprobs"][1:]] == prompt[1:]


def test_log_probabilities_of_given_tokens(llm, reference):
    """Beside requests that want others, or none."""
    prompts = [random_prompt(n, seed=n) for n in (5, 30, 17, 9)]
    wanted = [[3, 250, 7], None, [9], None]
    params = [
        greedy(6, logprobs=1, logprob_token_ids=wanted[0]),
        greedy(6, logprobs=4),
        greedy(6, logprobs=0, logprob_token_ids=wanted[2]),
        greedy(6),
    ]
    outputs = generate(llm, prompts, params)
    assert outputs[3]["logprobs"] is None
    for prompt, output, tokens, num_likeliest in zip(prompts[:3], outputs, wanted, (1, 4, 0), strict=False):
        assert_own_logprobs(reference, prompt, output)
        expected = reference.logits(prompt, output["token_ids"]).log_softmax(-1)
        for found, row, own in zip(output["logprobs"], expected, output["token_ids"], strict=True):
            likeliest = row.topk(num_likeliest).indices.tolist()
            assert list(found) == list(dict.fromkeys([own, *likeliest, *(tokens or [])]))
            assert [*found.values()] == pytest.approx(row[list(found)].tolist(), abs=1e-4)


def test_those_who_ask_for_their_own_tokens_alone_are_told_from_their_neighbours(llm, reference):
    prompts = [random_prompt(n, seed=n) for n in (5, 30, 17, 9)]
    params = [greedy(6), greedy(6, logprobs=0), greedy(6, top_k=3, min_tokens=2), greedy(6, logprobs=0)]
    outputs = generate(llm, prompts, params)
    assert [output["logprobs"] is None for output in outputs] == [True, False, True, False]
    for i in (1, 3):
        assert len(outputs[i]["logprobs"]) == 6
        assert_own_logprobs(reference, prompts[i], outputs[i])


def test_logprobs_end_where_the_completion_does(llm, reference):
    prompts = [random_prompt(n, seed=n) for n in (5, 30, 17)]
    plain = generate(llm, prompts, greedy(20))
    stop = plain[1]["text"][3:6]
    num_steps = 0

    def on_step(stats):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 9:
            llm.abort_request()

    params = [greedy(4, logprobs=0), greedy(20, logprobs=2, stop=stop), greedy(20, logprobs=0)]
    outputs = llm.generate(prompts, params, use_tqdm=False, on_step=on_step)
    assert [output["finish_reason"] for output in outputs] == ["length", "stop", "abort"]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert 0 < len(output["token_ids"]) < 20
        assert_own_logprobs(reference, prompt, output)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5},
        {"temperature": 1.7, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.6, "logit_bias": {3: 2.0}},
        {"temperature": 0.0, "logit_bias": {3: 50.0}},
    ],
    ids=str,
)
def test_processed_log_probabilities_are_those_of_the_draw(path, reference, fields):
    """As a trainer needs them of its own samples."""
    prompt = random_prompt(20, seed=3)
    params = SamplingParams(**fields, max_tokens=12, ignore_eos=True, logprobs=7, seed=1)
    found = {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        with make_llm(path, logprobs_mode=mode) as llm:
            ((found[mode],),) = (generate(llm, [prompt], params),)
    raw, processed = found["raw_logprobs"], found["processed_logprobs"]
    assert raw["token_ids"] == processed["token_ids"]
    logits = reference.logits(prompt, raw["token_ids"])
    biased = logits.clone()
    for token, bias in fields.get("logit_bias", {}).items():
        biased[:, token] += bias
    biased /= fields["temperature"] or 1.0
    if "top_k" in fields:
        biased[biased < biased.topk(fields["top_k"]).values[:, -1:]] = -torch.inf
    if "top_p" in fields:
        ordered = biased.softmax(-1).sort(descending=True).values
        num_kept = (ordered.cumsum(-1) - ordered < fields["top_p"]).sum(1, keepdim=True)
        # Equals of the last one that is kept are kept too.
        biased[biased < biased.sort(descending=True).values.gather(1, num_kept - 1)] = -torch.inf
    for output, rows in ((raw, logits), (processed, biased)):
        rows = rows.log_softmax(-1)
        for token, row, entries in zip(output["token_ids"], rows, output["logprobs"], strict=True):
            assert next(iter(entries)) == token
            assert len(entries) in (min(7, int((row > -torch.inf).sum())), 8)
            for each, value in entries.items():
                assert value == pytest.approx(float(row[each]), abs=2e-4)
