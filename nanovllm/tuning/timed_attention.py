"""Attention between the products that the tuner times."""

from typing import Any

import numpy as np
import torch

from nanovllm.kernels.attention.qk_norm_rope import qk_norm_rope_store
from nanovllm.layers.attention import Attention
from nanovllm.layers.backends.backend import AttentionShape, StepSizes
from nanovllm.layers.backends.choice import select_backend
from nanovllm.layers.matmul.table import Table
from nanovllm.utils.context import Context

_NUM_BLOCKS = 2  # of each sequence, about the mean of `bench` and `single`. With fewer keys, other constants win.


class TimedAttention:
    """Computes from q, k and v the input of o, as in a decode step whose sequences have two full blocks of keys
    each."""

    def __init__(self, shape: AttentionShape, table: Table, max_tokens: int):
        """table: has the constants of decode attention. max_tokens: the most tokens of a step."""
        self.shape = shape
        self._backend = select_backend("auto", shape)
        num_keys = _NUM_BLOCKS * shape.block_size
        self._backend.prepare(shape, [None], StepSizes(0, num_keys, max_tokens, num_layer_params=1), table)
        heads = shape.num_heads, shape.head_dim, shape.head_dim**-0.5
        self._attn = Attention(*heads, shape.num_kv_heads, self._backend)
        options: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
        cache_shape = _NUM_BLOCKS * max_tokens, shape.block_size, shape.num_kv_heads, shape.head_dim
        self._attn.k_cache, self._attn.v_cache = torch.randn(2, *cache_shape, **options)
        self._norm_weight = torch.ones(shape.head_dim, **options)
        self._num_keys = num_keys
        self._cos_sin_cache = torch.rand(self._num_keys, 1, shape.head_dim, device=shape.device)
        self._positions = torch.full((max_tokens,), self._num_keys - 1, device=shape.device)

    def context(self, num_tokens: int) -> Context:
        """A decode step's context, on the shape's device."""
        device, backend = self.shape.device, self._backend
        host = {
            "context_lens": np.full(num_tokens, self._num_keys, np.int32),
            "block_tables": np.arange(_NUM_BLOCKS * num_tokens, dtype=np.int32).reshape(num_tokens, -1),
        }
        host |= {name: np.zeros(shape, dtype) for name, (shape, dtype) in backend.layout().items()}
        backend.host_arrays(host, num_tokens)
        arrays = {name: torch.from_numpy(values).to(device) for name, values in host.items()}
        seqs = torch.arange(num_tokens, dtype=torch.int32, device=device)
        return Context(
            slot_mapping=(seqs + 1) * self._num_keys - 1,
            context_lens=arrays["context_lens"],
            block_tables=arrays["block_tables"],
            attention=backend.arguments(arrays, num_tokens),
        )

    def __call__(self, qkv: torch.Tensor, context: Context) -> torch.Tensor:
        """qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, perhaps with further columns, overwritten.
        Returns `[num_tokens, num_heads * head_dim]`."""
        num_heads, num_kv_heads, head_dim = self.shape[:3]
        qkv = qkv[:, : (num_heads + 2 * num_kv_heads) * head_dim]
        attn, weight = self._attn, self._norm_weight
        qk_norm_rope_store(
            qkv, weight, weight, 1e-6, self._cos_sin_cache, self._positions[: len(qkv)], attn.k_cache, attn.v_cache,
            context.slot_mapping, None, num_heads, num_kv_heads, pdl=True,
        )  # fmt: skip
        heads = qkv.view(len(qkv), -1, head_dim)
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        return attn.attend(q, k, v, context).flatten(1)
