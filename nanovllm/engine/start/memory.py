"""What a device's memory has room for: the largest step, measured, and the KV cache in what is left."""

import logging
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from nanovllm.config import CPU_KVCACHE_GIB, MAX_SLOTS, Config
from nanovllm.engine.features.columns import Columns, ContextFields
from nanovllm.engine.inputs import ModelInputs
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.layers.stores.store import Store, count_blocks, count_cells, total_bytes
from nanovllm.utils.context import Context
from nanovllm.utils.host_memory import host_memory
from nanovllm.utils.units import GIB

logger = logging.getLogger(__name__)

# Share of a GPU's memory that the KV cache leaves free for what is allocated after it: CUDA graphs, workspaces of
# libraries, and logits if requests ask for more than a temperature.
RESERVED_SHARE = 0.02


def largest_prefill(config: Config, device: torch.device, columns: Sequence[Columns] = ()) -> ModelInputs:
    """The step that needs the most memory. It has the most sequences that a step may have, because each adds a row of
    logits. columns: of the engine."""
    most_tokens = config.max_num_batched_tokens
    num_seqs = min(config.max_num_seqs, most_tokens)
    num_tokens = min(most_tokens, num_seqs * cast(int, config.max_model_len))
    ends = torch.arange(num_seqs + 1, device=device) * num_tokens // num_seqs
    cu_seqlens, seq_len = ends.int(), -(-num_tokens // num_seqs)
    input_ids = torch.randint(config.hf_config.vocab_size, (num_tokens,), device=device)
    positions = torch.arange(num_tokens, device=device) - ends[:-1].repeat_interleave(ends.diff())
    temperatures = torch.zeros(num_seqs, dtype=torch.float32, device=device)
    seeds = torch.zeros(num_seqs, dtype=torch.int64, device=device)
    more = ContextFields()
    for each in columns:
        more |= each.largest_prefill(num_tokens)
    context = Context(True, cu_seqlens, cu_seqlens, seq_len, seq_len, last_tokens=ends[1:] - 1, **more)
    return ModelInputs(input_ids, positions, context, temperatures, seeds, ends[1:] - 1, {})


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


def allocate_stores(
    stores: Sequence[Store], config: Config, device: torch.device, tp: TensorParallel, free_at_start: int
) -> tuple[int, int]:
    """Allocate this rank's stores: as many cells as `count_cells` says, and as many blocks as every rank has room for
    beside them. Returns the numbers of blocks and of cells. Raises MemoryError, with the numbers, if there is no room
    for a block."""
    cell_bytes = sum(store.bytes_per_cell for store in stores)
    blocks, limit = config.num_kvcache_blocks, "num_kvcache_blocks"
    cells = count_cells(cell_bytes, config.max_decode_rows)
    if blocks == -1:
        budget = kv_cache_budget(config, device, free_at_start)
        limit = budget.limit
        if cell_bytes:
            cells = count_cells(cell_bytes, config.max_decode_rows, budget.num_bytes)
            cells = int(tp.all_gather(torch.tensor(cells, device=device)).min())
        room = count_blocks(stores, budget.num_bytes, cells, MAX_SLOTS // config.kvcache_block_size)
        counts = tp.all_gather(torch.tensor(room, device=device)).tolist()
        blocks = min(counts)
        if blocks < 1:
            where = "" if counts[tp.rank] == blocks else f" on rank {counts.index(blocks)}; on rank {tp.rank}"
            beside = f" beside {cells} cells of {cell_bytes / GIB:.3f} GiB for states" if cells else ""
            raise MemoryError(
                f"no room for one KV cache block of {total_bytes(stores, 1, 0) / GIB:.3f} GiB{beside}{where}: "
                f"{budget.reason}; {budget.remedy}"
            )
    capacity, max_model_len = blocks * config.kvcache_block_size, cast(int, config.max_model_len)
    logger.info(
        "KV cache: %d blocks x %d = %d tokens, %.2f GiB of %s (limit: %s); longest sequence: %d tokens (%s)",
        blocks,
        config.kvcache_block_size,
        capacity,
        total_bytes(stores, blocks, 0) / GIB,
        config.kv_cache_dtype,
        limit,
        min(max_model_len, capacity),
        "max_model_len" if max_model_len <= capacity else "the KV cache",
    )
    if device.type == "cpu":
        memory, needed = host_memory().total, total_bytes(stores, blocks, cells)
        if needed > memory:
            raise MemoryError(
                f"{blocks} KV cache blocks take {needed / GIB:.1f} GiB, and this machine has {memory / GIB:.1f} GiB: "
                "lower num_kvcache_blocks or kvcache_gib"
            )
    if cells:
        text = "states: %d cells, %.2f GiB, for %d sequences and for snapshots of prefixes"
        logger.info(text, cells, cells * cell_bytes / GIB, min(cells, config.max_num_seqs))
    for store in stores:
        if description := store.description(blocks):
            logger.info("%s: %s", store.name, description)
        store.allocate(blocks, cells)
    return blocks, cells


def free_stores(stores: Sequence[Store]) -> None:
    """Give back what `allocate_stores` has allocated."""
    for store in stores:
        store.free()
