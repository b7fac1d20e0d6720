"""Results before the batch is done: the deltas of a stream, and requests that finish one after the other."""

from collections.abc import Iterator
from itertools import islice, takewhile
from typing import Any, cast

from nanovllm.engine.features.pooling.pooled_sequence import PooledSequence
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.text.outputs import ErrorOutput, FinishReason, RequestOutput, StreamDelta, as_result
from nanovllm.engine.text.pooled_outputs import pooled_output
from nanovllm.engine.text.prompts import Prompt
from nanovllm.engine.text.results import Results, completion_logprobs

# Among the prompts of generate_iter: there is none at the moment, and another may come later.
NO_PROMPT: Any = object()


def new_deltas(seqs: list[Sequence], finished: list[Sequence]) -> Iterator[StreamDelta]:
    """What is new after a step of seqs. finished: those that it completed, with their texts, and those that were
    aborted since the last step."""
    ended = set(finished)
    for seq in dict.fromkeys([*seqs, *finished]):
        completion = seq.completion
        first, start, is_last = seq.num_prompt_tokens, completion.num_streamed_tokens, seq in ended
        end = seq.num_known_tokens - first
        if start == end and not is_last:
            continue
        completion.num_streamed_tokens = end
        delta = StreamDelta(
            index=seq.request.prompt_index,
            sample=completion.sample,
            request_id=seq.request.request_id,
            text=_new_text(seq, is_last),
            token_ids=seq.token_ids[first + start : first + end].tolist(),
            logprobs=completion_logprobs(seq, start, end),
            finish_reason=cast(FinishReason, completion.finish_reason) if is_last else None,
            stop_reason=completion.stop_reason if is_last else None,
        )
        if is_last and completion.error is not None:
            delta["error"] = completion.error
        if isinstance(seq, PooledSequence) and is_last:
            delta["output"] = pooled_output(seq)
        yield as_result(delta)


def _new_text(seq: Sequence, is_last: bool) -> str:
    """A request by hand without `streams` has its whole text in the last delta."""
    completion = seq.completion
    if completion.text_stream is not None:
        return completion.text_stream.take()
    return (completion.text if is_last else None) or ""


class PromptFeed(Results):
    """Takes prompts from an iterable, and returns their results: as they come, or in the prompts' order."""

    def __init__(self, pairs: Iterator[tuple[Prompt, Any]], max_ahead: int | None):
        """max_ahead: in order, prompts taken beyond the last returned result, at most. None: results as they come."""
        super().__init__()
        self.num_taken = 0
        self._pairs = pairs
        self._max_ahead = max_ahead
        self._num_given = 0

    def take(self, num: int) -> list[tuple[Prompt, Any]]:
        """The next prompts, at most num; none if the iterable has ended or gives NO_PROMPT, or results wait for a slow
        one."""
        if self._max_ahead is not None:
            num = min(num, self._num_given + self._max_ahead - self.num_taken)
        batch = list(takewhile(lambda pair: pair[0] is not NO_PROMPT, islice(self._pairs, num)))
        self.num_taken += len(batch)
        return batch

    def refuse(self, index: int, error: Exception) -> None:
        """Make the result of a request that cannot be served."""
        self.ready[index] = self.make_error(error)

    def results(self) -> Iterator[tuple[int, RequestOutput | ErrorOutput]]:
        """Those that may be returned now."""
        while self.ready:
            index = next(iter(self.ready)) if self._max_ahead is None else self._num_given
            if index not in self.ready:
                return
            self._num_given += 1
            yield index, self.ready.pop(index)
