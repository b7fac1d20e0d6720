"""Chat results split into what the model thinks and what it says: of whole texts, of streams, and by LLM.chat."""

import re

import pytest
import transformers
from channels import ANALYSIS, FINAL, let_it_say, make_channels_checkpoint
from checkpoints import greedy, make_ascii_checkpoint, make_llm
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nanovllm import (
    LLM,
    ReasoningSplitter,
    SamplingParams,
    StructuredOutputsParams,
    opens_reasoning,
    split_reasoning,
    split_tool_calls,
    with_channels,
)

TO_TOOL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'  # as Qwen3 writes it


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nTwo and two.\n</think>\n\nFour.", False, "Two and two.", "Four."),
        ("Two and two.\n</think>\n\nFour.\n", True, "Two and two.", "Four.\n"),
        ("\n<think>a</think>b", False, "a", "b"),
        ("<think>\n\n</think>\n\nFour.", False, "", "Four."),
        ("<think>Two and two ", False, "Two and two", ""),  # ended by max_tokens
        ("Two and </thi", True, "Two and </thi", ""),
        ("<think>a</think> \n", False, "a", ""),
        ("", True, "", ""),
        ("", False, None, ""),
        (" Four.\n", False, None, " Four.\n"),
        ("<thinking> is a tag", False, None, "<thinking> is a tag"),
        ("<thi", False, None, "<thi"),
        ("Say <think>a</think>", False, None, "Say <think>a</think>"),
        ("a</think>b", False, None, "a</think>b"),
        ("<think>a<think>b</think>c</think>d", False, "a<think>b", "c</think>d"),
        (f"{ANALYSIS}Two and two.<|end|><|start|>assistant{FINAL}Four.<|return|>", False, "Two and two.", "Four."),
        (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|><|start|>assistant{FINAL}c", False, "a\nb", "c"),
        (f"{FINAL}Four.", False, None, "Four."),
        (f"{ANALYSIS}Two and <|en", False, "Two and <|en", ""),  # ended by max_tokens
        (f"{ANALYSIS}Two.<|end|><|start|>assistant<|channel|>fi", False, "Two.", ""),
        (f"{ANALYSIS}Two.{FINAL}Four.", False, "Two.", "Four."),
        (
            f"{ANALYSIS}I add.<|end|><|start|>assistant{TO_TOOL}{{}}<|call|>",
            False,
            "I add.",
            CALL,
        ),
        (  # the recipient before the channel, and a text for the user before the call
            "<|channel|>commentary<|message|>Adding.<|end|><|start|>assistant to=functions.add<|channel|>commentary "
            "<|constrain|>json<|message|>{}",
            False,
            None,
            f"Adding.\n{CALL}",
        ),
        (f"{TO_TOOL}{{", False, None, CALL.replace("{}", "{")),
        ("<|chan", False, None, "<|chan"),
    ],
)
def test_whole_texts(text, is_open, reasoning, content):
    assert split_reasoning(text, is_open) == (reasoning, content)


pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</thi", "nk>", ">", " ", "\n", "a", "\u00a0é"]), max_size=9
)


@given(pieces, st.booleans(), st.data())
def test_streams(parts, is_open, data):
    """However the text is cut, a stream adds up to the parts of the whole, and takes nothing back."""
    text = "".join(parts)
    reasoning, content = split_reasoning(text, is_open)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    splitter = ReasoningSplitter(is_open)
    found = ["", ""]
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        new = splitter.push(text[start:end], is_last=end == len(text) and start == (cuts[-1] if cuts else 0))
        found = [before + added for before, added in zip(found, new, strict=True)]
        assert (reasoning or "").startswith(found[0])
        assert content.startswith(found[1])
        assert not new[0] or not found[1] or new[1], "nothing is thought after the answer has begun"
    rest = splitter.push("", is_last=True)
    assert [found[0] + rest[0], found[1] + rest[1]] == [reasoning or "", content]
    assert splitter.has_reasoning == (reasoning is not None)


def test_calls_in_channels_are_tool_calls():
    text = f"{ANALYSIS}I add.<|end|><|start|>assistant{TO_TOOL}" + '{"a": [1, "<b>"]}'
    content, calls = split_tool_calls(split_reasoning(text)[1])
    function = {"name": "add", "arguments": {"a": [1, "<b>"]}}
    assert (content, calls) == ("", [{"type": "function", "function": function}])


channel_pieces = st.lists(
    st.sampled_from([ANALYSIS, FINAL, TO_TOOL, "<|end|>", "<|start|>assistant", "<|", "end", "|>", "<", "a", "b c"]),
    max_size=8,
)


@given(channel_pieces, st.data())
def test_streams_of_channels(parts, data):
    """However the text is cut, a stream adds up to the parts of the whole."""
    text = "".join((ANALYSIS, *parts))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    splitter, found = ReasoningSplitter(), ["", ""]
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found = [before + added for before, added in zip(found, splitter.push(text[start:end]), strict=True)]
    rest = splitter.push("", is_last=True)
    reasoning, content = split_reasoning(text)
    assert [found[0] + rest[0], found[1] + rest[1]] == [reasoning, content]


@given(pieces, st.booleans())
def test_the_parts_are_those_of_the_tags(parts, is_open):
    text = "".join(parts)
    match = re.fullmatch(r"\s*<think>(.*?)(?:</think>(.*))?", "<think>" * is_open + text, re.DOTALL)
    expected = (None, text) if match is None else (match[1].strip(), (match[2] or "").lstrip())
    assert split_reasoning(text, is_open) == expected


@given(st.text("ab <>/think", max_size=40), st.integers(1, 5))
def test_text_comes_soon(text, size):
    """What is held back is white space and the beginning of a tag."""
    splitter = ReasoningSplitter(is_open=True)
    given = "".join("".join(splitter.push(text[i : i + size])) for i in range(0, len(text), size))
    assert len("".join(text.split())) - len("".join(given.split())) <= len("</think>")


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


def test_only_models_with_channels_keep_their_special_tokens(channels_path, llm):
    params = SamplingParams()
    assert with_channels(llm.tokenizer, params) is params
    tokenizer = AutoTokenizer.from_pretrained(channels_path)
    assert not with_channels(tokenizer, params).skip_special_tokens
    assert not with_channels(tokenizer, None).skip_special_tokens
    assert [each.skip_special_tokens for each in with_channels(tokenizer, [params, params])] == [False, False]
