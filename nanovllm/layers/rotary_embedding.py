"""Rotary position embedding (Su et al. 2021): the table, and the rotation."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from nanovllm.kernels.attention.qk_norm_rope import apply_rotary_emb
from nanovllm.kernels.attention.rotary_embedding import rotary_embedding
from nanovllm.layers.rope_parameters import RopeParameters, rope_parameters

__all__ = ["RotaryEmbedding", "apply_rotary_emb", "get_rope"]

# What `get_rope` has made and somebody still uses. It keeps nothing alive.
_ROPES: "WeakValueDictionary[tuple, RotaryEmbedding]" = WeakValueDictionary()


class RotaryEmbedding(nn.Module):
    """Half-split rotary embedding with a precomputed table; one instance serves all layers with the same settings.

    Args:
        head_size: dimensions of a head. The first rotary_dim of them are rotated.
        max_position_embeddings: positions in the table; every position looked up must be below it.
        base: theta of the paper.
        rope: the checkpoint's scaling, from `rope_parameters`, with this base and rotary_dim; None: none.

    Attributes:
        head_size: as given.
        cos_sin_cache: float32 `[max_position, 1, rotary_dim]`, each position's cosines and then its sines.
        query_scales: float32 `[max_position]`, what queries are multiplied by; None for 1.

    Raises ValueError if rotary_dim is odd, or is not what the scaling says.
    """

    cos_sin_cache: Tensor
    query_scales: Tensor | None

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        rope: RopeParameters | None = None,
    ) -> None:
        super().__init__()
        self.head_size = head_size
        # Without scaling, frequencies are those of a head of rotary_dim that is rotated as a whole.
        size, rope = (rotary_dim, RopeParameters(base)) if rope is None else (head_size, rope)
        if (rope.rotary_dim(size), rope.base) != (rotary_dim, base) or rotary_dim > head_size:
            raise ValueError(
                f"rotary_dim={rotary_dim}, base={base}: of heads of {head_size} the settings rotate "
                f"{rope.rotary_dim(size)}, with base {rope.base}"
            )
        positions = torch.arange(max_position_embeddings, dtype=torch.float32)
        angles = torch.outer(positions, rope.inverse_frequencies(size, max_position_embeddings))
        cache = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_scaling
        self.register_buffer("cos_sin_cache", cache.unsqueeze(1), persistent=False)
        self.register_buffer("query_scales", rope.query_scales(max_position_embeddings), persistent=False)

    @classmethod
    def of(cls, rope: RopeParameters, head_size: int, max_position_embeddings: int) -> "RotaryEmbedding":
        """With a checkpoint's settings."""
        return cls(head_size, rope.rotary_dim(head_size), max_position_embeddings, rope.base, rope)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """query `[num_tokens, num_heads, head_size]` and key `[num_tokens, num_kv_heads, head_size]`, rotated, in new
        tensors. positions: int32 or int64 `[num_tokens]`, each below max_position_embeddings."""
        return rotary_embedding(positions, query, key, self.cos_sin_cache, self.query_scales)


def get_rope(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    rope_scaling: RopeParameters | Mapping[str, Any] | None = None,
) -> RotaryEmbedding:
    """The RotaryEmbedding with these settings on torch's default device. Equal settings share one while it is in use.

    rope_scaling: as config.json has it under this name or under `rope_parameters`; or `RopeParameters`. Raises
    ValueError for settings that are not supported.
    """
    if rope_scaling is not None and not isinstance(rope_scaling, RopeParameters):
        sizes = {"max_position_embeddings": max_position, "partial_rotary_factor": rotary_dim / head_size}
        rope_scaling = rope_parameters(SimpleNamespace(rope_scaling=dict(rope_scaling), rope_theta=base, **sizes))
    example = torch.empty(0, dtype=torch.float32)  # A fake tensor while kernels are traced.
    key = head_size, rotary_dim, max_position, base, rope_scaling, example.device, type(example)
    found = _ROPES.get(key)
    # A model that was moved or converted takes its table along.
    if found is None or (found.cos_sin_cache.device, found.cos_sin_cache.dtype) != (example.device, example.dtype):
        found = _ROPES[key] = RotaryEmbedding(head_size, rotary_dim, max_position, base, rope_scaling)
    return found
