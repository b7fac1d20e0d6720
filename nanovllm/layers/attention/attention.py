"""Attention over the paged KV cache: the layer, and what it asks of a back end."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.layers.matmul.table import Table
from nanovllm.utils.context import Context

Layout = dict[str, tuple[tuple[int, ...], type]]  # name of an array -> (shape, numpy dtype)


class AttentionShape(NamedTuple):
    """What attention is computed for. The heads are this rank's."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    cache_dtype: torch.dtype | None = None  # float8_e4m3fn for an fp8 KV cache; None for dtype

    @property
    def is_fp8_cache(self) -> bool:
        return self.cache_dtype not in (None, self.dtype)


class StepSizes(NamedTuple):
    """How large a step can be, and what a layer does for each of its tokens."""

    max_num_batched_tokens: int  # of a prefill
    max_model_len: int
    max_rows: int  # of a decode or mixed step
    num_layer_params: int  # parameters of a layer on this rank, of experts only those that a token uses
    max_group_rows: int = 1  # rows of one sequence in a speculative step; 1 without speculation


class AttentionBackend(ABC):
    """Computes attention. The engine chooses one at its start, by `backends.select_backend`.

    A back end may need more of a step than the context holds. It declares arrays of its own in `layout`, fills them in
    `host_arrays`, and makes of them in `arguments` what its `decode` finds in `Context.attention`. The arrays reach the
    device in the same copy as the others.

    Attributes:
        name: the value of the option `attention_backend` that selects it.
        supports_cuda_graphs: whether a decode step can be captured.
        shares_reads: whether the rows of one sequence in a speculative step share what they read, and such steps have
            arrays and CUDA graphs of their own for it. Known after `prepare`.
    """

    name: str
    supports_cuda_graphs = True
    shares_reads = False

    @property
    def description(self) -> str:
        return self.name

    @classmethod
    @abstractmethod
    def obstacle(cls, shape: AttentionShape) -> str | None:
        """Why it cannot run here, in words; None if it can."""

    def prepare(self, shape: AttentionShape, windows: Sequence[int | None], sizes: StepSizes, table: Table) -> None:
        """Allocate what all layers of this shape and steps share. Called once, before the first step.

        Args:
            windows: each window that such a layer has, once.
            table: settings that were measured on this GPU.
        """
        return None

    def layout(self) -> Layout:
        """Its own arrays of the largest decode step, if it has some. Their memory on the device stays where it is."""
        return {}

    def host_arrays(self, arrays: dict[str, np.ndarray], num_rows: int) -> dict[str, np.ndarray]:
        """Fill its arrays for a decode step on the host.

        Args:
            arrays: the step's `context_lens` and `block_tables`, filled, and all of `layout`. In a speculative step, if
                the back end `shares_reads`, also `group_rows`, as in `decode_plan.RowGroups.of`: rows of one sequence.
            num_rows: rows of the step, padding included.

        Returns:
            Of each array the beginning, in every dimension, that `arguments` reads.
        """
        return {}

    def arguments(self, arrays: dict[str, Tensor], num_rows: int, shares_reads: bool = False) -> Any:
        """`Context.attention` of a decode step. Where it runs for a CUDA graph, later steps replace the content.

        Args:
            arrays: the step's and those of `layout`, all of them, on the device.
            shares_reads: whether `host_arrays` had group_rows.
        """
        return None

    @abstractmethod
    def prefill(self, layer: "Attention", q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """`layer.forward` of the flat batch of new tokens, each to the keys up to its own. k and v hold the numbers
        that the caches hold of them."""

    @abstractmethod
    def decode(self, layer: "Attention", q: Tensor, context: Context) -> Tensor:
        """`layer.forward` of one token a row to its context_lens keys; zeros if that is 0."""


class Attention(nn.Module):
    """Causal grouped-query attention of one layer, over its slices of the KV cache.

    Args:
        window: the number of keys that a token attends to, its own included (sliding-window attention); None: all.
        scale: factor of the scores; None: `head_dim ** -0.5`.
        sinks: `[num_heads]` of this rank, as in `kernels.attention.paged_cache`; None: none. They are another module's
            parameter.

    Attributes:
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], of q's dtype or float8_e4m3fn, set by the
            KV cache's store; None until then (the warm-up runs without a cache).
        kv_scales: float32 [2, num_kv_heads], of the keys and of the values in a float8 cache; None for any other.
    """

    sinks: Tensor | None

    def __init__(
        self,
        head_dim: int,
        backend: AttentionBackend,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ):
        super().__init__()
        vars(self)["sinks"] = sinks  # past nn.Module, which would list them a second time
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.backend = backend
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None
        self.kv_scales: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attend. The step's new keys and values are in their slots already: `qk_norm_rope_store` wrote them.

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]; of the step's new tokens,
        after RoPE, any stride between tokens. context: the step's; if q has the last tokens only, its
        `of_last_tokens()`. Returns a tensor like q.
        """
        if context.is_prefill:
            return self.backend.prefill(self, q, k, v, context)
        return self.backend.decode(self, q, context)
