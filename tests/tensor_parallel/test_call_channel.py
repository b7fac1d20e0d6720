"""The segment of shared memory: messages of any size arrive whole, in order, and none is overwritten unread."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from nanovllm.engine.ranks.call_channel import SEGMENT_BYTES, CallReader, CallWriter


class DeadError(Exception):
    """What the check raises here."""


@pytest.fixture
def channel():
    writer = CallWriter(2, lambda: None)
    readers = [CallReader(writer.name, writer.worker_event(worker)) for worker in range(2)]
    writer.unlink()
    yield writer, readers
    for end in (writer, *readers):
        end.close()


def test_messages_of_any_size_reach_every_worker_in_order(channel):
    writer, readers = channel
    sizes = [0, 1, 100, SEGMENT_BYTES - 5, SEGMENT_BYTES - 4, SEGMENT_BYTES - 3, SEGMENT_BYTES, 5 * SEGMENT_BYTES, 7]
    messages = [bytes([i]) * size for i, size in enumerate(sizes)]
    received = [[], []]

    def read(reader, into):
        into.extend(reader.read() for _ in messages)

    threads = [threading.Thread(target=read, args=pair) for pair in zip(readers, received, strict=True)]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.write(message)
    for thread in threads:
        thread.join()
    assert received == [messages, messages]


def test_the_layout_is_a_length_and_the_bytes(channel):
    writer, readers = channel
    writer.write(b"hello")
    assert bytes(writer.segment.buf[:9]) == b"\5\0\0\0hello"
    assert [reader.read() for reader in readers] == [b"hello", b"hello"]


def test_an_unread_message_is_not_overwritten(channel):
    writer, readers = channel
    writer.write(b"first")
    assert readers[0].read() == b"first"

    def check():
        raise DeadError

    writer._check = check
    with pytest.raises(DeadError):
        writer.write(b"second")
    assert readers[1].read() == b"first"


def test_a_wait_for_a_worker_can_have_an_end(channel):
    writer, _ = channel
    writer.write(b"first")
    with pytest.raises(TimeoutError, match="a worker does not read its calls"):
        writer.write(b"second", deadline=time.monotonic())


def test_the_memory_is_reserved_at_once(monkeypatch):
    writer = CallWriter(1, lambda: None)
    assert os.stat(Path("/dev/shm", writer.name)).st_blocks * 512 >= SEGMENT_BYTES
    writer.close()

    def refuse(descriptor, start, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr("secrets.token_hex", lambda size: writer.name.removeprefix("nanovllm-"))
    message = r"/dev/shm has no room for the 1048576 bytes .*No space left on device.*\d+ of its \d+ bytes are free"
    with pytest.raises(MemoryError, match=message):
        CallWriter(1, lambda: None)
    assert not Path("/dev/shm", writer.name).exists()


def test_a_worker_that_has_gone_shows(channel):
    writer, readers = channel
    writer.close_worker_events()
    readers[1].close()
    with pytest.raises((EOFError, OSError)):
        writer.write(b"first")


def test_a_worker_notices_that_rank_0_has_gone(channel):
    writer, readers = channel
    writer.close()
    with pytest.raises((EOFError, OSError)):
        readers[0].read()


@pytest.mark.parametrize("unlinked", [True, False])
def test_nothing_stays_in_shared_memory(unlinked):
    writer = CallWriter(1, lambda: None)
    file = Path("/dev/shm", writer.name)
    assert file.exists()
    reader = CallReader(writer.name, writer.worker_event(0))
    if unlinked:
        writer.unlink()
        assert not file.exists()
        writer.write(b"still works")
        assert reader.read() == b"still works"
    reader.close()
    writer.close()
    assert not file.exists()
