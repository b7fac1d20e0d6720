"""What callers get: results, deltas of a stream, counters of the engine. docs/reference.md describes them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast

from typing_extensions import NotRequired, TypedDict

from nanovllm.engine.scheduler import Scheduler

if TYPE_CHECKING:
    import numpy as np


class RequestMetrics(TypedDict):
    """How long a completion took, in seconds. The clock is read once a step."""

    queued: float  # from its arrival to the first step that worked on it
    time_to_first_token: float | None  # from its arrival; None if it has no token
    total: float  # from its arrival to its end
    tokens_per_second: float  # completion tokens, since it left the queue


FinishReason = Literal["stop", "length", "abort", "error"]


class SampleOutput(TypedDict):
    """One completion of a prompt."""

    text: str  # up to a stop string; "" with skip_tokenizer_init
    token_ids: list[int]  # all generated tokens, including the end-of-sequence token and those of a stop string
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string, or the token of stop_token_ids, that ended it
    logprobs: list[dict[int, float]] | None  # of each token {token id: log-probability}, the sampled token first
    metrics: RequestMetrics
    error: NotRequired[str]  # only with finish_reason "error": what went wrong after the completion had begun
    reasoning: NotRequired[str | None]  # only of chat(split_reasoning=True): what is between <think> and </think>
    content: NotRequired[str]  # and the text after it
    tool_calls: NotRequired[list[dict[str, Any]]]  # only of chat(split_tool_calls=True): the content is without them


class RequestOutput(SampleOutput):
    """One prompt's result: its completion (with n > 1 the first one), and what concerns the prompt."""

    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens that the prefix cache supplied (to the first sample)
    prompt_logprobs: list[dict[int, float] | None] | None  # like logprobs, for each prompt token, None for the first
    samples: NotRequired[list[SampleOutput]]  # only with n > 1: all completions, including the first one


class ErrorOutput(TypedDict):
    """The result of a prompt that was not served, with on_error="return": a RequestOutput's keys, all empty, and the
    error. It has no text, so that nobody takes an empty one for an answer."""

    text: None
    token_ids: list[int]
    finish_reason: Literal["error"]
    stop_reason: None
    logprobs: None
    metrics: RequestMetrics
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: None
    error: str  # what is wrong with the prompt or its parameters


class StreamDelta(TypedDict):
    """What one step added to one completion."""

    index: int  # of the prompt
    sample: int  # index of the completion, 0 unless n > 1
    request_id: int  # for abort_request
    text: str  # whole characters, which no later delta takes back; "" if the tokens complete none
    token_ids: list[int]  # of the new tokens, like logprobs
    logprobs: list[dict[int, float]] | None
    finish_reason: FinishReason | None  # on a completion's last delta, like stop_reason and error
    stop_reason: str | int | None
    error: NotRequired[str]
    output: NotRequired[Any]  # only of a request with PoolingParams: what embed, classify or rerank_iter gives of it


class ChatDelta(StreamDelta):
    """What one step added to one answer of a conversation, and to its parts."""

    reasoning: str  # what the model thinks, with split_reasoning
    content: str  # the rest of the text, without calls with split_tool_calls
    tool_calls: list[dict[str, Any]]  # with split_tool_calls: those that this step completed, as a message has them


class Score(TypedDict):
    """How likely a completion is after its prompt."""

    token_ids: list[int]  # the completion's
    logprobs: list[float]  # of each token, given all tokens before it
    total: float  # their sum


class EmbeddingOutput(TypedDict):
    """One text's vector."""

    embedding: "np.ndarray | None"  # float32 [dimensions or hidden_size]; None with error
    num_prompt_tokens: int
    num_cached_tokens: int  # that the prefix cache supplied
    error: NotRequired[str]  # with on_error="return": why there is no vector


class ClassOutput(TypedDict):
    """What a model with a classification head says of one text. With an error the first three are None."""

    logits: "np.ndarray | None"  # float32 [num_labels]
    probs: "np.ndarray | None"  # likewise: their softmax; of one label its sigmoid
    label: str | None  # the name of the likeliest
    num_prompt_tokens: int
    num_cached_tokens: int
    error: NotRequired[str]


class RankOutput(TypedDict):
    """How well one document answers one query."""

    relevance_score: float | None  # 0 to 1; None with error
    num_prompt_tokens: int
    num_cached_tokens: int
    error: NotRequired[str]


class RankedDocument(TypedDict):
    """One of the documents that were ranked."""

    index: int  # among the documents
    document: str
    relevance_score: float


class ChoiceScores(TypedDict):
    """How likely the model finds each of several completions of a prompt."""

    logprobs: list[float]  # of each whole choice
    best: int  # the index of the likeliest


class EngineStats(TypedDict):
    """The engine's state now, and what it has done since it was made."""

    running: int  # sequences now (a prompt with n > 1 has n)
    waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_free: int  # They may hold cached prefixes.
    prefix_cache_queries: int  # prompt tokens looked up in the prefix cache
    prefix_cache_hits: int  # and found there
    prefix_cache_hit_rate: float  # hits / queries, 0 before the first
    prompt_tokens: int  # of the prompts that were started, including cached ones
    generated_tokens: int
    steps: int
    proposed_tokens: int  # that steps have tried, with speculation
    accepted_tokens: int  # of them
    preemptions: int  # times that a sequence had to give its blocks back and be computed again
    seconds: float  # that steps have taken, with the waits for the device
    tokens_per_second: float  # generated_tokens / seconds


class Result(dict):
    """A result, which is a dict, and says so to those who look for attributes, as vLLM's results have them."""

    def __getattr__(self, name: str) -> NoReturn:
        instead = f"result[{name!r}]" if name in self else "result['text']"
        if name == "outputs" and "samples" in self:
            instead = "result['samples'], a list of dicts with 'text'"
        raise AttributeError(
            f"a result is a dict and has no attribute {name!r}: use {instead}; keys: {', '.join(self)}"
        )


_Dict = TypeVar("_Dict", bound=Mapping[str, object])


def as_result(values: _Dict) -> _Dict:
    """The same dict, for callers."""
    return cast(_Dict, Result(values))


def engine_stats(scheduler: Scheduler, num_steps: int, seconds: float) -> EngineStats:
    """num_steps, seconds: what the engine has computed so far, and how long that took."""
    manager = scheduler.block_manager
    queries, hits = scheduler.num_prefix_queries, scheduler.num_prefix_hits
    return EngineStats(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        kv_blocks_total=len(manager.blocks),
        kv_blocks_used=len(manager.used_block_ids),
        kv_blocks_free=len(manager.free_block_ids),
        prefix_cache_queries=queries,
        prefix_cache_hits=hits,
        prefix_cache_hit_rate=hits / queries if queries else 0.0,
        prompt_tokens=scheduler.num_prompt_tokens,
        generated_tokens=scheduler.num_generated_tokens,
        steps=num_steps,
        proposed_tokens=scheduler.num_proposed_tokens,
        accepted_tokens=scheduler.num_accepted_tokens,
        preemptions=scheduler.num_preemptions,
        seconds=seconds,
        tokens_per_second=scheduler.num_generated_tokens / seconds if seconds else 0.0,
    )
