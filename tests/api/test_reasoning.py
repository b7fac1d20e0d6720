"""Chat results split into what the model thinks, says and calls, by LLM.chat and of streams. The formats have a file of
their own, tests/engine/test_formats.py."""

import re

import pytest
import transformers
from channels import CALLS, HARMONY_CALLS, QWEN_CALLS, TOOLS, let_it_say, make_channels_checkpoint, make_qwen_checkpoint
from checkpoints import edit_json, greedy, make_ascii_checkpoint, make_llm
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import LLM, ReasoningSplitter, SamplingParams, StructuredOutputsParams, opens_reasoning, split_reasoning

pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</thi", "nk>", ">", " ", "\n", "a", "\u00a0é"]), max_size=9
)


@given(pieces, st.booleans())
def test_the_parts_are_those_of_the_tags(parts, is_open):
    text = "".join(parts)
    match = re.fullmatch(r"\s*<think>(.*?)(?:</think>(.*))?", "<think>" * is_open + text, re.DOTALL)
    expected = (None, text) if match is None else (match[1].strip(), (match[2] or "").lstrip())
    assert split_reasoning(text, is_open) == expected


# -- LLM.chat ----------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is not defined %}"
    "{% elif enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
CHAT = [{"role": "user", "content": "what is <think>"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = make_ascii_checkpoint(tmp_path_factory.mktemp("reasoning"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    with make_llm(path, skip_tokenizer_init=False, max_model_len=200) as llm:
        yield llm


def chat(llm: LLM, params: SamplingParams, **options) -> dict:
    (output,) = llm.chat(CHAT, params, use_tqdm=False, split_reasoning=True, **options)
    return output


def form(regex: str, **fields) -> SamplingParams:
    structured = StructuredOutputsParams(regex=regex)
    return SamplingParams(temperature=0.8, seed=1, max_tokens=150, structured_outputs=structured, **fields)


def test_chats_of_templates_that_open_it_and_of_models_that_do(llm):
    pytest.importorskip("llguidance", reason="needs the extra structured")
    opened = chat(llm, form("a{20}\n</think>\n\nb{9}"), chat_template_kwargs={"enable_thinking": True})
    assert (opened["reasoning"], opened["content"]) == ("a" * 20, "b" * 9)
    assert opened["text"] == "a" * 20 + "\n</think>\n\n" + "b" * 9
    by_model = chat(llm, form("<think>\na{20}\n</think>\n\nb{9}"))
    assert (by_model["reasoning"], by_model["content"]) == ("a" * 20, "b" * 9)
    output = chat(llm, form("<think>(a{20}|c{20})</think>b{9}", n=3))
    assert [sample["content"] for sample in output["samples"]] == ["b" * 9] * 3
    assert output["reasoning"] == output["samples"][0]["reasoning"]


def test_chats_without_an_end_of_the_reasoning_or_without_reasoning(llm):
    whole = greedy(10)
    opened = chat(llm, whole, chat_template_kwargs={"enable_thinking": True})
    assert (opened["reasoning"], opened["content"]) == (opened["text"].strip(), "")
    off = chat(llm, whole, chat_template_kwargs={"enable_thinking": False})
    assert (off["reasoning"], off["content"]) == (None, off["text"])
    plain = chat(llm, whole)  # The question's tag is none of the answer.
    assert (plain["reasoning"], plain["content"]) == (None, plain["text"])
    (unsplit,) = llm.chat(CHAT, whole, use_tqdm=False)
    assert unsplit.keys() == plain.keys() - {"reasoning", "content"}


@pytest.mark.parametrize(
    ("begun", "is_open"), [("<think>\na b c d e f g h i j", True), ("<think>a</think> b", False), ("a", False)]
)
def test_a_message_that_is_continued(llm, begun, is_open):
    messages = [*CHAT, {"role": "assistant", "content": begun}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = llm.chat(iter(messages), greedy(10), use_tqdm=False, split_reasoning=True, **options)
    parts = (output["text"].strip(), "") if is_open else (None, output["text"])
    assert (output["reasoning"], output["content"]) == parts


def test_a_stream_as_the_docstring_has_it(llm):
    tokenizer = llm.get_tokenizer()
    for is_open in (True, False):
        text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, enable_thinking=is_open)
        prompt = tokenizer(text)["input_ids"]
        assert opens_reasoning(tokenizer, prompt) == is_open
        splitter = ReasoningSplitter(is_open)
        added = [
            splitter.push(delta["text"], delta["finish_reason"] is not None)
            for delta in llm.stream([prompt], greedy(9))
        ]
        output = chat(llm, greedy(9), chat_template_kwargs={"enable_thinking": is_open})
        assert ("".join(a for a, _ in added), "".join(b for _, b in added)) == (
            output["reasoning"] or "",
            output["content"],
        )


def test_a_request_that_has_failed(llm):
    good, long = CHAT, [{"role": "user", "content": "a" * 5000}]
    with pytest.raises(ValueError, match="conversation 1"):
        llm.chat([good, long], greedy(3), use_tqdm=False, split_reasoning=True)
    with pytest.raises(TypeError, match="split_reasoning"):
        llm.chat(good, greedy(3), use_tqdm=False, split_reasoning="yes")


# -- channels ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def channels_path(tmp_path_factory):
    return make_channels_checkpoint(tmp_path_factory.mktemp("channels"))


def test_chats_of_a_model_with_channels(channels_path):
    with make_llm(channels_path, skip_tokenizer_init=False, max_model_len=200) as llm:
        let_it_say(llm, CHAT)
        params = SamplingParams(temperature=0, max_tokens=50)
        for given in (params, [params]):
            (output,) = llm.chat(CHAT, given, use_tqdm=False, split_reasoning=True)
            assert output["text"].startswith("<|channel|>")
            assert (output["reasoning"], output["content"]) == ("ab", "cd")
        (output,) = llm.chat(CHAT, params, use_tqdm=False)
        assert "<|channel|>" not in output["text"]


@pytest.mark.parametrize(
    ("make", "written"), [(make_channels_checkpoint, HARMONY_CALLS), (make_qwen_checkpoint, QWEN_CALLS)]
)
def test_thinking_and_two_calls(make, written, tmp_path):
    path = make(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=200)
    with make_llm(path, skip_tokenizer_init=False, max_model_len=400) as llm:
        let_it_say(llm, CHAT, written, tools=TOOLS)
        options = {"use_tqdm": False, "tools": TOOLS}
        (output,) = llm.chat(CHAT, params, split_reasoning=True, split_tool_calls=True, **options)
        assert (output["reasoning"], output["content"]) == ("ab", "cd")
        assert [tuple(call["function"].values()) for call in output["tool_calls"]] == CALLS
        (calls,) = llm.chat(CHAT, params, split_tool_calls=True, **options)
        assert calls["tool_calls"] == output["tool_calls"]
        assert "ab" in calls["content"]
        assert "reasoning" not in calls
        (thought,) = llm.chat(CHAT, params, split_reasoning=True, **options)
        assert thought["reasoning"] == "ab"
        assert CALLS[0][0] in thought["content"]
        assert "tool_calls" not in thought
        # A call that max_tokens cuts is content as written.
        cut = SamplingParams(temperature=0, max_tokens=len(output["token_ids"]) - 6)
        (output,) = llm.chat(CHAT, cut, split_reasoning=True, split_tool_calls=True, **options)
        assert [call["function"]["name"] for call in output["tool_calls"]] == [CALLS[0][0]]
        assert output["content"].startswith("cd")
        assert output["text"].endswith(output["content"][3:])


def test_a_call_ends_by_the_format(tmp_path):
    """Without generation_config.json, and with a tokenizer and a config that know another end."""
    path = make_channels_checkpoint(tmp_path)
    (path / "generation_config.json").unlink(missing_ok=True)
    edit_json(path / "config.json", eos_token_id=None)
    edit_json(path / "tokenizer_config.json", eos_token=None)
    with make_llm(path, skip_tokenizer_init=False, max_model_len=400) as llm:
        for end in ("<|call|>", "<|return|>"):
            let_it_say(llm, CHAT, f"ab{end}cd")
            (output,) = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
            assert (output["text"], output["finish_reason"]) == ("ab", "stop")


@pytest.mark.parametrize("stop", ["</tool_call>", "</function>"])
def test_a_call_that_a_stop_string_ends(stop, tmp_path):
    written = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    path = make_qwen_checkpoint(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=200, stop=stop)
    with make_llm(path, skip_tokenizer_init=False, max_model_len=400, chat_format="qwen_xml") as llm:
        let_it_say(llm, CHAT, written + "<|im_end|>", tools=TOOLS)
        (output,) = llm.chat(CHAT, params, tools=TOOLS, split_tool_calls=True, use_tqdm=False)
    calls = [tuple(call["function"].values()) for call in output["tool_calls"]]
    if stop == "</tool_call>":
        assert (calls, output["content"]) == ([("add", {"a": 1})], "")
    else:  # Another parameter might have followed.
        assert (calls, output["content"]) == ([], output["text"])


def test_an_unknown_format_is_content_as_written(tmp_path, caplog):
    path = make_ascii_checkpoint(tmp_path)
    written = "<think>a</think>b"
    options = {
        "chat_template": "{% if tools %}{% endif %}{{ messages[0].content }}.",
        "tools": TOOLS,
        "use_tqdm": False,
    }
    options |= {"split_reasoning": True, "split_tool_calls": True}
    for name, expected in ((None, (None, written)), ("think", ("a", "b"))):
        with make_llm(path, skip_tokenizer_init=False, chat_format=name) as llm:
            tokens = llm.tokenizer.encode(written)
            let_it_say(llm, CHAT, written, len(llm.tokenizer.encode(CHAT[0]["content"] + ".")))
            for _ in range(2):
                (output,) = llm.chat(CHAT, greedy(len(tokens)), **options)
                assert (output["reasoning"], output["content"], output["tool_calls"]) == (*expected, [])
    assert len([record for record in caplog.records if "--chat-format" in record.message]) == 1
    with pytest.raises(ValueError, match="chat_format='qwen': must be None or one of harmony"):
        make_llm(path, chat_format="qwen")
