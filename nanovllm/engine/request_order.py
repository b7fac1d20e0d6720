"""The order in which the sequences of a batch begin."""

from nanovllm.engine.sequence import Sequence


def longest_first(seqs: list[Sequence], max_seq_len: int, capacity: int, prefix_caching: bool) -> list[Sequence]:
    """Sort by max_tokens, largest first, so that a batch of more than max_num_seqs does not end with a few long ones
    (the LPT rule, Graham 1969). Equals keep their order.

    All keep their order if prompts share their first block and the cache, of `capacity` tokens, cannot hold the whole
    batch: such prompts side by side find the shared blocks before these are evicted.
    """

    limits = {seq: min(seq.max_tokens, max_seq_len) for seq in seqs}
    if len(set(limits.values())) < 2:
        return seqs
    needed = sum(min(seq.num_tokens + limit, max_seq_len) for seq, limit in limits.items())
    if prefix_caching and needed > capacity:
        # Samples of one request share their prompt in any case, and stay side by side.
        requests = {seq.request.request_id: seq for seq in seqs if seq.num_tokens >= seq.block_size}.values()
        if len({seq.token_ids[: seq.block_size].tobytes() for seq in requests}) < len(requests):
            return seqs
    return sorted(seqs, key=limits.__getitem__, reverse=True)
