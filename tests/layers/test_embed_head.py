"""The embedding and the head driven by hand."""

import pytest
import torch

from nanovllm.layers.embed_head import ParallelLMHead, ReplicatedEmbedding, VocabParallelEmbedding
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.utils.context import Context, step_context


def test_one_rank_has_the_whole_vocabulary():
    embedding, head = VocabParallelEmbedding(11, 4), ParallelLMHead(11, 4)
    weight = torch.randn(11, 4)
    for layer in (embedding, head):
        layer.weight.weight_loader(layer.weight, weight)
        assert (layer.vocab_start_idx, layer.vocab_end_idx, layer.num_embeddings_per_partition) == (0, 11, 11)
    tokens = torch.tensor([10, 0, 0])
    assert torch.equal(embedding(tokens), weight[tokens])
    hidden = torch.randn(5, 4)
    with step_context(Context(True, cu_seqlens_q=torch.tensor([0, 4, 5], dtype=torch.int32))):
        torch.testing.assert_close(head(hidden), hidden[[3, 4]] @ weight.t())
        torch.testing.assert_close(head.shard_logits(hidden), hidden @ weight.t())
    torch.testing.assert_close(head(hidden), hidden @ weight.t())
    with pytest.raises(ValueError, match="bias=True"):
        ParallelLMHead(11, 4, True)


def test_a_tied_head_has_the_embeddings_rows():
    embedding = ReplicatedEmbedding(150, 4)
    heads = [ParallelLMHead(150, 4, tp=TensorParallel(i, 2), tied_to=embedding, shard_multiple=64) for i in range(2)]
    assert [head.num_tokens for head in heads] == [128, 22]
    assert all(not list(head.parameters()) for head in heads)
    embedding.weight.normal_()
    assert torch.equal(torch.cat([head.weight for head in heads]), embedding.weight)
