"""Sums of the ranks' parts of a layer's output, over memory that all GPUs map of each other."""

from typing import Any

import torch

from nanovllm.kernels.matmul.gemv import GemvConfig, gemv
from nanovllm.kernels.parallel import all_reduce as kernels
from nanovllm.kernels.parallel import posted_sums
from nanovllm.kernels.parallel.posted_sums import Inboxes, collect, push_add_norm
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.parallel.peer_memory import Peers

# Two shots are faster than NCCL (docs/notebook.md has the figures). The memory for longer sums would be missing in each
# rank's KV cache, and what they gain in a whole prefill has not been measured.
_MAX_TOKENS_OF_MANY_RANKS = 2048


class ResidualReducer:
    """Adds the ranks' parts of a layer's output to the residual stream. One object serves all layers of a rank. All
    ranks must call it in the same order with the same shapes.

    Sums of up to `posted_sums.MAX_TOKENS` tokens are messages. Longer ones are in one shot between two ranks, and in
    two shots among more (`kernels.parallel.all_reduce`).

    Every forward pass begins with `begin_pass`. It must have an even number of sums of up to `posted_sums.MAX_TOKENS`
    tokens, and of longer ones: two buffers take turns, and a CUDA graph replays the turns that it captured.

    While `is_posting`, all sums of a forward pass go through `add_linear`.
    """

    def __init__(self, peers: Peers, max_tokens: int, hidden_size: int, dtype: torch.dtype):
        """max_tokens: the most tokens of a step; dtype: a 16-bit float; hidden_size: even. Raises RuntimeError if the
        GPUs cannot map each other's memory."""
        self.rank, self.size = peers.rank, peers.size
        self._turn = 0
        self._abort_flag = peers.abort_flag
        self._has_two_shots = self.size > 2
        # After a sum in two shots, no other rank uses this rank's buffer any more. So one is enough.
        num_buffers, num_programs = 2, kernels.MAX_PULL_PROGRAMS
        if self._has_two_shots:
            num_buffers, num_programs = 1, kernels.MAX_TWO_SHOT_PROGRAMS
            max_tokens = min(max_tokens, _MAX_TOKENS_OF_MANY_RANKS)
        shape = max_tokens, hidden_size
        self._buffers = [peers.share(f"sums/buffer {i}", shape, dtype) for i in range(num_buffers)]
        self._flags = peers.share("sums/flags", (num_programs, self.size), torch.int32)
        inboxes = (2, self.size, posted_sums.MAX_TOKENS, hidden_size // 2)
        self._inbox_memory = peers.share("sums/inboxes", inboxes, torch.int64)
        own, addresses = self._inbox_memory.tensor, self._inbox_memory.address_table
        # Inboxes begin with zeros, so no sum may have the number 0.
        step = torch.ones(1, dtype=torch.int32, device=peers.device)
        self._inboxes = Inboxes(own, addresses, step, peers.abort_flag, self.rank)
        self._index = 0
        self.is_posting = False
        torch.cuda.synchronize(peers.device)

    def takes(self, num_tokens: int) -> bool:
        """Whether this is faster than NCCL for a step of this many tokens."""
        return not self._has_two_shots or num_tokens <= _MAX_TOKENS_OF_MANY_RANKS

    def partial(self, num_tokens: int) -> torch.Tensor:
        """The memory to write this rank's part of the next sum to: [num_tokens, hidden_size]. Raises RuntimeError for
        more tokens than there is room for."""
        buffer = self._buffers[self._turn].tensor
        if num_tokens > len(buffer):
            raise RuntimeError(f"a step of {num_tokens} tokens, where the ranks share memory for {len(buffer)}")
        return buffer[:num_tokens] if num_tokens > posted_sums.MAX_TOKENS else torch.empty_like(buffer[:num_tokens])

    def begin_pass(self, num_sums: int, is_posting: bool) -> None:
        """num_sums: how many sums the pass will have. is_posting: whether `add_linear` makes all of them; then at least
        one ordinary launch must come before the first."""
        self.is_posting = is_posting
        # A CUDA graph replays indices, so the step tells passes apart. Indices end at 0. If they began there, a short
        # pass could repeat numbers of a longer one before it.
        self._inboxes.step.add_(num_sums)
        self._index = -num_sums

    def add_linear(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        constants: tuple,
    ) -> None:
        """residual += the sum of all ranks' `x W^T + bias`, by dependent launches, for up to `gemv.MAX_TOKENS` tokens.
        constants: the GEMV kernel's."""
        options: dict[str, Any] = {"inboxes": self._inboxes, "index": self._index, "pdl": True}
        gemv(x, weight.values, None, bias, GemvConfig(*constants), weight_scale=weight.scale, **options)
        collect(self._inboxes, self._index, residual, pdl=True)
        self._index += 1

    def add_norm(self, residual: torch.Tensor, partial: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += the sum of all ranks' `partial`, which `partial()` returned; then the RMS norm of residual."""
        if len(residual) <= posted_sums.MAX_TOKENS:
            self._index += 1
            return push_add_norm(self._inboxes, self._index - 1, partial, residual, weight, eps)
        buffers, flags = self._buffers[self._turn].address_table, self._flags.address_table
        self._turn = (self._turn + 1) % len(self._buffers)
        add_norm = kernels.two_shot_add_norm if self._has_two_shots else kernels.pull_add_norm
        return add_norm(buffers, flags, self._abort_flag, self.rank, residual, weight, eps)


def make_reducer(peers: Peers | None, max_tokens: int, hidden_size: int, dtype: torch.dtype) -> ResidualReducer | None:
    """A ResidualReducer, or None if its kernels cannot run. All ranks agree."""
    if peers is None or dtype not in (torch.bfloat16, torch.float16) or hidden_size % 2:
        return None
    return ResidualReducer(peers, max_tokens, hidden_size, dtype)
