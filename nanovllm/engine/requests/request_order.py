"""The order in which the requests of a batch begin."""

from nanovllm.engine.sequence import Sequence


def longest_first(seqs: list[Sequence], max_seq_len: int, capacity: int, prefix_caching: bool) -> list[Sequence]:
    """Sort by max_tokens, largest first, so that a batch of more than max_num_seqs does not end with a few long ones
    (the LPT rule, Graham 1969). Equals keep their order.

    All keep their order where prompts share their first block and the cache cannot hold the whole batch: such prompts
    side by side find the shared blocks before these are evicted.

    Args:
        seqs: none of them begun.
        max_seq_len: tokens of the longest sequence that the engine can hold.
        capacity: tokens that the KV cache can hold.
        prefix_caching: whether equal beginnings share blocks.
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
