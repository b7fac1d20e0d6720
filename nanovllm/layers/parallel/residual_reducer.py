"""Sums of the ranks' parts of a layer's output, over memory that all GPUs map of each other."""

from typing import NamedTuple

import torch

from nanovllm.kernels.matmul.gemv import GemvConfig, gemv
from nanovllm.kernels.parallel import all_reduce as kernels
from nanovllm.kernels.parallel import posted_sums
from nanovllm.kernels.parallel.all_reduce import add_norm_arrived
from nanovllm.kernels.parallel.posted_sums import Inboxes, collect, push_add_norm
from nanovllm.layers.parallel.peer_memory import Peers, copy_bytes

# With more than two ranks a one-shot sum moves more bytes than NCCL does, so it pays only for few tokens.
_MAX_TOKENS_OF_MANY_RANKS = 512
_MIN_LONG_TOKENS = 2048  # of a step; for fewer the transfer is too short to be hidden behind half of a product
# A rank that sends part k has finished part k - 2 (see `layers.parallel.rank_sums` for the order). It therefore
# received the other rank's part k - 2, which that rank sent after it had finished part k - 4. So slot k - 4 is free.
_NUM_SLOTS = 4
_NUM_ROUNDS = 1 << 15  # rounds over the slots until the numbers of arrivals repeat


class ResidualReducer:
    """Adds the ranks' parts of a layer's output to the residual stream. One object serves all layers of a rank. All
    ranks must call it in the same order with the same shapes.

    Every forward pass begins with `begin_pass`. It must have an even number of sums of up to `posted_sums.MAX_TOKENS`
    tokens, and of longer ones: two buffers take turns, and a CUDA graph replays the turns that it captured.

    `long_sums` is for prefills of thousands of tokens over two ranks, else None. While `is_posting`, all sums of a
    forward pass go through `add_linear`.
    """

    def __init__(self, peers: Peers, max_tokens: int, hidden_size: int, dtype: torch.dtype):
        """max_tokens: the most tokens of a step; dtype: a 16-bit float; hidden_size: even. Raises RuntimeError if the
        GPUs cannot map each other's memory."""
        self.rank, self.size = peers.rank, peers.size
        self._turn = 0
        self._abort_flag = peers.abort_flag
        self.long_sums = None
        # More ranks would send more than NCCL does. A long step is computed in two halves.
        if peers.size == 2 and max_tokens >= _MIN_LONG_TOKENS:
            self.long_sums = LongSums(peers, -(-max_tokens // 2), hidden_size, dtype)
        self._buffers = [peers.share(f"sums/buffer {i}", (max_tokens, hidden_size), dtype) for i in range(2)]
        self._flags = peers.share("sums/flags", (kernels.MAX_PULL_PROGRAMS, self.size), torch.int32)
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
        return self.size == 2 or num_tokens <= _MAX_TOKENS_OF_MANY_RANKS

    def takes_parts(self, num_tokens: int) -> bool:
        """Whether long_sums is faster for a prefill of this many tokens."""
        return self.long_sums is not None and num_tokens >= _MIN_LONG_TOKENS

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
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        constants: tuple,
    ) -> None:
        """residual += the sum of all ranks' `x W^T + bias`, by dependent launches, for up to `gemv.MAX_TOKENS` tokens.
        constants: the GEMV kernel's."""
        gemv(x, weight, None, bias, GemvConfig(*constants), inboxes=self._inboxes, index=self._index, pdl=True)
        collect(self._inboxes, self._index, residual, pdl=True)
        self._index += 1

    def add_norm(self, residual: torch.Tensor, partial: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += the sum of all ranks' `partial`, which `partial()` returned; then the RMS norm of residual."""
        if len(residual) <= posted_sums.MAX_TOKENS:
            self._index += 1
            return push_add_norm(self._inboxes, self._index - 1, partial, residual, weight, eps)
        buffers, flags = self._buffers[self._turn].address_table, self._flags.address_table
        self._turn = 1 - self._turn
        return kernels.pull_add_norm(buffers, flags, self._abort_flag, self.rank, residual, weight, eps)


class SentPart(NamedTuple):
    """A sum under way."""

    partial: torch.Tensor  # this rank's part, [num_tokens, hidden_size]
    is_read: torch.cuda.Event  # when the copy engine has read it
    slot: int  # where the other rank's part arrives
    number: int  # what the slot's arrival flag is set to when it has arrived


class LongSums:
    """Sums over two GPUs for long prefills. Each rank sends its part to the other by a copy engine, which needs no
    multiprocessor, and computes something else meanwhile. `finish` adds both parts up when the sum is needed.

    Both ranks must send and finish parts of the same sizes in the same order, and must finish part k - 2 before they
    send part k.
    """

    def __init__(self, peers: Peers, max_part_tokens: int, hidden_size: int, dtype: torch.dtype):
        self._peers = peers
        self._received = peers.share("long sums/received", (_NUM_SLOTS, max_part_tokens, hidden_size), dtype)
        self._arrivals = peers.share("long sums/arrivals", (_NUM_SLOTS,), torch.int32)
        self._numbers = torch.arange(_NUM_ROUNDS + 1, dtype=torch.int32, device=peers.device)
        self._stream = torch.cuda.Stream(peers.device)
        self._num_sent = 0

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
        first, second = sent.partial, self._received.tensor[sent.slot, : len(sent.partial)]
        if self._peers.rank == 1:
            first, second = second, first
        arrival = self._arrivals.tensor[sent.slot]
        return add_norm_arrived(residual, first, second, weight, eps, arrival, sent.number, self._peers.abort_flag)


def make_reducer(peers: Peers | None, max_tokens: int, hidden_size: int, dtype: torch.dtype) -> ResidualReducer | None:
    """A ResidualReducer, or None if its kernels cannot run. The answer is the same on all ranks."""
    if peers is None or dtype not in (torch.bfloat16, torch.float16) or hidden_size % 2:
        return None
    return ResidualReducer(peers, max_tokens, hidden_size, dtype)
