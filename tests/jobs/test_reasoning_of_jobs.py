"""Jobs with split_reasoning: what a model thinks is apart from the text of its answers."""

import re

import pytest
from channels import let_it_say, make_channels_checkpoint
from checkpoints import make_llm
from job_files import read_folder, write_lines

from nanovllm.jobs import GenerateActor, check_batch, run_batch

pytest.importorskip("llguidance", reason="needs the extra structured")

TEMPLATE = "{% for message in messages %}{{ message.content.split('</think>')[-1] }}\n{% endfor %}{{ tag }}"
MESSAGES = [{"role": "user", "content": "a block"}]
WHOLE = {"guided_regex": "<think>[a-z]{9}</think> [a-z]{5}"}
OPENED = {"guided_regex": "[a-z]{9}</think> [a-z]{5}", "chat_template_kwargs": {"tag": "<think>\n"}}
BUDGET = {"guided_regex": "[a-z]{5}", "thinking_token_budget": 6, "chat_template_kwargs": {"tag": "<think>\n"}}
LINES = [
    {"id": "opened", "messages": MESSAGES, "reasoning": "mine", "content": "mine too", **OPENED},
    {"id": "whole", "messages": MESSAGES, "temperature": 0.9, "n": 2, **WHOLE},
    {"id": "none", "messages": MESSAGES, "guided_regex": "[a-z]{9}"},
    {"id": "text", "prompt": "a block", **WHOLE},
    {"custom_id": "openai", "body": {"messages": MESSAGES, **WHOLE}},
    {"custom_id": "openai opened", "body": {"messages": MESSAGES, **OPENED}},
    {"id": "budget", "messages": MESSAGES, **BUDGET},
    {"custom_id": "openai budget", "body": {"messages": MESSAGES, **BUDGET}},
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
    assert (summary.num_answered, summary.num_failed) == (8, 0)
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
    # The form begins where the budget ends the thinking.
    (choice,) = rows["openai budget"]["response"]["body"]["choices"]
    for answer, text in ((rows["budget"], "text"), (choice["message"], "content")):
        assert re.fullmatch("[a-z]{5}", answer[text])
        assert answer["reasoning"]
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


def test_conversations_with_a_model_of_channels(tmp_path):
    """The tags are special tokens, which other texts lack."""
    lines = [{"id": "chat", "messages": MESSAGES}, {"id": "text", "prompt": "a block"}]
    lines.append({"custom_id": "openai", "body": {"messages": MESSAGES}})
    file = write_lines(tmp_path / "prompts.jsonl", lines)
    path = make_channels_checkpoint(tmp_path / "model")
    with make_llm(path, skip_tokenizer_init=False, max_model_len=200) as llm:
        let_it_say(llm, MESSAGES)
        options = {"split_reasoning": True, "temperature": 0, "max_tokens": 50, "use_tqdm": False}
        run_batch(file, tmp_path / "answers", llm, **options)
    rows = {row.get("custom_id", row["id"]): row for row in read_folder(tmp_path / "answers")}
    assert (rows["chat"]["reasoning"], rows["chat"]["text"]) == ("ab", "cd")
    (choice,) = rows["openai"]["response"]["body"]["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("ab", "cd")
    assert "<|" not in rows["text"]["text"]
