"""What a sequence's completion says of its end."""

import logging
from collections.abc import Collection

from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.sampling.sampler import NON_FINITE

logger = logging.getLogger(__name__)

_NO_TOKEN = frozenset({NON_FINITE})  # It ends every sequence, so that the scheduler finds it at no extra cost.


def end_token_ids(seq: Sequence, eos: frozenset[int]) -> frozenset[int]:
    """The tokens that end a sequence, and NON_FINITE, which stands for none. eos: the model's."""
    params = seq.request.params
    # A complete form is followed by nothing else.
    ends = _NO_TOKEN if params.ignore_eos and params.structured_outputs is None else eos | _NO_TOKEN
    return ends.union(params.stop_token_ids)


def note_end_token(seq: Sequence, token_id: int, eos: Collection[int]) -> None:
    """It ends at one of its end_token_ids, whatever else has ended it before."""
    request, completion = seq.request, seq.completion
    completion.finish_reason = "stop"
    if token_id in request.stop_tokens:
        completion.stop_reason = request.stop_tokens[token_id]
    elif token_id not in eos or (seq.ignore_eos and request.params.structured_outputs is None):
        completion.stop_reason = token_id


def note_failure(seq: Sequence, is_first: bool) -> bool:
    """The sampler found no token for it. Returns whether its keys and values are likely to be wrong too. is_first: of
    the engine's, which is logged."""
    completion = seq.completion
    completion.finish_reason, completion.stop_reason = "error", None
    if completion.error is not None:  # Masks left no token.
        return False
    completion.error = (
        f"the model's logits for the token at position {seq.num_tokens} hold NaN or infinity: its weights are damaged, "
        "or overflow in this dtype; check the checkpoint's files, or try dtype='float32'"
    )
    if is_first:
        text = "request %d: %s (results say so; this is logged once)"
        logger.warning(text, seq.request.request_id, completion.error)
    return True
