"""The tiles of quack-kernels' products, and the batches that are padded to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.layers.quack_tiles import (
    LARGE_PREFILL_TILE,
    PREFILL_TILE,
    Kind,
    decode_tile,
    padded_batch,
    prefill_tile,
)

GATE_UP = {
    "0.5B": (9728, 896),
    "0.6B": (6144, 1024),
    "1.7B": (12288, 2048),
    "4B": (19456, 2560),
    "8B": (24576, 4096),
    "32B": (51200, 5120),
}
H200 = 132  # multiprocessors

shapes = st.one_of(
    st.sampled_from(list(GATE_UP.values())),
    st.tuples(st.integers(1, 800).map(lambda n: 64 * n), st.integers(1, 160).map(lambda n: 64 * n)),
)


@given(st.sampled_from(Kind), st.integers(1, 2000), shapes, st.integers(1, 200))
def test_tiles_are_whole_and_fit_the_chip(kind, num_tokens, shape, num_multiprocessors):
    tile = decode_tile(kind, num_tokens, *shape, num_multiprocessors)
    if tile is None:
        return
    assert tile.tokens in (64, 128, 192, 256)
    assert num_tokens % tile.tokens == 0
    if kind is not Kind.ADD and (kind, *tile[:2]) != (Kind.SILU, 64, 96):
        # Programs come in whole clusters.
        count = -(-num_tokens // (tile.tokens * tile.cluster[0])) * tile.cluster[0] * -(-shape[0] // tile.columns)
        assert count <= num_multiprocessors, "a second round"


@given(st.integers(1, 2000), shapes)
def test_padding(num_seqs, shape):
    padded = padded_batch(num_seqs, *shape, H200)
    assert num_seqs <= padded < num_seqs + 128
    assert padded_batch(padded, *shape, H200) == padded, "padding is padded again"
    # Buffers for the largest batch have room for all.
    assert padded <= padded_batch(num_seqs + 1, *shape, H200)
    assert padded == num_seqs or decode_tile(Kind.SILU, padded, *shape, H200) is not None


@pytest.mark.parametrize(
    ("model", "batches"),
    [
        ("0.6B", {16: 16, 32: 32, 33: 64, 64: 64, 65: 128, 129: 192, 193: 256, 257: 384, 385: 512, 513: 513}),
        ("0.5B", {16: 16, 17: 64, 65: 128}),
        ("1.7B", {16: 16, 17: 64, 65: 128, 129: 192, 193: 256, 257: 257}),
        ("4B", {17: 64, 65: 128, 129: 129, 209: 209, 256: 256}),
        ("8B", {16: 16, 17: 64, 65: 128, 129: 129, 208: 208, 209: 256, 257: 257, 500: 500}),
        ("32B", {40: 40, 100: 100, 250: 250}),
    ],
)
def test_batches_that_are_padded(model, batches):
    assert {n: padded_batch(n, *GATE_UP[model], H200) for n in batches} == batches


def test_sums_are_for_it_where_rows_are_few_or_short():
    def takes(num_tokens, N, K):
        return decode_tile(Kind.ADD, num_tokens, N, K, H200) is not None

    out, down = (1024, 2048), (1024, 3072)  # 0.6B's
    assert takes(64, *out), "a row is short enough not to be split"
    assert not takes(64, *down)
    assert takes(128, *down)
    assert takes(384, *down)
    assert not takes(512, *down)
    assert takes(128, 2048, 6144)
    assert takes(256, 2048, 2048)
    assert not takes(256, 2048, 6144)
    assert not takes(128, 2560, 9728)
    assert takes(128, 4096, 12288)
    assert not takes(192, 4096, 12288)
    assert not takes(128, 5120, 8192), "a second round"


def test_tiles_of_prefills():
    for kind in (Kind.LINEAR, Kind.SILU):
        assert prefill_tile(kind, 16000, *GATE_UP["0.6B"]) == PREFILL_TILE
        assert prefill_tile(kind, 16000, *GATE_UP["8B"]) == LARGE_PREFILL_TILE
        assert prefill_tile(kind, 2047, *GATE_UP["8B"]) is None, "the launch would take longer than the product"
        assert prefill_tile(kind, 2048, *GATE_UP["0.6B"]) is None
    assert prefill_tile(Kind.LINEAR, 16000, 6144, 4096) == LARGE_PREFILL_TILE, "8B's q, k and v"
    assert prefill_tile(Kind.ADD, 16000, 4096, 12288) is None
