"""ResidualReducer: adds what the ranks have computed of a layer's output to the residual stream, through memory that
all GPUs of the engine map."""

import torch

from nanovllm.kernels import HAS_TRITON
from nanovllm.utils.long_sums import MIN_TOKENS, LongSums
from nanovllm.utils.peer_memory import Peers

if HAS_TRITON:
    from nanovllm.kernels import all_reduce as kernels

# With more than two ranks one shot moves more than NCCL does, which pays while latency counts and not bandwidth.
_MAX_TOKENS_OF_MANY_RANKS = 512


class ResidualReducer:
    """One for all layers of a rank. All ranks must call it in the same order with the same shapes.

    Every forward pass has to call `add_norm` for more than MAX_PUSH_TOKENS tokens an even number of times: two buffers
    take turns, and a CUDA graph replays the turns that it has captured.

    Attributes:
        long_sums: for steps of thousands of tokens over two ranks; None where there are none.
    """

    def __init__(self, peers: Peers, max_tokens: int, hidden_size: int, dtype: torch.dtype):
        """max_tokens: of one step; dtype: a 16-bit float; hidden_size: even. Raises RuntimeError where the GPUs cannot
        map each other's memory."""
        self.rank, self.size = peers.rank, peers.size
        self._turn = 0
        self._abort_flag = peers.abort_flag
        self.long_sums = LongSums.make(peers, max_tokens, hidden_size, dtype)

        def share(name: str, shape: tuple[int, ...], dtype: torch.dtype):
            return peers.share(f"reducer/{name}", shape, dtype)

        self._buffers = [share(f"buffer {i}", (max_tokens, hidden_size), dtype) for i in range(2)]
        self._flags = share("flags", (kernels.MAX_PULL_PROGRAMS, self.size), torch.int32)
        self._inboxes = share("inboxes", (2, self.size, kernels.MAX_PUSH_TOKENS, hidden_size // 2), torch.int64)
        self._epochs = torch.zeros(kernels.MAX_PUSH_TOKENS, dtype=torch.int32, device=peers.device)
        torch.cuda.synchronize(peers.device)

    def takes(self, num_tokens: int) -> bool:
        """Whether this is the fast way for so many tokens."""
        return self.size == 2 or num_tokens <= _MAX_TOKENS_OF_MANY_RANKS

    def takes_parts(self, num_tokens: int) -> bool:
        """Whether long_sums is, for a prefill of so many tokens."""
        return self.long_sums is not None and num_tokens >= MIN_TOKENS

    def partial(self, num_tokens: int) -> torch.Tensor:
        """Where this rank's part of the next sum is to be written: [num_tokens, hidden_size]."""
        buffer = self._buffers[self._turn].tensor
        return buffer[:num_tokens] if num_tokens > kernels.MAX_PUSH_TOKENS else torch.empty_like(buffer[:num_tokens])

    def add(self, residual: torch.Tensor, partial: torch.Tensor, pdl: bool = False) -> torch.Tensor:
        """residual += the sum of all ranks' `partial`, up to MAX_PUSH_TOKENS tokens. Returns residual."""
        inboxes = self._inboxes.address_table
        kernels.push_add_norm(inboxes, self._epochs, self._abort_flag, self.rank, partial, residual, pdl=pdl)
        return residual

    def add_norm(self, residual: torch.Tensor, partial: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The RMS norm of residual, after residual += the sum of all ranks' `partial`, which `partial()` gave."""
        if len(residual) <= kernels.MAX_PUSH_TOKENS:
            inboxes = self._inboxes.address_table
            return kernels.push_add_norm(
                inboxes, self._epochs, self._abort_flag, self.rank, partial, residual, weight, eps, pdl=True
            )
        buffers, flags = self._buffers[self._turn].address_table, self._flags.address_table
        self._turn = 1 - self._turn
        return kernels.pull_add_norm(buffers, flags, self._abort_flag, self.rank, residual, weight, eps)


def make_reducer(peers: Peers | None, max_tokens: int, hidden_size: int, dtype: torch.dtype) -> ResidualReducer | None:
    """A ResidualReducer, or None where its kernels do not run; what decides is the same on all ranks."""
    if peers is None or dtype not in (torch.bfloat16, torch.float16) or hidden_size % 2:
        return None
    return ResidualReducer(peers, max_tokens, hidden_size, dtype)
