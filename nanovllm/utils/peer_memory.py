"""Memory that the GPUs of one engine read and write in each other, by the CUDA driver's own calls for processes.

torch has this as symmetric memory, whose processes find each other by a count of all that they have ever exchanged: a
second engine in the caller's process, with workers that count from zero, would wait in vain.
"""

import ctypes
import math
import weakref
from functools import cache

import torch
import torch.distributed as dist

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class PeerMemory:
    """Zeros of one shape on every rank, which all ranks can address. Given back when it is collected.

    Attributes:
        tensor: this rank's, on its device.
        addresses: int64 [size] on the device, of all ranks' in the order of ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        size: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ):
        """name: what the store has not seen yet, the same on all ranks, which all must come here. Raises RuntimeError
        where the driver cannot."""
        num_bytes = math.prod(shape) * dtype.itemsize
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context this thread's, which is the one the driver takes
            memory = _Allocation(num_bytes)
            self.tensor = torch.as_tensor(memory, device=device).view(dtype).view(shape).zero_()
            torch.cuda.synchronize()  # nobody may write before the zeros
            store.set(f"{name}/{rank}", memory.handle())
            addresses = [memory.address if r == rank else _open(store.get(f"{name}/{r}")) for r in range(size)]
        others = [address for r, address in enumerate(addresses) if r != rank]
        weakref.finalize(self, _close, others, device)
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)


class _Allocation:
    """Bytes on the current device, for torch.as_tensor; they last as long as a tensor of them does."""

    def __init__(self, num_bytes: int):
        address = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self.address = address.value
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        self._device = torch.cuda.current_device()

    def handle(self) -> bytes:
        """By which another process finds it."""
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
    """The address, on the current device, of another process's memory."""
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
