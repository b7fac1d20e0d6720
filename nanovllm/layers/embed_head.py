"""The vocabulary at both ends of the model, its rows over the tensor-parallel ranks."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels import HAS_TRITON
from nanovllm.layers.linear import make_parameter
from nanovllm.utils.parallel import TensorParallel
from nanovllm.utils.peer_memory import PeerMemory

if HAS_TRITON:
    from nanovllm.kernels.peer_embedding import peer_embedding

# Rows that each rank's shard is a multiple of: whole groups for the sampler, whole tiles for the product.
ROW_MULTIPLE = 64


class VocabParallelEmbedding(nn.Module):
    """Token ids [num_tokens] -> embeddings [num_tokens, hidden_size].

    Attributes:
        first: this rank's first token.
        num_tokens: how many tokens are this rank's; with a small vocabulary it may be none.
        weight: [rows, hidden_size], as many rows on every rank, those past num_tokens zero.
        shared: the weights of all ranks, which each GPU reads where they are; None where it cannot.
    """

    is_shared = True

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel):
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        rows = vocab_size
        if tp.size > 1:
            rows = -(-vocab_size // (tp.size * ROW_MULTIPLE)) * ROW_MULTIPLE
        self.first = tp.rank * rows
        self.num_tokens = max(0, min(rows, vocab_size - self.first))
        self.weight = make_parameter((rows, hidden_size), {None: (vocab_size, hidden_size)}, self.weight_loader)
        self.shared: PeerMemory | None = None
        if tp.peers is not None and self.is_shared:
            self.shared = tp.peers.share("embedding", tuple(self.weight.shape), self.weight.dtype)
            self.weight.data = self.shared.tensor

    def weight_loader(self, param: nn.Parameter, loaded, shard_id=None) -> None:
        if self.num_tokens:
            param.data[: self.num_tokens].copy_(loaded[self.first : self.first + self.num_tokens])
        param.data[self.num_tokens :].zero_()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        if self.shared is not None:
            rows, hidden_size = self.weight.shape
            tables, abort = self.shared.address_table, self.tp.peers.abort_flag
            return peer_embedding(tables, token_ids, abort, rows, hidden_size, self.weight.dtype)
        local = token_ids - self.first
        mine = (local >= 0) & (local < self.weight.shape[0])
        embeddings = F.embedding(torch.where(mine, local, 0), self.weight)
        # Not by a product: 0 * NaN is not 0, and the first row of a damaged table would spoil every token.
        return self.tp.all_reduce(embeddings.masked_fill_(~mine.unsqueeze(-1), 0.0))


class ParallelLMHead(VocabParallelEmbedding):
    """Hidden states -> logits of this rank's tokens, [num_rows, num_tokens]. With one rank those are all tokens."""

    is_shared = False

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [num_rows, hidden_size]."""
        return F.linear(hidden_states, self.weight)[:, : self.num_tokens]

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of all tokens [num_rows, vocab_size], on every rank, from this rank's [num_rows, num_tokens].
        All ranks must call it."""
        if self.tp.size == 1:
            return logits
        padded = F.pad(logits, (0, self.weight.shape[0] - logits.shape[1]))
        gathered = self.tp.all_gather(padded)
        return gathered.transpose(0, 1).flatten(1)[:, : self.vocab_size]
