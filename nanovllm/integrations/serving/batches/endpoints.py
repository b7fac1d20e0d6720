"""What the lines of a batch may ask for."""

from typing import NamedTuple

from nanovllm import PoolingParams, SamplingParams
from nanovllm.openai_format.openai_batch import CHAT, COMPLETION
from nanovllm.openai_format.pooled_calls import EmbeddingCall


class Endpoint(NamedTuple):
    """A route whose requests may be lines of a batch."""

    task: str  # of the batch's job
    params: SamplingParams | PoolingParams  # of the least that a line can ask for: whether a model can do it at all
    options: tuple[str, ...] = ()  # of the server, that its answers depend on


_SHORTEST = SamplingParams(max_tokens=1)
_OF_TEXTS = ("chat_template", "split_reasoning", "split_tool_calls")

# By the url that a batch and its lines name.
ENDPOINTS = {
    **{kind.url: Endpoint("generate", _SHORTEST, _OF_TEXTS) for kind in (CHAT, COMPLETION)},
    EmbeddingCall.urls[0]: Endpoint(EmbeddingCall.task, PoolingParams(task="embed")),
}
