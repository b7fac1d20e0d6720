"""Llama 3's calls: an answer that is {"name": ..., "parameters": {...}}, after <|python_tag|> or without it."""

from nanovllm.engine.text.formats.format import ConversationFormat

TAG = "<|python_tag|>"


class Llama3Json(ConversationFormat):
    name = "llama3_json"
    tags = (TAG,)

    def is_named_by(self, template: str) -> bool:
        return "<|start_header_id|>" in template and (TAG in template or '"parameters": ' in template)
