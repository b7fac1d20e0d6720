"""ResidualReducer: adds what the ranks have computed of a layer's output to the residual stream, through memory that
all GPUs of the engine map (torch's symmetric memory)."""

import logging
import math
import uuid

import torch
import torch.distributed as dist

from nanovllm.kernels import HAS_TRITON

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
        self._device = device
        self._store = store
        self._group_name = self._agree_on_name()
        self._group = dist.ProcessGroup(store, rank, size)
        self._turn = 0
        torch._C._distributed_c10d._register_process_group(self._group_name, self._group)
        try:
            buffers = [self._map((max_tokens, hidden_size), dtype) for _ in range(2)]
            self._buffers, self._buffer_addresses = zip(*buffers, strict=True)
            flags = self._map((kernels.MAX_PULL_PROGRAMS, size), torch.int32)
            inbox = self._map((2, size, kernels.MAX_PUSH_TOKENS, hidden_size // 2), torch.int64)
            (self._flags, self._flag_addresses), (self._inbox, self._inbox_addresses) = flags, inbox
        finally:
            torch._C._distributed_c10d._unregister_process_group(self._group_name)
        self._epochs = torch.zeros(kernels.MAX_PUSH_TOKENS, dtype=torch.int32, device=device)
        self._abort = torch.zeros(1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32).pin_memory()
        self._abort_stream = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)

    def _agree_on_name(self) -> str:
        """A name that no other engine of these processes has used: torch keeps what it has heard of a name."""
        if self.rank == 0:
            self._store.set("reducer", uuid.uuid4().hex)
        return self._store.get("reducer").decode()

    def _map(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros that all ranks can address, and the addresses of each rank's, int64 [size]."""
        from torch._C._distributed_c10d import _SymmetricMemory

        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        store = dist.PrefixStore("symmetric_memory", self._store)
        _SymmetricMemory.set_group_info(self._group_name, self.rank, self.size, store)
        tensor = _SymmetricMemory.empty_strided_p2p(shape, strides, dtype, self._device, self._group_name)
        addresses = _SymmetricMemory.rendezvous(tensor).buffer_ptrs
        return tensor.zero_(), torch.tensor(addresses, dtype=torch.int64, device=self._device)

    def takes(self, num_tokens: int) -> bool:
        """Whether this is the fast way for so many tokens."""
        return self.size == 2 or num_tokens <= _MAX_TOKENS_OF_MANY_RANKS

    def partial(self, num_tokens: int) -> torch.Tensor:
        """Where this rank's part of the next sum is to be written: [num_tokens, hidden_size]."""
        buffer = self._buffers[self._turn]
        return buffer[:num_tokens] if num_tokens > kernels.MAX_PUSH_TOKENS else torch.empty_like(buffer[:num_tokens])

    def add(self, residual: torch.Tensor, partial: torch.Tensor, pdl: bool = False) -> torch.Tensor:
        """residual += the sum of all ranks' `partial`, up to MAX_PUSH_TOKENS tokens. Returns residual."""
        kernels.push_add_norm(self._inbox_addresses, self._epochs, self._abort, self.rank, partial, residual, pdl=pdl)
        return residual

    def add_norm(self, residual: torch.Tensor, partial: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The RMS norm of residual, after residual += the sum of all ranks' `partial`, which `partial()` gave."""
        if len(residual) <= kernels.MAX_PUSH_TOKENS:
            return kernels.push_add_norm(
                self._inbox_addresses, self._epochs, self._abort, self.rank, partial, residual, weight, eps
            )
        addresses = self._buffer_addresses[self._turn]
        self._turn = 1 - self._turn
        return kernels.pull_add_norm(addresses, self._flag_addresses, self._abort, self.rank, residual, weight, eps)

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
