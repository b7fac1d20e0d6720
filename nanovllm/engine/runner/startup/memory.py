"""What a device's memory has room for: the largest step, measured, and the KV cache in what is left."""

import logging
import math
import mmap
from contextlib import suppress
from typing import NamedTuple

import torch

from nanovllm.config import CPU_KVCACHE_GIB, MAX_SLOTS, Config
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.hf_config import get_head_dim
from nanovllm.models.model_size import GIB
from nanovllm.utils.context import Context
from nanovllm.utils.host_memory import host_memory

logger = logging.getLogger(__name__)

# Share of a GPU's memory that the KV cache leaves free for what is allocated after it: CUDA graphs, workspaces of
# libraries, and logits if requests ask for more than a temperature.
RESERVED_SHARE = 0.02


def largest_prefill(config: Config, device: torch.device) -> tuple[tuple[torch.Tensor, ...], Context]:
    """The step that takes the most memory: (input_ids, positions, temperatures, seeds, sample positions), and its
    context. It has as many sequences as a step may hold, so that the logits are at their largest as well."""
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    num_tokens = min(config.max_num_batched_tokens, num_seqs * config.max_model_len)
    ends = torch.arange(num_seqs + 1, device=device) * num_tokens // num_seqs
    cu_seqlens, seq_len = ends.int(), -(-num_tokens // num_seqs)
    input_ids = torch.randint(config.hf_config.vocab_size, (num_tokens,), device=device)
    positions = torch.arange(num_tokens, device=device) - ends[:-1].repeat_interleave(ends.diff())
    dtypes = (torch.float32, torch.int64, torch.int64)
    sampling = (torch.zeros(num_seqs, dtype=dtype, device=device) for dtype in dtypes)
    context = Context(True, cu_seqlens, cu_seqlens, seq_len, seq_len, last_tokens=ends[1:] - 1)
    return (input_ids, positions, *sampling), context


class CacheBudget(NamedTuple):
    """Bytes for the KV cache."""

    num_bytes: int
    limit: str  # the option that they come from, or "free memory" if that is less
    reason: str  # the numbers that they come from, in words
    remedy: str  # what to do if they are too few


def free_memory(device: torch.device) -> int:
    """Free bytes of a GPU, after torch's allocator has given back what it only keeps for later; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def kv_cache_budget(config: Config, device: torch.device, free_at_start: int) -> CacheBudget:
    """What gpu_memory_utilization leaves for the KV cache, at most what is free. On a GPU, run the largest step before.
    free_at_start: `free_memory` when the engine began; what has gone since is the engine's own."""
    if config.kvcache_gib is not None or device.type == "cpu":
        gib = config.kvcache_gib or CPU_KVCACHE_GIB
        return CacheBudget(int(gib * GIB), "kvcache_gib", f"kvcache_gib is {gib}", "raise kvcache_gib")
    free = free_memory(device)
    total = torch.cuda.mem_get_info(device)[1]
    stats = torch.cuda.memory_stats(device)
    activations = stats["allocated_bytes.all.peak"] - stats["allocated_bytes.all.current"]
    own = max(0, free_at_start - free)  # Negative where another process has ended meanwhile.
    within_limit = int(total * config.gpu_memory_utilization) - own - activations
    reserved = int(total * RESERVED_SHARE)
    within_free = free - activations - reserved
    uses = f"this engine uses {own / GIB:.2f} GiB already, and a step's activations take {activations / GIB:.2f} GiB"
    if within_limit <= within_free:
        return CacheBudget(
            within_limit,
            "gpu_memory_utilization",
            f"this engine's limit is {total / GIB:.2f} GiB x gpu_memory_utilization={config.gpu_memory_utilization}, "
            + uses,
            "raise gpu_memory_utilization, set kvcache_gib, or lower max_num_batched_tokens",
        )
    return CacheBudget(
        within_free,
        "free memory",
        f"of the GPU's {total / GIB:.2f} GiB other processes and engines hold {(total - own - free) / GIB:.2f} GiB, "
        f"{uses}, and {reserved / GIB:.2f} GiB stay free for CUDA graphs",
        "end what else holds the GPU's memory, or lower max_num_batched_tokens",
    )


def allocate_kv_cache(
    config: Config, num_layers: int, num_kv_heads: int, device: torch.device, tp: TensorParallel, free_at_start: int
) -> torch.Tensor:
    """This rank's KV cache, [2, layers, blocks, block_size, kv_heads, head_dim], of as many blocks as every rank has
    room for. Raises MemoryError, with the numbers, if there is no room for one."""
    block_shape = (config.kvcache_block_size, num_kv_heads, get_head_dim(config.hf_config))
    block_bytes = 2 * num_layers * math.prod(block_shape) * config.kv_cache_dtype.itemsize
    blocks, limit = config.num_kvcache_blocks, "num_kvcache_blocks"
    if blocks == -1:
        budget = kv_cache_budget(config, device, free_at_start)
        limit = budget.limit
        counts = tp.all_gather(torch.tensor(budget.num_bytes // block_bytes, device=device)).tolist()
        blocks = min(*counts, MAX_SLOTS // config.kvcache_block_size)
        if blocks < 1:
            where = "" if counts[tp.rank] == blocks else f" on rank {counts.index(blocks)}; on rank {tp.rank}"
            raise MemoryError(
                f"no room for one KV cache block of {block_bytes / GIB:.3f} GiB{where}: {budget.reason}; "
                f"{budget.remedy}"
            )
    capacity = blocks * config.kvcache_block_size
    logger.info(
        "KV cache: %d blocks x %d = %d tokens, %.2f GiB of %s (limit: %s); longest sequence: %d tokens (%s)",
        blocks,
        config.kvcache_block_size,
        capacity,
        blocks * block_bytes / GIB,
        config.kv_cache_dtype,
        limit,
        min(config.max_model_len, capacity),
        "max_model_len" if config.max_model_len <= capacity else "the KV cache",
    )
    shape = (2, num_layers, blocks, *block_shape)
    if device.type == "cpu":
        memory = host_memory().total
        if blocks * block_bytes > memory:
            raise MemoryError(
                f"{blocks} KV cache blocks take {blocks * block_bytes / GIB:.1f} GiB, and this machine has "
                f"{memory / GIB:.1f} GiB: lower num_kvcache_blocks or kvcache_gib"
            )
        return _zeros_when_touched(blocks * block_bytes).view(config.kv_cache_dtype).view(shape)
    return torch.zeros(shape, dtype=config.kv_cache_dtype, device=device)


def _zeros_when_touched(num_bytes: int) -> torch.Tensor:
    """uint8 zeros on the host. A page becomes memory when it is written, because to write gigabytes of zeros would take
    seconds. Raises MemoryError if the system refuses.

    The pages are small ones (4 KiB). In one of 2 MiB a sequence's first tokens in one layer would cost the time to fill
    all of it with zeros: docs/notebook.md, "On a CPU".
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        remedy = "lower num_kvcache_blocks or kvcache_gib"
        raise MemoryError(f"no {num_bytes / GIB:.1f} GiB for the KV cache ({error}): {remedy}") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux, which may be set to use large pages unasked
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
