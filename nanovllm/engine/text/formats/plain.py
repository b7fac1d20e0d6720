"""No format: an answer is content as written."""

from nanovllm.engine.text.formats.format import ConversationFormat


class Plain(ConversationFormat):
    name = "plain"
