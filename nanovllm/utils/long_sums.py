"""LongSums: sums over two GPUs for long prefills, where the transfer is hidden behind other work.

Each rank sends its part to the other by a copy engine, which needs no multiprocessor, and computes something else
meanwhile. `finish` adds both parts up when the sum is needed.
"""

from typing import NamedTuple

import torch

from nanovllm.kernels import HAS_TRITON
from nanovllm.utils.peer_memory import Peers, copy_bytes

if HAS_TRITON:
    from nanovllm.kernels.all_reduce import add_norm_arrived

MIN_TOKENS = 2048  # of a step; for fewer the transfer is too short to be hidden behind half of a product
# A rank that sends part k has finished part k - 2 (see `layers.rank_sums` for the order). It therefore
# received the other rank's part k - 2, which that rank sent after it had finished part k - 4. So slot k - 4 is free.
_NUM_SLOTS = 4
_NUM_ROUNDS = 1 << 15  # rounds over the slots until the numbers of arrivals repeat


class SentPart(NamedTuple):
    """A sum under way.

    Attributes:
        partial: this rank's part, [num_tokens, hidden_size].
        is_read: when the copy engine has read it.
        slot: where the other rank's part arrives.
        number: what the slot's arrival flag is set to when it has arrived.
    """

    partial: torch.Tensor
    is_read: torch.cuda.Event
    slot: int
    number: int


class LongSums:
    """Both ranks must send and finish parts of the same sizes in the same order, and must finish part k - 2 before they
    send part k."""

    def __init__(self, peers: Peers, max_part_tokens: int, hidden_size: int, dtype: torch.dtype):
        self._peers = peers
        self._received = peers.share("long sums/received", (_NUM_SLOTS, max_part_tokens, hidden_size), dtype)
        self._arrivals = peers.share("long sums/arrivals", (_NUM_SLOTS,), torch.int32)
        self._numbers = torch.arange(_NUM_ROUNDS + 1, dtype=torch.int32, device=peers.device)
        self._stream = torch.cuda.Stream(peers.device)
        self._num_sent = 0

    @classmethod
    def make(cls, peers: Peers, max_tokens: int, hidden_size: int, dtype: torch.dtype) -> "LongSums | None":
        """For steps of up to max_tokens in two halves. None if no step is long enough, or if there are not two ranks:
        more ranks would send more than NCCL does."""
        if peers.size != 2 or max_tokens < MIN_TOKENS:
            return None
        return cls(peers, -(-max_tokens // 2), hidden_size, dtype)

    def send(self, partial: torch.Tensor) -> SentPart:
        """Begin the sum of both ranks' `partial` [num_tokens, hidden_size], contiguous, which must not change until the
        sum is finished. Raises RuntimeError for more tokens than there is room for."""
        max_tokens = self._received.tensor.shape[1]
        if len(partial) > max_tokens:
            raise RuntimeError(f"a part of {len(partial)} tokens, where the ranks share memory for {max_tokens}")
        round_, slot = divmod(self._num_sent, _NUM_SLOTS)
        self._num_sent += 1
        number = round_ % _NUM_ROUNDS + 1
        other = 1 - self._peers.rank
        received = self._received.tensor[slot]
        target = self._received.addresses[other] + slot * received.numel() * received.element_size()
        self._stream.wait_stream(torch.cuda.current_stream(self._peers.device))
        copy_bytes(target, partial.data_ptr(), partial.numel() * partial.element_size(), self._stream)
        # The arrival flag follows the data, because a stream makes its copies one after the other.
        flag, value = self._arrivals.addresses[other] + 4 * slot, self._numbers.data_ptr() + 4 * number
        copy_bytes(flag, value, 4, self._stream)
        is_read = torch.cuda.Event()
        is_read.record(self._stream)
        return SentPart(partial, is_read, slot, number)

    def finish(self, residual: torch.Tensor, sent: SentPart, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += both ranks' parts; then the RMS norm of residual. Afterwards the partial may be overwritten."""
        # The device waits, so that the memory is free in stream order. With `record_stream` it would be free only when
        # the host sees that the copy is done, a whole prefill later.
        torch.cuda.current_stream(self._peers.device).wait_event(sent.is_read)
        parts = [sent.partial, self._received.tensor[sent.slot, : len(sent.partial)]]
        if self._peers.rank == 1:
            parts.reverse()
        arrival = self._arrivals.tensor[sent.slot]
        return add_norm_arrived(residual, *parts, weight, eps, arrival, sent.number, self._peers.abort_flag)
