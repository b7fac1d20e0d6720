"""Offline batch inference for language models: `from nanovllm import LLM, SamplingParams`.

The pages of the documentation are in this folder: docs/reference.md has every option, method and result.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.checks import RequestChecker, check_options
    from nanovllm.engine.images import ImagePrompt
    from nanovllm.engine.ranks.workers import WorkerError
    from nanovllm.engine.text.chat import Conversation, as_conversations, image_sources, with_images
    from nanovllm.engine.text.formats.all_formats import find_format
    from nanovllm.engine.text.formats.answers import AnswerFormat, AnswerSplitter, with_channels
    from nanovllm.engine.text.formats.format import ConversationFormat
    from nanovllm.engine.text.image_reader import ImageReader, PackedImage, find_image_reader, reads_images
    from nanovllm.engine.text.outputs import (
        ChatDelta,
        ChoiceScores,
        ClassOutput,
        EmbeddingOutput,
        EngineStats,
        ErrorOutput,
        RankedDocument,
        RankOutput,
        RequestOutput,
        SampleOutput,
        Score,
        StreamDelta,
    )
    from nanovllm.engine.text.prompt_encoder import ChatRenderer, PromptEncoder
    from nanovllm.engine.text.reasoning import ReasoningSplitter, opens_reasoning, split_reasoning
    from nanovllm.engine.text.streaming import NO_PROMPT
    from nanovllm.engine.text.tool_calls import ToolCallSplitter, split_tool_calls
    from nanovllm.images.pixels import ImagePixels
    from nanovllm.images.read import read_image
    from nanovllm.images.rules import ImageRules
    from nanovllm.llm import LLM
    from nanovllm.models.sentence_files import read_sentence_facts
    from nanovllm.models.tokenizer_files import find_tokenizer
    from nanovllm.pooling_params import PoolingParams
    from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "NO_PROMPT",
    "AnswerFormat",
    "AnswerSplitter",
    "ChatDelta",
    "ChatRenderer",
    "ChoiceScores",
    "ClassOutput",
    "Config",
    "Conversation",
    "ConversationFormat",
    "EmbeddingOutput",
    "EngineStats",
    "ErrorOutput",
    "ImagePixels",
    "ImagePrompt",
    "ImageReader",
    "ImageRules",
    "PackedImage",
    "PoolingParams",
    "PromptEncoder",
    "RankOutput",
    "RankedDocument",
    "ReasoningSplitter",
    "RequestChecker",
    "RequestOutput",
    "SampleOutput",
    "SamplingParams",
    "Score",
    "StreamDelta",
    "StructuredOutputsParams",
    "ToolCallSplitter",
    "WorkerError",
    "as_conversations",
    "check_options",
    "find_format",
    "find_image_reader",
    "find_tokenizer",
    "image_sources",
    "opens_reasoning",
    "read_image",
    "read_sentence_facts",
    "reads_images",
    "split_reasoning",
    "split_tool_calls",
    "with_channels",
    "with_images",
]
__version__ = "0.1.0"

_MODULES = {
    "LLM": "nanovllm.llm",
    "NO_PROMPT": "nanovllm.engine.text.streaming",
    "AnswerFormat": "nanovllm.engine.text.formats.answers",
    "AnswerSplitter": "nanovllm.engine.text.formats.answers",
    "ChatRenderer": "nanovllm.engine.text.prompt_encoder",
    "Config": "nanovllm.config",
    "Conversation": "nanovllm.engine.text.chat",
    "ConversationFormat": "nanovllm.engine.text.formats.format",
    "ImagePixels": "nanovllm.images.pixels",
    "ImagePrompt": "nanovllm.engine.images",
    "ImageReader": "nanovllm.engine.text.image_reader",
    "ImageRules": "nanovllm.images.rules",
    "PackedImage": "nanovllm.engine.text.image_reader",
    "PoolingParams": "nanovllm.pooling_params",
    "PromptEncoder": "nanovllm.engine.text.prompt_encoder",
    "ReasoningSplitter": "nanovllm.engine.text.reasoning",
    "RequestChecker": "nanovllm.engine.checks",
    "SamplingParams": "nanovllm.sampling_params",
    "StructuredOutputsParams": "nanovllm.sampling_params",
    "ToolCallSplitter": "nanovllm.engine.text.tool_calls",
    "WorkerError": "nanovllm.engine.ranks.workers",
    "as_conversations": "nanovllm.engine.text.chat",
    "check_options": "nanovllm.engine.checks",
    "find_format": "nanovllm.engine.text.formats.all_formats",
    "find_image_reader": "nanovllm.engine.text.image_reader",
    "image_sources": "nanovllm.engine.text.chat",
    "reads_images": "nanovllm.engine.text.image_reader",
    "with_images": "nanovllm.engine.text.chat",
    "find_tokenizer": "nanovllm.models.tokenizer_files",
    "read_image": "nanovllm.images.read",
    "read_sentence_facts": "nanovllm.models.sentence_files",
    "opens_reasoning": "nanovllm.engine.text.reasoning",
    "split_reasoning": "nanovllm.engine.text.reasoning",
    "split_tool_calls": "nanovllm.engine.text.tool_calls",
    "with_channels": "nanovllm.engine.text.formats.answers",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that `nanovllm --help` does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, "nanovllm.engine.text.outputs")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Those names, also before they are imported, and no others."""
    return sorted([*__all__, "__version__"])
