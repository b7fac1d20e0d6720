"""Log-probabilities of tokens under the model's own distribution."""

import torch
from torch import Tensor

from nanovllm.kernels.sampling.logsumexp import logsumexp

# Logits that are converted to float32 at a time: 64 MiB.
_MAX_ELEMENTS = 2**24


def rows_at_once(vocab_size: int) -> int:
    """How many rows of logits to work on at a time."""
    return max(1, _MAX_ELEMENTS // vocab_size)


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int, others: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """log_softmax(logits) in float32, of each row's token, of the likeliest tokens, and of others.

    Args:
        logits: `[batch, vocab_size]`, any float dtype.
        tokens: int64 `[batch]`; the value of a negative one (`kernels.sampling.sampler.NON_FINITE`) means nothing.
        num_top: likeliest tokens of a row; at most the vocabulary.
        others: int64 `[batch, num_others]`, None for none.

    Returns:
        Token ids, int64, and their log-probabilities, float32, both `[batch, 1 + num_top + num_others]`: the row's
        token, then the likeliest, likeliest first, then the others (tokens may come several times).
    """
    num_top = min(num_top, logits.shape[1])
    sums = logsumexp(logits).unsqueeze(1)
    if num_top == 0 and others is None:  # the common case: nothing but the sum reads all logits
        tokens = tokens.unsqueeze(1)
        return tokens, logits.gather(1, tokens.clamp(min=0)).float() - sums
    if others is None:
        others = tokens.new_zeros(len(tokens), 0)
    ids, values = [], []
    size = rows_at_once(logits.shape[1])
    for some, token, other in zip(logits.split(size), tokens.unsqueeze(1).split(size), others.split(size), strict=True):
        some = some.float()
        top = some.topk(num_top, dim=1)
        ids.append(torch.cat((token, top.indices, other), dim=1))
        values.append(torch.cat((some.gather(1, token.clamp(min=0)), top.values, some.gather(1, other)), dim=1))
    return torch.cat(ids), torch.cat(values) - sums
