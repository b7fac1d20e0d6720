"""ResidualReducer: adds the ranks' parts of a layer's output to the residual stream, over memory that all GPUs map."""

import torch

from nanovllm.kernels import HAS_TRITON
from nanovllm.utils.long_sums import MIN_TOKENS, LongSums
from nanovllm.utils.peer_memory import Peers

if HAS_TRITON:
    from nanovllm.kernels import all_reduce as kernels
    from nanovllm.kernels import posted_sums
    from nanovllm.kernels.gemv import GemvConfig, linear_post
    from nanovllm.kernels.posted_sums import Inboxes, collect

# With more than two ranks a one-shot sum moves more bytes than NCCL does, so it pays only for few tokens.
_MAX_TOKENS_OF_MANY_RANKS = 512


class ResidualReducer:
    """One object serves all layers of a rank. All ranks must call it in the same order with the same shapes.

    Every forward pass must call `add_norm` for more than MAX_PUSH_TOKENS tokens an even number of times: two buffers
    take turns, and a CUDA graph replays the turns that it captured.

    Attributes:
        long_sums: for prefills of thousands of tokens over two ranks, else None.
        is_posting: whether all sums of this forward pass go through `add_linear`.
    """

    def __init__(self, peers: Peers, max_tokens: int, hidden_size: int, dtype: torch.dtype):
        """max_tokens: the most tokens of a step; dtype: a 16-bit float; hidden_size: even. Raises RuntimeError if the
        GPUs cannot map each other's memory."""
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
        self._posted = share("posted", (2, self.size, posted_sums.MAX_TOKENS, hidden_size // 2), torch.int64)
        self._step = torch.zeros(1, dtype=torch.int32, device=peers.device)
        self._index = 0
        self.is_posting = False
        own, addresses = self._posted.tensor, self._posted.address_table
        self._posts = Inboxes(own, addresses, self._step, peers.abort_flag, self.rank)
        torch.cuda.synchronize(peers.device)

    def takes(self, num_tokens: int) -> bool:
        """Whether this is faster than NCCL for a step of this many tokens."""
        return self.size == 2 or num_tokens <= _MAX_TOKENS_OF_MANY_RANKS

    def takes_parts(self, num_tokens: int) -> bool:
        """Whether long_sums is faster for a prefill of this many tokens."""
        return self.long_sums is not None and num_tokens >= MIN_TOKENS

    def partial(self, num_tokens: int) -> torch.Tensor:
        """The memory to write this rank's part of the next sum to: [num_tokens, hidden_size]. Raises RuntimeError for
        more tokens than there is room for."""
        buffer = self._buffers[self._turn].tensor
        if num_tokens > len(buffer):
            raise RuntimeError(f"a step of {num_tokens} tokens, where the ranks share memory for {len(buffer)}")
        return buffer[:num_tokens] if num_tokens > kernels.MAX_PUSH_TOKENS else torch.empty_like(buffer[:num_tokens])

    def begin_step(self, num_sums: int) -> None:
        """Call this at the beginning of every forward pass. num_sums: how often the pass calls `add_linear`, an even
        number, or 0. At least one ordinary launch must come before the first call."""
        self.is_posting = num_sums > 0
        if self.is_posting:
            self._step += num_sums
            self._index = 0

    def add_linear(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        constants: tuple | None = None,
    ) -> None:
        """residual += the sum of all ranks' `x W^T + bias`, by dependent launches, for up to 16 tokens. constants: the
        GEMV kernel's."""
        config = GemvConfig(*constants) if constants else None
        linear_post(x, weight, self._posts, self._index, bias, config, pdl=True)
        collect(self._posts, self._index, residual, pdl=True)
        self._index += 1

    def add_norm(self, residual: torch.Tensor, partial: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += the sum of all ranks' `partial`, which `partial()` returned; then the RMS norm of residual."""
        if len(residual) <= kernels.MAX_PUSH_TOKENS:
            inboxes = self._inboxes.address_table
            return kernels.push_add_norm(
                inboxes, self._epochs, self._abort_flag, self.rank, partial, residual, weight, eps
            )
        buffers, flags = self._buffers[self._turn].address_table, self._flags.address_table
        self._turn = 1 - self._turn
        return kernels.pull_add_norm(buffers, flags, self._abort_flag, self.rank, residual, weight, eps)


def make_reducer(peers: Peers | None, max_tokens: int, hidden_size: int, dtype: torch.dtype) -> ResidualReducer | None:
    """A ResidualReducer, or None if its kernels cannot run. The answer is the same on all ranks."""
    if peers is None or dtype not in (torch.bfloat16, torch.float16) or hidden_size % 2:
        return None
    return ResidualReducer(peers, max_tokens, hidden_size, dtype)
