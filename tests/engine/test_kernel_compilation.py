"""Which decode steps the start goes through, so that no later one compiles a kernel in mid-run."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.engine.cuda_graphs import MAX_GRAPH_BATCH_SIZE, graph_batch_sizes
from nanovllm.engine.kernel_compilation import telling_batch_sizes
from nanovllm.kernels.decode_config import choose_config


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 16, 33, 100, 193, 256, 257, 500, 512, 513, 800, 1024, 1500])
def test_every_variant_of_decode_attention_is_among_them(max_num_seqs, num_kv_heads):
    def variants(batch_sizes):
        return {choose_config(n * num_kv_heads, 128, 2, torch.device("cpu")) for n in batch_sizes}

    sizes = telling_batch_sizes(max_num_seqs)
    assert max(sizes) == max_num_seqs
    without_graph = range(MAX_GRAPH_BATCH_SIZE + 1, max_num_seqs + 1)
    assert variants(sizes) >= variants([*graph_batch_sizes(max_num_seqs), *without_graph])
    assert len(sizes) <= 13
