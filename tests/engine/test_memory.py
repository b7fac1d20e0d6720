"""The step whose memory is measured before the KV cache takes the rest, and what that rest is."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from nanovllm.engine.start import memory
from nanovllm.engine.start.memory import (
    GIB,
    RESERVED_SHARE,
    allocate_stores,
    free_memory,
    kv_cache_budget,
    largest_prefill,
)
from nanovllm.layers.attention import Attention
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.layers.stores.paged_kv_cache import PagedKVCache


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_tokens"),
    [
        (512, 16384, 4096, 16384),
        (512, 1023, 4096, 1023),
        (600, 1024, 4096, 1024),
        (3, 1024, 4096, 1024),
        (3, 1024, 100, 300),
        (8, 5, 100, 5),
        (1, 1, 1, 1),
    ],
)
def test_no_step_has_more_tokens(max_num_seqs, max_num_batched_tokens, max_model_len, num_tokens):
    config = SimpleNamespace(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        hf_config=SimpleNamespace(vocab_size=50),
    )
    input_ids, positions, context, *sampling, _ = largest_prefill(config, torch.device("cpu"))
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    ends = context.cu_seqlens_q.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    assert (len(input_ids), len(lengths), ends[-1]) == (num_tokens, num_seqs, num_tokens)
    assert 1 <= min(lengths) <= max(lengths) == context.max_seqlen_q <= max_model_len
    assert positions.tolist() == [i for length in lengths for i in range(length)]
    assert context.last_tokens.tolist() == [end - 1 for end in ends[1:]]
    assert [len(tensor) for tensor in sampling] == [num_seqs] * 3


CUDA = torch.device("cuda", 0)
TOTAL, CONTEXT, WEIGHTS, ACTIVATIONS = 80 * GIB, GIB // 2, 10 * GIB, 3 * GIB


class FakeGpu:
    """A GPU without any: what processes hold of it, and what torch says of that in this one.

    Attributes:
        held: bytes by holder.
        cached: bytes that torch's allocator has kept, and gives back when asked to.
    """

    def __init__(self, monkeypatch, **held: int):
        self.held = held
        self.cached = 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL - self.used, TOTAL))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(self, "cached", 0))
        current = lambda: sum(self.held.values())  # noqa: E731  # The other engines' of this process are in it, too.
        stats = lambda device: {  # noqa: E731
            "allocated_bytes.all.current": current(),
            "allocated_bytes.all.peak": current() + ACTIVATIONS,
        }
        monkeypatch.setattr(torch.cuda, "memory_stats", stats)

    @property
    def used(self) -> int:
        return sum(self.held.values()) + self.cached

    def start(self, name: str, share: float, kvcache_gib: float | None = None):
        """An engine's start up to its KV cache, which takes the whole budget; returns that."""
        config = SimpleNamespace(gpu_memory_utilization=share, kvcache_gib=kvcache_gib)
        free_at_start = free_memory(CUDA)
        self.held[name] = WEIGHTS
        self.cached = ACTIVATIONS  # of the largest step, which has run
        budget = kv_cache_budget(config, CUDA, free_at_start)
        self.held[name] += max(0, budget.num_bytes)
        return budget


def test_an_engine_takes_its_share_of_the_gpu(monkeypatch):
    gpu = FakeGpu(monkeypatch, context=CONTEXT)
    budget = gpu.start("engine", 0.5)
    # With the activations of its steps it fills half of the GPU, and the process's context is no part of it.
    assert budget.num_bytes == TOTAL // 2 - WEIGHTS - ACTIVATIONS
    assert budget.limit == "gpu_memory_utilization"
    assert "80.00 GiB x gpu_memory_utilization=0.5" in budget.reason
    assert "uses 10.00 GiB" in budget.reason
    assert "activations take 3.00 GiB" in budget.reason


def test_two_engines_have_a_share_each(monkeypatch):
    gpu = FakeGpu(monkeypatch, context=CONTEXT)
    budgets = [gpu.start(name, 0.3) for name in ("first", "second")]
    assert budgets[0] == budgets[1]
    assert budgets[0].num_bytes == int(0.3 * TOTAL) - WEIGHTS - ACTIVATIONS
    # What torch's allocator has kept of the others counts as free.
    gpu.cached = 5 * GIB
    assert gpu.start("third", 0.3) == budgets[0]


def test_all_of_the_gpu_leaves_room_for_what_comes_later(monkeypatch):
    gpu = FakeGpu(monkeypatch, context=CONTEXT)
    budget = gpu.start("engine", 1.0)
    assert budget.num_bytes == TOTAL - int(RESERVED_SHARE * TOTAL) - CONTEXT - WEIGHTS - ACTIVATIONS
    assert budget.limit == "free memory"


def test_what_another_process_holds_is_not_there(monkeypatch):
    gpu = FakeGpu(monkeypatch, other=TOTAL // 2)
    assert gpu.start("small", 0.3).limit == "gpu_memory_utilization"
    del gpu.held["small"]
    budget = gpu.start("engine", 0.9)
    assert budget.num_bytes == TOTAL // 2 - int(RESERVED_SHARE * TOTAL) - WEIGHTS - ACTIVATIONS
    assert budget.limit == "free memory"
    assert "other processes and engines hold 40.00 GiB" in budget.reason
    assert "1.60 GiB stay free" in budget.reason


def test_memory_that_others_give_back_meanwhile_is_not_the_engines(monkeypatch):
    gpu = FakeGpu(monkeypatch, other=TOTAL // 2)
    free_at_start = free_memory(CUDA)
    gpu.held = {"engine": WEIGHTS}
    config = SimpleNamespace(gpu_memory_utilization=0.5, kvcache_gib=None)
    assert kv_cache_budget(config, CUDA, free_at_start).num_bytes == TOTAL // 2 - ACTIVATIONS


@pytest.mark.parametrize(
    ("others", "share", "message"),
    [
        (
            0,
            0.15,
            r"this engine's limit is 80\.00 GiB x gpu_memory_utilization=0\.15, .*; raise gpu_memory_utilization",
        ),
        (
            TOTAL - 11 * GIB,
            0.9,
            r"other processes and engines hold 69\.00 GiB, .*; end what else holds the GPU's memory",
        ),
    ],
)
def test_no_room_for_a_block(monkeypatch, others, share, message):
    budget = FakeGpu(monkeypatch, others=others).start("engine", share)
    assert budget.num_bytes < 0
    monkeypatch.setattr(memory, "kv_cache_budget", lambda *args: budget)
    config = SimpleNamespace(
        kvcache_block_size=256,
        num_kvcache_blocks=-1,
        kv_cache_dtype=torch.bfloat16,
        max_num_seqs=8,
        max_decode_rows=8,
        max_model_len=100,
    )
    shape = AttentionShape(16, 8, 128, 256, torch.bfloat16, torch.device("cpu"))
    cache = PagedKVCache([Attention(16, 128, 1.0, 8, TorchBackend())] * 28, [shape] * 28)
    with pytest.raises(MemoryError, match=r"^no room for one KV cache block of 0\.027 GiB: .*" + message):
        allocate_stores([cache], config, torch.device("cpu"), TensorParallel(), 0)


def test_a_size_that_was_asked_for_is_given(monkeypatch):
    budget = FakeGpu(monkeypatch).start("engine", 0.1, kvcache_gib=1.5)
    assert (budget.num_bytes, budget.limit) == (3 * GIB // 2, "kvcache_gib")
