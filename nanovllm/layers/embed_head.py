"""The vocabulary at both ends of the model: the embedding, and the head, whose tokens are divided over the ranks."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.formats.format import Weight, WeightFormat
from nanovllm.layers.formats.parameters import make_parameter
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.parallel.tensor_parallel import TensorParallel

# Shards of the head are multiples of this many tokens (except the last): whole groups for the sampler, whole tiles for
# the product.
SHARD_MULTIPLE = 64


class ReplicatedEmbedding(nn.Module):
    """Token ids [num_tokens] -> embeddings [num_tokens, hidden_size]. weight: [vocab_size, hidden_size].

    Every rank holds the whole table. nano-vLLM's VocabParallelEmbedding holds a shard, which saves memory but costs a
    sum over the ranks at every step.
    """

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


class ParallelLMHead(nn.Module):
    """Hidden states -> logits of this rank's tokens, [num_rows, num_tokens]. With one rank these are all tokens.

    Attributes:
        first: this rank's first token.
        num_tokens: how many tokens this rank has. With a small vocabulary the last ranks may have none.
        weight: [num_tokens, hidden_size]; with a tied embedding a view of this rank's rows of it, or once packed a
            copy, because the embedding looks tokens up in the plain one.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, tp: TensorParallel, tied_to: ReplicatedEmbedding | None = None
    ):
        super().__init__()
        self.tp = tp
        self.format: WeightFormat = Unquantized()
        self.vocab_size = vocab_size
        self.shard_size = vocab_size
        if tp.size > 1:
            self.shard_size = -(-vocab_size // (tp.size * SHARD_MULTIPLE)) * SHARD_MULTIPLE
        self.first = tp.rank * self.shard_size
        self.num_tokens = max(0, min(self.shard_size, vocab_size - self.first))
        self._rows_of_embedding = None if tied_to is None else partial(self._rows_of, tied_to.weight)
        if self._rows_of_embedding is not None:
            # Not a parameter: the embedding's loader fills it.
            self.weight: torch.Tensor = self._rows_of_embedding()
        else:
            shape, shards = (self.num_tokens, hidden_size), {None: (vocab_size, hidden_size)}
            self.weight = make_parameter(shape, shards, self.weight_loader, self.format)

    def weight_loader(self, param: nn.Parameter, loaded: Any, shard_id: object = None) -> None:
        if self.num_tokens:
            param.data.copy_(loaded[self.first : self.first + self.num_tokens])

    def forward(self, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden_states: [num_rows, hidden_size]. out: where the logits go, on a GPU; None for a new tensor."""
        if out is not None:
            return torch.mm(hidden_states, self.weight.t(), out=out)
        return self.format.linear(hidden_states, Weight(self.format, self.weight))

    def _rows_of(self, embedding: nn.Parameter) -> torch.Tensor:
        return embedding.data[self.first : self.first + self.num_tokens]

    def pack_weight(self) -> None:
        """The same as `LinearBase.pack_weight`."""
        self.format, self.weight = self.format.packed(self.weight)

    def unpack_weight(self) -> None:
        """As `LinearBase.unpack_weight`. A tied head has the embedding's rows again."""
        if self._rows_of_embedding is not None:
            self.format, self.weight = Unquantized(), self._rows_of_embedding()
        else:
            self.format, self.weight = self.format.unpacked(self.weight)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of all tokens [num_rows, vocab_size], on every rank, from this rank's [num_rows, num_tokens].
        All ranks must call it."""
        if self.tp.size == 1:
            return logits
        padded = F.pad(logits, (0, self.shard_size - self.num_tokens))
        gathered = self.tp.all_gather(padded)
        return gathered.transpose(0, 1).flatten(1)[:, : self.vocab_size]
