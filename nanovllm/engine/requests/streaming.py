"""Results before the batch is done: the deltas of a stream, and requests that finish one after the other."""

from collections.abc import Iterator
from itertools import islice, takewhile

from nanovllm.engine.requests.outputs import RequestOutput, StreamDelta, error_output, request_output
from nanovllm.engine.requests.prompts import Prompt
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


class DeltaReader:
    """Finds what is new in the sequences of a stream."""

    def __init__(self, requests: list[list[Sequence]]):
        self._places = {
            seq.seq_id: (index, sample) for index, seqs in enumerate(requests) for sample, seq in enumerate(seqs)
        }
        self._num_read = dict.fromkeys(self._places, 0)

    def read(self, seqs: list[Sequence], finished: list[Sequence]) -> Iterator[StreamDelta]:
        """The deltas after a step of seqs. finished: those that it completed, with their texts, and those that were
        aborted since the last step."""
        ended = {seq.seq_id for seq in finished}
        stepped = {seq.seq_id for seq in seqs}
        for seq in [*seqs, *(seq for seq in finished if seq.seq_id not in stepped)]:
            start = self._num_read[seq.seq_id]
            end = seq.num_known_tokens - seq.num_prompt_tokens
            is_last = seq.seq_id in ended
            if start < end or is_last:
                self._num_read[seq.seq_id] = end
                yield self._delta(seq, start, end, is_last)

    def _delta(self, seq: Sequence, start: int, end: int, is_last: bool) -> StreamDelta:
        index, sample = self._places[seq.seq_id]
        first = seq.num_prompt_tokens
        delta = StreamDelta(
            index=index,
            sample=sample,
            request_id=seq.request_id,
            text=None if seq.text_stream is None else seq.text_stream.take(),
            token_ids=seq.tokens[first + start : first + end].tolist(),
            logprobs=None if seq.logprobs is None else seq.logprobs[start:end],
            finish_reason=seq.finish_reason if is_last else None,
            stop_reason=seq.stop_reason if is_last else None,
        )
        if is_last and seq.error is not None:
            delta["error"] = seq.error
        return delta


class Results:
    """Makes each request's result when the last of its samples has finished, while the device works on the others.

    `ready` is {index of the request: its result}, in the order in which they were made.
    """

    def __init__(self) -> None:
        self.ready: dict[int, RequestOutput] = {}
        self._num_admitted = 0
        self._unfinished: dict[int, tuple[int, list[Sequence]]] = {}  # request id -> (index, all samples)
        self._num_left: dict[int, int] = {}  # request id -> unfinished samples

    def admit(self, requests: list[list[Sequence] | Exception]) -> None:
        """The next requests: the samples of each, or what is wrong with it."""
        for index, seqs in enumerate(requests, self._num_admitted):
            if isinstance(seqs, Exception):
                self.ready[index] = error_output(seqs)
                continue
            self._unfinished[seqs[0].request_id] = index, seqs
            self._num_left[seqs[0].request_id] = len(seqs)
        self._num_admitted += len(requests)

    def record(self, finished: list[Sequence]) -> None:
        """Sequences that are complete, with their texts."""
        for seq in finished:
            self._num_left[seq.request_id] -= 1
            if self._num_left[seq.request_id] == 0:
                del self._num_left[seq.request_id]
                index, samples = self._unfinished.pop(seq.request_id)
                self.ready[index] = request_output(samples)


class PromptFeed(Results):
    """Takes prompts from an iterable, and returns their results: as they come, or in the prompts' order."""

    def __init__(self, pairs: Iterator[tuple[Prompt, SamplingParams]], max_ahead: int | None):
        """max_ahead: in order, prompts taken beyond the last returned result, at most. None: results as they come."""
        super().__init__()
        self.num_taken = 0
        self._pairs = pairs
        self._max_ahead = max_ahead
        self._num_given = 0

    def take(self, num: int) -> list[tuple[Prompt, SamplingParams]]:
        """The next prompts, at most num; none if the iterable has ended or gives a None, or results wait for a slow
        one."""
        if self._max_ahead is not None:
            num = min(num, self._num_given + self._max_ahead - self.num_taken)
        batch = list(takewhile(lambda pair: pair[0] is not None, islice(self._pairs, num)))
        self.num_taken += len(batch)
        return batch

    def results(self) -> Iterator[tuple[int, RequestOutput]]:
        """Those that may be returned now."""
        while self.ready:
            index = next(iter(self.ready)) if self._max_ahead is None else self._num_given
            if index not in self.ready:
                return
            self._num_given += 1
            yield index, self.ready.pop(index)
