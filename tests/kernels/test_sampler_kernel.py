"""The sampling kernel against its plain-torch twin: the random words exactly, the scores to rounding."""

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from draws import sample_torch, sample_triton  # noqa: E402
from kernel_harness import nightly  # noqa: E402

from nanovllm.kernels.sampling import sampler as kernels  # noqa: E402
from nanovllm.kernels.sampling.sampler import NON_FINITE  # noqa: E402

INF = float("inf")
SEEDS = torch.tensor([0, -1, 2**62 + 12345, -(2**63), 7, 7, 2**32, 99, 1234567890123])


@triton.jit
def _philox_kernel(words, out, size, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    mask = row < size
    c0 = tl.load(words + row * 6, mask=mask).to(tl.uint32)
    c1 = tl.load(words + row * 6 + 1, mask=mask).to(tl.uint32)
    c2 = tl.load(words + row * 6 + 2, mask=mask).to(tl.uint32)
    c3 = tl.load(words + row * 6 + 3, mask=mask).to(tl.uint32)
    k0 = tl.load(words + row * 6 + 4, mask=mask).to(tl.uint32)
    k1 = tl.load(words + row * 6 + 5, mask=mask).to(tl.uint32)
    r0, r1, r2, r3 = kernels.philox4x32(c0, c1, c2, c3, k0, k1)
    tl.store(out + row * 4, r0.to(tl.int64), mask=mask)
    tl.store(out + row * 4 + 1, r1.to(tl.int64), mask=mask)
    tl.store(out + row * 4 + 2, r2.to(tl.int64), mask=mask)
    tl.store(out + row * 4 + 3, r3.to(tl.int64), mask=mask)


@triton.jit
def _log2_exponential_kernel(bits, out, FAST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, kernels.log2_exponential(tl.load(bits + at).to(tl.uint32), FAST))


def test_philox_words_equal_the_twins(device):
    words = torch.randint(2**32, (61, 6), device=device)
    words[0], words[1] = 0, 2**32 - 1
    out = torch.empty(61, 4, dtype=torch.int64, device=device)
    _philox_kernel[(1,)](words, out, 61, BLOCK=64)
    assert torch.equal(out, torch.stack(kernels.philox4x32_torch(*words.unbind(1)), dim=1))


def test_exponentials_equal_the_twins(device):
    bits = torch.randint(2**32, (4096,), device=device)
    bits[:1024] = torch.arange(1024)
    bits[1024:1536] = 2**32 - 1 - torch.arange(512)
    bits[1536:2048] = 2**27 - 256 + torch.arange(512)
    out = torch.empty(4096, device=device)
    _log2_exponential_kernel[(1,)](bits, out, FAST=isinstance(_philox_kernel, triton.JITFunction), BLOCK=4096)
    torch.testing.assert_close(out, kernels.log2_exponential_torch(bits), rtol=1e-6, atol=2e-5)


def assert_same_draws(logits, temperatures, seeds, positions, thresholds=None):
    """Equal tokens, or, where two columns' scores are equal to rounding, a token that could as well have won."""
    tokens = sample_triton(logits, temperatures, seeds, positions, thresholds)
    expected = sample_torch(logits, temperatures, seeds, positions, thresholds)
    if thresholds is not None:
        assert (logits.gather(1, tokens[:, None]).squeeze(1).float() >= thresholds).all()
    assert tokens.dtype == torch.int64
    assert tokens.shape == expected.shape
    greedy = temperatures == 0
    assert torch.equal(tokens[greedy], expected[greedy])
    rows = (~greedy).nonzero().squeeze(1)
    if thresholds is not None:
        logits = logits.masked_fill(logits.float() < thresholds[:, None], -INF)
    draw = temperatures[rows], seeds[rows], positions[rows]
    missing = -logits.shape[1] % kernels.GROUP
    groups = F.pad(logits[rows], (0, missing), value=-INF).unflatten(1, (-1, kernels.GROUP))
    scores = kernels.group_scores(groups, *draw)
    got, best = (scores.gather(1, x[rows, None] // kernels.GROUP) for x in (tokens, expected))
    torch.testing.assert_close(got, best, rtol=2e-6, atol=5e-5)
    # Where another group won there is no telling who of it has to win: so its own race is asked.
    columns = tokens[rows, None] // kernels.GROUP * kernels.GROUP + torch.arange(kernels.GROUP, device=logits.device)
    is_column = columns < logits.shape[1]
    members = logits[rows].gather(1, columns.clamp(max=logits.shape[1] - 1)).masked_fill(~is_column, -INF)
    within = kernels.race_scores(members, *draw, columns[:, 0])
    got = within.gather(1, tokens[rows, None] % kernels.GROUP).squeeze(1)
    torch.testing.assert_close(got, within.amax(dim=1), rtol=2e-6, atol=5e-5)
    assert (tokens == expected).float().mean() >= 0.9 or len(tokens) < 10


@pytest.mark.parametrize(
    ("batch", "vocab_size", "dtype"),
    [
        (0, 5, torch.float32),
        (1, 1, torch.float32),
        (4, 3, torch.float32),
        (9, 7, torch.float32),
        (2, 1030, torch.float16),
        (4, 2100, torch.bfloat16),
        (5, 4101, torch.float32),
    ],
)
def test_kernel_equals_twin(batch, vocab_size, dtype, device):
    logits = (torch.randn(batch, vocab_size, device=device) * 3).to(dtype)
    temperatures = torch.tensor([0.6, 1.0, 0.0, 0.05, 1.7, 1e-5, 0.0, 30.0, 0.9], device=device)[:batch]
    positions = torch.tensor([0, 5, 2**31, 2**32 + 5, 17, 18, 2**40, 1, 4095], device=device)[:batch]
    assert_same_draws(logits, temperatures, SEEDS[:batch].to(device), positions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *nightly(torch.float32)])
def test_tokens_below_the_threshold_are_never_drawn(dtype, device):
    logits = (torch.randn(9, 2100, device=device) * 3).to(dtype)
    temperatures = torch.tensor([0.6, 1.0, 0.0, 0.05, 1.7, 1e-5, 0.0, 30.0, 0.9], device=device)
    thresholds = logits.float().topk(20).values[:, -1].contiguous()
    thresholds[1] = -INF
    thresholds[7] = logits[7].max()
    assert_same_draws(logits, temperatures, SEEDS.to(device), torch.arange(9, device=device), thresholds)


def test_large_vocabulary(device):
    # Triton's interpreter takes 10 s for all of Qwen3's.
    logits = torch.randn(1, 151_936 if device == "cuda" else 15_193, device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    assert_same_draws(logits, one.float(), one * 42, one * 1000)


def test_rows_of_a_wider_tensor(device):
    logits = torch.randn(4, 777, device=device)[:, 5:705]
    ones = torch.ones(4, dtype=torch.int64, device=device)
    assert_same_draws(logits, ones.float(), torch.arange(4, device=device), ones)


def test_the_batch_does_not_matter(device):
    """Splits differ with the batch size; a row's draw does not."""
    logits = torch.randn(5, 2500, device=device)
    temperatures = torch.full((5,), 0.8, device=device)
    seeds, positions = torch.arange(5, device=device), torch.arange(5, device=device) * 100
    together = sample_triton(logits, temperatures, seeds, positions)
    alone = [
        sample_triton(logits[i : i + 1], temperatures[:1], seeds[i : i + 1], positions[i : i + 1]) for i in range(5)
    ]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of overflows and NaN, in Triton's interpreter
@pytest.mark.parametrize(
    ("temperature", "truncated"),
    [(0.0, False), (0.7, True), (3e38, False), *nightly((0.0, True), (0.7, False), (3e38, True), (1e-39, False))],
)
def test_a_row_without_a_token(temperature, truncated, device):
    """One NaN or +inf among healthy logits, wherever it is, or nothing but -inf; not the largest finite numbers."""
    vocab_size, largest = 1100, torch.finfo(torch.float32).max
    logits = torch.randn(11, vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
    for row, column in enumerate((0, 17, 1023, vocab_size - 1)):
        logits[row, column] = float("nan")
    logits[4, 1024] = INF
    logits[5] = -INF
    logits[6, ::2] = -INF
    logits[6, 3] = float("nan")
    logits[7] = float("nan")
    logits[8] = -INF
    logits[8, 1055] = -3.0
    logits[9, ::3], logits[9, 1::3] = -largest, -INF
    logits[9, 700] = largest
    logits[10] = -largest
    temperatures = torch.full((11,), temperature, device=device)
    zeros = torch.zeros(11, dtype=torch.int64, device=device)
    # Truncation looks at what is finite, as sampling_thresholds does.
    best = logits.nan_to_num(nan=-INF, posinf=0.0, neginf=-INF).amax(dim=1)
    thresholds = best - 0.5 if truncated else None
    tokens = sample_triton(logits, temperatures, zeros, zeros, thresholds)
    assert tokens[:9].tolist() == [NON_FINITE] * 8 + [1055]
    assert tokens[9] == 700
    assert 0 <= tokens[10] < vocab_size
    expected = sample_torch(logits, temperatures, zeros, zeros, thresholds)
    assert expected[:10].tolist() == tokens[:10].tolist()
    assert 0 <= expected[10] < vocab_size


@pytest.mark.parametrize(("temperature", "dtype"), [(0.0, torch.float16), (1.0, torch.bfloat16)])
def test_no_row_is_spoilt_by_its_neighbour(temperature, dtype, device):
    logits = (torch.randn(6, 1100, device=device) * 3).to(dtype)
    temperatures = torch.full((6,), temperature, device=device)
    arguments = SEEDS[:6].to(device), torch.arange(6, device=device)
    expected = sample_triton(logits, temperatures, *arguments)
    spoilt = logits.clone()
    spoilt[1::2, 777] = float("nan")
    spoilt[5, 777] = INF
    tokens = sample_triton(spoilt, temperatures, *arguments)
    assert (tokens[1::2] == NON_FINITE).all()
    assert torch.equal(tokens[::2], expected[::2])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # in Triton's interpreter
def test_the_smallest_temperatures_are_greedy(device):
    """Though their inverses are infinite in float32."""
    logits = torch.tensor([-1.0, 0.0, 3.0, 2.0] * 10, device=device).repeat(3, 1)
    logits[1], logits[2] = 0.0, -5.0
    logits[2, 30] = -4.0
    temperatures = torch.tensor([4e-39, 1e-40, 1e-38], device=device)
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    for draw in (sample_triton, sample_torch):
        best, tied, negative = draw(logits, temperatures, zeros, zeros).tolist()
        assert best % 4 == 2
        assert 0 <= tied < 40
        assert negative == 30


def test_the_highest_temperatures_draw_what_is_not_masked(device):
    """A logit of -inf times a scale of 0 would be undefined."""
    highest = torch.finfo(torch.float32).max
    logits = torch.full((3, 100), -INF, device=device)
    logits[0, 40:43], logits[1, 99], logits[2, 17:] = -1e8, 1e8, 3.0
    draw = torch.full((3,), highest, device=device), SEEDS[:3].to(device), torch.arange(3, device=device)
    assert_same_draws(logits, *draw)
    assert logits.gather(1, sample_triton(logits, *draw).unsqueeze(1)).isfinite().all()


def test_greedy_takes_the_lowest_of_equals(device):
    logits = torch.zeros(1, 9000, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    for columns in ([5000, 8999], [3, 4], [1023, 1024], [700, 8000, 8001]):
        tied = logits.clone()
        tied[0, columns] = 1.0
        assert sample_triton(tied, zero.float(), zero, zero).item() == columns[0]


@pytest.mark.gpu
def test_captured_in_a_cuda_graph():
    logits = torch.randn(5, 151_936, device="cuda", dtype=torch.bfloat16)
    temperatures = torch.full((5,), 0.6, device="cuda")
    seeds, positions = torch.arange(5, device="cuda"), torch.arange(5, device="cuda")
    sample_triton(logits, temperatures, seeds, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample_triton(logits, temperatures, seeds, positions)
    for step in range(3):
        positions.fill_(step)
        graph.replay()
        assert torch.equal(tokens, sample_triton(logits, temperatures, seeds, positions))
