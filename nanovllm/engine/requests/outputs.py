"""What callers get back: results, deltas of a stream, figures of the engine."""

from typing import TypedDict

from nanovllm.engine.sequence import Sequence


class RequestMetrics(TypedDict):
    """How long a completion took, in seconds of time.perf_counter(), taken once a step.

    queued: from its arrival to the first step that worked on it.
    time_to_first_token: from its arrival to its first token; None where it has none.
    total: from its arrival to its end.
    tokens_per_second: completion tokens over the time since it left the queue.
    """

    queued: float
    time_to_first_token: float | None
    total: float
    tokens_per_second: float


class _SampleOutput(TypedDict):
    text: str | None
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[dict[int, float]] | None
    metrics: RequestMetrics


class SampleOutput(_SampleOutput, total=False):
    """One completion of a prompt.

    text: up to a stop string, special tokens left out unless skip_special_tokens says otherwise; None with
        skip_tokenizer_init, and for a request that was not served.
    token_ids: all tokens that were generated, the end-of-sequence token and those of a stop string included.
    finish_reason: "stop" (an end-of-sequence or stop token, or a stop string), "length" (max_tokens, or the engine's
        longest sequence), "abort" (abort_request) or "error": see `error`.
    stop_reason: the stop string or the one of stop_token_ids that ended it; None for any other end.
    logprobs: for each token of token_ids {token id: log-probability}, the sampled token first; None unless asked for.
    metrics: how long it took.
    error: what went wrong, where finish_reason is "error", else not there. A completion fails where the model's logits
        are NaN or infinite; it has the text and the tokens that came before. With on_error="return" a request that
        could not be served has none.
    """

    error: str


class _RequestOutput(SampleOutput):
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, float] | None] | None


class RequestOutput(_RequestOutput, total=False):
    """One prompt's result: its completion as in SampleOutput, the first one with n > 1, and

    num_prompt_tokens: tokens of the prompt.
    num_cached_tokens: those of them that the prefix cache supplied (to the first sample).
    prompt_logprobs: as logprobs, for each prompt token, None for the first; None unless asked for.
    samples: with n > 1 all completions, the first one included; else not there. One may fail where others do not.
    """

    samples: list[SampleOutput]


class _StreamDelta(TypedDict):
    index: int
    sample: int
    request_id: int
    text: str | None
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    stop_reason: str | int | None


class StreamDelta(_StreamDelta, total=False):
    """What one step added to one completion.

    index: of the prompt. sample: of the completion, 0 unless n > 1.
    request_id: what abort_request takes.
    text: whole characters, which no later delta takes back; "" where the tokens complete none, None with
        skip_tokenizer_init. All deltas' texts together are the RequestOutput's.
    token_ids, logprobs: of the new tokens, as in RequestOutput.
    finish_reason, stop_reason: as in RequestOutput on a completion's last delta, None before.
    error: as in RequestOutput, on a completion's last delta.
    """

    error: str


class Score(TypedDict):
    """token_ids: the completion's tokens; logprobs: of each, given all before it; total: their sum."""

    token_ids: list[int]
    logprobs: list[float]
    total: float


class EngineStats(TypedDict):
    """The engine's state, and what it has done since it was made.

    running, waiting: sequences now (a prompt with n > 1 has n).
    kv_blocks_total, kv_blocks_used, kv_blocks_free: blocks of the KV cache now. Free ones may hold prefixes that can
        still be found.
    prefix_cache_queries, prefix_cache_hits: prompt tokens that the prefix cache was asked for, and that it had.
    prefix_cache_hit_rate: hits / queries, 0 before the first.
    prompt_tokens: of the prompts that were started, cached ones included.
    generated_tokens: completion tokens.
    steps: prefill and decode steps.
    preemptions: times that a sequence had to give its blocks back and start over.
    seconds: wall-clock time in which there was work.
    tokens_per_second: generated_tokens / seconds. For the rate over a while, take two readings and their differences.
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
    output = SampleOutput(
        text=seq.text,
        token_ids=seq.completion_token_ids,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        logprobs=seq.logprobs,
        metrics=_metrics(seq),
    )
    if seq.error is not None:
        output["error"] = seq.error
    return output


def _metrics(seq: Sequence) -> RequestMetrics:
    arrival, end = seq.arrival_time, seq.finish_time
    scheduled = end if seq.scheduled_time is None else seq.scheduled_time
    return RequestMetrics(
        queued=scheduled - arrival,
        time_to_first_token=None if seq.first_token_time is None else seq.first_token_time - arrival,
        total=end - arrival,
        tokens_per_second=seq.num_completion_tokens / (end - scheduled) if end > scheduled else 0.0,
    )
