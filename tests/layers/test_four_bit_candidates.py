"""The candidates for weights of 4 bits give what the dequantized weights do, whatever stands before a product."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import launch_everywhere, nightly
from products import default_result, problem

from nanovllm.kernels.experts import four_bit_experts as tiles_kernels
from nanovllm.kernels.experts import four_bit_experts_hopper as hopper_kernels
from nanovllm.kernels.experts.four_bit_experts import FourBitExpertTiles
from nanovllm.kernels.gluon_stub import HAS_GLUON
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.matmul import four_bit_gemv as gemv_kernels
from nanovllm.kernels.matmul.four_bit_hopper import FourBitHopperConfig, four_bit_hopper
from nanovllm.kernels.matmul.four_bit_tiles import FourBitTileConfig
from nanovllm.kernels.silu_and_mul import Activation
from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.int4 import Int4
from nanovllm.layers.formats.mxfp4 import Mxfp4
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.candidates import (
    Dequantized,
    FourBitExperts,
    FourBitExpertsGemv,
    FourBitExpertsHopper,
    FourBitGemv,
    FourBitHopper,
    FourBitTiles,
    Int4Gemv,
    Mxfp4ExpertsGemv,
    dequantized,
    expert_tiles,
    four_bit_experts,
    four_bit_experts_gemv,
    four_bit_gemv,
    four_bit_tiles,
    int4_gemv,
)
from nanovllm.layers.matmul.candidates import four_bit_experts_hopper as experts_hopper_candidate
from nanovllm.layers.matmul.candidates import four_bit_hopper as hopper_candidate
from nanovllm.layers.matmul.candidates.four_bit import four_bit
from nanovllm.layers.matmul.problem import ExpertsProblem
from nanovllm.layers.matmul.table import Key, package_table

H200 = 132
FORMATS = {"int4": Int4(), "mxfp4": Mxfp4()}
DTYPE = torch.float16  # Triton's interpreter multiplies bfloat16 wrongly.
DEVICE = torch.device("cpu")


@pytest.fixture
def kernels_everywhere(monkeypatch):
    modules = four_bit_experts, four_bit_experts_gemv, four_bit_gemv, four_bit_tiles, int4_gemv
    launch_everywhere(monkeypatch, *modules, experts_hopper_candidate)


def assert_close(found, expected) -> None:
    found, expected = (each.value() if isinstance(each, Gated) else each for each in (found, expected))
    # Gate and up, hidden numbers and results are rounded.
    assert (found.float() - expected.float()).norm() <= 3 * torch.finfo(DTYPE).eps * expected.float().norm()


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        *(("linear", "int4"), ("linear_silu", "mxfp4"), ("linear_add", "int4"), ("linear_sum", "mxfp4")),
        *nightly(("linear", "mxfp4"), ("linear_silu", "int4"), ("linear_add", "mxfp4"), ("linear_sum", "int4")),
    ],
)
def test_products(operation, name, kernels_everywhere):
    format = FORMATS[name]
    weight = format.quantize(torch.randn(48, 64) / 8, DTYPE)
    norm = RMSNorm(64).to(DTYPE).requires_grad_(False)
    candidates = [
        (FourBitGemv(DEVICE), (16, 2, 1, 3, 0)),
        (FourBitTiles(DEVICE), (16, 16, 64, 1, 2, 3)),
    ]
    if format.name == Int4Gemv.formats[0]:
        candidates.append((Int4Gemv(), (16, 512, 1)))
    for candidate, constants in candidates:
        for x in (torch.randn(3, 64).to(DTYPE), Gated(torch.randn(3, 128).to(DTYPE))):
            for given in (x, Normed(x, norm) if isinstance(x, torch.Tensor) else x):
                bias = None if operation in ("linear_silu", "linear_add") else torch.randn(48).to(DTYPE)
                out = torch.randn(3, 48).to(DTYPE) if operation in ("linear_add", "linear_sum") else None
                asked = problem(operation, given, weight, bias, out)
                expected = default_result(asked._replace(out=None if out is None else out.clone()))
                assert candidate.supports(asked.key, weight)
                assert_close(candidate.launch(asked, candidate.fitted(weight, constants)), expected)


def test_more_tokens_than_a_program_has_registers_for_are_left_to_others(kernels_everywhere):
    weight, candidate = Mxfp4().quantize(torch.randn(16, 128), DTYPE), FourBitGemv(DEVICE)
    for num_tokens, is_computed in ((2, True), (3, False)):  # with four groups in a chunk and eight columns
        asked = problem("linear", torch.randn(num_tokens, 128).to(DTYPE), weight)
        assert (candidate.launch(asked, (64, 1, 1, 3, 0)) is not None) == is_computed
    assert not candidate.supports(asked.key, Mxfp4().quantize(torch.randn(16, 128), torch.float32))
    assert not candidate.supports(asked.key._replace(format="bfloat16"), weight)


EXPERTS = [
    (FourBitExperts(), ()),
    (FourBitExperts(), ((16, 32, 64, 2, 3), (16, 64, 128, 2, 3))),
    (FourBitExpertsGemv(), ((16, 1, 3), (16, 2, 3))),
    (Mxfp4ExpertsGemv(), ((16, 32, 1), (16, 32, 2))),
]


@pytest.mark.parametrize(
    ("candidate", "constants", "format"),
    [(*each, format) for each in EXPERTS for format in FORMATS.values() if format.name in each[0].formats],
)
def test_experts(candidate, constants, format, kernels_everywhere):
    num_experts, top_k, hidden_size, intermediate = 4, 2, 64, 32
    gate_up, down = (
        format.quantize(torch.randn(num_experts, *shape) / 8, DTYPE)
        for shape in ((2 * intermediate, hidden_size), (hidden_size, intermediate))
    )
    x, out = torch.randn(3, hidden_size).to(DTYPE), torch.randn(3, hidden_size).to(DTYPE)
    lens, norm = torch.tensor([1, 0, 1], dtype=torch.int32), RMSNorm(hidden_size).to(DTYPE).requires_grad_(False)
    key = Key.of("experts", False, gate_up)
    for given, add in ((x, True), (Normed(x, norm), False)):
        options = gate_up, down, top_k, True, out.clone(), add, lens
        asked = ExpertsProblem(key, given, torch.randn(3, num_experts), *options)
        expected = default_result(asked._replace(out=out.clone()))
        assert candidate.supports(key, gate_up)
        assert_close(candidate.launch(asked, candidate.fitted(gate_up, constants))[::2], expected[::2])


def test_dequantized_experts_have_tiles_of_their_own(kernels_everywhere, monkeypatch):
    num_experts, hidden_size, intermediate = 4, 64, 32
    gate_up, down = (
        Mxfp4().quantize(torch.randn(num_experts, *shape) / 8, DTYPE)
        for shape in ((2 * intermediate, hidden_size), (hidden_size, intermediate))
    )
    x, logits, key = (
        torch.randn(300, hidden_size).to(DTYPE),
        torch.randn(300, num_experts),
        Key.of("experts", 1, gate_up),
    )
    asked = ExpertsProblem(key, x, logits, gate_up, down, 2, True, torch.empty_like(x), False)
    expected = default_result(asked._replace(out=torch.empty_like(x)))
    for module in (dequantized, expert_tiles):
        monkeypatch.setattr(module, "use_kernels", lambda x: True)
    found = set(Dequantized.challengers(key, 300, 2, H200))
    assert () in found
    assert not set(Dequantized.challengers(key, 200, 2, H200))
    constants = Dequantized().fitted(gate_up, max(found))
    assert len(constants) == 2
    assert_close(Dequantized().launch(asked, constants), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_challengers_are_few_and_fit_their_bounds(format):
    for N, K in ((6144, 4096), (4096, 12288), (1024, 2048)):
        for num_tokens in (1, 16, 64, 2048):
            key = Key("linear", "decode", N, K, format)
            found = list(FourBitGemv.challengers(key, num_tokens, 1, H200))
            assert all(num_tokens <= gemv_kernels.FourBitGemvConfig(*each).columns for each in found)
            tiles = [FourBitTileConfig(*each) for each in FourBitTiles.challengers(key, num_tokens, 1, H200)]
            assert all(each.tokens <= max(16, 2 * num_tokens) and each.num_stages >= 2 for each in tiles)
            assert len(found) + len(tiles) < 100
            assert bool(found) == (num_tokens == 1)
            assert tiles


@pytest.fixture
def tiles_for_hopper(kernels_everywhere, monkeypatch):
    """Triton's interpreter runs no Gluon. These compute the same of the same arguments, and are held to it on GPUs."""
    tile = FourBitExpertTiles(16, 32, 64, 2, 3)

    def gate_up(x, starts, weight, bias, config, activation):
        return tiles_kernels.gate_up(x, torch.arange(len(x)).int(), starts, weight, bias, tile, activation)

    def down(x, order, starts, shares, weight, bias, config):
        return tiles_kernels.down(x, order, starts, shares, weight, bias, tile)

    monkeypatch.setattr(hopper_kernels, "gate_up", gate_up)
    monkeypatch.setattr(hopper_kernels, "down", down)


def test_experts_on_hopper_get_a_row_for_each_pair(tiles_for_hopper):
    num_experts, top_k, hidden_size, intermediate = 5, 2, 64, 32
    gate_up, down = (
        Mxfp4().quantize(torch.randn(num_experts, *shape) / 8, DTYPE)
        for shape in ((2 * intermediate, hidden_size), (hidden_size, intermediate))
    )
    x, out = torch.randn(9, hidden_size).to(DTYPE), torch.randn(9, hidden_size).to(DTYPE)
    lens, norm = torch.ones(9, dtype=torch.int32), RMSNorm(hidden_size).to(DTYPE).requires_grad_(False)
    lens[2] = 0
    biases = torch.randn(num_experts, 2 * intermediate).to(DTYPE), torch.randn(num_experts, hidden_size).to(DTYPE)
    key, config = Key.of("experts", False, gate_up), (16, 16, 64, 2)
    # All experts, or those of a rank among seven.
    for given, add, mine in ((x, True, None), (Normed(x, norm), False, None), (x, True, range(1, 6))):
        options = gate_up, down, top_k, True, out.clone(), add, lens, *biases, Activation(alpha=1.7, limit=2.0)
        asked = ExpertsProblem(key, given, torch.randn(9, num_experts if mine is None else 7), *options, mine=mine)
        expected = default_result(asked._replace(out=out.clone()))
        assert_close(FourBitExpertsHopper().launch(asked, (config, config))[lens > 0], expected[lens > 0])


@pytest.mark.skipif(not HAS_GLUON, reason="this Triton has no Gluon that the kernel is written in")
def test_experts_on_hopper_are_offered_for_mxfp4(monkeypatch):
    monkeypatch.setattr(experts_hopper_candidate, "use_kernels", lambda x: True)
    candidate = FourBitExpertsHopper()

    def is_offered(format, N, K, dtype=torch.bfloat16):
        weight = format.quantize(torch.randn(2, N, K), dtype)
        return candidate.supports(Key.of("experts", False, weight), weight)

    assert not is_offered(Mxfp4(), 128, 64), "a CPU"
    monkeypatch.setattr(GpuFacts, "is_hopper", True)
    assert is_offered(Mxfp4(), 128, 64)
    for format, N, K, dtype in (
        (Int4(), 128, 128, torch.bfloat16),
        (Mxfp4(), 64, 64, torch.bfloat16),
        (Mxfp4(), 128, 96, torch.bfloat16),
        (Mxfp4(), 128, 64, torch.float16),
    ):
        assert not is_offered(format, N, K, dtype)


def test_challengers_of_experts_on_hopper_fit_its_memory():
    key = Key("experts", "decode", 5760, 2880, "mxfp4", experts=32)
    for num_tokens in (1, 16, 64, 256, 1024, 16384):
        found = list(FourBitExpertsHopper.challengers(key, num_tokens, 4, H200))
        assert len(found) < 16
        for each in found:
            assert all(config.fitted(DEVICE) == config for config in each)
    assert not list(FourBitExpertsHopper.challengers(key._replace(format="int4"), 64, 4, H200))
    row = package_table("NVIDIA H200").rows[key]
    for num_tokens, choices in zip(row.bounds, row.choices, strict=True):
        tried = set(FourBitExpertsHopper.challengers(key, num_tokens, 4, H200))
        assert {each.constants for each in choices if each.candidate == FourBitExpertsHopper.name} <= tried


@pytest.mark.skipif(not HAS_GLUON, reason="this Triton has no Gluon that the kernel is written in")
def test_hopper_is_asked_for_what_its_kernel_can_multiply(monkeypatch):
    """Triton's interpreter doesn't run it. tests/gpu does, and `scripts/compile_for_cards.py` compiles it."""
    monkeypatch.setattr(hopper_candidate, "use_kernels", lambda x: True)
    candidate = FourBitHopper(DEVICE)

    def is_offered(format, K, dtype=DTYPE):
        weight = format.quantize(torch.randn(16, K), dtype)
        return candidate.supports(Key.of("linear", False, weight), weight)

    assert not is_offered(Int4(), 256), "a CPU"
    monkeypatch.setattr(GpuFacts, "is_hopper", True)
    assert is_offered(Int4(), 256)
    assert is_offered(Int4(), 768, torch.bfloat16)
    for format, K, dtype in (
        (Mxfp4(), 256, DTYPE),
        (Int4(), 384, DTYPE),
        (Int4(), 192, DTYPE),
        (Int4(), 256, torch.float32),
    ):
        assert not is_offered(format, K, dtype)
    asked = Key("linear", "decode", 6144, 4096, "int4")
    for operation in ("linear_silu", "linear_add", "linear_sum"):
        assert candidate.is_for(asked._replace(operation=operation))
    assert not candidate.is_for(asked._replace(operation="experts"))


def test_hopper_refuses_other_weights():
    weight = four_bit(Int4().quantize(torch.randn(16, 256), DTYPE))
    x, y = torch.zeros(16, 256, dtype=DTYPE), torch.zeros(16, 16, dtype=DTYPE)
    with pytest.raises(ValueError, match=r"^weight must have integers .* on Hopper, not \[16, 256\] in groups of 128"):
        four_bit_hopper(x, weight, y, None, FourBitHopperConfig(128, 16, False, 2), None)


def test_challengers_of_hopper_are_few_and_fit_its_memory():
    for N, K in ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1024, 2048)):
        for num_tokens in (1, 16, 33, 64, 256, 2048, 16384):
            key = Key("linear", "decode", N, K, "int4")
            found = [FourBitHopperConfig(*each) for each in FourBitHopper.challengers(key, num_tokens, 1, H200)]
            assert bool(found) == (num_tokens > 1)
            assert len(found) < 10
            assert all(each.fitted(DEVICE) == each for each in found)
    assert not list(FourBitHopper.challengers(key._replace(format="mxfp4"), 64, 1, H200))


def test_hopper_takes_fewer_stages_where_memory_is_short(monkeypatch):
    config = FourBitHopperConfig(256, 128, True, 4)
    assert config.fitted(DEVICE) == config
    for kib, num_stages in ((227, 4), (160, 3), (100, 2), (90, None)):
        monkeypatch.setattr(GpuFacts, "of", lambda device, kib=kib: GpuFacts("card", (9, 0), kib * 1024, 132, 0))
        found = config.fitted(DEVICE)
        assert (found and found.num_stages) == num_stages
