"""Formats of conversations: what models write, and what a program gets of it, whole and however it is cut."""

import copy
import functools
import json
import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers_of_families import byte_level

from nanovllm import (
    AnswerFormat,
    ReasoningSplitter,
    SamplingParams,
    ToolCallSplitter,
    find_format,
    split_reasoning,
    split_tool_calls,
    with_channels,
)
from nanovllm.engine.text.formats.all_formats import FORMATS, end_tokens
from nanovllm.engine.text.formats.argument_types import ArgumentTypes
from nanovllm.engine.text.formats.by_tags import ByTags
from nanovllm.engine.text.formats.format import CALL, CONTENT, REASONING

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "area": {"$ref": "#/$defs/Area"},
    "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "level": {"enum": [1, 2, "high"]},
    "kind": {"const": 5},
    "step": {"allOf": [{"type": "integer"}, {"minimum": 1}]},
    "exact": {"type": "boolean"},
    "where": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    "id": {"type": ["string", "integer"]},
    "size": {"oneOf": [{"$ref": "#/$defs/Number"}, {"type": "array", "items": {"type": "number"}}]},
    "self": {"$ref": "#/properties/self"},
    "lost": {"$ref": "#/$defs/Nowhere"},
    "old": {"type": "number", "nullable": True},
}
DEFINITIONS = {"Area": {"type": "object", "properties": {"km": {"type": "number"}}}, "Number": {"type": "number"}}
PARAMETERS = {"type": "object", "$defs": DEFINITIONS, "properties": PROPERTIES}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]

QWEN_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def json_call(name="weather", **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def xml_call(_inside="", **parameters):
    """As the template of Qwen3.5 writes it."""
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function=weather>\n{inside}{_inside}</function>\n</tool_call>"


def weather(**arguments):
    return ("weather", arguments)


CLOCK = ("clock", {})
THINKING, ANSWER = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
TO_TOOL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
OPENED = {"is_open": True}

# (name, format, what the model writes, reasoning, content, calls, options)
ANSWERS = [
    # Harmony
    ("channels", "harmony", f"{THINKING}Two.{NEXT}{ANSWER}Four.<|return|>", "Two.", "Four.", []),
    ("thinking twice", "harmony", f"{THINKING}a{NEXT}{THINKING}b{NEXT}{ANSWER}c", "a\nb", "c", []),
    ("no thinking", "harmony", f"{ANSWER}Four.\n", None, "Four.\n", []),
    ("cut in thinking", "harmony", f"{THINKING}Two and <|en", "Two and <|en", "", []),
    ("cut in a header", "harmony", f"{THINKING}Two.{NEXT}<|channel|>fi", "Two.", "", []),
    ("an end left out", "harmony", f"{THINKING}Two.{ANSWER}Four.", "Two.", "Four.", []),
    ("opened by the prompt", "harmony", f"Two.{NEXT}{ANSWER}Four.", "Two.", "Four.", [], OPENED),
    ("no header", "harmony", "to be Four.", None, "to be Four.", []),
    (
        "thinking, a preamble and two calls",
        "harmony",
        f'{THINKING}hm{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{TO_TOOL}{{"city": "Bern"}}<|call|>'
        "<|start|>assistant to=functions.clock<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
        "hm",
        "I look.",
        [weather(city="Bern"), CLOCK],
    ),
    (
        "the recipient before the channel",
        "harmony",
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Bern"}<|call|>',
        None,
        "",
        [weather(city="Bern")],
    ),
    ("empty arguments", "harmony", f"{THINKING}hm{NEXT}{TO_TOOL}<|call|>", "hm", "", [weather()]),
    (
        "the type glued to the name",
        "harmony",
        '<|channel|>commentary to=functions.weatherjson<|message|>{"days": 3}<|call|>',
        None,
        "",
        [weather(days=3)],
    ),
    (
        "tags in arguments",
        "harmony",
        f'{TO_TOOL}{{"city": "<tool_call>x</tool_call>"}}<|call|>',
        None,
        "",
        [weather(city="<tool_call>x</tool_call>")],
    ),
    (
        "its own tags in arguments",
        "harmony",
        f'{TO_TOOL}{{"city": "<|call|>"}}<|call|>',
        None,
        "",
        [weather(city="<|call|>")],
    ),
    ("no message token", "harmony", f"{THINKING}hm{NEXT}<|channel|>final Nine.", "hm", "Nine.", []),
    ("no message token, and a type's word", "harmony", "<|channel|>final json is text.", None, "json is text.", []),
    ("to the assistant", "harmony", "<|channel|>commentary to=assistant<|message|>Hi.<|end|>", None, "Hi.", []),
    (
        "a cut call",
        "harmony",
        f'{THINKING}hm{NEXT}{TO_TOOL}{{"city": "Be',
        "hm",
        f'<|start|>assistant{TO_TOOL}{{"city": "Be',
        [],
    ),
    ("a call cut before its arguments", "harmony", TO_TOOL, None, TO_TOOL, []),
    ("a whole call without its end", "harmony", f'{TO_TOOL}{{"city": "Bern"}}', None, "", [weather(city="Bern")]),
    (
        "code to a tool",
        "harmony",
        f"{THINKING}a{NEXT}<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        "a",
        "<|start|>assistant<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        [],
    ),
    ("arguments that are no object", "harmony", f"{TO_TOOL}[1]<|call|>", None, f"{TO_TOOL}[1]<|call|>", []),
    # Qwen's JSON
    ("JSON", "hermes", json_call(city="Bern", days=3), None, "", [weather(city="Bern", days=3)]),
    (
        "two calls",
        "hermes",
        f"Let me see.\n\n{json_call(days=1)}\n{json_call('clock')}",
        None,
        "Let me see.",
        [weather(days=1), CLOCK],
    ),
    ("text after a call", "hermes", f"{json_call('clock')}\nSo.", None, "So.", [CLOCK]),
    ("no arguments", "hermes", '<tool_call>{"name": "clock"}</tool_call>', None, "", [CLOCK]),
    (
        "arguments as a text",
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"days\\": 1}"}</tool_call>',
        None,
        "",
        [weather(days=1)],
    ),
    (
        "a line feed in a text",
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "a\nb"}}</tool_call>',
        None,
        "",
        [weather(city="a\nb")],
    ),
    (
        "the closing tag in arguments",
        "hermes",
        json_call(city='"</tool_call>'),
        None,
        "",
        [weather(city='"</tool_call>')],
    ),
    (
        "two objects in one tag",
        "hermes",
        '<tool_call>{"name": "clock"}\n{"name": "clock"}</tool_call>',
        None,
        "",
        [CLOCK, CLOCK],
    ),
    (
        "the closing tag missing at the end",
        "hermes",
        json_call(days=1)[: -len("</tool_call>")],
        None,
        "",
        [weather(days=1)],
    ),
    ("the closing tag cut", "hermes", json_call(days=1)[:-3], None, "", [weather(days=1)]),
    (
        "the closing tag missing between",
        "hermes",
        json_call(days=1)[: -len("</tool_call>")] + json_call("clock"),
        None,
        "",
        [weather(days=1), CLOCK],
    ),
    ("a call cut", "hermes", json_call(days=1)[:40], None, json_call(days=1)[:40], []),
    ("no JSON", "hermes", "<tool_call>weather()</tool_call> ", None, "<tool_call>weather()</tool_call> ", []),
    ("no name", "hermes", '<tool_call>{"name": 3}</tool_call> ', None, '<tool_call>{"name": 3}</tool_call> ', []),
    (
        "a bracket missing",
        "hermes",
        '<tool_call>{"name": "clock", "arguments": {}</tool_call>',
        None,
        '<tool_call>{"name": "clock", "arguments": {}</tool_call>',
        [],
    ),
    (
        "a wrong call, and a right one",
        "hermes",
        f'<tool_call>{{"name": "f</tool_call>\n{json_call("clock")}',
        None,
        '<tool_call>{"name": "f</tool_call>',
        [CLOCK],
    ),
    ("a tag begun", "hermes", "a <tool_cal", None, "a <tool_cal", []),
    ("plain", "hermes", " Plain.\n", None, " Plain.\n", []),
    ("nothing", "hermes", "", None, "", []),
    ("thinking", "hermes", f"<think>\nHm.\n</think>\n\nSo.\n{json_call('clock')}", "Hm.", "So.", [CLOCK]),
    (
        "a draft in thinking",
        "hermes",
        f"I try {json_call('clock')}, no.\n</think>\n\nSo.",
        f"I try {json_call('clock')}, no.",
        "So.",
        [],
        OPENED,
    ),
    (
        "a draft at the end of thinking",
        "hermes",
        f"I try {json_call('clock')}\n</think>\n\nSo.",
        f"I try {json_call('clock')}",
        "So.",
        [],
        OPENED,
    ),
    (
        "thinking not closed",
        "hermes",
        f"<think>I look.\n{json_call('clock')}\n{json_call(days=2)}\n",
        "I look.",
        "",
        [CLOCK, weather(days=2)],
    ),
    (
        "thinking not closed, and no call at its end",
        "hermes",
        f"Try {json_call('clock')} or",
        f"Try {json_call('clock')} or",
        "",
        [],
        OPENED,
    ),
    # Qwen's XML
    ("XML", "qwen_xml", xml_call(city="Bern", days=3), None, "", [weather(city="Bern", days=3)]),
    ("nothing but a function", "qwen_xml", xml_call(), None, "", [weather()]),
    (
        "two functions",
        "qwen_xml",
        f"I look.\n\n{xml_call(days=1)}\n{xml_call(days=2)}",
        None,
        "I look.",
        [weather(days=1), weather(days=2)],
    ),
    ("lines and spaces", "qwen_xml", xml_call(city="a\n  b\n\nc"), None, "", [weather(city="a\n  b\n\nc")]),
    ("an empty text", "qwen_xml", xml_call(city=""), None, "", [weather(city="")]),
    ("JSON in place of XML", "qwen_xml", json_call(city="Bern"), None, "", [weather(city="Bern")]),
    (
        "types",
        "qwen_xml",
        xml_call(area='{"km": 4}', level="1", kind="5", step="3", unit="null"),
        None,
        "",
        [weather(area={"km": 4}, level=1, kind=5, step=3, unit=None)],
    ),
    (
        "the end of a parameter missing",
        "qwen_xml",
        xml_call("<parameter=city>\nBern\n"),
        None,
        "",
        [weather(city="Bern")],
    ),
    (
        "it is missing between",
        "qwen_xml",
        xml_call("<parameter=city>\nBern\n<parameter=days>\n3\n</parameter>\n"),
        None,
        "",
        [weather(city="Bern", days=3)],
    ),
    (
        "it is missing, and a call follows",
        "qwen_xml",
        xml_call("<parameter=city>\nBern\n") + "\n" + xml_call(days=1),
        None,
        "",
        [weather(city="Bern"), weather(days=1)],
    ),
    (
        "the end of a parameter in a value",
        "qwen_xml",
        xml_call(city="a </parameter> b", days=3),
        None,
        "",
        [weather(city="a </parameter> b", days=3)],
    ),
    (
        "a call's text in a value",
        "qwen_xml",
        xml_call(city="Write\n<parameter=x>\n1\n</parameter>\nso."),
        None,
        "",
        [weather(city="Write\n<parameter=x>\n1\n</parameter>\nso.")],
    ),
    (
        "tags in a value",
        "qwen_xml",
        xml_call(city="<tool_call>x</tool_call> </function>."),
        None,
        "",
        [weather(city="<tool_call>x</tool_call> </function>.")],
    ),
    (
        "a parameter twice",
        "qwen_xml",
        xml_call("<parameter=city>\na\n</parameter>\n<parameter=city>\nb\n</parameter>\n"),
        None,
        xml_call("<parameter=city>\na\n</parameter>\n<parameter=city>\nb\n</parameter>\n"),
        [],
    ),
    (
        "the opening tag missing",
        "qwen_xml",
        "One moment.\n\n" + xml_call(city="Bern").removeprefix("<tool_call>\n"),
        None,
        "One moment.",
        [weather(city="Bern")],
    ),
    (
        "both tags missing",
        "qwen_xml",
        xml_call(city="Bern").removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"),
        None,
        "",
        [weather(city="Bern")],
    ),
    (
        "both tags missing, and a text",
        "qwen_xml",
        xml_call(city="Bern").removeprefix("<tool_call>\n").removesuffix("\n</tool_call>") + "\nDone.",
        None,
        "Done.",
        [weather(city="Bern")],
    ),
    (
        "a closing tag missing",
        "qwen_xml",
        xml_call(city="Bern").removesuffix("</tool_call>"),
        None,
        "",
        [weather(city="Bern")],
    ),
    (
        "the end of the function missing",
        "qwen_xml",
        xml_call(city="Bern").replace("</function>\n", ""),
        None,
        "",
        [weather(city="Bern")],
    ),
    (
        "cut between parameters",
        "qwen_xml",
        xml_call(city="Bern", days=3)[:70],
        None,
        xml_call(city="Bern", days=3)[:70],
        [],
    ),
    ("cut in a value", "qwen_xml", xml_call(city="Bern")[:45], None, xml_call(city="Bern")[:45], []),
    (
        "about functions",
        "qwen_xml",
        "Write <function=NAME> and <parameter=",
        None,
        "Write <function=NAME> and <parameter=",
        [],
    ),
    (
        "XML in thinking that is not closed",
        "qwen_xml",
        f"I look.\n\n{xml_call(city='Bern')}",
        "I look.",
        "",
        [weather(city="Bern")],
        OPENED,
    ),
    # Mistral
    ("brackets", "mistral", "[THINK]a b[/THINK]c", "a b", "c", []),
    (
        "name and arguments",
        "mistral",
        'So.[TOOL_CALLS]weather[ARGS]{"city": "[ARGS]"}[TOOL_CALLS]clock[CALL_ID]aB3[ARGS]{}',
        None,
        "So.",
        [weather(city="[ARGS]"), CLOCK],
    ),
    ("a name alone", "mistral", '[TOOL_CALLS]weather{"days": 1}', None, "", [weather(days=1)]),
    (
        "a list",
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"days": 1}, "id": "x"}, {"name": "clock", "arguments": {}}]',
        None,
        "",
        [weather(days=1), CLOCK],
    ),
    ("a list cut", "mistral", '[TOOL_CALLS][{"name": "clock"}, {"na', None, '[TOOL_CALLS][{"name": "clock"}, {"na', []),
    ("no arguments follow", "mistral", "[TOOL_CALLS] begins a call.", None, "[TOOL_CALLS] begins a call.", []),
    # Gemma 4
    ("a channel", "gemma4", "<|channel>a b<channel|>c", "a b", "c", []),
    ("a channel with its name", "gemma4", "<|channel>thought\na b\n<channel|>c", "a b", "c", []),
    ("a channel begun by the prompt", "gemma4", "thought\na<channel|>c", "a", "c", [], OPENED),
    (
        "its notation",
        "gemma4",
        'So.<|tool_call>call:weather{city:<|"|>Bern, "<tool_call|>"<|"|>,days:3,exact:true,where:{a:[1,<|"|>b'
        '<|"|>,null]}}<tool_call|>'
        "<|tool_call>call:clock{}<tool_call|>",
        None,
        "So.",
        [weather(city='Bern, "<tool_call|>"', days=3, exact=True, where={"a": [1, "b", None]}), CLOCK],
    ),
    (
        "JSON's quotes",
        "gemma4",
        '<|tool_call>call:weather{"city": "B\\u00e9rn", days: -1.5}<tool_call|>',
        None,
        "",
        [weather(city="Bérn", days=-1.5)],
    ),
    ("its closing tag cut", "gemma4", "<|tool_call>call:clock{}<tool_", None, "", [CLOCK]),
    (
        "a notation cut",
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>Be',
        None,
        '<|tool_call>call:weather{city:<|"|>Be',
        [],
    ),
    (
        "no notation",
        "gemma4",
        "<|tool_call>weather(Bern)<tool_call|>",
        None,
        "<|tool_call>weather(Bern)<tool_call|>",
        [],
    ),
    # Llama 3
    (
        "parameters",
        "llama3_json",
        '{"name": "weather", "parameters": {"city": "Bern"}}',
        None,
        "",
        [weather(city="Bern")],
    ),
    (
        "several",
        "llama3_json",
        '<|python_tag|>{"name": "weather", "parameters": {"days": 1}}; {"name": "clock", "parameters": {}}',
        None,
        "",
        [weather(days=1), CLOCK],
    ),
    (
        "JSON that is an answer",
        "llama3_json",
        '{"name": "Bern", "parameters": {}}',
        None,
        '{"name": "Bern", "parameters": {}}',
        [],
    ),
    (
        "JSON before a text",
        "llama3_json",
        '{"name": "clock", "parameters": {}} is a call.',
        None,
        '{"name": "clock", "parameters": {}} is a call.',
        [],
    ),
    ("JSON cut", "llama3_json", '{"name": "clock", "para', None, '{"name": "clock", "para', []),
    # <think>
    ("tags", "think", "<think>\nTwo and two.\n</think>\n\nFour.\n", "Two and two.", "Four.\n", []),
    ("opened by the template", "think", "Two and two.\n</think>\n\nFour.", "Two and two.", "Four.", [], OPENED),
    ("empty thinking", "think", "<think>\n\n</think>\n\nFour.", "", "Four.", []),
    ("ended in thinking", "think", "<think>Two and two ", "Two and two ", "", []),
    ("ended in its tag", "think", "Two and </thi", "Two and </thi", "", [], OPENED),
    ("another tag", "think", "<thinking> is a tag", None, "<thinking> is a tag", []),
    ("a tag further on", "think", "Say <think>a</think>", None, "Say <think>a</think>", []),
    ("a tag without the other", "think", "a</think>b", None, "a</think>b", []),
    ("a tag in thinking", "think", "<think>a<think>b</think>c</think>d", "a<think>b", "c</think>d", []),
    ("a call", "think", f"<think>a</think>{json_call('clock')}", "a", json_call("clock"), []),
    ("no format", "plain", f"<think>a</think>{json_call('clock')}", None, f"<think>a</think>{json_call('clock')}", []),
]
# Seed-OSS writes Qwen's XML between other tags: whatever holds of the one holds of the other.
SEED_TAGS = {tag: tag.replace("think", "seed:think").replace("tool_call", "seed:tool_call") for tag in QWEN_TOKENS}


def as_seed(text):
    return functools.reduce(lambda a, tag: a.replace(tag, SEED_TAGS[tag]), SEED_TAGS, text)


def row_as_seed(title, _, written, reasoning, content, calls, *options):
    calls = [(name, {key: as_seed(v) if isinstance(v, str) else v for key, v in each.items()}) for name, each in calls]
    return title, "seed_oss", as_seed(written), reasoning and as_seed(reasoning), as_seed(content), calls, *options


ANSWERS += [row_as_seed(*each) for each in ANSWERS if each[1] == "qwen_xml" and each[0] != "JSON in place of XML"]
ANSWERS += [
    (
        "the whole of it",
        "seed_oss",
        "<seed:think>Bern?</seed:think>\n<seed:tool_call>\n<function=weather>\n<parameter=city>Bern</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        "Bern?",
        "",
        [weather(city="Bern", days=3)],
    ),
    ("Qwen's tags", "seed_oss", "<think>a</think>b", None, "<think>a</think>b", []),
]
ANSWERS = [(*each, {}) if len(each) == 6 else each for each in ANSWERS]
NAMES = ("format", "written", "reasoning", "content", "calls", "options")
TABLE = pytest.mark.parametrize(NAMES, [pytest.param(*each[1:], id=f"{each[1]}: {each[0]}") for each in ANSWERS])
# Where the tags do not tell that it is Seed-OSS.
UNTOLD = ("Qwen's tags", "the opening tag missing")
# Those whose tags tell the format; of Harmony and Gemma, if the prompt has not begun the thinking.
BY_TAGS = [
    *((each[1], *each) for each in ANSWERS),
    *((None, *each) for each in ANSWERS if each[1] in ("hermes", "qwen_xml", "mistral")),
    *((None, *each) for each in ANSWERS if each[1] == "seed_oss" and each[0] not in UNTOLD),
    *((None, *each) for each in ANSWERS if each[1] in ("harmony", "gemma4") and each[-1] != OPENED),
]
TABLE_OF_TEXTS = pytest.mark.parametrize(
    ("name", "written", "reasoning", "content", "calls", "options"),
    [pytest.param(each[0], *each[3:], id=f"{each[2]}, {each[0] and 'named'}: {each[1]}") for each in BY_TAGS],
)


def read(reader, pieces):
    """(reasoning, content, calls) of an answer that comes in pieces."""
    events = [event for i, piece in enumerate(pieces) for event in reader.push(piece, i == len(pieces) - 1)]
    assert "".join(event.raw for event in events) == "".join(pieces), "nothing is lost"
    texts = ["".join(event.text for event in events if event.kind == kind) for kind in (REASONING, CONTENT)]
    calls = [(event.name, event.arguments) for event in events if event.kind == CALL and event.arguments is not None]
    return texts[0] if reader.has_reasoning else None, texts[1], calls


def cut(text, places):
    return [text[start:end] for start, end in pairwise([0, *places, len(text)])]


@TABLE
def test_whole_and_in_every_cut(format, written, reasoning, content, calls, options):
    expected = (None if reasoning is None else reasoning.rstrip(), content, calls)

    def answer(pieces):
        found = read(FORMATS[format].reader(TOOLS, **options), pieces)
        return (None if found[0] is None else found[0].rstrip(), *found[1:])

    assert answer([written]) == expected
    for place in range(1, len(written)):
        assert answer(cut(written, [place])) == expected
    assert answer(list(written) or [""]) == expected
    assert answer(["", *written, ""]) == expected


@TABLE_OF_TEXTS
def test_the_functions_for_texts(name, written, reasoning, content, calls, options):
    is_open = options.get("is_open", False)
    thought, rest = split_reasoning(written, is_open, name)
    assert (thought or "").strip() == (reasoning or "").strip()
    assert (thought is None) == (reasoning is None)
    found, found_calls = split_tool_calls(rest, TOOLS, name)
    assert found.strip() == content.strip()
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in found_calls] == calls
    assert all(call["type"] == "function" for call in found_calls)
    reasoner, caller = ReasoningSplitter(is_open, name), ToolCallSplitter(TOOLS, name)
    pieces = [reasoner.push(character) for character in written] + [reasoner.push("", is_last=True)]
    assert ("".join(a for a, _ in pieces), "".join(b for _, b in pieces)) == (thought or "", rest)
    assert reasoner.has_reasoning == (thought is not None)
    parts = [caller.push(character) for character in rest] + [caller.push("", is_last=True)]
    assert ("".join(a for a, _ in parts), [call for _, each in parts for call in each]) == (found, found_calls)


@TABLE
def test_calls_that_are_not_read_are_content_as_written(format, written, reasoning, content, calls, options):
    _, text, found = read(FORMATS[format].reader(None, **options), [written])
    assert found == []
    if calls:
        name = calls[0][0]
        assert name in text
    else:
        assert text.strip() == content.strip()


PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=weather>", "</function>", "<parameter=city>"),
    *("\n<parameter=days>", "</parameter>", '{"name": "clock", "arguments": {}}', '{"name": "clock", "arguments": "'),
    *("[THINK]", "[/THINK]", "[TOOL_CALLS]", "clock", "[ARGS]", "{}", "<|channel>", "thought\n", "<channel|>"),
    *("<|tool_call>", "call:clock{", '<|"|>', "<tool_call|>", "<|channel|>", "analysis", "final", "<|message|>"),
    *("<|end|>", "<|start|>", "assistant", " to=functions.weather", " to=assistant", "<|constrain|>", "json"),
    *("<|call|>", "<|python_tag|>", "{", "}", '"', "<", "|", ">", " ", "\n", "a", "é\u00a0", ";"),
]


@given(
    st.sampled_from([*FORMATS.values(), ByTags()]),
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.sampled_from([None, [], TOOLS]),
    st.booleans(),
    st.data(),
)
def test_any_text_reads_alike_however_it_is_cut(format, text, tools, is_open, data):
    whole = read(format.reader(tools, is_open), [text])
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert read(format.reader(tools, is_open), cut(text, places)) == whole
    assert read(format.reader(tools, is_open), [*text, ""]) == whole
    if not whole[2] and not (whole[0] or "") and "<|" not in text:
        assert whole[1].strip() in text, "content is a part of the text"


@given(st.text("ab <>/[]{}think", max_size=60), st.sampled_from([*FORMATS]), st.integers(1, 5))
def test_text_comes_soon(text, name, size):
    """What is held back is white space and the beginning of a tag."""
    reader = FORMATS[name].reader(None, is_open=FORMATS[name].thinking is not None)
    given = "".join(event.raw for i in range(0, len(text), size) for event in reader.push(text[i : i + size]))
    assert len("".join(text.split())) - len("".join(given.split())) <= len("<|channel|>")


def test_what_is_surely_content_is_not_held_back():
    reader = FORMATS["qwen_xml"].reader(TOOLS)
    pushes = ["I ", "look", " at <", "b> it", " <tool_call>\n", "<function=weather>\n", "<parameter=city>\nBern"]
    assert ["".join(event.text for event in reader.push(piece)) for piece in pushes] == [
        *("I", " look", " at", " <b> it", "", "", "")
    ]


# -- types of arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "5", "5"),
        ("city", "null", "null"),
        ("other", "5", "5"),
        ("days", "3", 3),
        ("days", "5.0", 5),
        ("days", "three", "three"),
        ("exact", "true", True),
        ("exact", "False", False),
        ("where", '{"a": [1]}', {"a": [1]}),
        ("where", "None", None),
        ("area", '{"km": 4.5}', {"km": 4.5}),
        ("unit", "null", None),
        ("unit", "metric", "metric"),
        ("unit", "5", "5"),
        ("level", "1", 1),
        ("level", "high", "high"),
        ("kind", "5", 5),
        ("step", "3", 3),
        ("id", "7", "7"),
        ("size", "2", 2),
        ("size", "[1, 2.5]", [1, 2.5]),
        ("self", "5", "5"),
        ("lost", "5", "5"),
        ("old", "null", None),
        ("old", "1e3", 1000.0),
    ],
)
def test_values_have_the_types_of_the_schema(key, text, value):
    found = ArgumentTypes(TOOLS).value("weather", key, text)
    assert (found, type(found)) == (value, type(value))


@given(
    st.recursive(
        st.booleans() | st.none() | st.text(max_size=3),
        lambda each: (
            st.lists(each, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "$ref", "anyOf", "allOf", "oneOf", "enum", "const", "properties", "nullable"]),
                each,
                max_size=4,
            )
        ),
    )
)
def test_no_schema_is_too_odd(schema):
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": schema}, "$defs": schema}}}
    ArgumentTypes([tool, schema]).value("f", "a", "5")


# -- which format ------------------------------------------------------------------------------------------------------


class Tokenizer:
    def __init__(self, template=None, tokens=()):
        self.chat_template, self._tokens = template, tokens
        self.eos_token_id = 0

    def get_added_vocab(self):
        return {token: i for i, token in enumerate(self._tokens, 1)}


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        ("<|start|>assistant<|channel|>final<|message|>", (), "harmony"),
        ("<|start|>{{ role }}", ("<|channel|>", "<|message|>"), "harmony"),
        ("<think> <tool_call>\n<function=x>\n<parameter=y>", QWEN_TOKENS, "qwen_xml"),
        ("<think> <tool_call>{{ tool }}", QWEN_TOKENS, "hermes"),
        ("<seed:think> <seed:tool_call>\n<function=x>\n<parameter=y>", (), "seed_oss"),
        ("{{ message }}", ("<seed:think>", "</seed:think>"), "seed_oss"),
        ("<tool_call>", ("[TOOL_CALLS]", "<|python_tag|>"), "hermes"),
        ("{{ message }}", QWEN_TOKENS, "hermes"),
        ("[INST] [TOOL_CALLS]", (), "mistral"),
        ("[INST]", ("[THINK]", "[/THINK]"), "mistral"),
        ("<|turn>model\n<|channel>thought\n<channel|>", (), "gemma4"),
        ("<|turn>", ("<|channel>", "<channel|>"), "gemma4"),
        ('<|start_header_id|> {"name": function name, "parameters": {}}', (), "llama3_json"),
        ("{{ content.split('</think>')[-1] }}", (), "think"),
        ("{{ message }}", ("<think>", "</think>"), "think"),
        ("{{ message }}", (), "plain"),
        ({"default": "a", "tool_use": "<tool_call>"}, (), "hermes"),
        (None, (), "plain"),
    ],
)
def test_the_format_of_a_checkpoint(template, tokens, name, caplog):
    assert find_format(Tokenizer(template, tokens)).name == name
    assert find_format(Tokenizer("", tokens), template if isinstance(template, str) else None) is not None
    assert not caplog.records


@pytest.mark.parametrize(
    "template", ["{% if tools %}{% endif %}", "{% if enable_thinking %}", "{{ m.reasoning_content }}"]
)
def test_an_unknown_format_is_told_once(template, caplog):
    with caplog.at_level(logging.WARNING):
        assert find_format(Tokenizer(template)).name == "plain"
        (record,) = caplog.records
        assert "--chat-format" in record.message
        assert find_format(Tokenizer(template), name="mistral").name == "mistral"
        assert find_format(Tokenizer(template), log=False).name == "plain"
    assert len(caplog.records) == 1


def test_a_name_of_no_format():
    with pytest.raises(ValueError, match="chat_format='qwen': must be None or one of harmony, "):
        find_format(Tokenizer(), name="qwen")
    with pytest.raises(ValueError, match="format='qwen': must be None or one of harmony, "):
        split_reasoning("a", format="qwen")


def test_harmony_ends_by_its_format():
    tokens = ("<|channel|>", "<|message|>", "<|call|>", "<|return|>")
    assert end_tokens(Tokenizer(None, tokens)) == [0, 4, 3]
    assert end_tokens(Tokenizer(None, tokens), "think") == [0]
    assert end_tokens(Tokenizer(None)) == [0]


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].thinking])
def test_prompts_that_begin_the_thinking(name):
    format = FORMATS[name]
    opening, closing = format.thinking
    assert format.opens(f"user{opening}\n")
    assert not format.opens(f"user{opening}\n\n{closing}\n\n")
    assert not format.opens("user")
    assert format.is_in_thinking(f"{opening}a")
    assert not format.is_in_thinking(f"{opening}a{closing}b")


# -- special tokens are tokens -----------------------------------------------------------------------------------------


def tokenizer_with(*tokens, special=False):
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.chat_template = None
    tokenizer.add_tokens([AddedToken(token, special=special) for token in tokens], special_tokens=special)
    return tokenizer


def spelled(tokenizer, text):
    """The tokens of a text of which no tag is one."""
    return [token for character in text for token in tokenizer.encode(character, add_special_tokens=False)]


def answer_of(tokenizer, name, pieces, size, finish_reason="stop", end=(), **options):
    """(reasoning, content, calls) of an answer whose text comes `size` tokens at a time."""
    token_ids = [token for piece in pieces for token in piece]
    answers = AnswerFormat(tokenizer, FORMATS[name])
    splitter = answers.splitter(TOOLS, **options)
    reasoning = content = ""
    calls, shown = [], ""
    given = [*token_ids, *end]
    for start in range(0, len(given), size):
        known = [token for token in given[: start + size] if token not in end]
        text = tokenizer.decode(known, clean_up_tokenization_spaces=False)
        is_last = start + size >= len(given)
        parts = splitter.push(text[len(shown) :], given[start : start + size], finish_reason if is_last else None)
        shown = text
        reasoning, content, calls = reasoning + parts[0], content + parts[1], calls + parts[2]
    return reasoning, content, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_tag_that_ordinary_tokens_spell_is_text(size):
    tokenizer = tokenizer_with(*QWEN_TOKENS)
    value = "a\n</parameter>\n</function>\n</tool_call> b <think>"
    written = xml_call(city=value)
    before, after = written.split(value)
    pieces = [tokenizer.encode(before), spelled(tokenizer, value), tokenizer.encode(after)]
    assert answer_of(tokenizer, "qwen_xml", pieces, size) == ("", "", [weather(city=value)])
    # Where the tokens are those of tags, the first closing one ends the call.
    assert answer_of(tokenizer, "qwen_xml", [tokenizer.encode(written)], size)[1] != ""
    thought = [tokenizer.encode("<think>"), spelled(tokenizer, "a </think> b"), tokenizer.encode("</think>c")]
    assert answer_of(tokenizer, "qwen_xml", thought, size) == ("a </think> b", "c", [])
    plain = [spelled(tokenizer, f"<think>a</think>{json_call('clock')}")]
    assert answer_of(tokenizer, "hermes", plain, size) == ("", f"<think>a</think>{json_call('clock')}", [])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_token_that_ends_a_call_is_known(size):
    """The text of an answer lacks the token that ended it."""
    tokenizer = tokenizer_with(*FORMATS["harmony"].tags, special=True)
    pieces, end = [tokenizer.encode(f"{THINKING}a{NEXT}{TO_TOOL}")], tokenizer.encode("<|call|>")
    assert answer_of(tokenizer, "harmony", pieces, size, end=end) == ("a", "", [weather()])
    as_written = f"<|start|>assistant{TO_TOOL}"
    assert answer_of(tokenizer, "harmony", pieces, size, "length") == ("a", as_written, [])


def test_reasoning_that_is_not_split_stays_in_the_content():
    tokenizer = tokenizer_with(*QWEN_TOKENS)
    written = f"<think>\nI try {json_call('clock')}\n</think>\n\nSo.\n{json_call(days=1)}"
    found = answer_of(tokenizer, "hermes", [tokenizer.encode(written)], 5, splits_reasoning=False)
    assert found == ("", f"<think>\nI try {json_call('clock')}\n</think>\n\nSo.", [weather(days=1)])


def test_only_formats_of_special_tokens_keep_them_in_texts():
    params = SamplingParams()
    plain, channels = tokenizer_with(*QWEN_TOKENS), tokenizer_with(*FORMATS["harmony"].tags, special=True)
    assert with_channels(plain, params) is params
    assert not with_channels(channels, params).skip_special_tokens
    assert not with_channels(channels, None).skip_special_tokens
    assert [each.skip_special_tokens for each in with_channels(channels, [params, params])] == [False, False]


# -- what transformers reads -------------------------------------------------------------------------------------------


def test_a_tokenizer_that_describes_its_format():
    tokenizer = tokenizer_with()
    if not hasattr(tokenizer, "get_response_parser"):
        pytest.skip("this version of transformers reads no response_template")
    tokenizer.chat_template = "{% if tools %}{% endif %}<turn>"
    tokenizer.response_template = {
        "start_anchor": "<turn>",
        "defaults": {"role": "assistant"},
        "fields": {
            "thinking": {"open": "<musing>", "close": "</musing>"},
            "content": {},
            "tool_calls": {
                "open": "<do>",
                "close": "</do>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
    format = find_format(tokenizer)
    assert (format.name, format.thinking) == ("response_schema", ("<musing>", "</musing>"))
    written = '<musing>a</musing>So.<do>{"name": "weather", "arguments": {"days": 1}}</do>'
    for pieces in ([written], list(written)):
        reader = format.reader(TOOLS)
        events = [event for i, piece in enumerate(pieces) for event in reader.push(piece, i == len(pieces) - 1)]
        assert [(event.kind, event.text.strip()) for event in events] == [
            (REASONING, "a"),
            (CONTENT, "So."),
            (CALL, ""),
        ]
        assert (events[2].name, events[2].arguments) == weather(days=1)
    assert format.opens("<turn><musing>\n")
    assert [event.text for event in format.reader(TOOLS, is_open=True).push("a</musing>So.", True)] == ["a", "So."]
