"""Compiling ahead: what goes on in the block, and that it leaves nothing behind."""

import threading
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels import launch
from nanovllm.kernels.attention.qk_norm_rope import qk_norm_rope_store
from nanovllm.kernels.launch import compile_ahead


@pytest.fixture
def rotate(device):
    """rotate() -> whether a launch has changed the heads that it rotates in place."""
    qkv = torch.randn(3, 4 * 16, device=device)
    table = torch.full((8, 16), 0.5, device=device)
    positions = torch.arange(3, device=device)

    def run() -> bool:
        before = qkv.clone()
        qk_norm_rope_store.kernel(qkv, None, None, 1e-6, table, positions, None, None, None, None, 2, 1)
        return not torch.equal(qkv, before)

    return run


def test_nothing_is_launched_in_the_block(rotate):
    with compile_ahead():
        assert not rotate()
        assert not rotate()
    assert rotate()


def test_other_threads_launch_meanwhile(rotate):
    seen = []
    with compile_ahead():
        thread = threading.Thread(target=lambda: seen.append(rotate()))
        thread.start()
        thread.join()
    assert seen == [True]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_blocks_exception_ends_it(rotate, error):
    running = set(threading.enumerate())

    def fail():
        with compile_ahead():
            rotate()
            raise error

    with pytest.raises(error):
        fail()
    assert set(threading.enumerate()) == running
    assert rotate()
    with compile_ahead():  # once more: the first has left no mode behind
        assert not rotate()


def test_after_an_exception_the_threads_are_waited_for_in_a_block_that_can_hold_ctrl_c(monkeypatch):
    release, futures, ends = threading.Event(), [], []

    class Pool(launch._CompilingPool):
        def __init__(self, max_workers):
            super().__init__(max_workers)
            futures.append(self.submit(release.wait))

    @contextmanager
    def waiting():
        release.set()
        yield
        ends.append(futures[0].done())

    monkeypatch.setattr(launch, "_CompilingPool", Pool)
    with pytest.raises(KeyboardInterrupt), compile_ahead(waiting=waiting):
        raise KeyboardInterrupt
    assert ends == [True]
