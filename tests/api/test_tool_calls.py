"""Tool calls in chat results: of whole texts in the published forms, of streams, and by LLM.chat."""

import random

import pytest
from checkpoints import greedy, make_ascii_checkpoint, make_llm

from nanovllm import ToolCallSplitter, split_tool_calls

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "metric": {"type": "boolean"},
    "where": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    "id": {"type": ["string", "integer"]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
JSON = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'


def function(**parameters):
    """As the template of Qwen3.5 writes it."""
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function=weather>\n{inside}</function>\n</tool_call>"


def call(**arguments):
    return {"type": "function", "function": {"name": "weather", "arguments": arguments}}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (JSON, "", [call(city="Oslo", days=3)]),
        (function(city="Oslo", days=3), "", [call(city="Oslo", days=3)]),
        (f"Let me see.\n\n{JSON}\n{function(days=1)}", "Let me see.", [call(city="Oslo", days=3), call(days=1)]),
        (function(city="1", id="7", other="2"), "", [call(city="1", id="7", other="2")]),
        (function(metric="true"), "", [call(metric=True)]),
        (function(metric="False"), "", [call(metric=False)]),
        (function(where='{"a": [1]}'), "", [call(where={"a": [1]})]),
        (function(where="None"), "", [call(where=None)]),
        (function(days="three"), "", [call(days="three")]),
        (function(city="a\n  b\n\nc"), "", [call(city="a\n  b\n\nc")]),
        (function(city=""), "", [call(city="")]),
        (function(), "", [call()]),
        (f"{JSON}\nSo.", "So.", [call(city="Oslo", days=3)]),
        ('<tool_call>{"name": "weather"}</tool_call>', "", [call()]),
        # No whole call: ended by max_tokens, or another form.
        (JSON[:-3], JSON[:-3], []),
        ("<tool_call>weather()</tool_call>", "<tool_call>weather()</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call> ', '<tool_call>{"name": 3}</tool_call> ', []),
        ("a <tool_cal", "a <tool_cal", []),
        (" Plain.\n", " Plain.\n", []),
        ("", "", []),
    ],
)
def test_whole_texts_and_streams(text, content, calls):
    assert split_tool_calls(text, TOOLS) == (content, calls)
    for seed in range(5):
        rng, splitter, found, rest = random.Random(seed), ToolCallSplitter(TOOLS), [], text
        shown = ""
        while True:
            size = rng.choice((1, 2, 5, 40))
            piece, rest = rest[:size], rest[size:]
            part, more = splitter.push(piece, is_last=not rest)
            shown, found = shown + part, found + more
            if not rest:
                break
        assert (shown, found) == (content, calls)


def test_what_is_surely_content_is_not_held_back():
    splitter = ToolCallSplitter(TOOLS)
    assert splitter.push("So ") == ("So", [])
    assert splitter.push("be it <") == (" be it", [])
    assert splitter.push("b> ") == (" <b>", [])
    assert splitter.push(f"\n{JSON}\n") == ("", [call(city="Oslo", days=3)])
    assert splitter.push(" ") == ("", [])
    assert splitter.push("Then", is_last=True) == ("Then", [])


def test_chat_results(tmp_path):
    path = make_ascii_checkpoint(tmp_path)
    messages = [{"role": "user", "content": "Oslo?"}]
    template = "{% if tools %}{% endif %}{{ messages[0].content }}"
    options = {"chat_template": template, "tools": TOOLS, "use_tqdm": False}
    with make_llm(path, skip_tokenizer_init=False) as llm:
        (plain,) = llm.chat(messages, greedy(8, n=2), **options)
        (output,) = llm.chat(messages, greedy(8, n=2), split_tool_calls=True, **options)
        assert "tool_calls" not in plain
        for sample in (output, *output["samples"]):
            assert (sample["content"], sample["tool_calls"]) == (plain["text"], [])
        with pytest.raises(TypeError, match="split_tool_calls='yes': must be True or False"):
            llm.chat(messages, split_tool_calls="yes", **options)
