"""Jobs with split_reasoning: what a model thinks is apart from the text of its answers."""

import re

import pytest
from checkpoints import make_tokenizer
from job_files import read_folder, write_lines
from transformers import AutoTokenizer

from nanovllm.jobs import GenerateActor, check_batch, run_batch
from nanovllm.jobs.inputs import RawLine
from nanovllm.jobs.lines import LineFormat
from nanovllm.jobs.reader import Preparer

pytest.importorskip("llguidance", reason="needs the extra structured")

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}{{ tag }}"
MESSAGES = [{"role": "user", "content": "a block"}]
WHOLE = {"guided_regex": "<think>[a-z]{9}</think> [a-z]{5}"}
OPENED = {"guided_regex": "[a-z]{9}</think> [a-z]{5}", "chat_template_kwargs": {"tag": "<think>\n"}}
LINES = [
    {"id": "opened", "messages": MESSAGES, "reasoning": "mine", "content": "mine too", **OPENED},
    {"id": "whole", "messages": MESSAGES, "temperature": 0.9, "n": 2, **WHOLE},
    {"id": "none", "messages": MESSAGES, "guided_regex": "[a-z]{9}"},
    {"id": "text", "prompt": "a block", **WHOLE},
    {"custom_id": "openai", "body": {"messages": MESSAGES, **WHOLE}},
    {"custom_id": "openai opened", "body": {"messages": MESSAGES, **OPENED}},
]
OPTIONS = {"split_reasoning": True, "chat_template": TEMPLATE, "temperature": 0, "max_tokens": 80}


def assert_split(answer: dict, text: str = "text") -> None:
    assert re.fullmatch("[a-z]{9}", answer["reasoning"])
    assert re.fullmatch("[a-z]{5}", answer[text])


def test_rows_of_a_job(llm, tmp_path):
    """With the process that reads lines, which has no torch."""
    file = write_lines(tmp_path / "prompts.jsonl", LINES)
    assert check_batch(file, llm, use_tqdm=False, **OPTIONS).num_failed == 0
    summary = run_batch(file, tmp_path / "answers", llm, use_tqdm=False, **OPTIONS)
    assert (summary.num_answered, summary.num_failed) == (6, 0)
    rows = {
        row.get("id") if "response" not in row else row["custom_id"]: row for row in read_folder(tmp_path / "answers")
    }
    assert_split(rows["opened"])
    assert (rows["opened"]["input_reasoning"], rows["opened"]["content"]) == ("mine", "mine too")
    assert_split(rows["whole"])
    for sample in rows["whole"]["samples"]:
        assert_split(sample)
    assert rows["none"]["reasoning"] is None
    assert len(rows["none"]["text"]) == 9
    assert "reasoning" not in rows["text"], "only conversations are split"
    assert rows["text"]["text"].startswith("<think>")
    for name in ("openai", "openai opened"):
        (choice,) = rows[name]["response"]["body"]["choices"]
        assert_split(choice["message"], "content")
        assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"]
    with pytest.raises(ValueError, match="split_reasoning"):
        run_batch(file, tmp_path / "answers", llm, use_tqdm=False, **OPTIONS | {"split_reasoning": False})


def test_columns_of_parquet(llm, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra jobs")
    file = write_lines(tmp_path / "prompts.jsonl", LINES[:4])
    run_batch(file, tmp_path / "answers", llm, format="parquet", use_tqdm=False, **OPTIONS)
    rows = {row["id"]: row for row in parquet.read_table(tmp_path / "answers").to_pylist()}
    assert_split(rows["opened"])
    assert rows["opened"]["input_reasoning"] == "mine"
    assert rows["none"]["reasoning"] is rows["text"]["reasoning"] is None
    options = {name: value for name, value in OPTIONS.items() if name != "split_reasoning"}
    run_batch(file, tmp_path / "others", llm, format="parquet", use_tqdm=False, **options)
    rows = {row["id"]: row for row in parquet.read_table(tmp_path / "others").to_pylist()}
    assert rows["opened"]["reasoning"] == "mine", "without the option nothing is called otherwise"
    assert "</think>" in rows["opened"]["text"]


def test_columns_of_a_ray_dataset(path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra ray")
    lines = [{name: line.get(name) for name in ("id", "messages", "reasoning", "guided_regex")} for line in LINES[1:3]]
    actor = GenerateActor(str(path), device="cpu", num_kvcache_blocks=16, max_model_len=200, **OPTIONS)
    rows = actor(pyarrow.Table.from_pylist(lines)).to_pylist()
    assert_split(rows[0])
    assert rows[1]["reasoning"] is None
    assert "input_reasoning" in rows[0]


def test_conversations_with_a_model_of_channels_keep_the_tags(tmp_path):
    """They are special tokens, which texts lack otherwise."""
    make_tokenizer(tmp_path, ("<|return|>", "<|channel|>", "<|message|>"), "<|return|>", chat_template=TEMPLATE)
    preparer = Preparer(AutoTokenizer.from_pretrained(tmp_path), LineFormat(split_reasoning=True), None)
    rows = [{"messages": MESSAGES}, {"prompt": "a block"}]
    lines = [(i, RawLine(i, "a.jsonl", i + 1, row, None, 10)) for i, row in enumerate(rows)]
    assert [each.line.params.skip_special_tokens for each in preparer.prepare(lines)] == [False, True]
