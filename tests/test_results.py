"""What a result holds: samples, stop strings, timing, faults; and the figures of the engine."""

import dataclasses
import sys
import time

import pytest
import torch
from checkpoints import (
    VOCAB_SIZE,
    assert_idle,
    both_ways,
    complete,
    edit_tensors,
    generate,
    greedy,
    make_checkpoint,
    make_llm,
    random_prompt,
)
from transformers import AutoTokenizer

from nanovllm import SamplingParams, StructuredOutputsParams

shared_llm = both_ways()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model that says little but ASCII, so that there is text to stop at."""
    path = make_checkpoint(tmp_path_factory.mktemp("results"), tokenizer=True)
    texts = AutoTokenizer.from_pretrained(path).batch_decode([[i] for i in range(VOCAB_SIZE)])
    silent = [i for i, text in enumerate(texts) if not text.isascii() or not text.isprintable()]
    edit_tensors(path, lambda tensors: tensors["lm_head.weight"].index_fill_(0, torch.tensor(silent), 0.0))
    return path


# -- stop strings ------------------------------------------------------------------------------------------------


def first_stop(llm, tokens: list[int], stop: list[str]) -> tuple[int, str, str | None]:
    """Tokens until one of these texts is complete, the text before it, and which one it is."""
    for i in range(len(tokens)):
        text = llm.tokenizer.decode(tokens[: i + 1], skip_special_tokens=True)
        found = [(text.find(s), len(s), s) for s in stop if s in text]
        if found:
            return i + 1, text[: min(found)[0]], min(found)[2]
    return len(tokens), llm.tokenizer.decode(tokens, skip_special_tokens=True), None


def test_stop_strings_cut_the_text_and_end_the_sequence(llm):
    prompts = [random_prompt(n, seed=n) for n in (5, 30, 17, 9)]
    plain = generate(llm, prompts, greedy(24))
    stops = []
    for i, output in enumerate(plain):
        # From inside the text, over the border of a token at an odd place, and one that never comes.
        text, at = output["text"], 3 + 4 * i
        stops.append(["never ever", text[at : at + 3], text[at + 1 : at + 6]])
    for keep in (False, True):
        params = [greedy(24, stop=stop, include_stop_str_in_output=keep) for stop in stops]
        outputs = generate(llm, prompts, params)
        for output, before, stop in zip(outputs, plain, stops, strict=True):
            num_tokens, text, reason = first_stop(llm, before["token_ids"], stop)
            assert reason is not None
            assert output["token_ids"] == before["token_ids"][:num_tokens]
            assert (output["finish_reason"], output["stop_reason"]) == ("stop", reason)
            assert output["text"] == (text + reason if keep else text)


def test_only_those_stop_that_have_something_to_stop_at(llm):
    prompts = [random_prompt(n, seed=n) for n in (12, 13, 14)]
    plain = generate(llm, prompts, greedy(20))
    stop = plain[1]["text"][4:7]
    outputs = generate(llm, prompts, [greedy(20), greedy(20, stop=stop), greedy(20)])
    for i in (0, 2):
        assert (outputs[i]["text"], outputs[i]["token_ids"]) == (plain[i]["text"], plain[i]["token_ids"])
        assert (outputs[i]["finish_reason"], outputs[i]["stop_reason"]) == ("length", None)
    assert outputs[1]["stop_reason"] == stop


def test_a_stop_string_in_the_last_allowed_token_is_a_stop(llm):
    (plain,) = generate(llm, [[5, 6, 7]], greedy(30))
    stop = plain["text"][5:8]
    num_tokens, text, _ = first_stop(llm, plain["token_ids"], [stop])
    (output,) = generate(llm, [[5, 6, 7]], greedy(num_tokens, stop=stop))
    assert (output["finish_reason"], output["stop_reason"], output["text"]) == ("stop", stop, text)
    (output,) = generate(llm, [[5, 6, 7]], greedy(num_tokens - 1, stop=stop))
    assert (output["finish_reason"], output["stop_reason"]) == ("length", None)
    # What was held back because a stop string might have begun belongs to the text after all.
    assert output["text"] == llm.tokenizer.decode(plain["token_ids"][: num_tokens - 1], skip_special_tokens=True)


def test_stop_strings_while_sequences_are_preempted(path, reference):
    prompts = reference.draw_prompts((20, 18, 23), 25)
    expected = reference.greedy(prompts, 25)
    with make_llm(path, skip_tokenizer_init=False, num_kvcache_blocks=6, max_num_batched_tokens=16) as llm:
        stops = [llm.tokenizer.decode(tokens, skip_special_tokens=True)[-4:] for tokens in expected]
        outputs = generate(llm, prompts, [greedy(25, stop=stop) for stop in stops])
        assert llm.stats()["preemptions"] > 0
        assert_idle(llm)
        for output, tokens, stop in zip(outputs, expected, stops, strict=True):
            num_tokens, text, _ = first_stop(llm, tokens, [stop])
            assert (output["token_ids"], output["text"]) == (tokens[:num_tokens], text)


def test_stop_strings_by_hand(llm):
    (plain,) = generate(llm, [[5, 6, 7]], greedy(30))
    stop = plain["text"][5:8]
    request = llm.add_request([5, 6, 7], greedy(30, stop=stop))
    done = {}
    while not llm.is_finished():
        done |= dict(llm.step()[0])
    assert done == {request: plain["token_ids"][: first_stop(llm, plain["token_ids"], [stop])[0]]}


def test_special_tokens_are_left_out_unless_asked_for(llm):
    params = [SamplingParams(seed=i, max_tokens=60, ignore_eos=True, temperature=5.0) for i in range(12)]
    params += [dataclasses.replace(p, skip_special_tokens=False) for p in params]
    outputs = generate(llm, [[1, 2, 3]] * 24, params)
    for output, p in zip(outputs, params, strict=True):
        decoded = llm.tokenizer.decode(output["token_ids"], skip_special_tokens=p.skip_special_tokens)
        assert output["text"] == decoded
    assert any(output["text"].count("<|") for output in outputs[12:])


def test_stop_strings_need_a_tokenizer(path):
    with make_llm(path) as llm:
        with pytest.raises(ValueError, match=r"sampling_params\[1\]: stop=.*tokenizer"):
            generate(llm, [[1], [2]], [greedy(3), greedy(3, stop="a")])
        assert_idle(llm)


# -- several samples ---------------------------------------------------------------------------------------------


def test_samples_of_one_prompt(llm):
    prompts = [random_prompt(50, seed=1), random_prompt(8, seed=2)]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, seed=7, n=n) for n in (1, 4)]
    ones = generate(llm, prompts, params[0])
    outputs = generate(llm, prompts, params[1])
    for one, output in zip(ones, outputs, strict=True):
        samples = output["samples"]
        assert len(samples) == 4
        # The first sample is what n=1 gives; the others are others.
        assert one["token_ids"] == output["token_ids"] == samples[0]["token_ids"]
        assert len({tuple(sample["token_ids"]) for sample in samples}) == 4
        assert "samples" not in one
        for sample in samples:
            assert sample["text"] == llm.tokenizer.decode(sample["token_ids"], skip_special_tokens=True)
            assert sample["finish_reason"] == "length"
            assert sample["metrics"]["total"] > 0
    again = generate(llm, prompts[::-1], params[1])[::-1]
    assert [[s["token_ids"] for s in o["samples"]] for o in again] == [
        [s["token_ids"] for s in o["samples"]] for o in outputs
    ]


def test_samples_draw_apart_without_a_seed_too(llm):
    (output,) = generate(llm, [[1, 2, 3]], SamplingParams(max_tokens=16, ignore_eos=True, n=8))
    assert len({tuple(sample["token_ids"]) for sample in output["samples"]}) == 8


def test_greedy_samples_are_what_greedy_is(llm, reference):
    (prompt,) = reference.draw_prompts((20,), 6)
    (output,) = generate(llm, [prompt], greedy(6, n=3))
    assert [sample["token_ids"] for sample in output["samples"]] == reference.greedy([prompt], 6) * 3


def test_samples_share_the_prompts_blocks(llm):
    llm.reset_prefix_cache()
    used = []
    prompt = random_prompt(16 * 5 + 3, seed=3)
    before = llm.stats()
    llm.generate(
        [prompt],
        SamplingParams(max_tokens=4, ignore_eos=True, n=6),
        use_tqdm=False,
        on_step=lambda stats: used.append(stats["kv_blocks_used"]),
    )
    # Five full blocks once; and each sample's own, in which the prompt's rest and the completion are.
    assert max(used) == 5 + 6
    assert used[-1] == 0
    stats = llm.stats()
    assert stats["prefix_cache_hits"] - before["prefix_cache_hits"] == 5 * 80
    assert stats["prefix_cache_queries"] - before["prefix_cache_queries"] == 6 * 83


def test_samples_stop_each_for_itself(llm):
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=1, n=8, temperature=2.0)
    (plain,) = generate(llm, [[4, 5, 6]], params)
    letter = next(c for c in "aeionrst" if c in plain["text"][1:])
    (output,) = generate(llm, [[4, 5, 6]], dataclasses.replace(params, stop=letter))
    for sample, before in zip(output["samples"], plain["samples"], strict=True):
        num_tokens, text, reason = first_stop(llm, before["token_ids"], [letter])
        assert sample["token_ids"] == before["token_ids"][:num_tokens]
        assert sample["stop_reason"] == reason
        if reason:
            assert sample["text"] == text


# -- log-probabilities ----------------------------------------------------------------------------------------------


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


def test_a_stop_string_goes_before_a_stop_token(llm):
    (plain,) = generate(llm, [[5, 6, 7]], greedy(30))
    tokens = plain["token_ids"]
    last = next(token for i, token in enumerate(tokens) if i > 2 and token not in tokens[:i])
    stop = llm.tokenizer.decode(tokens[: tokens.index(last) + 1])[-4:]
    num_tokens, text, _ = first_stop(llm, tokens, [stop])
    assert tokens.index(last) == num_tokens - 1
    (output,) = generate(llm, [[5, 6, 7]], greedy(30, stop=stop, stop_token_ids=[last]))
    assert (output["token_ids"], output["text"]) == (tokens[:num_tokens], text)
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", stop)


# -- structured outputs ----------------------------------------------------------------------------------------------


def form(max_tokens: int = 40, **fields) -> SamplingParams:
    others = {name: fields.pop(name) for name in ("n", "seed") if name in fields}
    return SamplingParams(1.5, max_tokens, structured_outputs=StructuredOutputsParams(**fields), **others)


def test_each_sample_follows_a_grammar_of_its_own(llm):
    (output,) = generate(llm, [[1, 2, 3]], form(choice=["red", "green", "dark red", "blue"], n=8, seed=0))
    texts = [sample["text"] for sample in output["samples"]]
    assert set(texts) <= {"red", "green", "dark red", "blue"}
    assert len(set(texts)) > 1


BAD_SCHEMA = form(json={"type": "foo"})


def test_a_bad_schema_among_others(llm, reference):
    good = reference.draw_prompts((10, 6), 4)
    batch, params = [good[0], [1, 2], good[1]], [greedy(4), BAD_SCHEMA, greedy(4)]
    with pytest.raises(ValueError, match=r"(?s)^sampling_params\[1\]: json=.*Invalid type: foo"):
        generate(llm, batch, params)
    assert_idle(llm)
    outputs = llm.generate(batch, params, use_tqdm=False, on_error="return")
    assert [outputs[0]["token_ids"], outputs[2]["token_ids"]] == reference.greedy(good, 4)
    assert outputs[1]["finish_reason"] == "error"
    assert outputs[1]["error"].startswith("sampling_params[1]: json=")


def test_a_missing_library_is_named(llm, monkeypatch):
    monkeypatch.setattr(llm._checker, "_grammars", None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"sampling_params\[1\]: .*pip install nanovllm\[structured\]"):
        generate(llm, [[1], [2]], [greedy(2), form(choice=["a"])])
    outputs = llm.generate([[1], [2]], [greedy(2), form(choice=["a"])], use_tqdm=False, on_error="return")
    assert [output["finish_reason"] for output in outputs] == ["length", "error"]


# -- timing and counts -------------------------------------------------------------------------------------------


def test_metrics_add_up(path):
    with make_llm(path, num_kvcache_blocks=4) as llm:
        start = time.perf_counter()
        outputs = generate(llm, [random_prompt(20, seed=i) for i in range(5)], greedy(8))
        seconds = time.perf_counter() - start
    for output in outputs:
        metrics = output["metrics"]
        assert 0 <= metrics["queued"] <= metrics["time_to_first_token"] <= metrics["total"] <= seconds
        expected = len(output["token_ids"]) / (metrics["total"] - metrics["queued"])
        assert metrics["tokens_per_second"] == pytest.approx(expected)
        assert output["num_prompt_tokens"] == 20
        assert (output["logprobs"], output["prompt_logprobs"]) == (None, None)
    # Two have room at once: the others wait until these are done.
    assert outputs[4]["metrics"]["queued"] > outputs[0]["metrics"]["total"] / 2
    assert outputs[4]["metrics"]["total"] > outputs[0]["metrics"]["total"]


def test_stats_count_what_happened(path):
    with make_llm(path, num_kvcache_blocks=40) as llm:
        fresh = llm.stats()
        assert not any(value for name, value in fresh.items() if not name.startswith("kv_blocks"))
        assert (fresh["kv_blocks_total"], fresh["kv_blocks_used"], fresh["kv_blocks_free"]) == (40, 0, 40)
        readings = []
        prompts = [random_prompt(40, seed=0)] * 2 + [random_prompt(33, seed=1)]
        llm.generate(prompts, [greedy(5), greedy(9), greedy(1)], use_tqdm=False, on_step=readings.append)
        stats = llm.stats()
        assert (stats["running"], stats["waiting"], stats["kv_blocks_used"]) == (0, 0, 0)
        assert stats["prompt_tokens"] == stats["prefix_cache_queries"] == 113
        # The second prompt waited for the first one's two full blocks.
        assert stats["prefix_cache_hits"] == 32
        assert stats["prefix_cache_hit_rate"] == 32 / 113
        assert stats["generated_tokens"] == 5 + 9 + 1
        assert stats["tokens_per_second"] == pytest.approx(15 / stats["seconds"])
        assert stats["preemptions"] == 0
        # One reading a step: what was under way, and blocks that are all accounted for.
        assert stats["steps"] == len(readings) == readings[-1]["steps"]
        assert all(r["kv_blocks_used"] + r["kv_blocks_free"] == 40 for r in readings)
        assert max(r["running"] for r in readings) >= 2
        assert max(r["kv_blocks_used"] for r in readings) >= 4
        llm.add_request([1, 2], greedy(4))
        assert llm.stats()["waiting"] == 1
        while not llm.is_finished():
            llm.step()
        assert llm.stats()["generated_tokens"] == 19


def test_stats_count_preemptions_and_surplus_tokens_of_nobody(path, reference):
    prompts = reference.draw_prompts((20, 18, 23), 25)
    with make_llm(path, num_kvcache_blocks=6) as llm:
        complete(llm, prompts, greedy(25))
        stats = llm.stats()
        assert stats["preemptions"] > 0
        assert stats["generated_tokens"] == 75
        assert stats["prompt_tokens"] == 61
    eos = reference.greedy(prompts, 25)[0][5]
    with make_llm(path, eos=eos) as llm:
        outputs = complete(llm, prompts, SamplingParams(temperature=0, max_tokens=25))
        assert len(outputs[0]) <= 6
        assert llm.stats()["generated_tokens"] == sum(map(len, outputs))


def test_a_score_of_the_longest_pair_and_of_one_longer(path):
    with make_llm(path, max_model_len=50) as llm:
        (score,) = llm.score([random_prompt(40, seed=0)], [random_prompt(9, seed=1)], use_tqdm=False)
        assert len(score["logprobs"]) == 9
        with pytest.raises(ValueError, match=r"completions\[1\]: has 50 tokens with its prompt; 49 are possible"):
            llm.score([[1], random_prompt(40, seed=0)], [[2], random_prompt(10, seed=1)], use_tqdm=False)


def test_a_score_asks_the_prefix_cache_nothing(path):
    with make_llm(path) as llm:
        complete(llm, [random_prompt(40, seed=0)] * 2, greedy(2))
        before = llm.stats()
        llm.score([random_prompt(40, seed=0)], [[5]], use_tqdm=False)
        after = llm.stats()
    assert after["prompt_tokens"] - before["prompt_tokens"] == 41
    for name in ("prefix_cache_queries", "prefix_cache_hits", "prefix_cache_hit_rate"):
        assert after[name] == before[name]


def test_no_prefix_cache_is_asked_nothing(path):
    with make_llm(path, enable_prefix_caching=False) as llm:
        complete(llm, [random_prompt(40, seed=0)] * 2, greedy(2))
        stats = llm.stats()
    assert stats["prompt_tokens"] == 80
    assert (stats["prefix_cache_queries"], stats["prefix_cache_hits"], stats["prefix_cache_hit_rate"]) == (0, 0, 0.0)


# -- faults ------------------------------------------------------------------------------------------------------

FAULTY = [
    ("", "is empty"),
    ([1, 10**6], "outside the vocabulary"),
    (None, "integer token ids"),
    ([1] * 200, "200 tokens"),
    ("a lone surrogate: \ud800", "prompts"),
]


@pytest.mark.parametrize(("prompt", "message"), FAULTY, ids=lambda value: repr(value)[:12])
def test_a_faulty_prompt_among_others(llm, reference, prompt, message):
    good = reference.draw_prompts((10, 6), 4)
    batch = [good[0], prompt, good[1], "some text"]
    with pytest.raises((ValueError, TypeError), match=r"prompts\[1\]") as raised:
        generate(llm, batch, greedy(4))
    assert_idle(llm)
    outputs = llm.generate(batch, greedy(4), use_tqdm=False, on_error="return")
    assert [outputs[0]["token_ids"], outputs[2]["token_ids"]] == reference.greedy(good, 4)
    assert len(outputs[3]["token_ids"]) == 4
    fault = outputs[1]
    assert (fault["finish_reason"], fault["text"], fault["token_ids"]) == ("error", None, [])
    assert fault["error"] == str(raised.value)
    assert message in fault["error"]
    assert all(output.keys() - fault.keys() == set() for output in outputs)
    assert not any("error" in output for output in (outputs[0], outputs[2], outputs[3]))


def test_faulty_parameters_among_others(llm):
    outputs = llm.generate([[1], [2]], [greedy(2), "greedy"], use_tqdm=False, on_error="return")
    assert [output["finish_reason"] for output in outputs] == ["length", "error"]
    assert "sampling_params[1]" in outputs[1]["error"]
    # A list of another length is no fault of one prompt.
    with pytest.raises(ValueError, match=r"sampling_params: 1 .*2 prompts"):
        llm.generate([[1], [2]], [greedy(2)], use_tqdm=False, on_error="return")


def test_all_are_faulty(llm):
    outputs = llm.generate(["", []], greedy(2), use_tqdm=False, on_error="return")
    assert [output["finish_reason"] for output in outputs] == ["error", "error"]


def test_on_error_takes_one_of_two(llm):
    with pytest.raises(ValueError, match=r"on_error='ignore'.*raise, return"):
        llm.generate([[1]], greedy(2), on_error="ignore")


def test_a_wrong_prompt_leaves_the_prefix_cache_alone(llm):
    prompt = random_prompt(100, seed=9)
    complete(llm, [prompt], greedy(2))
    with pytest.raises(ValueError, match="empty"):
        generate(llm, [""], greedy(2))
    assert generate(llm, [prompt], greedy(2))[0]["num_cached_tokens"] == 96


# -- abort -------------------------------------------------------------------------------------------------------


def test_abort_from_a_callback_gives_what_there_is(llm, reference):
    prompts = reference.draw_prompts((10, 30, 20), 20)
    expected = reference.greedy(prompts, 20)
    steps = []

    def on_step(stats):
        steps.append(stats)
        if len(steps) == 5:
            llm.abort_request()

    outputs = llm.generate(prompts, [greedy(2), greedy(20), greedy(20, n=2)], use_tqdm=False, on_step=on_step)
    assert [output["finish_reason"] for output in outputs] == ["length", "abort", "abort"]
    assert [sample["finish_reason"] for sample in outputs[2]["samples"]] == ["abort", "abort"]
    for output, tokens in zip(outputs, expected, strict=True):
        num_tokens = len(output["token_ids"])
        assert 2 <= num_tokens < 20
        assert output["token_ids"] == tokens[:num_tokens]
        assert output["text"] == llm.tokenizer.decode(tokens[:num_tokens], skip_special_tokens=True)
        assert output["metrics"]["total"] > 0
    assert complete(llm, prompts, greedy(20)) == expected


def test_abort_before_anything_was_computed(path):
    with make_llm(path, max_num_seqs=1) as llm:
        outputs = llm.generate([[1, 2]] * 3, greedy(9), use_tqdm=False, on_step=lambda stats: llm.abort_request())
        assert [output["finish_reason"] for output in outputs] == ["abort"] * 3
        assert outputs[2]["token_ids"] == []
        assert outputs[2]["metrics"]["time_to_first_token"] is None
        assert_idle(llm)


def test_abort_of_a_request_drops_all_its_samples(llm):
    request = llm.add_request([1, 2, 3], greedy(9, n=3))
    other = llm.add_request([4, 5], greedy(3, n=2))
    llm.step()
    llm.abort_request(request)
    finished = []
    while not llm.is_finished():
        finished += llm.step()[0]
    assert [request_id for request_id, _ in finished] == [other, other]


def test_an_exception_in_the_callback_ends_the_batch(llm, reference):
    def on_step(stats):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate([[1, 2]], greedy(5), use_tqdm=False, on_step=on_step)
    assert_idle(llm)
    assert complete(llm, [[5, 6, 7]], greedy(4)) == reference.greedy([[5, 6, 7]], 4)


def test_a_callback_cannot_start_another_batch(llm):
    with pytest.raises(RuntimeError, match=r"generate\(\) while other requests are unfinished"):
        llm.generate([[1, 2]], greedy(5), use_tqdm=False, on_step=lambda stats: complete(llm, [[1]], greedy(1)))
