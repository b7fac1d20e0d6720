"""Parts of vision towers in the place of transformers' own. Attention computes all images of a step in one call.

Transformers' Qwen towers call torch's attention once for each image and layer, and rotate queries and keys in a dozen
operations. Those of Gemma hide padding by a mask, for which torch has slower kernels.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.kernels.attention.both_ways import attend_both_ways
from nanovllm.kernels.attention.rotary_embedding import rotary_embedding

NAME = "nanovllm_both_ways"  # of `attend_in_rows` among transformers' functions


class ImageRanges(NamedTuple):
    """Where each image of a batch is among its patches.

    Attributes:
        starts, ends: int32 [num_images], on the tower's device.
        max_length: patches of the largest one.
    """

    starts: Tensor
    ends: Tensor
    max_length: int


class RotaryTowerAttention(nn.Module):
    """Attention of a layer of Qwen's towers, with the parameters of transformers' module, which it replaces.

    Args:
        theirs: that module.
    """

    def __init__(self, theirs: Any):
        super().__init__()
        self.qkv, self.proj = theirs.qkv, theirs.proj
        self._num_heads, self._scale = theirs.num_heads, theirs.scaling

    def forward(
        self,
        hidden_states: Tensor,
        *,
        images: ImageRanges,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> Tensor:
        """hidden_states: [num_patches, hidden_size]. position_embeddings: cosines and sines, float32 [num_patches,
        head_dim], of which the second half is the first one again."""
        qkv = self.qkv(hidden_states).unflatten(1, (3, self._num_heads, -1))
        half = qkv.shape[-1] // 2
        table = torch.cat([part[:, :half].float() for part in position_embeddings], dim=1).unsqueeze(1)
        at = torch.arange(len(qkv), device=qkv.device)
        q, k = rotary_embedding(at, qkv[:, 0], qkv[:, 1], table)
        return self.proj(attend_both_ways(q, k, qkv[:, 2], *images, self._scale).flatten(1))


class PatchProduct(nn.Module):
    """The first layer of Qwen's towers, a product: transformers has it as a convolution of each patch alone, for which
    libraries have slow kernels.

    Args:
        theirs: transformers' module, whose parameters this has.
    """

    def __init__(self, theirs: Any):
        super().__init__()
        self.proj = theirs.proj

    def forward(self, pixels: Tensor) -> Tensor:
        """[num_patches, channels * frames * patch_size ** 2] -> [num_patches, hidden_size]."""
        return F.linear(pixels, self.proj.weight.flatten(1), self.proj.bias)


def attend_in_rows(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Transformers' interface: of `[num_images, num_heads, num_patches, head_dim]`, the result as `[num_images,
    num_patches, num_heads, head_dim]`. attention_mask: bool `[num_images, num_patches]`, True up to an image's padding;
    None without padding."""
    num_images, num_patches = query.shape[0], query.shape[2]
    starts = torch.arange(num_images, dtype=torch.int32, device=query.device) * num_patches
    lengths = num_patches if attention_mask is None else attention_mask.sum(1, dtype=torch.int32)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    found = attend_both_ways(q, k, v, starts, starts + lengths, num_patches, scaling)
    return found.unflatten(0, (num_images, num_patches)), None


def attention_options() -> dict[str, Any]:
    """What transformers' `from_config` is told, so that a tower attends by `attend_in_rows`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend_in_rows)
    AttentionMaskInterface.register(NAME, _mask_of_rows)
    return {"attn_implementation": NAME, "dtype": torch.get_default_dtype()}


def _mask_of_rows(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    return attention_mask
