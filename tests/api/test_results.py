"""What a result holds: text up to a stop string, several samples, structured outputs."""

import dataclasses
import sys

import pytest
from checkpoints import assert_idle, both_ways, generate, greedy, make_ascii_checkpoint, make_llm, random_prompt

from nanovllm import SamplingParams, StructuredOutputsParams

shared_llm = both_ways()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_ascii_checkpoint(tmp_path_factory.mktemp("results"))


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


def test_special_tokens_are_left_out_unless_asked_for(llm):
    params = [SamplingParams(seed=i, max_tokens=60, ignore_eos=True, temperature=5.0) for i in range(12)]
    params += [dataclasses.replace(p, skip_special_tokens=False) for p in params]
    outputs = generate(llm, [[1, 2, 3]] * 24, params)
    for output, p in zip(outputs, params, strict=True):
        decoded = llm.tokenizer.decode(output["token_ids"], skip_special_tokens=p.skip_special_tokens)
        assert output["text"] == decoded
    assert any(output["text"].count("<|") for output in outputs[12:])


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


def test_samples_without_a_seed_draw_apart_and_greedy_ones_do_not(llm, reference):
    (output,) = generate(llm, [[1, 2, 3]], SamplingParams(max_tokens=16, ignore_eos=True, n=8))
    assert len({tuple(sample["token_ids"]) for sample in output["samples"]}) == 8
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


# -- structured outputs ----------------------------------------------------------------------------------------------


def form(max_tokens: int = 40, **fields) -> SamplingParams:
    others = {name: fields.pop(name) for name in ("n", "seed") if name in fields}
    return SamplingParams(1.5, max_tokens, structured_outputs=StructuredOutputsParams(**fields), **others)


def test_each_sample_follows_a_grammar_of_its_own(llm):
    (output,) = generate(llm, [[1, 2, 3]], form(choice=["red", "green", "dark red", "blue"], n=8, seed=0))
    texts = [sample["text"] for sample in output["samples"]]
    assert set(texts) <= {"red", "green", "dark red", "blue"}
    assert len(set(texts)) > 1


def test_a_missing_library_is_named(llm, monkeypatch):
    monkeypatch.setattr(llm._sequences._special, "_grammars", None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"sampling_params\[1\]: .*pip install llguidance"):
        generate(llm, [[1], [2]], [greedy(2), form(choice=["a"])])
    outputs = llm.generate([[1], [2]], [greedy(2), form(choice=["a"])], use_tqdm=False, on_error="return")
    assert [output["finish_reason"] for output in outputs] == ["length", "error"]
