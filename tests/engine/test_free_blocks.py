"""FreeBlocks: a queue of distinct ids, of which one may leave from the middle."""

import random

from nanovllm.engine.free_blocks import FreeBlocks


def test_an_id_that_left_the_middle_is_gone():
    free = FreeBlocks(range(5))
    free.remove(2)
    free.remove(0)
    assert (len(free), list(free), free[0], free[-1]) == (3, [1, 3, 4], 1, 4)
    assert 2 not in free
    assert [free.popleft() for _ in range(3)] == [1, 3, 4]
    assert not free


def test_none_is_left_when_all_have_left_the_middle():
    free = FreeBlocks(range(2))
    for block_id in range(2):
        assert free
        free.remove(block_id)
    assert not free


def test_an_id_that_comes_back_waits_behind_the_others():
    free = FreeBlocks(range(3))
    for _ in range(2):
        free.remove(0)
        free.append(0)
    assert list(free) == [1, 2, 0]
    assert [free.popleft() for _ in range(3)] == [1, 2, 0]


def test_it_is_a_queue_whatever_leaves_and_comes_back():
    """Compared with a list. Most ids leave from the middle, so the deque is made anew many times."""
    numbers = random.Random(0)
    free, expected, used = FreeBlocks(range(100)), list(range(100)), list[int]()
    for _ in range(5000):
        choice = numbers.random()
        if choice < 0.5 and used:
            block_id = used.pop(numbers.randrange(len(used)))
            free.append(block_id)
            expected.append(block_id)
        elif choice < 0.9 and expected:
            block_id = numbers.choice(expected)
            free.remove(block_id)
            expected.remove(block_id)
            used.append(block_id)
        elif expected:
            used.append(free.popleft())
            assert used[-1] == expected.pop(0)
        assert len(free) == len(expected)
        assert sum(1 for _ in super(FreeBlocks, free).__iter__()) <= 2 * len(expected) + 65
    assert list(free) == expected
