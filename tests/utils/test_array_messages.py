"""Messages with large arrays, between two ends of a pipe."""

import threading
from multiprocessing import Pipe

import numpy as np
import pytest

from nanovllm.utils.array_messages import pack, receive, send, unpack


@pytest.fixture
def ends():
    ours, theirs = Pipe()
    yield ours, theirs
    for connection in (ours, theirs):
        connection.close()


@pytest.mark.parametrize("sizes", [[], [3], [10**6], [10**5, 0, 7, 3 * 10**5]])
def test_arrays_come_as_they_were_and_may_be_written(ends, sizes):
    ours, theirs = ends
    content = {"arrays": [np.arange(size) for size in sizes], "text": "a"}
    thread = threading.Thread(target=lambda: [send(theirs, pack(each)) for each in (content, "next")])
    thread.start()
    found, following = (unpack(receive(ours)) for _ in range(2))
    thread.join()
    assert (found["text"], following) == ("a", "next")
    for array, right in zip(found["arrays"], content["arrays"], strict=True):
        assert (array == right).all()
        array[:] = 1


def test_large_arrays_are_not_copied_and_equal_objects_are_sent_once():
    large, small, columns = np.arange(10**5), np.arange(10), np.zeros((300, 400)).T
    packed = pack([large, large, small, columns])
    assert [each.nbytes for each in packed.arrays] == [large.nbytes, columns.nbytes]
    assert np.shares_memory(np.frombuffer(packed.arrays[0], large.dtype), large)
    assert len(packed.head) < 2000
    assert unpack(packed)[3].shape == (400, 300)


def test_an_end_that_is_closed_in_the_middle_of_an_array(ends):
    ours, theirs = ends
    packed = pack(np.zeros(10**4))
    send(theirs, packed._replace(arrays=[]))  # The head alone; it says so.
    assert receive(ours).arrays == []
    whole = pack(np.zeros(10**6))
    theirs.send_bytes((1).to_bytes(8, "little") + whole.arrays[0].nbytes.to_bytes(8, "little") + whole.head)
    theirs.close()
    with pytest.raises(EOFError):
        receive(ours)
