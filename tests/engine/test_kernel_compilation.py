"""Which steps the start goes through, so that no later one compiles a kernel in mid-run."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.engine.cuda_graphs import MAX_GRAPH_BATCH_SIZE, graph_batch_sizes
from nanovllm.engine.kernel_compilation import telling_batch_sizes
from nanovllm.engine.memory import warmup_sequences
from nanovllm.kernels.decode_config import choose_config
from nanovllm.kernels.paged_prefill import choose_tiles
from nanovllm.layers.quack_tiles import Kind, decode_tile, padded_batch
from nanovllm.models.presets import PRESET_NAMES, preset_config


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 16, 33, 100, 193, 256, 257, 500, 512, 513, 800, 1024, 1500])
def test_every_variant_of_decode_attention_is_among_them(max_num_seqs, num_kv_heads, tma):
    def variants(batch_sizes):
        return {choose_config(n * num_kv_heads, 128, 2, torch.device("cpu"), tma) for n in batch_sizes}

    sizes = telling_batch_sizes(max_num_seqs)
    assert max(sizes) == max_num_seqs
    without_graph = range(MAX_GRAPH_BATCH_SIZE + 1, max_num_seqs + 1)
    assert variants(sizes) >= variants([*graph_batch_sizes(max_num_seqs), *without_graph])
    assert len(sizes) <= 13


@pytest.mark.parametrize("model", PRESET_NAMES)
@pytest.mark.parametrize("max_num_seqs", [1, 20, 33, 64, 100, 129, 193, 209, 256, 257, 300, 385, 500, 512, 800])
def test_every_tile_of_quack_kernels_is_among_them(max_num_seqs, model):
    """A tile that the first step of its size had to compile would hold that one up for seconds."""
    config = preset_config(model)
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    gate_up, sums = (2 * intermediate, hidden), ((hidden, q), (hidden, intermediate))
    weights = [(Kind.LINEAR, (q + 2 * kv, hidden)), (Kind.SILU, gate_up), *((Kind.ADD, weight) for weight in sums)]

    def tiles(batch_sizes):
        rows = {padded_batch(n, *gate_up, 132) for n in batch_sizes}
        found = {(kind, decode_tile(kind, n, *weight, 132)) for kind, weight in weights for n in rows}
        return {(kind, tile) for kind, tile in found if tile is not None}

    captured = tiles(graph_batch_sizes(max_num_seqs))
    assert tiles(telling_batch_sizes(max_num_seqs)) >= captured
    assert captured or max_num_seqs < 64


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("max_model_len", [16, 33, 100, 300, 4096])
def test_every_variant_of_prefill_attention_is_warmed_up(max_model_len, group):
    """With flash-attn-4 as well, which leaves steps of few tokens to our kernel."""

    def variants(lens):
        """Of our kernel, for (cached, new) tokens."""
        return {(choose_tiles(128, 2, new * group, paged=cached > 0), cached > 0) for cached, new in lens}

    config = SimpleNamespace(max_model_len=max_model_len, kvcache_block_size=16)
    seqs = list(warmup_sequences(config, num_blocks=300))
    assert all(seq.num_tokens <= max_model_len and len(seq.block_table) <= 300 for seq in seqs)
    # A cached beginning is a block at least, and one token is always left to compute.
    possible = [(0, n) for n in range(1, max_model_len)] + [(16, n - 16) for n in range(17, max_model_len)]
    assert variants((seq.num_cached_tokens, seq.num_scheduled_tokens) for seq in seqs) >= variants(possible)
