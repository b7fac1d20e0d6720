"""The call channel: bytes from rank 0 to all workers, through a segment of shared memory."""

import secrets
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

SEGMENT_BYTES = 2**20
_HEADER_BYTES = 4  # little endian: bytes of the message that are still to come, this part of it included
_CHECK_SECONDS = 0.2


class Event:
    """One end of a flag between rank 0 and a worker: set by the one when a message lies in the segment, cleared by
    the other once it has been read.

    Over a socket pair, where multiprocessing.Event takes five named semaphores: those would stay in /dev/shm when all
    processes are killed, and whoever waits for one never learns that the other side has gone.
    """

    def __init__(self, connection: Connection):
        self._connection = connection

    @classmethod
    def pair(cls) -> tuple["Event", "Event"]:
        """Rank 0's end and the worker's, which may be passed to a process that is being spawned."""
        ours, theirs = Pipe()
        return cls(ours), cls(theirs)

    def set(self) -> None:
        self._connection.send_bytes(b"1")

    def wait(self) -> None:
        """Until it is set. Raises EOFError or OSError when rank 0 has gone."""
        self._connection.recv_bytes()

    def clear(self) -> None:
        self._connection.send_bytes(b"0")

    def wait_cleared(self, check: Callable[[], None]) -> None:
        """Until it is cleared, calling check() now and then. Raises EOFError or OSError when the worker has gone."""
        while not self._connection.poll(_CHECK_SECONDS):
            check()
        self._connection.recv_bytes()

    def close(self) -> None:
        self._connection.close()


class CallWriter:
    """Rank 0's end of the channel: makes the segment, under a random name.

    Attributes:
        name: of the segment, for CallReader.
    """

    def __init__(self, num_workers: int, check: Callable[[], None]):
        """check: called while waiting for a worker; raises where one of them has gone."""
        self._check = check
        self._segment = SharedMemory(f"nanovllm-{secrets.token_hex(8)}", create=True, size=SEGMENT_BYTES)
        self.name = self._segment.name
        self._is_named = True
        self._events, self._worker_events = zip(*(Event.pair() for _ in range(num_workers)), strict=True)
        self._unread: list[Event] = []

    def worker_event(self, worker: int) -> Event:
        """What worker 0, 1, ... gives to its CallReader."""
        return self._worker_events[worker]

    def close_worker_events(self) -> None:
        """Once all workers are started: a worker's end must be nobody else's, for its death to show."""
        for event in self._worker_events:
            event.close()

    def unlink(self) -> None:
        """Once all workers have attached: from here on the segment goes when its last process goes, however it
        goes. Until then multiprocessing's resource tracker sees to it."""
        if self._is_named:
            self._is_named = False
            self._segment.unlink()

    def write(self, message: bytes) -> None:
        """Send to all workers, in as many parts as the segment's size makes of it, each after all have read the one
        before it. Raises EOFError, OSError, or what check() raises, where a worker has gone."""
        start, room = 0, SEGMENT_BYTES - _HEADER_BYTES
        while True:
            left = len(message) - start
            part = message[start : start + room]
            self._wait_until_read()
            self._segment.buf[:_HEADER_BYTES] = left.to_bytes(_HEADER_BYTES, "little")
            self._segment.buf[_HEADER_BYTES : _HEADER_BYTES + len(part)] = part
            for event in self._events:
                event.set()
                self._unread.append(event)
            start += len(part)
            if left <= room:
                return

    def _wait_until_read(self) -> None:
        while self._unread:
            self._unread[-1].wait_cleared(self._check)
            self._unread.pop()

    def close(self) -> None:
        self.unlink()
        self._segment.close()
        for event in (*self._events, *self._worker_events):
            event.close()


class CallReader:
    """A worker's end of the channel."""

    def __init__(self, name: str, event: Event):
        self._segment = SharedMemory(name)
        self._event = event

    def read(self) -> bytes:
        """The next message. Raises EOFError or OSError when rank 0 has gone."""
        message = b""
        while True:
            self._event.wait()
            left = int.from_bytes(self._segment.buf[:_HEADER_BYTES], "little")
            length = min(left, SEGMENT_BYTES - _HEADER_BYTES)
            message += bytes(self._segment.buf[_HEADER_BYTES : _HEADER_BYTES + length])
            self._event.clear()
            if length == left:
                return message

    def close(self) -> None:
        self._segment.close()
        self._event.close()
