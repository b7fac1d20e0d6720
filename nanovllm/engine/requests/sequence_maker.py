"""SequenceMaker: from checked requests to the sequences that the scheduler queues."""

import dataclasses
from itertools import count

from xxhash import xxh64_intdigest

from nanovllm.engine.requests.detokenizer import Detokenizer
from nanovllm.engine.requests.request_checker import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


class SequenceMaker:
    """Gives requests and sequences their ids and seeds.

    Attributes:
        num_requests: so far, which is the next one's id.
    """

    def __init__(self, block_size: int, seed: int, detokenizer: Detokenizer | None):
        """seed: of requests that name none, each of which gets one of its own."""
        self.num_requests = 0
        self._seq_ids = count()
        self._block_size = block_size
        self._seed = seed
        self._detokenizer = detokenizer

    def make(self, request: Request, params: SamplingParams, streams: bool = False) -> list[Sequence]:
        """The n samples of a request. Each has a seed of its own, the first one the request's. streams: whether their
        text is wanted as it comes."""
        request_id = self.num_requests
        self.num_requests += 1
        # A hash and not a sum, so that neighbouring requests do not draw from related streams.
        seed = _hash_seed(request_id, self._seed) if params.seed is None else params.seed
        seqs = []
        for sample in range(params.n):
            grammar = request.grammar and request.grammar.fresh()
            edits = request.logit_edits
            seq = Sequence(next(self._seq_ids), request.token_ids, params, self._block_size, seed, grammar, edits)
            seq.request_id = request_id
            if sample:
                seq.seed = _hash_seed(sample, seed)
            if self._detokenizer is not None and (streams or params.stop):
                seq.text_stream = self._detokenizer.stream(params)
            seqs.append(seq)
            if params.prompt_logprobs is not None and params.n > 1:
                params = dataclasses.replace(params, prompt_logprobs=None)  # The first sample's are all the others'.
        return seqs

    def make_all(
        self, requests: list[Request | Exception], params: list[SamplingParams], streams: bool = False
    ) -> list[list[Sequence] | Exception]:
        """The samples of each request; of one that cannot be served, the exception that says why."""
        return [
            request if isinstance(request, Exception) else self.make(request, each, streams)
            for request, each in zip(requests, params, strict=True)
        ]


def _hash_seed(number: int, seed: int) -> int:
    return xxh64_intdigest(number.to_bytes(8, "little"), seed) >> 1
