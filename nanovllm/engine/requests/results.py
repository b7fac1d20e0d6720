"""Results: from finished sequences to what callers get."""

from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter
from typing import cast

from nanovllm.engine.requests.outputs import RequestMetrics, RequestOutput, Result, SampleOutput, as_result
from nanovllm.engine.sequence import Sequence


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
        finish_reason=cast(str, seq.finish_reason),
        stop_reason=seq.stop_reason,
        logprobs=seq.completion_logprobs(),
        metrics=RequestMetrics(
            queued=scheduled - arrival,
            time_to_first_token=None if seq.first_token_time is None else seq.first_token_time - arrival,
            total=end - arrival,
            tokens_per_second=num_tokens / (end - scheduled) if end > scheduled else 0.0,
        ),
    )
    if seq.error is not None:
        output["error"] = seq.error
    return cast(SampleOutput, Result(output))
