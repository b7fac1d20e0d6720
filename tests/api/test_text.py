"""Text as users get it, of a model whose tokenizer drops a space at the beginning of a text, as Llama 2's does."""

import json
import logging
from itertools import pairwise

import pytest
import torch
from checkpoints import make_checkpoint
from tokenizers_of_families import sentencepiece_like
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.jobs import run_batch

COMPLETION = ["▁Paris", "▁is", "▁the", "<0x0A>", "▁▁▁", "▁return", "x", "y", "z", "</s>"]
PROMPT = "The no"
TEXT = " Paris is the\n    returnxyz"


def ids(pieces: list[str]) -> list[int]:
    return sentencepiece_like().convert_tokens_to_ids(pieces)


@pytest.fixture(scope="module")
def shared_llm(tmp_path_factory):
    """A model that continues PROMPT with COMPLETION: its next token depends on the last one alone."""
    tokenizer = sentencepiece_like()
    vocab_size = len(tokenizer)
    sizes = {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 1}
    path = make_checkpoint(tmp_path_factory.mktemp("text"), "llama", vocab_size=vocab_size, **sizes)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float("norm" in name))
        model.model.embed_tokens.weight[:, :vocab_size] = torch.eye(vocab_size)
        chain = [tokenizer.encode(PROMPT)[-1], *ids(COMPLETION)]
        for token, following in pairwise(chain):
            model.lm_head.weight[following, token] = 5.0
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    with LLM(path, device="cpu", kvcache_gib=0.05) as llm:
        yield llm


def complete(llm, **options) -> dict:
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30, **options), use_tqdm=False)
    return output


def test_the_space_at_the_beginning_is_in_every_kind_of_result(llm, tmp_path):
    plain = complete(llm)
    assert (plain["text"], plain["token_ids"]) == (TEXT, ids(COMPLETION))
    assert complete(llm, stop="no such")["text"] == TEXT
    params = SamplingParams(temperature=0, max_tokens=30)
    pieces = [delta["text"] for delta in llm.stream(PROMPT, params)]
    assert pieces == [" Paris", " is", " the", "", "\n   ", " return", "x", "y", "z", ""]
    assert [output["text"] for _, output in llm.generate_iter([PROMPT], params)] == [TEXT]
    (score,) = llm.score(PROMPT, " Paris is the\n", use_tqdm=False)
    assert score["token_ids"] == plain["token_ids"][:4]
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": PROMPT}))
    run_batch(tmp_path / "in.jsonl", tmp_path / "out", llm, temperature=0, max_tokens=30)
    (line,) = (tmp_path / "out").rglob("*.jsonl")
    assert json.loads(line.read_text())["text"] == TEXT


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [(" Paris", "", 1), ("\n", " Paris is the", 4), ("the\n   ", " Paris is ", 5), ("returnxy", TEXT[:-9], 8)],
)
def test_stop_strings(llm, stop, text, num_tokens):
    output = complete(llm, stop=stop)
    assert (output["text"], output["stop_reason"], len(output["token_ids"])) == (text, stop, num_tokens)
    assert complete(llm, stop=stop, include_stop_str_in_output=True)["text"] == text + stop
    request_id = llm.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=30, stop=stop))
    finished = []
    while not llm.is_finished():
        finished += llm.step()[0]
    assert finished == [(request_id, output["token_ids"])]


@pytest.mark.parametrize("choice", [(" yes", " no"), ("yes", "no"), ("  no", "\nno")])
def test_choices_with_and_without_a_space(llm, choice):
    form = StructuredOutputsParams(choice=choice)
    outputs = llm.generate([PROMPT] * 8, SamplingParams(structured_outputs=form), use_tqdm=False)
    assert {output["text"] for output in outputs} <= set(choice)
    assert {output["finish_reason"] for output in outputs} == {"stop"}


@pytest.mark.parametrize("skip", [True, False])
def test_a_token_that_ends_a_completion_has_no_text(llm, skip):
    (y,) = ids(["y"])
    output = complete(llm, stop_token_ids=[y], skip_special_tokens=skip)
    assert (output["text"], output["stop_reason"], output["token_ids"][-1]) == (TEXT.removesuffix("yz"), y, y)
    kept = complete(llm, stop_token_ids=[y], skip_special_tokens=skip, include_stop_str_in_output=True)
    assert kept["text"] == TEXT.removesuffix("z")
    params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[y], skip_special_tokens=skip)
    assert "".join(delta["text"] for delta in llm.stream(PROMPT, params)) == output["text"]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_stop_string_that_is_a_special_token(llm, skip, ignore_eos):
    options = {"stop": ["</s>", "no such"], "skip_special_tokens": skip, "ignore_eos": ignore_eos}
    output = complete(llm, **options)
    assert (output["text"], output["stop_reason"], output["finish_reason"]) == (TEXT, "</s>", "stop")
    assert complete(llm, include_stop_str_in_output=True, **options)["text"] == TEXT + "</s>"


def test_bad_words_begin_with_and_without_a_space(llm):
    text = complete(llm, bad_words=["Paris"])["text"]
    assert "Paris" not in text


def test_a_text_with_the_beginning_of_sequence_token_gets_one_warning(llm, caplog):
    params = SamplingParams(max_tokens=1)
    with caplog.at_level(logging.WARNING, "nanovllm"):
        llm.generate(["no", {"prompt_token_ids": [1, 1, 5]}], params, use_tqdm=False)
        assert not caplog.records
        for _ in range(2):
            llm.generate(["no", "<s>no"], params, use_tqdm=False)
    assert len(caplog.records) == 1
    assert "begins with <s> twice" in caplog.text


def test_results_say_that_they_are_dicts(llm):
    output, several = complete(llm), complete(llm, n=2)
    (score,) = llm.score(PROMPT, " Paris", use_tqdm=False)
    delta = next(llm.stream(PROMPT, SamplingParams(max_tokens=2)))
    for result, name, says in (
        (output, "outputs", r"a result is a dict and has no attribute 'outputs': use result\['text'\]"),
        (output, "text", r"use result\['text'\]"),
        (several, "outputs", r"use result\['samples'\], a list of dicts"),
        (several["samples"][1], "token_ids", r"use result\['token_ids'\]"),
        (score, "total", r"use result\['total'\]"),
        (delta, "text", r"use result\['text'\]"),
    ):
        assert isinstance(result, dict)
        assert json.loads(json.dumps(result))["token_ids"] == result["token_ids"]
        with pytest.raises(AttributeError, match=says):
            getattr(result, name)
