"""ImageAttention: a back end under which the tokens of an image attend to each other in both directions."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.backends.backend import AttentionBackend
from nanovllm.layers.backends.torch_backend import gather


class ImageSpan(NamedTuple):
    """Tokens of an image, to its last one, that a prefill computes. Earlier ones are in the cache.

    Attributes:
        row: of the first one, in the batch.
        length: how many there are.
        position: of the first one, in its sequence.
        seq: index of the sequence in the step.
        image_start: position of the image's first token, which may be in the cache.
    """

    row: int
    length: int
    position: int
    seq: int
    image_start: int

    @property
    def end(self) -> int:
        """Position behind the image's last token."""
        return self.position + self.length

    def first_key(self, window: int | None) -> int:
        """Position of the first key that a token of the span sees."""
        return 0 if window is None else max(0, self.position + 1 - window)


class ImageAttention:
    """Calls another back end, and then computes the tokens of the context's images anew: each sees all keys up to the
    image's end, within its layer's window. In plain torch, because images are few and short."""

    def __init__(self, backend: AttentionBackend):
        self._backend = backend

    def decode(self, layer: Any, q: Tensor, context: Any) -> Tensor:
        return self._backend.decode(layer, q, context)

    def prefill(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, context: Any) -> Tensor:
        out = self._backend.prefill(layer, q, k, v, context)
        # Of last tokens alone: the last one of an image sees no later key anyway.
        spans = () if context.images is None or context.max_seqlen_q == 1 else context.images.spans
        for span in spans:
            self._attend(layer, q, k, v, context, span, out)
        return out

    def _attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, context: Any, span: ImageSpan, out: Tensor) -> None:
        window, first, end = layer.window, span.first_key(layer.window), span.end
        keys, values = self._seen(layer, k, v, context, span, q.dtype)
        mask = None
        if window is not None and window < end - first:
            mask = torch.ones(span.length, end - first, dtype=torch.bool, device=q.device)
            mask = mask.triu(span.position - first + 1 - window)
        rows = slice(span.row, span.row + span.length)
        queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q[rows], keys, values))
        options: Any = {"attn_mask": mask, "scale": layer.scale, "enable_gqa": True}
        found = F.scaled_dot_product_attention(queries, keys, values, **options)
        out[rows] = found.squeeze(0).transpose(0, 1)

    @staticmethod
    def _seen(
        layer: Any, k: Tensor, v: Tensor, context: Any, span: ImageSpan, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Keys and values from the first one that the span sees to the image's end, [num_keys, num_kv_heads, head_dim].
        dtype: of those that come from a cache."""
        first, end = span.first_key(layer.window), span.end
        if context.block_tables is None:  # The batch has the whole sequence.
            start = span.row - span.position
            return k[start + first : start + end], v[start + first : start + end]
        positions = torch.arange(first, end, device=k.device)
        size, scales = layer.k_cache.shape[1], layer.kv_scales
        slots = context.block_tables[span.seq].long()[positions // size] * size + positions % size
        caches = zip((layer.k_cache, layer.v_cache), (None, None) if scales is None else scales, strict=True)
        keys, values = (gather(cache, slots, of_cache, dtype) for cache, of_cache in caches)
        return keys, values
