"""What a Sequence does not say itself: what its request asks for, and what its answer is."""

import sys
from dataclasses import dataclass, field
from typing import Any

from nanovllm.sampling_params import SamplingParams


@dataclass(eq=False, slots=True)
class Request:
    """What one prompt asks for. Its n samples, a Sequence each, share it.

    Attributes:
        params: as given, except stop strings that are tokens, which are stop_tokens.
        request_id: unique within the engine, in order of arrival.
        prompt_index: of the prompt in its call.
        logit_edits: an engine.features.logits.logit_edits.LogitEdits, if params ask for them.
        stop_tokens: tokens that a stop string stands for, and the string.
        end_token_ids: tokens that end a sequence; the scheduler sets them when it is added.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: int = 0
    prompt_index: int = 0
    logit_edits: Any = None
    stop_tokens: dict[int, str] = field(default_factory=dict)
    end_token_ids: frozenset[int] = frozenset()

    @property
    def asked(self) -> Any:
        """What makes the same request again: SamplingParams, or PoolingParams."""
        return self.params


@dataclass(eq=False, slots=True)
class Completion:
    """One sequence's answer, as it comes into being. Times are seconds of time.perf_counter().

    Attributes:
        sample: index of the completion among those of its request.
        text: once it has finished; None without a tokenizer.
        text_stream: detokenizes token by token, for streams and stop strings.
        num_streamed_tokens: of the completion, in deltas.
        grammar: the engine.features.logits.structured.Grammar that it follows; None after its end.
        thinking: the engine.features.logits.thinking.Thinking, if its form or its budget depends on it.
        logprobs: of each completion token its own log-probability, or where others are wanted {token id:
            log-probability}; None if the request does not ask for them.
        prompt_logprobs: likewise of the prompt's tokens, of a request's first sample only.
        first_needed_logits: position of the first prompt token whose logits prompt_logprobs still needs, so it cannot
            come from the prefix cache; sys.maxsize if none is.
        num_shared_tokens: tokens that the prefix cache gave when it began; -1 before.
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: the stop string or the token of stop_token_ids that ended it.
        error: why finish_reason is or will be "error".
        vector: float32 [size], of a request that asks for one instead of tokens (engine.features.pooling).
    """

    sample: int = 0
    text: str | None = None
    text_stream: Any = None
    num_streamed_tokens: int = 0
    grammar: Any = None
    thinking: Any = None
    logprobs: list[float | dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    first_needed_logits: int = sys.maxsize
    num_shared_tokens: int = -1
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    vector: Any = None
    arrival_time: float = 0.0
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float = 0.0

    @classmethod
    def of(cls, request: Request, sample: int, num_prompt_tokens: int, grammar: Any = None) -> "Completion":
        """An answer that has not begun."""
        params = request.params
        completion = cls(sample, grammar=grammar, logprobs=None if params.logprobs is None else [])
        if params.prompt_logprobs is not None and sample == 0:
            first, end, _ = slice(params.prompt_logprobs_start, None).indices(num_prompt_tokens)
            completion.prompt_logprobs = [None] * max(first, 1)
            if len(completion.prompt_logprobs) < end:
                completion.first_needed_logits = len(completion.prompt_logprobs) - 1
        return completion
