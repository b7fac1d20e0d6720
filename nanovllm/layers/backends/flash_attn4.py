"""Prefill attention by the flash-attn-4 package, which the back ends prefer if it can be used."""

import logging
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from typing import cast

import torch
from torch import Tensor

from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.launch import is_compiling_ahead
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.utils.context import Context
from nanovllm.utils.light_imports import import_without_torch_compile
from nanovllm.utils.optional_packages import OptionalPackage, installed_versions, keep_kernels

logger = logging.getLogger(__name__)

# For more sequences flash-attn-4 compiles further kernels, which takes seconds. Prompts of such batches are too short
# to gain from it.
MAX_SEQS = 256

# Tiles of queries and keys for Hopper with head_dim 128. By default the package uses 128 x 128 and keeps probabilities
# in registers, which takes up to 11 % longer on an H200.
_TILE = {"tile_mn": (192, 96), "mma_pv_is_rs": False}


class FlashAttn4(OptionalPackage):
    """Causal prefill attention by FlashAttention in CuTe (FlashAttention-3's design, arXiv:2407.08608), in bfloat16 and
    float16. `load` every kernel before the first step, which would wait for the compiler otherwise. After the package's
    first error, which is logged, `prefill` returns None.

    Args:
        varlen_func: like flash_attn.cute.flash_attn_varlen_func.
        paged_func: like varlen_func, for keys in pages; None: varlen_func itself.
    """

    name = "flash-attn-4"
    NUM_KERNELS = 2

    def __init__(self, varlen_func: Callable, paged_func: Callable | None = None):
        self.varlen_func = varlen_func
        self.paged_func = paged_func or varlen_func

    def prefill(self, q, k, v, k_cache, v_cache, context: Context, scale: float) -> torch.Tensor | None:
        """`AttentionBackend.prefill`: `[num_tokens, num_heads, head_dim]`, contiguous, or None if the caller has to
        compute it. Raises only torch.OutOfMemoryError.

        In a sequence's last tile of 96 or 128 keys, values past its end are multiplied by 0, not skipped. Without a
        block table these belong to the next sequence: if they are infinite or NaN, they spoil this one's result too.
        """
        starts, ends_of_keys = cast(Tensor, context.cu_seqlens_q), cast(Tensor, context.cu_seqlens_k)
        num_seqs = starts.numel() - 1
        if num_seqs > MAX_SEQS or is_compiling_ahead():  # Compile the fallback.
            return None
        attend = self.varlen_func
        if context.block_tables is None:
            keys = {"cu_seqlens_k": ends_of_keys}
        else:
            attend, k, v = self.paged_func, k_cache, v_cache
            keys = {"seqused_k": ends_of_keys.diff(), "page_table": context.block_tables}
        # max_seqlen_q is left out: on Hopper its only effect is a second compilation for prompts shorter than a tile.
        options = {"cu_seqlens_q": starts, "softmax_scale": scale, "causal": True, **keys}
        return self.attempt(lambda: attend(q, k, v, **options)[0])

    def load(self, shape: AttentionShape, kernel: int) -> None:
        """Compile one of the NUM_KERNELS kernels by calling it: 0 without a block table, 1 with one. Takes seconds, or
        milliseconds if a process has left the kernel on the disk."""
        num_heads, num_kv_heads, head_dim, block_size, dtype, device, _ = shape
        length = 512
        qkv = torch.zeros(length, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        k_cache, v_cache = torch.zeros(2, 2, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)
        tables = torch.zeros(2, -(-length // block_size), dtype=torch.int32, device=device) if kernel else None
        cu_seqlens = torch.tensor([0, 2, length], dtype=torch.int32, device=device)
        context = Context(True, cu_seqlens, cu_seqlens, length - 2, length - 2, block_tables=tables)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Its compiler warns about the package's own code.
            self.prefill(q, k, v, k_cache, v_cache, context, head_dim**-0.5)


def load_kernel(shape: AttentionShape, kernel: int) -> None:
    """`FlashAttn4.load` in a process of its own."""
    with torch.cuda.device(shape.device):
        flash_attn4 = load_flash_attn4(shape.dtype, shape.head_dim, shape.device)
        if flash_attn4 is not None:
            flash_attn4.load(shape, kernel)
            torch.cuda.synchronize()


def load_flash_attn4(dtype: torch.dtype, head_dim: int, device: torch.device) -> FlashAttn4 | None:
    """flash-attn-4, if it is installed and supports this model on this GPU; else None. The import takes seconds. Logs a
    warning if the package is installed but cannot be imported."""
    # Compute capability 9 and 10 are Hopper and data-centre Blackwell. Others have no paged kernel.
    gpu = GpuFacts.of(device)
    if not gpu.is_gpu or gpu.capability[0] not in (9, 10) or dtype not in (torch.bfloat16, torch.float16):
        return None
    if head_dim > 128 or head_dim % 8:
        return None
    keep_kernels()
    try:
        package = import_without_torch_compile(lambda: import_module("flash_attn.cute"))
        flash_attn_varlen_func = package.flash_attn_varlen_func
    except Exception as error:
        # Where flash-attn 2 lies in another folder, before this package on the path, the module is not found either.
        is_missing = isinstance(error, ModuleNotFoundError) and error.name in ("flash_attn", "flash_attn.cute")
        if not is_missing or installed_versions(FlashAttn4.name):
            logger.warning("flash-attn-4 cannot be imported: %s: %s", type(error).__name__, error)
        return None
    in_tiles = _in_our_tiles() if gpu.is_hopper and head_dim == 128 else None
    return FlashAttn4(in_tiles or flash_attn_varlen_func, flash_attn_varlen_func)


def _in_our_tiles() -> Callable | None:
    """The function behind the package's public ones, the only one that accepts a tile. None if it is no longer what it
    was in 4.0.0b36."""
    try:
        forward = import_module("flash_attn.cute.interface")._flash_attn_fwd
        takes_tiles = _TILE.keys() <= signature(forward).parameters.keys()
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    return partial(forward, **_TILE) if takes_tiles else None
