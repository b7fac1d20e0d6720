"""What callers get: results, deltas of a stream, counters of the engine. docs/reference.md describes them."""

from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NoReturn, TypeVar, cast

from typing_extensions import NotRequired, TypedDict

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence


class RequestMetrics(TypedDict):
    """How long a completion took, in seconds. The clock is read once a step."""

    queued: float  # from its arrival to the first step that worked on it
    time_to_first_token: float | None  # from its arrival; None if it has no token
    total: float  # from its arrival to its end
    tokens_per_second: float  # completion tokens, since it left the queue


class SampleOutput(TypedDict):
    """One completion of a prompt."""

    text: str | None  # up to a stop string; None with skip_tokenizer_init, and for a request that was not served
    token_ids: list[int]  # all generated tokens, including the end-of-sequence token and those of a stop string
    finish_reason: str  # "stop", "length", "abort" or "error"
    stop_reason: str | int | None  # the stop string, or the token of stop_token_ids, that ended it
    logprobs: list[dict[int, float]] | None  # of each token {token id: log-probability}, the sampled token first
    metrics: RequestMetrics
    error: NotRequired[str]  # only with finish_reason "error": what went wrong


class RequestOutput(SampleOutput):
    """One prompt's result: its completion (with n > 1 the first one), and what concerns the prompt."""

    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens that the prefix cache supplied (to the first sample)
    prompt_logprobs: list[dict[int, float] | None] | None  # like logprobs, for each prompt token, None for the first
    samples: NotRequired[list[SampleOutput]]  # only with n > 1: all completions, including the first one


class StreamDelta(TypedDict):
    """What one step added to one completion."""

    index: int  # of the prompt
    sample: int  # index of the completion, 0 unless n > 1
    request_id: int  # for abort_request
    text: str | None  # whole characters, which no later delta takes back; "" if the tokens complete none
    token_ids: list[int]  # of the new tokens, like logprobs
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None  # on a completion's last delta, like stop_reason and error
    stop_reason: str | int | None
    error: NotRequired[str]


class Score(TypedDict):
    """How likely a completion is after its prompt."""

    token_ids: list[int]  # the completion's
    logprobs: list[float]  # of each token, given all tokens before it
    total: float  # their sum


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
    preemptions: int  # times that a sequence had to give its blocks back and be computed again
    seconds: float  # that steps have taken, with the waits for the device
    tokens_per_second: float  # generated_tokens / seconds


class _Result(dict):
    """A result, which is a dict, and says so to those who look for attributes, as vLLM's results have them."""

    def __getattr__(self, name: str) -> NoReturn:
        instead = f"result[{name!r}]" if name in self else "result['text']"
        if name == "outputs" and "samples" in self:
            instead = "result['samples'], a list of dicts with 'text'"
        raise AttributeError(
            f"a result is a dict and has no attribute {name!r}: use {instead}; keys: {', '.join(self)}"
        )


_Dict = TypeVar("_Dict")


def as_result(values: _Dict) -> _Dict:
    """The same dict, for callers."""
    return cast(_Dict, _Result(cast(Any, values)))


class Results:
    """Makes each request's result when the last of its samples has finished, while the device works on the others.

    `ready` is {index of the request: its result}, in the order in which they were made.
    """

    def __init__(self, requests: Iterable[object] = ()) -> None:
        """requests: sequences, or the exception that refuses the request, whose result is ready then."""
        self._samples: dict[int, list[Sequence]] = defaultdict(list)  # finished, of requests that are not
        self.ready = {i: error_output(each) for i, each in enumerate(requests) if isinstance(each, Exception)}

    def record(self, finished: list[Sequence]) -> None:
        """Sequences that are complete, with their texts."""
        for seq in finished:
            samples = self._samples[seq.prompt_index]
            samples.append(seq)
            if len(samples) == seq.params.n:
                self.ready[seq.prompt_index] = request_output(sorted(samples, key=attrgetter("sample")))
                del self._samples[seq.prompt_index]


def request_output(samples: list[Sequence]) -> RequestOutput:
    first = samples[0]
    output = cast(RequestOutput, _sample_output(first))
    output["num_prompt_tokens"] = first.num_prompt_tokens
    output["num_cached_tokens"] = max(first.num_shared_tokens, 0)
    output["prompt_logprobs"] = first.prompt_logprobs
    if len(samples) > 1:
        output["samples"] = [_sample_output(seq) for seq in samples]
    return output


def error_output(error: Exception) -> RequestOutput:
    """The result of a request that was not served."""
    output = RequestOutput(
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
    return as_result(output)


def _sample_output(seq: Sequence) -> SampleOutput:
    arrival, end = seq.arrival_time, seq.finish_time
    scheduled = end if seq.scheduled_time is None else seq.scheduled_time
    num_tokens = len(seq.tokens) - seq.num_prompt_tokens
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
            tokens_per_second=num_tokens / (end - scheduled) if end > scheduled else 0.0,
        ),
    )
    if seq.error is not None:
        output["error"] = seq.error
    return cast(SampleOutput, _Result(output))


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
