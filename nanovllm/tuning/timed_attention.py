"""Attention between the products that the tuner times."""

from typing import Any

import numpy as np
import torch

from nanovllm.kernels.attention.decode_plan import PIECE_FIELDS, plan_decode
from nanovllm.layers.attention.attention import Attention
from nanovllm.layers.attention.backends import select_backend
from nanovllm.layers.attention.decode_constants import DecodeConstants
from nanovllm.layers.attention.flash_attn4 import AttentionShape
from nanovllm.layers.attention.qk_norm_rope import qk_norm_rope_store
from nanovllm.layers.matmul.table import Table
from nanovllm.utils.context import Context

_NUM_BLOCKS = 2  # of each sequence, about the mean of `bench` and `single`. With fewer keys, other constants win.


class TimedAttention:
    """From q, k and v to the input of o, as in a decode step whose sequences have two full blocks of keys each."""

    def __init__(self, shape: AttentionShape, table: Table, max_tokens: int):
        """table: has the constants of decode attention. max_tokens: the most tokens of a step."""
        self.shape = shape
        backend = select_backend("auto", shape.device.type, shape.dtype, shape.head_dim, shape.block_size)
        self._constants = DecodeConstants(table, shape.head_dim, shape.dtype, shape.dtype)
        backend.prepare(self._constants, max_tokens, shape)
        self._attn = Attention(shape.head_dim, backend)
        options: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
        cache_shape = _NUM_BLOCKS * max_tokens, shape.block_size, shape.num_kv_heads, shape.head_dim
        self._attn.k_cache, self._attn.v_cache = torch.randn(2, *cache_shape, **options)
        self._norm_weight = torch.ones(shape.head_dim, **options)
        self._num_keys = _NUM_BLOCKS * shape.block_size
        self._cos_sin_cache = torch.rand(self._num_keys, shape.head_dim, device=shape.device)
        self._positions = torch.full((max_tokens,), self._num_keys - 1, device=shape.device)

    def context(self, num_tokens: int, has_keys: bool) -> Context:
        """Of a decode step of so many tokens, on the shape's device. Without keys they are rows of padding."""
        device = self.shape.device
        num_keys = self._num_keys if has_keys else 0
        plan = np.zeros((self._constants.num_pieces(num_tokens, self.shape.num_kv_heads), PIECE_FIELDS), np.int32)
        plan_decode(np.full(num_tokens, num_keys, np.int32), plan)
        seqs = torch.arange(num_tokens, dtype=torch.int32, device=device)
        return Context(
            slot_mapping=(seqs + 1) * num_keys - 1,
            context_lens=torch.full_like(seqs, num_keys),
            block_tables=torch.arange(_NUM_BLOCKS * num_tokens, dtype=torch.int32, device=device).view(num_tokens, -1),
            decode_plans={None: torch.from_numpy(plan).to(device)},
        )

    def __call__(self, qkv: torch.Tensor, context: Context) -> torch.Tensor:
        """qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, overwritten.
        Returns `[num_tokens, num_heads * head_dim]`."""
        num_heads, num_kv_heads, head_dim = self.shape[:3]
        attn, weight = self._attn, self._norm_weight
        qk_norm_rope_store(
            qkv, weight, weight, 1e-6, self._cos_sin_cache, self._positions[: len(qkv)], attn.k_cache, attn.v_cache,
            context.slot_mapping, None, num_heads, num_kv_heads, pdl=True,
        )  # fmt: skip
        heads = qkv.view(len(qkv), -1, head_dim)
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        return attn(q, k, v, context).flatten(1)
