"""Messages between processes: pickles, with large arrays beside them. These are written from where they are, and read
to where they stay: without a copy, and without Python's lock."""

import os
import pickle
import struct
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

_LARGE = 1 << 16  # bytes; a smaller array is a part of the pickle
_MOST_AT_ONCE = 1 << 30  # Linux writes less than 2 GiB at once.


class Packed(NamedTuple):
    """A message.

    Attributes:
        head: a pickle.
        arrays: the bytes of its large arrays, in order.
    """

    head: bytes
    arrays: list[Any]


def pack(content: object) -> Packed:
    """Large arrays are not copied: nobody may write to them before the message has been sent."""
    arrays = list[Any]()

    def take(buffer: pickle.PickleBuffer) -> bool:
        """Whether it goes into the pickle."""
        view = buffer.raw()
        if view.nbytes < _LARGE:
            return True
        arrays.append(view)
        return False

    return Packed(pickle.dumps(content, protocol=5, buffer_callback=take), arrays)


def unpack(packed: Packed) -> Any:
    """Arrays that have been received may be written."""
    return pickle.loads(packed.head, buffers=packed.arrays)


def send(connection: Connection, packed: Packed) -> None:
    """connection: an end of a Pipe, to which no other thread sends at the same time. Raises OSError."""
    sizes = [array.nbytes for array in packed.arrays]
    connection.send_bytes(struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes) + packed.head)
    for array in packed.arrays:
        _write(connection.fileno(), array)


def receive(connection: Connection) -> Packed:
    """Raises EOFError if the other end has been closed, and OSError."""
    message = connection.recv_bytes()
    (num,) = struct.unpack_from("<Q", message)
    sizes = struct.unpack_from(f"<{num}Q", message, 8)
    return Packed(message[8 + 8 * num :], list(_read_all(connection.fileno(), sizes)))


def _write(file: int, array: memoryview) -> None:
    while array.nbytes:
        array = array[os.write(file, array[:_MOST_AT_ONCE]) :]


def _read_all(file: int, sizes: Iterable[int]) -> Iterable[bytearray]:
    for size in sizes:
        array = bytearray(size)
        view = memoryview(array)
        while view.nbytes:
            if not (num := os.readv(file, [view[:_MOST_AT_ONCE]])):
                raise EOFError
            view = view[num:]
        yield array
