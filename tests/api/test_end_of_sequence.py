"""Where a completion ends: at an end-of-sequence token, whoever names it, or where the engine's room does."""

import pytest
from checkpoints import EOS, assert_idle, edit_json, edit_tensors, greedy, make_checkpoint, make_llm, random_prompt

from nanovllm import SamplingParams


@pytest.fixture(scope="module")
def endings(reference):
    """Two prompts, their greedy completions, and a token of each that the other lacks, not the first one."""
    for seed in range(100):
        prompts = [random_prompt(8, seed), random_prompt(11, seed + 100)]
        a, b = reference.greedy(prompts, 16)
        ends = [next((t for t in x[2:] if t not in x[:2] and t not in y), None) for x, y in ((a, b), (b, a))]
        if None not in ends:
            return prompts, (a, b), ends
    pytest.fail("no such prompts")


def cut(tokens, ends):
    """What of a completion is left with these end-of-sequence tokens, and its finish reason."""
    for i, token in enumerate(tokens):
        if token in ends:
            return tokens[: i + 1], "stop"
    return tokens, "length"


@pytest.mark.parametrize("source", ["generation_config", "option"])
def test_each_end_of_sequence_token_stops(tmp_path, endings, source):
    prompts, completions, ends = endings
    path = make_checkpoint(tmp_path)
    # An option replaces what the files say.
    edit_json(path / "generation_config.json", eos_token_id=ends if source != "option" else [completions[0][0]])
    with make_llm(path, **({"eos": ends} if source == "option" else {})) as llm:
        stopping = SamplingParams(temperature=0, max_tokens=16)
        outputs = llm.generate([*prompts, *prompts], [stopping] * 2 + [greedy(16)] * 2, use_tqdm=False)
        assert_idle(llm)
    found = [(output["token_ids"], output["finish_reason"]) for output in outputs]
    assert found == [cut(tokens, ends) for tokens in completions] + [(tokens, "length") for tokens in completions]
    assert [reason for _, reason in found[:2]] == ["stop", "stop"]


def test_the_tokenizers_end_of_sequence_stops_and_stays_out_of_the_text(tmp_path, endings):
    prompts, completions, ends = endings
    path = make_checkpoint(tmp_path, tokenizer=True)

    def swap(tensors, eos=1, other=ends[0]):
        head = tensors["lm_head.weight"]
        head[[eos, other]] = head[[other, eos]]

    edit_tensors(path, swap)
    with make_llm(path, skip_tokenizer_init=False) as llm:
        assert llm.tokenizer.eos_token_id == 1
        assert llm.tokenizer.eos_token == EOS
        (output,) = llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    kept = cut(completions[0], ends[:1])[0][:-1]
    assert output["token_ids"] == [*kept, 1]
    assert output["finish_reason"] == "stop"
    assert output["text"] == llm.tokenizer.decode(kept)


def test_completion_ends_where_the_engine_does(llm, reference):
    prompts = [random_prompt(length, seed=length) for length in (150, 198, 199)]
    outputs = llm.generate(prompts, [greedy(100), greedy(None), greedy(100)], use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [50, 2, 1]
    assert {output["finish_reason"] for output in outputs} == {"length"}
    assert [output["token_ids"] for output in outputs] == [
        tokens[:n] for tokens, n in zip(reference.greedy(prompts, 50), (50, 2, 1), strict=True)
    ]
