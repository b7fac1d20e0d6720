"""Log-probabilities of tokens under the model's own distribution."""

import torch
from torch import Tensor

# Logits that are converted to float32 at a time: 64 MiB.
_MAX_ELEMENTS = 2**24


def rows_at_once(vocab_size: int) -> int:
    """How many rows of logits to work on at a time."""
    return max(1, _MAX_ELEMENTS // vocab_size)


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """log_softmax(logits) in float32, of each row's token and of the likeliest tokens.

    Args:
        logits: `[batch, vocab_size]`, any float dtype.
        tokens: int64 `[batch]`; the value of a negative one (`kernels.sampling.sampler.NON_FINITE`) means nothing.
        num_top: likeliest tokens of a row; at most the vocabulary.

    Returns:
        Token ids, int64, and their log-probabilities, float32, both `[batch, 1 + num_top]`: the row's token, then
        the likeliest, likeliest first (it may be among them).
    """
    num_top = min(num_top, logits.shape[1])
    ids, values = [], []
    size = rows_at_once(logits.shape[1])
    for some, token in zip(logits.split(size), tokens.unsqueeze(1).split(size), strict=True):
        some = some.float()
        top = some.topk(num_top, dim=1)
        ids.append(torch.cat((token, top.indices), dim=1))
        chosen = torch.cat((some.gather(1, token.clamp(min=0)), top.values), dim=1)
        values.append(chosen - some.logsumexp(dim=1, keepdim=True))
    return torch.cat(ids), torch.cat(values)
