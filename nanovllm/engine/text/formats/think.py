"""DeepSeek's way to think: `<think>What I think.</think>What I say.` Calls are not read."""

from nanovllm.engine.text.formats.format import ConversationFormat

OPENING, CLOSING = "<think>", "</think>"


class Think(ConversationFormat):
    name = "think"
    thinking = (OPENING, CLOSING)
    tags = (OPENING, CLOSING)

    def is_named_by(self, template: str) -> bool:
        return OPENING in template or CLOSING in template

    def is_known_by(self, tokens: set[str]) -> bool:
        return {OPENING, CLOSING} <= tokens
