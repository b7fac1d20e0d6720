"""The call channel: bytes from rank 0 to all workers, through a segment of shared memory.

A socket pair with each worker carries one byte when a message lies in the segment, and one back once it has been read.
multiprocessing.Event would leave named semaphores in /dev/shm if all processes are killed, and whoever waits for one
never learns that the other side has gone.
"""

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import cast

SEGMENT_BYTES = 2**20
_HEADER_BYTES = 4  # little endian: bytes of the message that are still to come, this part of it included
_ROOM = SEGMENT_BYTES - _HEADER_BYTES
_CHECK_SECONDS = 0.2
_FOLDER = Path("/dev/shm")  # where Linux keeps segments


class CallWriter:
    """Rank 0's end of the channel: makes the segment, under a random `name`."""

    def __init__(self, num_workers: int, check: Callable[[], None]):
        """check: called while waiting for a worker; raises if one of them has gone. Raises MemoryError if there is no
        room for the segment."""
        self._check = check
        self.segment = SharedMemory(f"nanovllm-{secrets.token_hex(8)}", create=True, size=SEGMENT_BYTES)
        self.name = self.segment.name
        try:
            _reserve(self.name)
        except BaseException:
            self.unlink()
            self.segment.close()
            raise
        events, self._worker_events = zip(*(Pipe() for _ in range(num_workers)), strict=True)
        self.events = list(events)
        self._unread: list[Connection] = []

    def worker_event(self, worker: int) -> Connection:
        """What worker 0, 1, ... gives to its CallReader."""
        return self._worker_events[worker]

    def close_worker_events(self) -> None:
        """Call this once all workers are started. If others held a worker's end open, its death would not show."""
        for event in self._worker_events:
            event.close()

    def unlink(self) -> None:
        """Once all workers have attached: from here on the segment goes with its last process. Until then
        multiprocessing's resource tracker removes it."""
        with suppress(FileNotFoundError):  # if called again
            self.segment.unlink()

    def write(self, message: bytes, deadline: float | None = None) -> None:
        """Send to all workers, in parts that fit the segment. Raises EOFError, OSError, or what check() raises, if a
        worker has gone, and TimeoutError after `deadline`, a time.monotonic()."""
        for start in range(0, max(1, len(message)), _ROOM):
            part, left = message[start : start + _ROOM], len(message) - start
            while self._unread:
                while not self._unread[-1].poll(_CHECK_SECONDS):
                    self._check()
                    if deadline is not None and time.monotonic() > deadline:
                        raise TimeoutError("a worker does not read its calls")
                self._unread.pop().recv_bytes()
            buffer = cast(memoryview, self.segment.buf)
            buffer[:_HEADER_BYTES] = left.to_bytes(_HEADER_BYTES, "little")
            buffer[_HEADER_BYTES : _HEADER_BYTES + len(part)] = part
            for event in self.events:
                event.send_bytes(b"1")
                self._unread.append(event)

    def close(self) -> None:
        self.unlink()
        self.segment.close()
        for event in (*self.events, *self._worker_events):
            event.close()


def _reserve(name: str) -> None:
    """Have the segment's memory now: a write to a page for which there is no room later would end the process with
    SIGBUS. Raises MemoryError."""
    if not (_FOLDER / name).exists():  # Not Linux, where segments are no files.
        return
    descriptor = os.open(_FOLDER / name, os.O_RDWR)
    try:
        os.posix_fallocate(descriptor, 0, SEGMENT_BYTES)
    except OSError as error:
        room = os.statvfs(_FOLDER)
        raise MemoryError(
            f"{_FOLDER} has no room for the {SEGMENT_BYTES} bytes that the ranks share ({error.strerror}): "
            f"{room.f_bavail * room.f_frsize} of its {room.f_blocks * room.f_frsize} bytes are free; remove files from "
            "it, or make it larger (in a container: docker run --shm-size=1g)"
        ) from error
    finally:
        os.close(descriptor)


class CallReader:
    """A worker's end of the channel."""

    def __init__(self, name: str, event: Connection):
        self.segment = SharedMemory(name)
        self._event = event

    def read(self) -> bytes:
        """The next message. Raises EOFError or OSError if rank 0 has gone."""
        message, buffer = b"", cast(memoryview, self.segment.buf)
        while True:
            self._event.recv_bytes()
            left = int.from_bytes(buffer[:_HEADER_BYTES], "little")
            length = min(left, _ROOM)
            message += bytes(buffer[_HEADER_BYTES : _HEADER_BYTES + length])
            self._event.send_bytes(b"0")
            if length == left:
                return message

    def close(self) -> None:
        self.segment.close()
        self._event.close()
