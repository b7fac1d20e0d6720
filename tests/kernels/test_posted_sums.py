"""Sums by messages that go to all ranks, with all "ranks" in one process, one after the other."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import HALF, assert_added_and_normed, rounding
from linear_inputs import linear_torch, same_bits_in_a_graph

from nanovllm.kernels.dependent_launch import has_pdl
from nanovllm.kernels.matmul.gemv import GemvConfig, gemv
from nanovllm.kernels.parallel.posted_sums import (
    MAX_TOKENS,
    Inboxes,
    collect,
    collect_torch,
    push_add_norm,
    push_add_norm_torch,
)
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks

EPS = 1e-6
CONFIG = GemvConfig(4, 64, 2)
FLOAT16 = torch.float16


def make_inboxes(size, hidden, device):
    """Those of each rank."""
    own = [torch.zeros(2, size, MAX_TOKENS, hidden // 2, dtype=torch.int64, device=device) for _ in range(size)]
    addresses = torch.tensor([each.data_ptr() for each in own], device=device)
    step, abort = torch.zeros(2, 1, dtype=torch.int32, device=device)
    return [Inboxes(own[rank], addresses, step, abort, rank) for rank in range(size)]


def random(*shape, dtype, device):
    return torch.randn(*shape, device=device).to(dtype)


@pytest.mark.parametrize(
    ("size", "num_tokens", "hidden", "K", "dtype", "config", "has_bias"),
    [
        (2, 1, 24, 48, FLOAT16, GemvConfig(4, 64, 2), True),
        (2, 3, 18, 33, HALF, GemvConfig(4, 64, 1), False),
        (3, 4, 22, 64, FLOAT16, GemvConfig(8, 32, 2), True),
        (4, 4, 2, 17, HALF, GemvConfig(2, 32, 1), False),
        (8, 2, 10, 40, FLOAT16, GemvConfig(8, 64, 2), True),
    ],
)
def test_posted_sums(size, num_tokens, hidden, K, dtype, config, has_bias, device):
    inboxes = make_inboxes(size, hidden, device)
    for _ in range(2):
        inboxes[0].step.add_(2)
        for index in range(2):  # the inboxes of the first step are used again by the second
            residual = random(num_tokens, hidden, dtype=dtype, device=device)
            xs = [random(num_tokens, K, dtype=dtype, device=device) for _ in range(size)]
            weights = [random(hidden, K, dtype=dtype, device=device) * K**-0.5 for _ in range(size)]
            bias = random(hidden, dtype=dtype, device=device) if has_bias else None
            parts = []
            for rank in range(size):
                own_bias = bias if rank == 0 else None
                gemv(xs[rank], weights[rank], None, own_bias, config, inboxes=inboxes[rank], index=index)
                parts.append(linear_torch(xs[rank], weights[rank], own_bias))
            results = [collect(inboxes[rank], index, residual.clone()) for rank in range(size)]
            expected = collect_torch(parts, residual.clone()).float()
            # Each rank's part is rounded, and the sum.
            torch.testing.assert_close(results[0].float(), expected, **rounding(dtype, 1 + size, K))
            assert all(torch.equal(result, results[0]) for result in results), "the ranks' residuals differ"


@pytest.mark.parametrize("format", [Fp8(), Fp8Blocks()], ids=["channels", "blocks"])
def test_posted_sums_of_weights_in_fp8(format, device):
    hidden, K = 128, 256
    inboxes = make_inboxes(2, hidden, device)
    inboxes[0].step.add_(2)
    residual = random(1, hidden, dtype=FLOAT16, device=device)
    xs = [random(1, K, dtype=FLOAT16, device=device) for _ in range(2)]
    weights = [format.quantize(random(hidden, K, dtype=FLOAT16, device=device) * K**-0.5, FLOAT16) for _ in range(2)]
    for rank in range(2):
        options = {"weight_scale": weights[rank].scale, "inboxes": inboxes[rank]}
        gemv(xs[rank], weights[rank].values, None, None, GemvConfig(32, 256, 2), **options)
    parts = [linear_torch(x, format.dequantized(weight)) for x, weight in zip(xs, weights, strict=True)]
    expected = collect_torch(parts, residual.clone()).float()
    close = rounding(FLOAT16, 3, K)
    for rank in range(2):
        torch.testing.assert_close(collect(inboxes[rank], 0, residual.clone()).float(), expected, **close)


def put(partial, number, inbox, sender):
    """Messages by hand: each pair of values below the number of the sum."""
    words = partial.view(torch.int32).long() & 0xFFFFFFFF
    inbox[number % 2, sender, : len(partial)] = words | number << 32


@pytest.mark.parametrize("is_wide", [False, True], ids=["", "float32 weight"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 64), (3, 100), (5, 256)])
def test_pushed_sums(dtype, num_tokens, hidden, is_wide, device):
    """Rank 0 goes first, so what rank 1 would have sent it by then is put there; rank 1 takes what rank 0 has sent."""
    inboxes = make_inboxes(2, hidden, device)
    for number in (1, 2, 3):  # the inboxes of the first are used again by the third
        partials = [random(num_tokens, hidden, dtype=dtype, device=device) for _ in range(2)]
        residual = random(num_tokens, hidden, dtype=dtype, device=device)
        weight = (1 + 0.3 * torch.randn(hidden, device=device)).to(torch.float32 if is_wide else dtype)
        total = residual.clone()
        norm = push_add_norm_torch(partials, total, weight, EPS)
        put(partials[1], number, inboxes[0].own, sender=1)
        results = [residual.clone(), residual.clone()]
        for rank in range(2):
            y = push_add_norm(inboxes[rank], number, partials[rank], results[rank], weight, EPS)
            assert_added_and_normed(results[rank], y, total, norm)
        assert torch.equal(*results)
        sent = inboxes[1].own[number % 2, 0] >> 32
        assert sent[:num_tokens].eq(number).all()
        assert sent[num_tokens:].eq(0).all()


def test_a_push_waits_for_nobody_once_it_is_aborted(device):
    inboxes = make_inboxes(2, 64, device)
    inboxes[0].abort.fill_(1)
    partial, residual = torch.randn(2, 2, 64, device=device).half()
    push_add_norm(inboxes[0], 1, partial, residual, torch.ones(64, device=device).half(), EPS)
    assert inboxes[1].own.eq(0).all(), "it wrote to a rank that may be gone"


def test_nothing_is_sent_to_ranks_that_may_be_gone_nor_waited_for(device):
    inboxes = make_inboxes(2, 64, device)
    inboxes[0].step.add_(4)
    inboxes[0].abort.fill_(1)
    x, weight = torch.randn(2, 32, device=device).half(), torch.randn(64, 32, device=device).half()
    gemv(x, weight, None, None, CONFIG, inboxes=inboxes[0])
    assert inboxes[1].own.eq(0).all()
    collect(inboxes[0], 0, torch.zeros(2, 64, device=device, dtype=FLOAT16))


def test_wrong_arguments_are_refused(device):
    inboxes = make_inboxes(2, 8, device)
    x, weight = torch.zeros(2, 32, device=device), torch.zeros(8, 32, device=device)
    with pytest.raises(ValueError, match=r"^x must be of a 16-bit float"):
        gemv(x, weight, None, None, CONFIG, inboxes=inboxes[0])
    with pytest.raises(ValueError, match=r"^x must be of a 16-bit float and weight have an even number"):
        gemv(x.half(), weight.half()[:7], None, None, CONFIG, inboxes=inboxes[0])
    with pytest.raises(ValueError, match=r"^x must be \[1\.\.4, 32\]"):
        gemv(x.half().new_zeros(5, 32), weight.half(), None, None, CONFIG, inboxes=inboxes[0])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_chain_in_a_graph(num_tokens, device):
    """Two ranks take turns on one stream, so that none waits; each sum is the next product's input."""
    if not has_pdl(torch.device(device)):
        pytest.skip("no programmatic dependent launch here")
    hidden, num_sums = 1024, 16
    inboxes = make_inboxes(2, hidden, device)
    weights = random(num_sums, 2, hidden, hidden, dtype=torch.bfloat16, device=device) * hidden**-0.5
    start = random(num_tokens, hidden, dtype=torch.bfloat16, device=device).expand(2, -1, -1)

    def chain(residuals: torch.Tensor, pdl: bool):
        inboxes[0].step.add_(num_sums)
        for index in range(num_sums):
            for rank in range(2):
                options = {"inboxes": inboxes[rank], "index": index, "pdl": pdl and rank == 1}
                gemv(residuals[rank], weights[index, rank], None, None, CONFIG, **options)
            for rank in range(2):
                collect(inboxes[rank], index, residuals[rank], pdl=pdl and rank == 0)

    same_bits_in_a_graph(chain, start)
