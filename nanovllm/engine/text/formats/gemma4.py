"""Gemma 4's answers: <|channel>thought ... <channel|>, and <|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>."""

from nanovllm.engine.text.formats.format import ConversationFormat

OPENING, CLOSING, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


class Gemma4(ConversationFormat):
    name = "gemma4"
    thinking = ("<|channel>", "<channel|>")
    tags = (*thinking, OPENING, CLOSING, QUOTE)

    def is_named_by(self, template: str) -> bool:
        return OPENING in template or self.thinking[0] in template

    def is_known_by(self, tokens: set[str]) -> bool:
        return {*self.thinking} <= tokens or {OPENING, CLOSING} <= tokens
