"""The sampler's promises: the right distribution, noise that belongs to the request, greedy as the limit."""

import math

import pytest
import torch

from nanovllm.kernels.sampling.sampler import log2_exponential_torch, philox4x32_torch
from nanovllm.layers.sampler import Sampler

VOCAB_SIZE = 24  # a group of tokens and a half
NUM_DRAWS = 40_000
TEMPERATURE = 0.8
# Chi-square with k degrees of freedom has mean k and variance 2k: beyond six deviations lies one case in 10^7.
CHI_SQUARE_BOUND = (VOCAB_SIZE - 1) + 6 * math.sqrt(2 * (VOCAB_SIZE - 1))


def draw(logits, temperature, seeds, positions) -> torch.Tensor:
    """One token for each of the seeds and positions, from one row of logits, on the logits' device."""
    device, batch = logits.device, len(seeds)
    temperatures = torch.full((batch,), temperature, device=device)
    rows = logits.expand(batch, -1).contiguous()
    return Sampler()(rows, temperatures, seeds.to(device), positions.to(device))


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * len(tokens)
    observed = torch.bincount(tokens, minlength=len(probabilities))
    return ((observed - expected).square() / expected).sum().item()


@pytest.fixture
def logits(device):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(VOCAB_SIZE, generator=generator).to(device) * 1.5


@pytest.mark.parametrize("varied", ["seeds", "positions"])
def test_draws_follow_the_softmax(logits, varied):
    varying, fixed = torch.arange(NUM_DRAWS) + 1000, torch.full((NUM_DRAWS,), 3)
    seeds, positions = (varying, fixed) if varied == "seeds" else (fixed, varying)
    tokens = draw(logits, TEMPERATURE, seeds, positions)
    assert chi_square(tokens, (logits / TEMPERATURE).softmax(-1)) < CHI_SQUARE_BOUND
    # The same statistic must notice a temperature that is 5% off, or it shows nothing.
    for wrong in (TEMPERATURE * 1.05, TEMPERATURE / 1.05):
        assert chi_square(tokens, (logits / wrong).softmax(-1)) > 2 * CHI_SQUARE_BOUND


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_neighbouring_draws_are_independent(device, vary):
    """Joint counts of the draws at n and n + 1 of a four-token vocabulary: 16 cells, all equally likely."""
    index, zeros = torch.arange(NUM_DRAWS), torch.zeros(NUM_DRAWS, dtype=torch.int64)
    arguments = (index, zeros) if vary == "seed" else (zeros, index)
    tokens = draw(torch.zeros(4, device=device), 1.0, *arguments)
    pairs = tokens[0::2] * 4 + tokens[1::2]
    assert chi_square(pairs, torch.full((16,), 1 / 16, device=device)) < 15 + 6 * math.sqrt(30)


def test_a_draw_depends_on_its_request_alone(device):
    logits = torch.randn(40, 999, device=device)
    temperatures = torch.rand(40, device=device) + 0.2
    temperatures[::7] = 0.0
    seeds, positions = torch.randint(2**62, (2, 40), device=device)
    tokens = Sampler()(logits, temperatures, seeds, positions)
    order = torch.randperm(40, device=device)
    shuffled = Sampler()(logits[order], temperatures[order], seeds[order], positions[order])
    assert torch.equal(shuffled, tokens[order])
    alone = Sampler()(logits[11:12], temperatures[11:12], seeds[11:12], positions[11:12])
    assert torch.equal(alone, tokens[11:12])


def test_seed_and_position_both_count_in_full(device):
    logits = torch.zeros(100_000, device=device)
    words = torch.tensor([0, 1, 2**31, 2**32, 2**32 + 1, 2**62, -1])
    same = torch.full_like(words, 5)
    assert len(set(draw(logits, 1.0, words, same).tolist())) == len(words)
    assert len(set(draw(logits, 1.0, same, words).tolist())) == len(words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_zero_temperature_is_argmax(device, dtype):
    logits = torch.randn(5, 3000, device=device).to(dtype)
    logits[0, [17, 2900]] = 9.0
    zeros = torch.zeros(5, dtype=torch.int64, device=device)
    tokens = Sampler()(logits, zeros.float(), torch.arange(5, device=device), zeros)
    assert tokens[0] == 17
    assert torch.equal(tokens, logits.argmax(-1))


def test_forbidden_tokens_are_never_drawn(device):
    logits = torch.full((VOCAB_SIZE,), -math.inf, device=device)
    logits[[3, 8, 9]] = torch.tensor([0.0, 1.0, -30.0], device=device)
    tokens = draw(logits, 5.0, torch.arange(2000), torch.zeros(2000, dtype=torch.int64))
    assert set(tokens.tolist()) == {3, 8, 9}


def test_draws_above_a_threshold_follow_what_is_left_of_the_softmax(device):
    """Of five groups of tokens and a piece of one, in which few, many or none are left."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(85, generator=generator).to(device) * 1.5
    threshold = logits.sort().values[60]
    logits[16:32] -= 10  # a group of which nothing is left
    kept = logits >= threshold
    rows = logits.expand(NUM_DRAWS, -1).contiguous()
    same = {"device": device, "dtype": torch.float32}
    seeds, positions = torch.arange(NUM_DRAWS, device=device), torch.full((NUM_DRAWS,), 9, device=device)
    temperatures, thresholds = torch.full((NUM_DRAWS,), 0.7, **same), threshold.expand(NUM_DRAWS).contiguous()
    tokens = Sampler()(rows, temperatures, seeds, positions, thresholds)
    counts = torch.bincount(tokens, minlength=85)
    assert not counts[~kept].any()
    degrees = int(kept.sum()) - 1
    probabilities = (logits[kept] / 0.7).softmax(-1)
    places = torch.cumsum(kept, 0) - 1
    bound = degrees + 6 * math.sqrt(2 * degrees)
    assert chi_square(places[tokens], probabilities) < bound
    assert chi_square(places[tokens], (logits[kept] / 0.75).softmax(-1)) > 2 * bound


# Vectors of Random123's kat_vectors for philox4x32 with ten rounds.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    words = philox4x32_torch(*(torch.tensor(word) for word in (*counter, *key)))
    assert [word.item() for word in words] == expected


def test_exponentials_are_precise_and_finite():
    """Against float64: where a large vocabulary is won (tiny u), at the seam of the series, and at both ends."""
    seam, end = 2**27, 2**32
    bits = torch.cat(
        (
            torch.arange(100_000),
            seam - 1000 + torch.arange(2000),
            end - 1 - torch.arange(2000),
            torch.randint(end, (100_000,)),
        )
    )
    actual = log2_exponential_torch(bits)
    u = ((bits.double() + 0.5) / end).clamp(max=1 - 2.0**-24)
    expected = torch.log2(-torch.log1p(-u))
    # Towards u = 1 the spacing of float32 shows in 1 - u: draws that large lose every race that has a choice.
    near_one = bits > end - 2**28
    torch.testing.assert_close(actual[~near_one].double(), expected[~near_one], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(actual[near_one].double(), expected[near_one], rtol=0, atol=0.15)
    assert actual.isfinite().all()
    small = log2_exponential_torch(torch.arange(2**16))
    assert (small[1:] > small[:-1]).all()


def test_without_seeds_torchs_generator_decides(device):
    logits, temperatures = (
        torch.randn(1, 50, device=device).expand(400, -1).contiguous(),
        torch.ones(400, device=device),
    )
    torch.manual_seed(3)
    first, second = Sampler()(logits, temperatures), Sampler()(logits, temperatures)
    torch.manual_seed(3)
    assert torch.equal(Sampler()(logits, temperatures), first)
    assert not torch.equal(first, second)
    assert len(first.unique()) > 10
    assert torch.equal(Sampler()(logits, temperatures * 0), logits.argmax(-1))


def test_without_seeds_it_draws_from_the_softmax():
    torch.manual_seed(0)
    logits = torch.randn(VOCAB_SIZE)
    tokens = Sampler()(logits.expand(NUM_DRAWS, -1).contiguous(), torch.full((NUM_DRAWS,), TEMPERATURE))
    assert chi_square(tokens, (logits / TEMPERATURE).softmax(-1)) < CHI_SQUARE_BOUND


def test_seeds_without_positions_repeat_themselves(device):
    logits, seeds = torch.randn(6, 50, device=device), torch.arange(6, device=device)
    ones = torch.ones(6, device=device)
    assert torch.equal(Sampler()(logits, ones, seeds), Sampler()(logits, ones, seeds, torch.zeros_like(seeds)))
