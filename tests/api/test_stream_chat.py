"""LLM.stream_chat: the parts of answers as they come are those that chat gives."""

import re
from pathlib import Path

import pytest
from channels import TOOLS, let_it_say, make_channels_checkpoint, make_qwen_checkpoint
from checkpoints import assert_idle, greedy, make_llm
from leaving import LEAVING

from nanovllm import LLM, SamplingParams

CHATS = [
    [{"role": "user", "content": "what is <think>"}],
    [{"role": "user", "content": "a block"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}],
]
QWEN = 'ab</think>cd<tool_call>{"name": "add", "arguments": {"a": 1, "b": 5}}</tool_call>ef<|im_end|>'
HARMONY = (
    "<|channel|>analysis<|message|>ab<|end|><|start|>assistant<|channel|>commentary<|message|>cd<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.add<|message|>{"a": 1, "b": 5}<|call|>'
)
SPLIT = {"tools": TOOLS, "split_reasoning": True, "split_tool_calls": True}
ENGINE = {"skip_tokenizer_init": False, "max_model_len": 400}
PAGE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with make_llm(make_qwen_checkpoint(tmp_path_factory.mktemp("stream")), **ENGINE) as llm:
        yield llm


def join(deltas) -> dict[tuple[int, int], dict]:
    """(conversation, sample) -> what its deltas come to."""
    results: dict = {}
    for delta in deltas:
        key = delta["index"], delta["sample"]
        result = results.setdefault(key, {"text": "", "reasoning": "", "content": "", "tool_calls": [], "deltas": []})
        for name in ("text", "reasoning", "content", "tool_calls"):
            result[name] += delta[name]
        result["deltas"].append(delta)
        result["finish_reason"] = delta["finish_reason"]
    return results


def assert_comes_in_parts(llm: LLM, written: str) -> None:
    let_it_say(llm, CHATS[0], written, tools=TOOLS)
    (result,) = join(llm.stream_chat(CHATS[0], greedy(100), **SPLIT)).values()
    parts = result["reasoning"], result["content"].removesuffix("ef"), result["tool_calls"]
    assert parts == ("ab", "cd", [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 5}}}])
    # As they come, not all at the end, and each call whole.
    names = "reasoning", "content", "tool_calls"
    places = [[bool(delta[name]) for delta in result["deltas"]].index(True) for name in names]
    assert places == sorted(set(places))
    assert places[1] < len(result["deltas"]) / 2


def test_thinking_text_and_calls_come_in_parts(llm, tmp_path):
    assert_comes_in_parts(llm, QWEN)
    with make_llm(make_channels_checkpoint(tmp_path), **ENGINE) as llm:  # whose texts have no tags by default
        assert_comes_in_parts(llm, HARMONY)


def assert_like_chat(llm: LLM, messages: list, params, **options) -> None:
    results = join(llm.stream_chat(messages, params, **options))
    for index, output in enumerate(llm.chat(messages, params, use_tqdm=False, **options)):
        for sample, expected in enumerate(output.get("samples", [output])):
            result = results.pop((index, sample))
            assert [delta["finish_reason"] for delta in result["deltas"][:-1]] == [None] * (len(result["deltas"]) - 1)
            assert (result["text"], result["finish_reason"]) == (expected["text"], expected["finish_reason"])
            assert result["reasoning"] == (expected.get("reasoning") or "")
            assert result["content"] == expected.get("content", expected["text"])
            assert result["tool_calls"] == expected.get("tool_calls", [])
    assert not results


@pytest.mark.parametrize("options", [{}, {"split_tool_calls": True}, SPLIT])
def test_several_conversations_and_samples(llm, options):
    """Of which one begins some tokens further on, so that each answer has parts of its own."""
    let_it_say(llm, CHATS[0], QWEN, tools=TOOLS)
    params = [SamplingParams(max_tokens=45, n=2, seed=1), greedy(25)]
    assert_like_chat(llm, CHATS, params, **({"tools": TOOLS} | options))


def test_messages_that_are_continued(llm):
    """One answers, and the other thinks on."""
    chats = [[*CHATS[0], {"role": "assistant", "content": content}] for content in ("a", "<think>\na")]
    options = {"add_generation_prompt": False, "continue_final_message": True, "split_reasoning": True}
    (first,) = llm.chat(chats[0], greedy(1), use_tqdm=False, **options)
    let_it_say(llm, chats[0], "ab" * 20 + "</think>cd<|im_end|>", first["num_prompt_tokens"])
    for messages in (chats, chats[::-1]):
        for num_tokens in (3, 45):  # before the end of the thinking, and after it
            assert_like_chat(llm, messages, greedy(num_tokens), **options)
    results = join(llm.stream_chat(chats, greedy(3), **options))
    assert [bool(result["reasoning"]) for result in results.values()] == [False, True]


@pytest.mark.parametrize("leave", LEAVING)
def test_a_stream_that_is_left_frees_its_blocks(llm, leave):
    stream = llm.stream_chat(CHATS, greedy(50), **SPLIT)
    next(stream)
    assert llm.stats()["running"] == 2
    leave(stream)
    del stream
    assert_idle(llm)


def test_wrong_calls_are_refused_at_once(llm):
    for options, error, says in (
        ({"split_reasoning": "yes"}, TypeError, "split_reasoning='yes'"),
        ({"continue_final_message": True}, ValueError, "continue_final_message=True"),
        ({"temperature": 0}, TypeError, "temperature.*SamplingParams"),
        ({"enable_thinking": False}, TypeError, "chat_template_kwargs"),
        ({"sampling_params": [greedy(3)]}, ValueError, "sampling_params"),
    ):
        with pytest.raises(error, match=says):
            llm.stream_chat(CHATS, **options)
    with pytest.raises(ValueError, match="conversation 1"):
        llm.stream_chat([CHATS[0], [{"role": "user"}]])
    stream = llm.stream_chat(CHATS, greedy(9))
    next(stream)
    with pytest.raises(RuntimeError, match=r"stream_chat\(\) while other requests"):
        llm.stream_chat(CHATS)
    stream.close()
    llm.tokenizer, tokenizer = None, llm.tokenizer
    try:
        with pytest.raises(ValueError, match=r"stream_chat\(\) needs the model's tokenizer"):
            llm.stream_chat(CHATS)
    finally:
        llm.tokenizer = tokenizer


def test_the_page(llm, capsys):
    """docs/reference.md: a model that calls a function, and gets what it returns."""
    code = re.search(r"### Chats as they come\n.*?```python\n(.*?)```", PAGE, re.DOTALL)[1]
    names: dict = {"llm": llm}
    let_it_say(llm, [{"role": "user", "content": "What is 17 + 25?"}], QWEN, tools=TOOLS)
    exec(code, names)
    assert capsys.readouterr().out.startswith("abcdef")
    assert [message["role"] for message in names["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert names["messages"][2]["content"] == "6"
