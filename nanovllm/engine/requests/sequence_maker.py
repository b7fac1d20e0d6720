"""From checked requests to the sequences that the scheduler queues, and the order in which a batch begins."""

import dataclasses
from itertools import count

from xxhash import xxh64_intdigest

from nanovllm.engine.requests.detokenizer import Detokenizer, TextStream
from nanovllm.engine.requests.request_checker import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


class SequenceMaker:
    """Gives requests and sequences their ids and seeds. `num_requests` so far is the next request's id."""

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
                seq.text_stream = TextStream(self._detokenizer, params)
            seqs.append(seq)
            if params.prompt_logprobs is not None and params.n > 1:
                params = dataclasses.replace(params, prompt_logprobs=None)  # The first sample's are all the others'.
        return seqs

    def make_all(
        self, requests: list[Request | Exception], params: list[SamplingParams], streams: bool = False
    ) -> list[list[Sequence] | Exception]:
        """The samples of each request, or the exception that says why it cannot be served."""
        return [
            request if isinstance(request, Exception) else self.make(request, each, streams)
            for request, each in zip(requests, params, strict=True)
        ]


def _hash_seed(number: int, seed: int) -> int:
    return xxh64_intdigest(number.to_bytes(8, "little"), seed) >> 1


def longest_first(seqs: list[Sequence], max_seq_len: int, capacity: int, prefix_caching: bool) -> list[Sequence]:
    """Sort by max_tokens, largest first, so that a batch of more than max_num_seqs does not end with a few long ones
    (the LPT rule, Graham 1969). Equals keep their order.

    All keep their order if prompts share their first block and the cache, of `capacity` tokens, cannot hold the whole
    batch: such prompts side by side find the shared blocks before these are evicted.
    """

    def limit(seq: Sequence) -> int:
        return min(seq.max_tokens, max_seq_len)

    if len(set(map(limit, seqs))) < 2:
        return seqs
    needed = sum(min(seq.num_tokens + limit(seq), max_seq_len) for seq in seqs)
    if prefix_caching and needed > capacity:
        # Samples of one request share their prompt in any case, and stay side by side.
        requests = {seq.request_id: seq for seq in seqs if seq.num_tokens >= seq.block_size}.values()
        if len({seq.tokens[: seq.block_size].tobytes() for seq in requests}) < len(requests):
            return seqs
    return sorted(seqs, key=limit, reverse=True)
