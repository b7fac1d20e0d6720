"""ResidualReducer: adds what the ranks have computed of a layer's output to the residual stream, through memory that
all GPUs of the engine map."""

import logging

import torch
import torch.distributed as dist

from nanovllm.kernels import HAS_TRITON
from nanovllm.utils.peer_memory import PeerMemory

if HAS_TRITON:
    from nanovllm.kernels import all_reduce as kernels

logger = logging.getLogger(__name__)

# With more than two ranks one shot moves more than NCCL does, which pays while latency counts and not bandwidth.
_MAX_TOKENS_OF_MANY_RANKS = 512


class ResidualReducer:
    """One for all layers of a rank. All ranks must call it in the same order with the same shapes.

    Every forward pass has to call `add_norm` for more than MAX_PUSH_TOKENS tokens an even number of times: two buffers
    take turns, and a CUDA graph replays the turns that it has captured.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """max_tokens: of one step. Raises RuntimeError where the GPUs cannot map each other's memory."""
        self.rank, self.size = rank, size
        self._turn = 0

        def share(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> PeerMemory:
            return PeerMemory(store, f"reducer/{name}", rank, size, shape, dtype, device)

        self._buffers = [share(f"buffer {i}", (max_tokens, hidden_size), dtype) for i in range(2)]
        self._flags = share("flags", (kernels.MAX_PULL_PROGRAMS, size), torch.int32)
        self._inboxes = share("inboxes", (2, size, kernels.MAX_PUSH_TOKENS, hidden_size // 2), torch.int64)
        self._epochs = torch.zeros(kernels.MAX_PUSH_TOKENS, dtype=torch.int32, device=device)
        self._abort = torch.zeros(1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32).pin_memory()
        self._abort_stream = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)

    def takes(self, num_tokens: int) -> bool:
        """Whether this is the fast way for so many tokens."""
        return self.size == 2 or num_tokens <= _MAX_TOKENS_OF_MANY_RANKS

    def partial(self, num_tokens: int) -> torch.Tensor:
        """Where this rank's part of the next sum is to be written: [num_tokens, hidden_size]."""
        buffer = self._buffers[self._turn].tensor
        return buffer[:num_tokens] if num_tokens > kernels.MAX_PUSH_TOKENS else torch.empty_like(buffer[:num_tokens])

    def add(self, residual: torch.Tensor, partial: torch.Tensor, pdl: bool = False) -> torch.Tensor:
        """residual += the sum of all ranks' `partial`, up to MAX_PUSH_TOKENS tokens. Returns residual."""
        kernels.push_add_norm(self._inboxes.addresses, self._epochs, self._abort, self.rank, partial, residual, pdl=pdl)
        return residual

    def add_norm(self, residual: torch.Tensor, partial: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The RMS norm of residual, after residual += the sum of all ranks' `partial`, which `partial()` gave."""
        if len(residual) <= kernels.MAX_PUSH_TOKENS:
            return kernels.push_add_norm(
                self._inboxes.addresses, self._epochs, self._abort, self.rank, partial, residual, weight, eps
            )
        addresses = self._buffers[self._turn].addresses
        self._turn = 1 - self._turn
        return kernels.pull_add_norm(addresses, self._flags.addresses, self._abort, self.rank, residual, weight, eps)

    def abort(self) -> None:
        """End all waiting for other ranks, from any thread; what is computed from here on means nothing."""
        # A copy by the DMA engine finds its way also where kernels that wait hold every multiprocessor.
        with torch.cuda.stream(self._abort_stream):
            self._abort.copy_(self._one, non_blocking=True)


def make_reducer(
    rank: int,
    size: int,
    store: dist.Store,
    max_tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ResidualReducer | None:
    """A ResidualReducer, or None where its kernels do not run, or the GPUs cannot map each other's memory. What decides
    is the same on all ranks."""
    if device.type != "cuda" or not HAS_TRITON or dtype not in (torch.bfloat16, torch.float16) or hidden_size % 2:
        return None
    first = device.index - rank
    pairs = ((a, b) for a in range(first, first + size) for b in range(first, first + size) if a != b)
    if not all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs):
        logger.warning("the GPUs cannot read each other's memory: all sums go through NCCL, which is slower")
        return None
    return ResidualReducer(rank, size, store, max_tokens, hidden_size, dtype, device)
