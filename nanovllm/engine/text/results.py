"""Results: from finished sequences to what callers get."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, cast

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.text.outputs import (
    ErrorOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    Result,
    SampleOutput,
    as_result,
)


def request_output(samples: list[Sequence]) -> RequestOutput:
    first = samples[0]
    output = cast(RequestOutput, _sample_output(first))
    output["num_prompt_tokens"] = first.num_prompt_tokens
    output["num_cached_tokens"] = max(first.completion.num_shared_tokens, 0)
    output["prompt_logprobs"] = first.completion.prompt_logprobs
    if len(samples) > 1:
        output["samples"] = [_sample_output(seq) for seq in samples]
    return output


def error_output(error: Exception) -> ErrorOutput:
    """The result of a request that was not served."""
    output = ErrorOutput(
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


def completion_logprobs(seq: Sequence, start: int = 0, end: int | None = None) -> list[dict[int, float]] | None:
    """{token id: log-probability} for each completion token from start to end; None unless asked for."""
    if seq.completion.logprobs is None:
        return None
    found, first = seq.completion.logprobs[start:end], seq.num_prompt_tokens + start
    tokens = seq.token_ids[first : first + len(found)]
    return [each if isinstance(each, dict) else {token: each} for token, each in zip(tokens, found, strict=True)]


def _sample_output(seq: Sequence) -> SampleOutput:
    completion = seq.completion
    arrival, end = completion.arrival_time, completion.finish_time
    scheduled = end if completion.scheduled_time is None else completion.scheduled_time
    num_tokens = seq.num_tokens - seq.num_prompt_tokens
    output = SampleOutput(
        text=completion.text or "",
        token_ids=seq.completion_token_ids,
        finish_reason=cast(FinishReason, completion.finish_reason),
        stop_reason=completion.stop_reason,
        logprobs=None if completion.logprobs is None else completion_logprobs(seq),
        metrics=RequestMetrics(
            queued=scheduled - arrival,
            time_to_first_token=None if completion.first_token_time is None else completion.first_token_time - arrival,
            total=end - arrival,
            tokens_per_second=num_tokens / (end - scheduled) if end > scheduled else 0.0,
        ),
    )
    if completion.error is not None:
        output["error"] = completion.error
    return cast(SampleOutput, Result(output))


class Results:
    """Makes each request's result when the last of its samples has finished, while the device works on the others.

    `ready` is {index of the request: its result}, in the order in which they were made.
    """

    ready: dict[int, Any]
    make_output: Callable[[list[Sequence]], Any] = staticmethod(request_output)
    make_error: Callable[[Exception], Any] = staticmethod(error_output)

    def __init__(self, requests: Iterable[object] = ()) -> None:
        """requests: sequences, or the exception that refuses the request, whose result is ready then."""
        self._samples: dict[int, list[Sequence]] = defaultdict(list)  # finished, of requests that are not
        self.ready = {i: self.make_error(each) for i, each in enumerate(requests) if isinstance(each, Exception)}

    def record(self, finished: list[Sequence]) -> None:
        """Sequences that are complete, with their texts."""
        for seq in finished:
            index = seq.request.prompt_index
            samples = self._samples[index]
            samples.append(seq)
            if len(samples) == seq.request.params.n:
                self.ready[index] = self.make_output(sorted(samples, key=attrgetter("completion.sample")))
                del self._samples[index]
