"""Images that attend in both directions, with the same bits in each step: of `deterministic=True`."""

import numpy as np
import torch

from nanovllm.layers.backends.backend import AttentionBackend
from nanovllm.layers.backends.fixed_order_torch import SCORES_AT_ONCE, attend_rows, padded
from nanovllm.layers.backends.fixed_order_triton import FixedOrderTritonBackend
from nanovllm.layers.backends.image_attention import ImageAttention


def fixed_order_images(backend: AttentionBackend) -> ImageAttention:
    """Over a back end that is batch-invariant."""
    if isinstance(backend, FixedOrderTritonBackend):
        return FixedOrderTritonImages(backend)
    return FixedOrderImageAttention(backend)


class FixedOrderTritonImages(ImageAttention):
    """On a GPU: the back end's own kernel, in which an image's tokens see keys up to the image's end."""

    def prefill(self, layer, q, k, v, context):
        # Of last tokens alone: the last one of an image sees no later key anyway.
        images = None if context.max_seqlen_q == 1 else context.images
        ends = {} if images is None else {"ends": images.ends}
        return self._backend.prefill(layer, q, k, v, context, **ends)


class FixedOrderImageAttention(ImageAttention):
    """On a CPU. Each token of an image is a row of its own, as in `FixedOrderTorchBackend`. Its keys begin and end
    where those of its image do, whichever of the image's tokens a step computes: those from the first one that a token
    of the image sees, padded to a number that follows from how many they are. A mask hides what is outside the token's
    window."""

    def _attend(self, layer, q, k, v, context, span, out):
        # The last token sees no later key, and the back end has computed it. In a step of last tokens alone it does so
        # as well.
        num_queries = span.length - 1
        window, end = layer.window, span.end
        start = 0 if window is None else max(0, span.image_start + 1 - window)
        seen = slice(span.first_key(window) - start, end - start)
        shape = padded(end - start), *k.shape[1:]
        keys, values = torch.zeros(shape), torch.zeros(shape)  # What is masked must be finite.
        for x, some in zip((keys, values), self._seen(layer, k, v, context, span, torch.float32), strict=True):
            x[seen] = some
        at = np.arange(len(keys)) + start
        at_once = max(1, SCORES_AT_ONCE // len(keys))
        for first in range(0, num_queries, at_once):
            position = span.position + np.arange(first, min(num_queries, first + at_once))[:, None]
            is_seen = (at < end) if window is None else (at < end) & (at > position - window)
            mask = np.where(np.broadcast_to(is_seen, (len(position), len(at))), np.float32(0), np.float32(-np.inf))
            rows = slice(span.row + first, span.row + first + len(position))
            own_keys, own_values = (x.expand(len(position), *shape) for x in (keys, values))
            out[rows] = attend_rows(q[rows], own_keys, own_values, torch.from_numpy(mask[:, None, None]), layer)
