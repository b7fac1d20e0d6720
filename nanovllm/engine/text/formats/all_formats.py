"""All formats, and which of them a checkpoint has."""

import logging
import re
from typing import Any

from nanovllm.engine.text.formats.format import ConversationFormat
from nanovllm.engine.text.formats.gemma4 import Gemma4
from nanovllm.engine.text.formats.harmony import Harmony
from nanovllm.engine.text.formats.hermes import Hermes
from nanovllm.engine.text.formats.llama3_json import Llama3Json
from nanovllm.engine.text.formats.mistral import Mistral
from nanovllm.engine.text.formats.plain import Plain
from nanovllm.engine.text.formats.qwen_xml import QwenXml
from nanovllm.engine.text.formats.response_schema import ResponseSchema, response_schema
from nanovllm.engine.text.formats.seed_oss import SeedOss
from nanovllm.engine.text.formats.think import Think
from nanovllm.utils.checks import require

logger = logging.getLogger(__name__)

# In the order in which a template is asked: the first that it names is its format.
_OF_CALLS: tuple[ConversationFormat, ...] = (
    *(Harmony(), Gemma4(), Mistral(), SeedOss(), QwenXml(), Hermes(), Llama3Json()),
)
_THINK = Think()
FORMATS: dict[str, ConversationFormat] = {each.name: each for each in (*_OF_CALLS, _THINK, Plain())}
_SUBJECTS = re.compile(r"think|reasoning|\btools\b")  # of a template whose answers probably have more than content


def find_format(
    tokenizer: Any, template: str | None = None, name: str | None = None, log: bool = True
) -> ConversationFormat:
    """The format in which a checkpoint's model answers, from its chat template and its special tokens.

    Args:
        tokenizer: a transformers tokenizer.
        template: the text of the chat template that is used; None: the tokenizer's.
        name: of the format to take instead, as `--chat-format` has it.
        log: whether to say in the log that the format is unknown, if the template mentions thinking or tools.

    Answers of an unknown format are content as written. Raises ValueError for a name of no format.
    """
    found = known_format(tokenizer, template, name)
    if found is not None:
        return found
    if log and _SUBJECTS.search(_text(tokenizer, template)):
        logger.warning(
            "the chat template mentions thinking or tools in a format that is not known: answers are content as the "
            "model writes them. chat_format (--chat-format) takes one of %s",
            ", ".join(FORMATS),
        )
    return FORMATS["plain"]


def known_format(tokenizer: Any, template: str | None = None, name: str | None = None) -> ConversationFormat | None:
    """As find_format; None for an unknown one."""
    if name is not None:
        require("chat_format", name, name in FORMATS, f"None or one of {', '.join(FORMATS)}")
        return FORMATS[name]
    template = _text(tokenizer, template)
    found = next((each for each in _OF_CALLS if each.is_named_by(template)), None)
    if found is not None:
        return found
    if response_schema(tokenizer) is not None:
        return ResponseSchema(tokenizer)
    if _THINK.is_named_by(template):
        return _THINK
    tokens = set(tokenizer.get_added_vocab())
    return next((each for each in (*_OF_CALLS, _THINK) if each.is_known_by(tokens)), None)


def end_tokens(tokenizer: Any, name: str | None = None) -> list[int]:
    """The tokens that end an answer by the tokenizer and by the format. name: as find_format's."""
    found = known_format(tokenizer, name=name)
    added = tokenizer.get_added_vocab() if found is not None and found.ends else {}
    ends = [added[text] for text in found.ends if text in added] if found is not None else []
    return ends if tokenizer.eos_token_id is None else [tokenizer.eos_token_id, *ends]


def _text(tokenizer: Any, template: str | None) -> str:
    """Of the chat template, or of all of a tokenizer's."""
    if template is not None:
        return template
    own = getattr(tokenizer, "chat_template", None)
    return "\n".join(own.values()) if isinstance(own, dict) else own or ""
