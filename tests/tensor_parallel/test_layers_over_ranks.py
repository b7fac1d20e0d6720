"""Layers driven by hand over several ranks."""

import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from rank_threads import on_ranks

from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.utils.context import reset_context, set_context


@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_columns_then_rows_are_the_whole(bias, has_table):
    torch.manual_seed(0)
    up, down, x = torch.randn(12, 8), torch.randn(6, 12), torch.randn(5, 8)
    biases = torch.randn(12), torch.randn(6)

    def work(tp):
        options = {"tp": tp, "matmul": Matmul() if has_table else None}
        first, second = ColumnParallelLinear(8, 12, bias, **options), RowParallelLinear(12, 6, bias, **options)
        for layer, weight, of_layer in ((first, up, biases[0]), (second, down, biases[1])):
            layer.weight.weight_loader(layer.weight, weight)
            if bias:
                layer.bias.weight_loader(layer.bias, of_layer)
        assert first.weight.shape == (6, 8)
        assert second.weight.shape == (6, 6)
        return second(first(x))

    expected = F.linear(F.linear(x, up, biases[0] if bias else None), down, biases[1] if bias else None)
    for y in on_ranks(2, work):
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("vocab_size", [60, 61, 3, 4])
def test_the_vocabulary_is_split_by_rows(vocab_size, size):
    """Also one that the ranks do not divide, and one with fewer tokens than would give each rank some."""
    weight, tokens, hidden = torch.randn(vocab_size, 8), torch.arange(vocab_size).flip(0), torch.randn(7, 8)
    weight[1] = torch.inf  # It must not spoil others.

    def work(tp):
        embedding, head = VocabParallelEmbedding(vocab_size, 8, tp), ParallelLMHead(vocab_size, 8, tp=tp)
        for layer in (embedding, head):
            layer.weight.weight_loader(layer.weight, weight)
        assert embedding.num_embeddings == vocab_size
        assert (embedding.tp_rank, embedding.tp_size) == (tp.rank, tp.size)
        assert embedding.weight.shape == (embedding.vocab_end_idx - embedding.vocab_start_idx, 8)
        assert len(embedding.weight) <= embedding.num_embeddings_per_partition == -(-vocab_size // size)
        set_context(True, torch.tensor([0, 2, 3, 7], dtype=torch.int32))
        prefilled = head(hidden)
        set_context(False)
        decoded = head(hidden)
        reset_context()
        rows = list(range(embedding.vocab_start_idx, embedding.vocab_end_idx))
        return embedding(tokens), prefilled, decoded, rows

    results = on_ranks(size, work) if size > 1 else [work(TensorParallel())]
    assert functools.reduce(operator.iadd, (rows for *_, rows in results), []) == list(range(vocab_size))
    for rank, (embedded, prefilled, decoded, _) in enumerate(results):
        assert torch.equal(embedded, weight[tokens])
        if rank:
            assert prefilled is None
            assert decoded is None
            continue
        expected = F.linear(hidden, weight)
        torch.testing.assert_close(decoded, expected, equal_nan=True)
        torch.testing.assert_close(prefilled, expected[[1, 2, 6]], equal_nan=True)
