"""The order in which the requests of a batch begin."""

from nanovllm.engine.sequence import Sequence


def longest_first(seqs: list[Sequence], max_seq_len: int, capacity: int, prefix_caching: bool) -> list[Sequence]:
    """The sequences with the most tokens to generate ahead, as far as their parameters tell, so that a batch of more
    than max_num_seqs does not end with a few of them (the LPT rule, Graham 1969). Equals stay in the given order.

    All stay in it where prompts begin with the same block and the cache cannot hold all that the batch may become:
    whoever put prompts of one beginning side by side did well, for by the time that a late one came, its beginning
    would have made room for others.

    Args:
        seqs: none of them begun.
        max_seq_len: tokens of the longest sequence that the engine can hold.
        capacity: token slots of the KV cache.
        prefix_caching: whether equal beginnings share blocks.
    """

    def limit(seq: Sequence) -> int:
        return min(seq.max_tokens, max_seq_len)

    if len(set(map(limit, seqs))) < 2:
        return seqs
    needed = sum(min(seq.num_tokens + limit(seq), max_seq_len) for seq in seqs)
    if prefix_caching and needed > capacity and _share_beginnings(seqs):
        return seqs
    return sorted(seqs, key=limit, reverse=True)


def _share_beginnings(seqs: list[Sequence]) -> bool:
    """Whether two requests begin with the same block; the samples of one, which follow each other in any case, don't
    count."""
    requests = {seq.request_id: seq for seq in seqs if seq.num_tokens >= seq.block_size}.values()
    beginnings = {seq.tokens[: seq.block_size].tobytes() for seq in requests}
    return len(beginnings) < len(requests)
