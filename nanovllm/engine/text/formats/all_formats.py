"""All formats, and which of them a checkpoint has."""

import logging
import re
from typing import Any

from nanovllm.engine.text.formats.format import ConversationFormat
from nanovllm.engine.text.formats.gemma4 import Gemma4
from nanovllm.engine.text.formats.harmony import Harmony
from nanovllm.engine.text.formats.llama3_json import Llama3Json
from nanovllm.engine.text.formats.mistral import Mistral
from nanovllm.engine.text.formats.plain import Plain
from nanovllm.engine.text.formats.qwen_json import QwenJson
from nanovllm.engine.text.formats.qwen_xml import QwenXml
from nanovllm.engine.text.formats.response_schema import ResponseSchema, response_schema
from nanovllm.engine.text.formats.think import Think
from nanovllm.utils.checks import require

logger = logging.getLogger(__name__)

# In the order in which a template is asked: the first that it names is its format.
_OF_CALLS: tuple[ConversationFormat, ...] = (Harmony(), Gemma4(), Mistral(), QwenXml(), QwenJson(), Llama3Json())
_OTHERS: tuple[ConversationFormat, ...] = (Think(), Plain())
FORMATS = {each.name: each for each in (*_OF_CALLS, *_OTHERS)}
_SUBJECTS = re.compile(r"think|reasoning|\btools\b")  # of a template whose answers probably have more than content


def find_format(tokenizer: Any, template: str | None = None, name: str | None = None) -> ConversationFormat:
    """The format in which a checkpoint's model answers, from its chat template and its special tokens.

    Args:
        tokenizer: a transformers tokenizer.
        template: the text of the chat template that is used; None: the tokenizer's.
        name: of the format to take instead, as `--chat-format` has it.

    Answers of an unknown format are content as written. A line of the log says so, if the template mentions thinking
    or tools. Raises ValueError for a name of no format.
    """
    if name is not None:
        require("chat_format", name, name in FORMATS, f"None or one of {', '.join(FORMATS)}")
        return FORMATS[name]
    template = _texts(getattr(tokenizer, "chat_template", None)) if template is None else template
    tokens = set(tokenizer.get_added_vocab()) if tokenizer is not None else set()
    schema = response_schema(tokenizer)
    for each in _OF_CALLS:
        if each.is_named_by(template):
            return each
    if schema is not None:
        return ResponseSchema(tokenizer)
    thinks = FORMATS["think"]
    for each in (thinks, *_OF_CALLS, thinks):
        if each.is_named_by(template) or each.is_known_by(tokens):
            return each
    if _SUBJECTS.search(template):
        logger.warning(
            "the chat template mentions thinking or tools in a format that is not known here: answers are content as "
            "the model writes them. chat_format (--chat-format) takes one of %s",
            ", ".join(FORMATS),
        )
    return FORMATS["plain"]


def _texts(template: Any) -> str:
    """Of a tokenizer's chat template, which may be several by their names."""
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""
