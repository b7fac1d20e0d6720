"""AttentionBackend: what computes attention, and what it needs to know of a step."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

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


class AttentionLayer(Protocol):
    """What a back end reads of a layer: see `layers.attention.Attention`."""

    scale: float
    window: int | None
    sinks: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    kv_scales: Tensor | None


class AttentionBackend(ABC):
    """Computes attention. The engine chooses one at its start, by `backends.select_backend`.

    A back end may need more of a step than the context holds. It declares arrays of its own in `layout`, fills them in
    `host_arrays`, and makes of them in `arguments` what its `decode` finds in `Context.attention`. One copy sends
    all arrays of a step to the device.

    Attributes:
        name: the value of the option `attention_backend` that selects it.
        supports_cuda_graphs: whether a decode step can be captured.
        shares_reads: whether the rows of one sequence in a speculative step share what they read, and such steps have
            arrays and CUDA graphs of their own for it. Known after `prepare`.
        is_batch_invariant: whether a token's result has the same bits in each step that could compute it: a prefill of
            any tokens beside it, with any of those before it in the cache, and a decode step of any rows.
    """

    name: str
    supports_cuda_graphs = True
    shares_reads = False
    is_batch_invariant = False

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

    def arguments(self, arrays: dict[str, Tensor], num_rows: int, shares_reads: bool = False) -> object:
        """`Context.attention` of a decode step. Where it runs for a CUDA graph, later steps replace the content.

        Args:
            arrays: the step's and those of `layout`, all of them, on the device.
            shares_reads: whether `host_arrays` had group_rows.
        """
        return None

    @abstractmethod
    def prefill(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """`layer.attend` of the flat batch of new tokens, each to the keys up to its own. k and v hold the numbers
        that the caches hold of them."""

    @abstractmethod
    def decode(self, layer: AttentionLayer, q: Tensor, context: Context) -> Tensor:
        """`layer.attend` of one token a row to its context_lens keys; zeros if that is 0. Where `Context.attention` is
        None, no engine drives the layer: the back end makes what it needs of the step itself, prepared or not."""
