"""What a device's memory has room for: the largest step, measured, and the KV cache in what is left."""

import torch

from nanovllm.config import CPU_KVCACHE_GIB, Config
from nanovllm.utils.context import Context

GIB = 2**30


def largest_prefill(config: Config, device: torch.device) -> tuple[tuple[torch.Tensor, ...], Context]:
    """The step that takes the most memory: (input_ids, positions, temperatures, seeds, sample positions), and its
    context. As many sequences as a step may hold, so that the logits are at their largest as well."""
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    seq_len = min(config.max_num_batched_tokens // num_seqs, config.max_model_len)
    cu_seqlens = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * seq_len
    input_ids = torch.randint(config.hf_config.vocab_size, (num_seqs * seq_len,), device=device)
    positions = torch.arange(seq_len, device=device).repeat(num_seqs)
    dtypes = (torch.float32, torch.int64, torch.int64)
    sampling = (torch.zeros(num_seqs, dtype=dtype, device=device) for dtype in dtypes)
    context = Context(True, cu_seqlens, cu_seqlens, seq_len, seq_len, last_tokens=cu_seqlens[1:].long() - 1)
    return (input_ids, positions, *sampling), context


def kv_cache_budget(config: Config, device: torch.device) -> tuple[int, str]:
    """Bytes for the KV cache, and in words where they come from. On a GPU the largest step must have run."""
    if config.kvcache_gib is not None or device.type == "cpu":
        gib = config.kvcache_gib or CPU_KVCACHE_GIB
        return int(gib * GIB), f"kvcache_gib is {gib}"
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    peak, current = stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.current"]
    budget = total * config.gpu_memory_utilization - (total - free) - (peak - current)
    return int(budget), (
        f"of {total / GIB:.2f} GiB x gpu_memory_utilization={config.gpu_memory_utilization}, "
        f"{(total - free) / GIB:.2f} GiB are in use (by other processes too) and a step's activations "
        f"take {(peak - current) / GIB:.2f} GiB"
    )
