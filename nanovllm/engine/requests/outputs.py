"""What callers get: results, deltas of a stream, counters of the engine."""

from typing_extensions import NotRequired, TypedDict

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence


class RequestMetrics(TypedDict):
    """How long a completion took, in seconds. The clock is read once a step.

    queued: from its arrival to the first step that worked on it.
    time_to_first_token: from its arrival to its first token; None if it has none.
    total: from its arrival to its end.
    tokens_per_second: completion tokens per second since it left the queue.
    """

    queued: float
    time_to_first_token: float | None
    total: float
    tokens_per_second: float


class SampleOutput(TypedDict):
    """One completion of a prompt.

    text: up to a stop string, without special tokens unless skip_special_tokens=False; None with skip_tokenizer_init,
        and for a request that was not served.
    token_ids: all generated tokens, including the end-of-sequence token and those of a stop string.
    finish_reason: "stop" (an end-of-sequence or stop token, or a stop string), "length" (max_tokens, or the engine's
        longest sequence), "abort" (abort_request) or "error" (see `error`).
    stop_reason: the stop string, or the token of stop_token_ids, that ended it; None for any other end.
    logprobs: for each token of token_ids {token id: log-probability}, the sampled token first; None unless asked for.
    metrics: how long it took.
    error: only where finish_reason is "error": what went wrong. A completion fails where the model's logits are NaN or
        infinite; it keeps the text and the tokens so far. With on_error="return" a request that could not be served has
        neither.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[dict[int, float]] | None
    metrics: RequestMetrics
    error: NotRequired[str]


class RequestOutput(SampleOutput):
    """One prompt's result: its completion as in SampleOutput, with n > 1 the first one, and

    num_prompt_tokens: tokens of the prompt.
    num_cached_tokens: prompt tokens that the prefix cache supplied (to the first sample).
    prompt_logprobs: like logprobs, for each prompt token, None for the first; None unless asked for.
    samples: only with n > 1: all completions, including the first one. One may fail where others do not.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, float] | None] | None
    samples: NotRequired[list[SampleOutput]]


class StreamDelta(TypedDict):
    """What one step added to one completion.

    index: index of the prompt.
    sample: index of the completion, 0 unless n > 1.
    request_id: the id for abort_request.
    text: whole characters, which no later delta takes back; "" if the tokens complete none, None with
        skip_tokenizer_init. The texts of all deltas together are the RequestOutput's.
    token_ids, logprobs: of the new tokens, as in RequestOutput.
    finish_reason, stop_reason: as in RequestOutput on a completion's last delta, None before.
    error: as in RequestOutput, on a completion's last delta.
    """

    index: int
    sample: int
    request_id: int
    text: str | None
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    stop_reason: str | int | None
    error: NotRequired[str]


class Score(TypedDict):
    """How likely a completion is after its prompt.

    token_ids: the completion's tokens.
    logprobs: the log-probability of each token, given all tokens before it.
    total: the sum of logprobs.
    """

    token_ids: list[int]
    logprobs: list[float]
    total: float


class EngineStats(TypedDict):
    """The engine's state now, and what it has done since it was made.

    running, waiting: sequences now (a prompt with n > 1 has n).
    kv_blocks_total, kv_blocks_used, kv_blocks_free: blocks of the KV cache now. Free ones may hold cached prefixes.
    prefix_cache_queries, prefix_cache_hits: prompt tokens looked up in the prefix cache, and found there.
    prefix_cache_hit_rate: hits / queries, 0 before the first.
    prompt_tokens: tokens of the prompts that were started, including cached ones.
    generated_tokens: completion tokens.
    steps: prefill and decode steps.
    preemptions: times that a sequence had to give its blocks back and be computed again.
    seconds: time that steps have taken, with the waits for the device.
    tokens_per_second: generated_tokens / seconds. For a rate over some time, subtract two readings.
    """

    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_free: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prefix_cache_hit_rate: float
    prompt_tokens: int
    generated_tokens: int
    steps: int
    preemptions: int
    seconds: float
    tokens_per_second: float


def request_output(samples: list[Sequence]) -> RequestOutput:
    """The result of a request whose sequences are all finished."""
    first = samples[0]
    output = RequestOutput(
        **_sample_output(first),
        num_prompt_tokens=first.num_prompt_tokens,
        num_cached_tokens=max(first.num_shared_tokens, 0),
        prompt_logprobs=first.prompt_logprobs,
    )
    if len(samples) > 1:
        output["samples"] = [_sample_output(seq) for seq in samples]
    return output


def error_output(error: Exception) -> RequestOutput:
    """The result of a request that was not served."""
    return RequestOutput(
        text=None,
        token_ids=[],
        finish_reason="error",
        stop_reason=None,
        logprobs=None,
        metrics=RequestMetrics(queued=0.0, time_to_first_token=None, total=0.0, tokens_per_second=0.0),
        num_prompt_tokens=0,
        num_cached_tokens=0,
        prompt_logprobs=None,
        error=str(error),
    )


def _sample_output(seq: Sequence) -> SampleOutput:
    arrival, end = seq.arrival_time, seq.finish_time
    scheduled = end if seq.scheduled_time is None else seq.scheduled_time
    output = SampleOutput(
        text=seq.text,
        token_ids=seq.completion_token_ids,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        logprobs=seq.logprobs,
        metrics=RequestMetrics(
            queued=scheduled - arrival,
            time_to_first_token=None if seq.first_token_time is None else seq.first_token_time - arrival,
            total=end - arrival,
            tokens_per_second=seq.num_completion_tokens / (end - scheduled) if end > scheduled else 0.0,
        ),
    )
    if seq.error is not None:
        output["error"] = seq.error
    return output


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
        preemptions=scheduler.num_preemptions,
        seconds=seconds,
        tokens_per_second=scheduler.num_generated_tokens / seconds if seconds else 0.0,
    )
