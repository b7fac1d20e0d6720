"""Jobs with split_tool_calls: what a model calls is apart from the text of its answers."""

import json

import pytest
from channels import (
    CALLS,
    HARMONY_CALLS,
    QWEN_CALLS,
    TOOLS,
    let_it_say,
    make_channels_checkpoint,
    make_qwen_checkpoint,
)
from checkpoints import make_llm
from job_files import read_folder, write_lines

from nanovllm.jobs import run_batch

MESSAGES = [{"role": "user", "content": "a block"}]
CHAT = {"messages": MESSAGES, "tools": TOOLS}
LINES = [
    {"id": "chat", **CHAT, "tool_calls": "mine"},
    {"id": "one", **CHAT, "parallel_tool_calls": False},
    {"custom_id": "openai", "body": CHAT},
    {"custom_id": "openai one", "body": {**CHAT, "parallel_tool_calls": False}},
    {"custom_id": "openai two", "body": {**CHAT, "n": 2}},
]
OPTIONS = {"temperature": 0, "max_tokens": 150, "use_tqdm": False}
MODELS = pytest.mark.parametrize(
    ("make", "written"), [(make_channels_checkpoint, HARMONY_CALLS), (make_qwen_checkpoint, QWEN_CALLS)]
)


@pytest.fixture
def llm(tmp_path, make, written):
    path = make(tmp_path / "model")
    with make_llm(path, skip_tokenizer_init=False, max_model_len=400) as llm:
        let_it_say(llm, MESSAGES, written, tools=TOOLS)
        yield llm


def calls_of(calls: list[dict]) -> list[tuple]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def answered(llm, tmp_path, lines, **options) -> dict:
    file = write_lines(tmp_path / "prompts.jsonl", lines)
    summary = run_batch(file, tmp_path / "answers", llm, **OPTIONS, **options)
    assert (summary.num_answered, summary.num_failed) == (len(lines), 0)
    return {row.get("custom_id", row["id"]): row for row in read_folder(tmp_path / "answers")}


@MODELS
def test_calls_are_apart(llm, tmp_path):
    rows = answered(llm, tmp_path, LINES, split_reasoning=True, split_tool_calls=True)
    for name, expected in (("chat", CALLS), ("one", CALLS[:1])):
        assert (rows[name]["reasoning"], rows[name]["text"]) == ("ab", "cd")
        assert calls_of(rows[name]["tool_calls"]) == expected
    assert rows["chat"]["input_tool_calls"] == "mine"
    for name, num, expected in (("openai", 1, CALLS), ("openai one", 1, CALLS[:1]), ("openai two", 2, CALLS)):
        choices = rows[name]["response"]["body"]["choices"]
        assert len(choices) == num
        for choice in choices:
            message = choice["message"]
            assert (message["reasoning_content"], message["content"]) == ("ab", "cd")
            assert choice["finish_reason"] == "tool_calls"
            found = [(name, json.loads(arguments)) for name, arguments in calls_of(message["tool_calls"])]
            assert found == expected
            assert len({call["id"] for call in message["tool_calls"]}) == len(expected)


@MODELS
def test_thinking_stays_where_only_calls_are_split(llm, tmp_path):
    rows = answered(llm, tmp_path, LINES[:1] + LINES[2:3], split_tool_calls=True)
    (choice,) = rows["openai"]["response"]["body"]["choices"]
    for text in (rows["chat"]["text"], choice["message"]["content"]):
        assert "ab" in text
        assert "cd" in text
        assert "look" not in text
    assert calls_of(rows["chat"]["tool_calls"]) == CALLS
    assert "reasoning" not in rows["chat"]


@MODELS
def test_without_the_option_and_without_tools_texts_stay(llm, tmp_path):
    without_tools = [{"id": "none", "messages": MESSAGES}]
    rows = answered(llm, tmp_path, without_tools, split_tool_calls=True)
    assert "tool_calls" not in rows["none"]
    file = write_lines(tmp_path / "prompts.jsonl", LINES[:1])
    run_batch(file, tmp_path / "others", llm, **OPTIONS)
    (row,) = read_folder(tmp_path / "others")
    assert row["tool_calls"] == "mine", "of the input"
    assert "look" in row["text"]


@MODELS
def test_a_column_of_parquet(llm, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra jobs")
    file = write_lines(tmp_path / "prompts.jsonl", LINES[:2])
    run_batch(file, tmp_path / "answers", llm, format="parquet", split_tool_calls=True, **OPTIONS)
    rows = {row["id"]: row for row in parquet.read_table(tmp_path / "answers").to_pylist()}
    assert calls_of(json.loads(rows["chat"]["tool_calls"])) == CALLS
