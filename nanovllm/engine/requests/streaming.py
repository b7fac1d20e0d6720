"""Results before the batch is done: deltas of a stream, and the prompts of an iterable as there is room for them."""

from collections.abc import Iterator
from itertools import islice

from nanovllm.engine.requests.outputs import RequestOutput, StreamDelta, error_output, request_output
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


class DeltaReader:
    """Tells what is new in the sequences of a stream."""

    def __init__(self, requests: list[list[Sequence]]):
        self._places = {
            seq.seq_id: (index, sample) for index, seqs in enumerate(requests) for sample, seq in enumerate(seqs)
        }
        self._num_told = dict.fromkeys(self._places, 0)

    def read(self, seqs: list[Sequence], finished: list[Sequence]) -> Iterator[StreamDelta]:
        """The deltas after a step.

        Args:
            seqs: the step's sequences.
            finished: those that are complete with it, their texts set, or that were aborted since the last step.
        """
        ended = {seq.seq_id for seq in finished}
        stepped = {seq.seq_id for seq in seqs}
        for seq in [*seqs, *(seq for seq in finished if seq.seq_id not in stepped)]:
            start = self._num_told[seq.seq_id]
            end = seq.num_known_tokens - seq.num_prompt_tokens
            is_last = seq.seq_id in ended
            if start < end or is_last:
                self._num_told[seq.seq_id] = end
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
    """Makes each request's result when the last of its samples has finished: while the device works on the others.

    Attributes:
        ready: {index of the request: its result}, in the order in which they were made.
    """

    def __init__(self):
        self.ready: dict[int, RequestOutput] = {}
        self._indexes: dict[int, int] = {}  # of the request with this id
        self._samples: dict[int, list[Sequence]] = {}  # of a request with several, by its id
        self._num_left: dict[int, int] = {}  # those of them that are not finished

    def admit(self, requests: list[list[Sequence] | Exception], start: int = 0) -> None:
        """The samples of each request, or what is wrong with it. start: the first one's index."""
        for index, seqs in enumerate(requests, start):
            if isinstance(seqs, Exception):
                self.ready[index] = error_output(seqs)
                continue
            request_id = seqs[0].request_id
            self._indexes[request_id] = index
            if len(seqs) > 1:
                self._samples[request_id], self._num_left[request_id] = seqs, len(seqs)

    def book(self, finished: list[Sequence]) -> None:
        """Sequences that are complete, their texts set."""
        for seq in finished:
            request_id, samples = seq.request_id, [seq]
            if request_id in self._samples:
                self._num_left[request_id] -= 1
                if self._num_left[request_id]:
                    continue
                del self._num_left[request_id]
                samples = self._samples.pop(request_id)
            self.ready[self._indexes.pop(request_id)] = request_output(samples)


class PromptFeed:
    """Takes prompts from an iterable, and hands out their results: as they come, or in the prompts' order.

    Attributes:
        num_taken: prompts taken so far.
    """

    def __init__(self, pairs: Iterator[tuple[object, SamplingParams]], max_ahead: int | None):
        """max_ahead: in order, prompts taken at most beyond the last result handed out; None for as they come."""
        self.num_taken = 0
        self._pairs = pairs
        self._max_ahead = max_ahead
        self._num_given = 0
        self._results = Results()

    def take(self, num: int) -> list[tuple[object, SamplingParams]]:
        """The next few prompts; none where the iterable has ended, or results pile up behind a slow one."""
        if self._max_ahead is not None:
            num = min(num, self._num_given + self._max_ahead - self.num_taken)
        batch = list(islice(self._pairs, num))
        self.num_taken += len(batch)
        return batch

    def admit(self, requests: list[list[Sequence] | Exception]) -> None:
        """What take() gave last: the samples of each prompt, or what is wrong with it."""
        self._results.admit(requests, self.num_taken - len(requests))

    def book(self, finished: list[Sequence]) -> None:
        """Sequences that are complete, their texts set."""
        self._results.book(finished)

    def results(self) -> Iterator[tuple[int, RequestOutput]]:
        """Those that may go out."""
        ready = self._results.ready
        while ready:
            index = next(iter(ready)) if self._max_ahead is None else self._num_given
            if index not in ready:
                return
            self._num_given += 1
            yield index, ready.pop(index)
