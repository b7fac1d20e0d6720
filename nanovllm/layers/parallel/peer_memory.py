"""Memory that the GPUs of one engine map of each other, by the CUDA driver's interprocess calls.

torch's symmetric memory cannot serve a second engine of the same process (docs/notebook.md).
"""

import ctypes
import logging
import math
import weakref
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.kernels import HAS_TRITON

logger = logging.getLogger(__name__)

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_ALL_WELL = "all well"


class Peers:
    """This rank's place among GPUs that map each other's memory.

    Kernels that wait for another rank read `abort_flag`, int32 [1] on the device, 0 until `abort`.
    """

    def __init__(self, rank: int, size: int, store: dist.Store, device: torch.device):
        self.rank, self.size, self.device = rank, size, device
        self.store: Any = store  # torch's types know only texts as values, and it takes bytes too.
        self.abort_flag = torch.zeros(1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32).pin_memory()
        self._abort_stream = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)

    def share(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> "PeerMemory":
        """Zeros on every rank. All ranks must call this, once a name. Raises RuntimeError if the driver cannot."""
        return PeerMemory(self, name, shape, dtype)

    def abort(self) -> None:
        """End all waiting for other ranks, from any thread. What is computed from here on means nothing."""
        # A copy engine works even while waiting kernels occupy every multiprocessor.
        with torch.cuda.stream(self._abort_stream):
            self.abort_flag.copy_(self._one, non_blocking=True)


def make_peers(rank: int, size: int, store: dist.Store, device: torch.device) -> Peers | None:
    """A Peers, or None if its kernels cannot run or the GPUs cannot map each other's memory. All ranks agree."""
    if device.type != "cuda" or not HAS_TRITON:
        return None
    first = device.index - rank
    pairs = ((a, b) for a in range(first, first + size) for b in range(first, first + size) if a != b)
    peers: Peers | None = None
    reason: str | None = "they have no access to each other"
    if all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs):
        peers = Peers(rank, size, store, device)
        reason = find_obstacle(peers)
    if reason is None:
        return peers
    if rank == 0:
        logger.warning("the GPUs do not share memory, and all sums go through NCCL, which is slower: %s", reason)
    return None


def find_obstacle(peers: Peers) -> str | None:
    """Why a rank cannot map another one's memory (containers and drivers may forbid it); None if all can."""
    try:
        probe, answer = peers.share("probe", (1,), torch.int32), _ALL_WELL
    except RuntimeError as error:
        probe, answer = None, f"rank {peers.rank}: {error}"
    peers.store.set(f"probe/answer/{peers.rank}", answer.encode())
    answers = [peers.store.get(f"probe/answer/{rank}").decode() for rank in range(peers.size)]
    del probe  # The other ranks have opened it once they have answered.
    return next((answer for answer in answers if answer != _ALL_WELL), None)


class PeerMemory:
    """Zeros of one shape on every rank, which all ranks can address. Freed when it is collected.

    `tensor` is this rank's part. `addresses` are those of all ranks' parts as this device sees them; `address_table`
    holds them on the device, int64 [size].
    """

    def __init__(self, peers: Peers, name: str, shape: tuple[int, ...], dtype: torch.dtype):
        rank, store, device = peers.rank, peers.store, peers.device
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context the current one, which the driver's calls use
            memory = _Allocation(math.prod(shape) * dtype.itemsize)
            self.tensor = torch.as_tensor(memory, device=device).view(dtype).view(shape).zero_()
            torch.cuda.synchronize()  # No rank may write before the zeros.
            try:
                handle = memory.handle()
            except RuntimeError as error:
                store.set(f"{name}/{rank}", str(error).encode())  # so that no rank waits
                raise
            store.set(f"{name}/{rank}", handle)
            ranks = range(peers.size)
            self.addresses = [memory.address if r == rank else _open(store.get(f"{name}/{r}")) for r in ranks]
        others = [address for r, address in enumerate(self.addresses) if r != rank]
        weakref.finalize(self, _close, others, device)
        self.address_table = torch.tensor(self.addresses, dtype=torch.int64, device=device)


class _Allocation:
    """Bytes on the current device, for torch.as_tensor. They live as long as a tensor of them."""

    def __init__(self, num_bytes: int):
        address = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self.address = address.value
        data = (self.address, False)
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": data, "version": 3}
        self._device = torch.cuda.current_device()

    def handle(self) -> bytes:
        handle = (ctypes.c_char * _HANDLE_BYTES)()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return bytes(handle)

    def __del__(self):
        if hasattr(self, "_device"):
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                _call("cuMemFree_v2", ctypes.c_uint64(self.address))


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


def _open(handle: bytes) -> int:
    """The address of another process's memory, on the current device."""
    if len(handle) != _HANDLE_BYTES:
        raise RuntimeError(f"another rank could not share its memory: {handle.decode()}")
    address = ctypes.c_uint64()
    by_value = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS))
    return address.value


def _close(addresses: list[int], device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        for address in addresses:
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args) -> None:
    code = getattr(_driver(), name)(*args)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name} failed: {(text.value or b'unknown error').decode()} ({code})")
