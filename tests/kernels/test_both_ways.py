"""Attention in both directions within ranges of tokens: kernel against twin."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import HALF, assert_refused, nightly, poisoned_memory, rounding

from nanovllm.kernels.attention.both_ways import attend_both_ways


def case(num_heads, head_dim, ranges, dtype, device):
    """Arguments, of tokens of which some are in no range: their queries, keys and values are NaN."""
    torch.manual_seed(0)
    num_tokens = ranges[-1][1] + 2
    # As a tower has them, side by side in a row.
    qkv = torch.full((num_tokens, 3, num_heads, head_dim), float("nan"), dtype=dtype, device=device)
    for start, end in ranges:
        qkv[start:end] = torch.randn(end - start, *qkv.shape[1:], device=device)
    starts, ends = (torch.tensor(x, dtype=torch.int32, device=device) for x in zip(*ranges, strict=True))
    return *qkv.unbind(1), starts, ends, max(end - start for start, end in ranges), head_dim**-0.5


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "ranges"),
    [
        (2, 72, [(0, 150), (150, 151), (151, 180)]),  # The last tile of keys is cut, and one is full.
        (1, 64, [(3, 67), (70, 101)]),  # Tokens between them, as padding is.
        *nightly((3, 16, [(0, 40)]), (1, 8, [(0, 20)]), (1, 80, [(0, 64)]), (1, 96, [(1, 33)]), (2, 128, [(0, 70)])),
    ],
)
def test_kernel_equals_twin(num_heads, head_dim, ranges, dtype, device):
    arguments = case(num_heads, head_dim, ranges, dtype, device)
    with poisoned_memory():
        kernel, twin = (function(*arguments) for function in (attend_both_ways.kernel, attend_both_ways.twin))
    # Weights, sums of up to 150 of them, and the result are rounded.
    torch.testing.assert_close(kernel, twin, **rounding(dtype, 3, arguments[-2]))
    assert torch.equal(kernel, attend_both_ways.kernel(*arguments)), "other bits"
    is_inside = torch.zeros(len(kernel), dtype=torch.bool, device=device)
    for start, end in ranges:
        is_inside[start:end] = True
    assert kernel[is_inside].any(dim=(1, 2)).all()
    assert not kernel[~is_inside].any()


def test_a_range_has_the_same_bits_alone_and_among_others(device):
    """In any place, whatever the longest one is."""
    q, k, v, starts, ends, longest, scale = case(2, 72, [(0, 70), (70, 270), (275, 340)], HALF, device)
    whole = attend_both_ways.kernel(q, k, v, starts, ends, longest, scale)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        own = (x[start:end].clone() for x in (q, k, v))
        at = torch.zeros(1, dtype=torch.int32, device=device)
        alone = attend_both_ways.kernel(*own, at, at + end - start, end - start, scale)
        assert torch.equal(alone, whole[start:end])


def test_none_and_wrong_ones(device):
    q, k, v, starts, ends, longest, scale = case(2, 16, [(0, 5)], HALF, device)
    assert not attend_both_ways.kernel(q, k, v, starts[:0], ends[:0], 0, scale).any()
    wrong = {"k": [k[:-1], k.float(), k.transpose(0, 1).contiguous().transpose(0, 1)]}
    assert_refused(lambda k: attend_both_ways.kernel(q, k, v, starts, ends, longest, scale), {"k": k}, wrong)
