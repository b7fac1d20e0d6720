"""The vocabulary at both ends of the model: the embedding, and the head, whose tokens are divided over the ranks."""

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.formats.all_formats import get_unquantized_format
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.parameters import Sliceable, make_parameter
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.utils.context import get_context

# Shards of the fast decoder's head are multiples of this many tokens (except the last): whole groups for the sampler,
# whole tiles for the product.
SHARD_MULTIPLE = 64


class ReplicatedEmbedding(nn.Module):
    """Token ids [num_tokens] -> embeddings [num_tokens, hidden_size]. weight: [vocab_size, hidden_size].

    Every rank holds the whole table, for the fast decoder. VocabParallelEmbedding holds a shard, which saves memory but
    costs a sum over the ranks at every step.
    """

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


class VocabParallelEmbedding(nn.Module):
    """Token ids [num_tokens] -> embeddings [num_tokens, embedding_dim], with the table's rows split over the ranks.

    Args:
        tp: this rank's place; None: there is one rank.
        shard_multiple: of how many tokens shards are multiples, with several ranks.

    Attributes:
        num_embeddings: tokens of the vocabulary.
        num_embeddings_per_partition: the most tokens that a rank has. Where the ranks do not divide the vocabulary, the
            last ones have fewer, or none.
        vocab_start_idx, vocab_end_idx: this rank's first token, and the one after its last; equal if it has none.
        num_tokens: how many tokens this rank has.
        weight: [num_tokens, embedding_dim].
    """

    weight: torch.Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        tp: TensorParallel | None = None,
        shard_multiple: int = 1,
        has_weight: bool = True,
    ):
        """has_weight: whether to allocate a weight."""
        super().__init__()
        self.tp = tp or TensorParallel()
        self.tp_rank, self.tp_size = self.tp.rank, self.tp.size
        self.num_embeddings = self.num_embeddings_per_partition = num_embeddings
        if self.tp_size > 1:
            self.num_embeddings_per_partition = -(-num_embeddings // (self.tp_size * shard_multiple)) * shard_multiple
        self.vocab_start_idx = start = self.tp_rank * self.num_embeddings_per_partition
        self.vocab_end_idx = max(start, min(start + self.num_embeddings_per_partition, num_embeddings))
        self.num_tokens = self.vocab_end_idx - self.vocab_start_idx
        if has_weight:
            shape, shards = (self.num_tokens, embedding_dim), {None: (num_embeddings, embedding_dim)}
            self.weight = make_parameter(shape, shards, self.weight_loader, get_unquantized_format())

    def weight_loader(self, param: nn.Parameter, loaded_weight: Sliceable, loaded_shard_id: object = None) -> None:
        if self.num_tokens:
            param.data.copy_(loaded_weight[self.vocab_start_idx : self.vocab_end_idx])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp_size == 1:
            return F.embedding(x, self.weight)
        is_ours = (x >= self.vocab_start_idx) & (x < self.vocab_end_idx)
        if self.num_tokens:
            y = F.embedding((x - self.vocab_start_idx).where(is_ours, 0), self.weight)
            y = y.where(is_ours.unsqueeze(-1), 0)
        else:
            y = self.weight.new_zeros(*x.shape, self.weight.shape[1])
        return self.tp.all_reduce(y)


class ParallelLMHead(VocabParallelEmbedding):
    """Hidden states -> logits. Each rank computes those of its tokens.

    Args:
        bias: False.
        tied_to: the embedding whose rows are the weight; None: it has a weight of its own.

    Attributes:
        weight: [num_tokens, embedding_dim]; with a tied embedding a view of this rank's rows of it, or once packed a
            copy, because the embedding looks tokens up in the plain one.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        tp: TensorParallel | None = None,
        tied_to: ReplicatedEmbedding | None = None,
        shard_multiple: int = 1,
    ):
        if bias:
            raise ValueError("bias=True: must be False, because no model here has a head with one")
        super().__init__(num_embeddings, embedding_dim, tp, shard_multiple, has_weight=tied_to is None)
        self.format = self._loaded_format = get_unquantized_format()
        self._rows_of_embedding = None if tied_to is None else partial(self._rows_of, tied_to.weight)
        if self._rows_of_embedding is not None:
            # Not a parameter: the embedding's loader fills it.
            self.weight = self._rows_of_embedding()

    def forward(self, x: torch.Tensor) -> torch.Tensor | None:  # type: ignore[override]
        """The logits [num_seqs, num_embeddings] to sample from, on rank 0; None on all others. Every rank must call it.

        x: [num_tokens, embedding_dim]; in a prefill the last token of each sequence is taken (`get_context`).
        """
        context = get_context()
        if context.is_prefill:
            ends = cast(torch.Tensor, context.cu_seqlens_q)[1:].long()
            x = x[ends - 1]
        logits = self.gather_shards(self.shard_logits(x))
        return logits if self.tp_rank == 0 else None

    def shard_logits(self, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of this rank's tokens, [num_rows, num_tokens], for the fast decoder.

        hidden_states: [num_rows, embedding_dim]. out: where the logits go, on a GPU; None for a new tensor."""
        if out is not None:
            return self.format.linear_into(hidden_states, Weight(self.format, self.weight), out)
        return self.format.linear(hidden_states, Weight(self.format, self.weight))

    def gather_shards(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of all tokens [num_rows, num_embeddings], on every rank, from this rank's [num_rows, num_tokens].
        All ranks must call it."""
        if self.tp.size == 1:
            return logits
        padded = F.pad(logits, (0, self.num_embeddings_per_partition - self.num_tokens))
        gathered = self.tp.all_gather(padded)
        return gathered.transpose(0, 1).flatten(1)[:, : self.num_embeddings]

    def _rows_of(self, embedding: nn.Parameter) -> torch.Tensor:
        return embedding.data[self.vocab_start_idx : self.vocab_end_idx]

    def pack_weight(self) -> None:
        """The same as `LinearBase.pack_weight`."""
        self.format, self.weight = self.format.packed(self.weight)

    def unpack_weight(self) -> None:
        """As `LinearBase.unpack_weight`. A tied head has the embedding's rows again."""
        if self._rows_of_embedding is not None:
            self.format, self.weight = self._loaded_format, self._rows_of_embedding()
        else:
            self.format, self.weight = self.format.unpacked(self.weight)
