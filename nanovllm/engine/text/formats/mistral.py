"""Mistral's calls, [TOOL_CALLS]name[ARGS]{...} or [TOOL_CALLS][{"name": ..., "arguments": ...}], and [THINK]."""

from nanovllm.engine.text.formats.format import ConversationFormat

CALLS, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(ConversationFormat):
    name = "mistral"
    thinking = ("[THINK]", "[/THINK]")
    tags = (*thinking, CALLS, ID, ARGUMENTS)

    def is_named_by(self, template: str) -> bool:
        return CALLS in template or self.thinking[0] in template

    def is_known_by(self, tokens: set[str]) -> bool:
        return CALLS in tokens or {*self.thinking} <= tokens
