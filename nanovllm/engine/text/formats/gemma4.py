"""Gemma 4's answers: thinking in a channel, and calls in a notation of their own.

<|channel>thought
Rome, so.<channel|><|tool_call>call:look{city:<|"|>Rome<|"|>,days:3}<tool_call|>
"""

import re
from collections.abc import Iterable
from typing import Any

from nanovllm.engine.text.formats.argument_types import ArgumentTypes
from nanovllm.engine.text.formats.format import AnswerReader, ConversationFormat
from nanovllm.engine.text.formats.json_end import parse
from nanovllm.engine.text.formats.tag_reader import CallForm, CallScanner, Scan, TagReader

THINKING, TITLE = ("<|channel>", "<channel|>"), "thought\n"
OPENING, CLOSING, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_TAGS = re.compile(f"{re.escape(QUOTE)}|{re.escape(CLOSING)}")
_HEAD = re.compile(r"\s*call:\s*([\w.\-/:]+)\s*(?=\{)")
_KEY = re.compile(r"\s*(?:<\|\"\|>(.*?)<\|\"\|>|\"([^\"]*)\"|([^\s:,{}\[\]\"<]+))\s*:\s*", re.DOTALL)
_BARE = re.compile(r"[^,}\]]*")
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_MAX_DEPTH = 64
_NO_CALL = Scan(len(OPENING), [])


class _Call(CallScanner):
    def __init__(self, types: ArgumentTypes):
        self._searched, self._is_quoted = len(OPENING), False

    def scan(self, text: str, is_last: bool) -> Scan | None:
        for match in _TAGS.finditer(text, self._searched):
            self._searched = match.end()
            if match[0] == QUOTE:
                self._is_quoted = not self._is_quoted
            elif not self._is_quoted:
                return self._read(text[len(OPENING) : match.start()], match.end())
        self._searched = max(self._searched, len(text) - len(CLOSING) + 1)
        if not is_last:
            self.awaited = frozenset(">")  # of a tag
            return None
        # The closing tag is missing, or a part of it.
        inside = next((text[:-n] for n in range(len(CLOSING) - 1, 0, -1) if text.endswith(CLOSING[:n])), text)
        return self._read(inside[len(OPENING) :], len(text))

    def _read(self, inside: str, end: int) -> Scan:
        match = _HEAD.match(inside)
        if match is None:
            return _NO_CALL
        try:
            arguments, at = _value(inside, match.end(), 0)
        except ValueError:
            return _NO_CALL
        return _NO_CALL if inside[at:].strip() else Scan(end, [(match[1], arguments)])


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at a place of a text, and where it ends. Raises ValueError if there is none."""
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    if text.startswith(QUOTE, at):
        end = text.index(QUOTE, at + len(QUOTE))
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    if text.startswith('"', at):
        match = _JSON_TEXT.match(text, at)
        if match is None or not isinstance(value := parse(match[0]), str):
            raise ValueError("no text")
        return value, match.end()
    if text.startswith("{", at):
        return _mapping(text, at + 1, depth)
    if text.startswith("[", at):
        return _list(text, at + 1, depth)
    match = _BARE.match(text, at)
    bare = match[0].strip() if match is not None else ""
    if match is None or not bare:
        raise ValueError("no value")
    value = parse(bare)
    return (bare if value is None and bare != "null" else value), match.end()


def _mapping(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _after_space(text, at)
    while not text.startswith("}", at):
        match = _KEY.match(text, at)
        if match is None:
            raise ValueError("no key")
        key = next(each for each in match.groups() if each is not None)
        found[key], at = _value(text, match.end(), depth + 1)
        at = _after_comma(text, at, "}")
    return found, at + 1


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found = []
    at = _after_space(text, at)
    while not text.startswith("]", at):
        value, at = _value(text, at, depth + 1)
        found.append(value)
        at = _after_comma(text, at, "]")
    return found, at + 1


def _after_comma(text: str, at: int, closing: str) -> int:
    """Where the next item of a mapping or a list begins, or its closing bracket stands."""
    at = _after_space(text, at)
    if text.startswith(",", at):
        return _after_space(text, at + 1)
    if not text.startswith(closing, at):
        raise ValueError("no comma")
    return at


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


NAMED_CALL = CallForm((OPENING,), _Call)


class Gemma4(ConversationFormat):
    name = "gemma4"
    thinking = THINKING
    tags = (*THINKING, OPENING, CLOSING, QUOTE)

    def reader(self, tools: Iterable[Any] | None = None, is_open: bool = False) -> AnswerReader:
        return TagReader((THINKING,), (NAMED_CALL,), tools, is_open, {THINKING[0]: TITLE})

    def is_named_by(self, template: str) -> bool:
        return OPENING in template or THINKING[0] in template

    def is_known_by(self, tokens: set[str]) -> bool:
        return {*THINKING} <= tokens or {OPENING, CLOSING} <= tokens

    def opens(self, text: str) -> bool:
        return text.rstrip().removesuffix(TITLE.rstrip()).endswith(THINKING[0])
