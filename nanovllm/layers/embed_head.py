"""The vocabulary at both ends of the model, its rows over the tensor-parallel ranks."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.linear import make_parameter
from nanovllm.utils.parallel import TensorParallel


class VocabParallelEmbedding(nn.Module):
    """Token ids [num_tokens] -> embeddings [num_tokens, hidden_size]; ranks share the vocabulary evenly, the
    last one's shard padded with zero rows where it does not divide."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel):
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        rows = -(-vocab_size // tp.size)
        self.first = tp.rank * rows
        self.weight = make_parameter((rows, hidden_size), {None: (vocab_size, hidden_size)}, self.weight_loader)

    def weight_loader(self, param: nn.Parameter, loaded, shard_id=None) -> None:
        rows = max(0, min(param.shape[0], self.vocab_size - self.first))
        param.data[:rows].copy_(loaded[self.first : self.first + rows])
        param.data[rows:].zero_()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.first
        mine = (local >= 0) & (local < self.weight.shape[0])
        embeddings = F.embedding(torch.where(mine, local, 0), self.weight)
        return self.tp.all_reduce(embeddings * mine.unsqueeze(-1))


class ParallelLMHead(VocabParallelEmbedding):
    """Hidden states [num_tokens, hidden_size] -> logits [num_tokens, vocab_size]."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = self.tp.all_gather(F.linear(hidden_states, self.weight))
        return logits[:, : self.vocab_size]
