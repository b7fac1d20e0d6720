"""Calls as Qwen3-Coder, Qwen3.5 and Qwen3.6 write them: <function=NAME> with a <parameter=KEY> for each argument."""

from nanovllm.engine.text.formats.format import ConversationFormat


class QwenXml(ConversationFormat):
    name = "qwen_xml"
    thinking = ("<think>", "</think>")
    tags = (*thinking, "<tool_call>", "</tool_call>")

    def is_named_by(self, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template
