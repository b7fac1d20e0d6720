"""Calls as JSON between <tool_call> and </tool_call>, as Hermes, Qwen2.5 and Qwen3 write them."""

from nanovllm.engine.text.formats.format import ConversationFormat

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class QwenJson(ConversationFormat):
    name = "qwen_json"
    thinking = ("<think>", "</think>")
    tags = (*thinking, OPENING, CLOSING)

    def is_named_by(self, template: str) -> bool:
        return OPENING in template

    def is_known_by(self, tokens: set[str]) -> bool:
        return {OPENING, CLOSING} <= tokens
