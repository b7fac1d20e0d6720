"""The format that a tokenizer describes itself, which transformers' parse_response reads."""

from typing import Any

from nanovllm.engine.text.formats.format import ConversationFormat


def response_schema(tokenizer: Any) -> Any:
    """What a tokenizer has for parse_response: `response_schema` of transformers 5.0 to 5.12, and `response_template`
    since. None if it has none, or transformers cannot read it."""
    if not hasattr(tokenizer, "parse_response"):
        return None
    return getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None)


class ResponseSchema(ConversationFormat):
    name = "response_schema"

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
