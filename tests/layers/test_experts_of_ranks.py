"""Whole experts on each rank: the parts of the sum by every candidate and format, and which part a rank holds."""

from typing import Any

import pytest
import torch
from fake_quack import CpuQuack, Package, make_config

pytest.importorskip("triton")

from kernel_harness import HALF, launch_everywhere, nightly, poisoned_memory
from products import default_result

from nanovllm.kernels.silu_and_mul import SWIGLU, Activation
from nanovllm.layers.experts.expert_shards import ExpertShards, divide_experts
from nanovllm.layers.experts.experts import MixtureOfExperts
from nanovllm.layers.formats.all_formats import weight_format
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks
from nanovllm.layers.formats.int4 import Int4
from nanovllm.layers.formats.mxfp4 import Mxfp4
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.candidates import (
    Dequantized,
    FourBitExperts,
    FourBitExpertsGemv,
    Mxfp4ExpertsGemv,
    dequantized,
    expert_tiles,
    experts_gemv,
    four_bit_experts,
    four_bit_experts_gemv,
    grouped_experts,
)
from nanovllm.layers.matmul.candidates.expert_tiles import ExpertTiles
from nanovllm.layers.matmul.candidates.experts_gemv import ExpertsGemv
from nanovllm.layers.matmul.candidates.grouped_experts import GroupedExperts
from nanovllm.layers.matmul.candidates.quack_experts import QuackExperts
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.matmul.problem import ExpertsProblem
from nanovllm.layers.matmul.table import Key, Table
from nanovllm.layers.parallel.tensor_parallel import TensorParallel

NUM_EXPERTS, TOP_K, NUM_TOKENS = 6, 3, 4
# The third rank of these has no work, the second none of the last token.
RANKS = range(2), range(2, 4), range(4, 6)
MODULES = dequantized, expert_tiles, experts_gemv, four_bit_experts, four_bit_experts_gemv, grouped_experts
TILES, GEMV = ((16, 16, 16, 4, 2), (16, 32, 16, 4, 2)), ((16, 64, 2), (16, 64, 2))
IN_FP8 = (16, 32, 32, 4, 2), (16, 32, 32, 4, 2)
TILES_4BIT, GEMV_4BIT = ((16, 32, 64, 2, 3), (16, 32, 64, 2, 3)), ((16, 1, 3), (16, 2, 3))
GEMV_MXFP4 = (16, 64, 2), (16, 32, 2)
GROUPED = (64, 16, 32, 4, 2), (64, 32, 32, 4, 3)
QUACK = (128, 256, (1, 1), False), (128, 192, (2, 1), True)
# What inputs that are rounded to fp8, or are not, change of a sum.
ROUNDED, EXACT, FLOAT16 = 0.02, 0.08, 4 * torch.finfo(HALF).eps

# Candidate, constants, format, hidden and intermediate size, how far from the twin.
CASES = {
    "tiles": (ExpertTiles(), TILES, Unquantized(), (33, 17), FLOAT16),
    "tiles by default": (ExpertTiles(), (), Unquantized(), (40, 24), FLOAT16),
    "few tokens": (ExpertsGemv(), GEMV, Unquantized(), (33, 17), FLOAT16),
    "tiles, fp8": (ExpertTiles(), IN_FP8, Fp8(), (64, 48), ROUNDED),
    "few tokens, fp8": (ExpertsGemv(), GEMV, Fp8(), (64, 48), EXACT),
    "tiles, blocks": (ExpertTiles(), IN_FP8, Fp8Blocks(), (128, 128), ROUNDED),
    "few tokens, blocks": (ExpertsGemv(), GEMV, Fp8Blocks(), (128, 128), EXACT),
    "tiles, int4": (FourBitExperts(), TILES_4BIT, Int4(), (64, 32), FLOAT16),
    "few tokens, int4": (FourBitExpertsGemv(), GEMV_4BIT, Int4(), (64, 32), FLOAT16),
    "tiles, mxfp4": (FourBitExperts(), (), Mxfp4(), (96, 64), FLOAT16),
    "few tokens, mxfp4": (FourBitExpertsGemv(), GEMV_4BIT, Mxfp4(), (32, 128), FLOAT16),
    "few tokens, mxfp4, plain": (Mxfp4ExpertsGemv(), GEMV_MXFP4, Mxfp4(), (96, 64), FLOAT16),
    "dequantized": (Dequantized(), TILES, Mxfp4(), (64, 32), FLOAT16),
    "grouped": (GroupedExperts(), GROUPED, Unquantized(), (72, 24), FLOAT16),
    "grouped, fp8": (GroupedExperts(), GROUPED, Fp8(), (64, 48), ROUNDED),
    "grouped, blocks": (GroupedExperts(), GROUPED, Fp8Blocks(), (256, 128), ROUNDED),
    "grouped, mxfp4": (GroupedExperts(), GROUPED, Mxfp4(), (96, 64), FLOAT16),
    "quack": (QuackExperts(CpuQuack(Package(), make_config)), QUACK, Unquantized(), (64, 32), FLOAT16),
}
# Whose code another case has.
NIGHTLY = "tiles by default", "tiles, fp8", "few tokens, blocks", "tiles, mxfp4"
# Each once, and in turns with an output that is added to and a new one.
QUICK = [(name, i % 2 == 0) for i, name in enumerate(name for name in CASES if name not in NIGHTLY)]
ALL = [*QUICK, *nightly(*((name, add) for name in CASES for add in (True, False) if (name, add) not in QUICK))]


def make_problem(format, sizes, has_norm, has_biases, add, device) -> ExpertsProblem:
    """Of a decode step whose second token is padding."""
    hidden_size, intermediate = sizes
    shapes = (2 * intermediate, hidden_size), (hidden_size, intermediate)

    def draw(*shape, dtype=HALF):
        return torch.randn(shape, device=device).to(dtype)

    weights = [format.quantize(draw(NUM_EXPERTS, *s, dtype=torch.float32) / s[1] ** 0.5, HALF) for s in shapes]
    x, out = (draw(NUM_TOKENS, hidden_size) for _ in range(2))
    logits = draw(NUM_TOKENS, NUM_EXPERTS, dtype=torch.float32)
    logits[:, 4:] -= 20
    logits[3, :2] += 9
    logits[3, 2:4] -= 30
    biases = [draw(NUM_EXPERTS, s[0]) if has_biases else None for s in shapes]
    norm = RMSNorm(hidden_size).to(device, HALF).requires_grad_(False)
    lens, key = torch.tensor([1, 0, 1, 1], dtype=torch.int32, device=device), Key.of("experts", False, weights[0])
    options: Any = *weights, TOP_K if not has_biases else 2, True, out, add, lens, *biases
    activation = Activation(alpha=1.702, limit=1.5) if has_biases else SWIGLU
    scales = torch.rand(NUM_EXPERTS, device=device) + 0.5
    return ExpertsProblem(
        key, Normed(x, norm) if has_norm else x, logits, *options, activation=activation, scales=scales
    )


def part_of(problem: ExpertsProblem, mine: range) -> ExpertsProblem:
    """That of a rank with these experts, which has an output of its own."""

    def cut(whole):
        if not isinstance(whole, Weight):
            return None if whole is None else whole[mine.start : mine.stop].clone()
        values, scale, zero = (cut(each) for each in (whole.values, whole.scale, whole.zero))
        return Weight(whole.format, values, scale, whole.input_dtype, zero)

    tensors = {name: cut(getattr(problem, name)) for name in ("weight", "down", "bias", "down_bias")}
    return problem._replace(**tensors, out=problem.out.clone(), mine=mine)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("name", "add"), ALL)
def test_the_parts_of_ranks_add_up(name, add, device, monkeypatch):
    if device != "cpu" and name == "quack":
        pytest.skip("a stand-in that computes on a CPU")
    candidate, constants, format, sizes, close = CASES[name]
    torch.manual_seed(len(name))
    problem = make_problem(format, sizes, add, name != "quack", add, device)
    is_token = problem.context_lens > 0
    expected = default_result(problem._replace(out=problem.out.clone(), add=False))[is_token].float()
    if device == "cpu":
        launch_everywhere(monkeypatch, *MODULES)
    before = problem.out.float() if add else torch.zeros_like(problem.out).float()
    parts = []
    for mine in RANKS:
        asked = part_of(problem, mine)
        with poisoned_memory():
            found = candidate.launch(asked, constants)
        assert found is asked.out
        assert not add or torch.equal(found[1], problem.out[1]), "a row of padding stays as it is"
        parts.append((found.float() - before)[is_token])
    assert (sum(parts) - expected).norm() <= close * (expected.norm() + 3 * before.norm())
    assert torch.equal(parts[2], torch.zeros_like(parts[2])), "a rank without work adds nothing"
    assert not parts[1][2].any() or name == "quack"
    assert all(part.norm() > 0.1 * expected.norm() for part in parts[:2])


@pytest.mark.parametrize("name", ["few tokens", "tiles by default", "dequantized"])
def test_the_parts_of_the_twin_add_up(name):
    _, _, format, sizes, close = CASES[name]
    problem = make_problem(format, sizes, True, True, False, "cpu")
    expected = default_result(problem._replace(out=problem.out.clone())).float()
    total = sum(default_result(part_of(problem, mine)).float() for mine in RANKS)
    assert (total - expected).norm() <= close * expected.norm()


# Which part a rank holds


def divide(rank, size, *, format=None, num_experts=6, num_columns=96, settings=None):
    format, tp = format or Unquantized(), TensorParallel(rank, size)
    return divide_experts(num_experts, num_columns, "moe_size", tp, format, settings or {}, "6x192x64 bfloat16")


def test_columns_are_divided_where_that_is_possible():
    assert divide(0, 1) == ExpertShards(range(6), range(96), 6, 96)
    assert divide(1, 2) == ExpertShards(range(6), range(48, 96), 6, 96)
    assert divide(2, 3, format=Mxfp4()) == ExpertShards(range(6), range(64, 96), 6, 96)
    assert divide(3, 4, num_experts=6).experts == range(6)


@pytest.mark.parametrize(
    ("format", "num_columns", "size"), [(Mxfp4(), 96, 2), (Int4(), 96, 6), (Fp8Blocks(), 128, 2), (None, 98, 3)]
)
def test_otherwise_each_rank_has_whole_experts(format, num_columns, size):
    found = [divide(rank, size, format=format, num_columns=num_columns) for rank in range(size)]
    assert [expert for each in found for expert in each.experts] == list(range(6))
    assert all(each.columns == range(num_columns) for each in found)
    assert [each.mine for each in found] == [each.experts for each in found]


def test_a_table_says_from_how_many_ranks_whole_experts_are_faster():
    settings = {"whole_experts": {"6x192x64 bfloat16": 3, "6x192x64 mxfp4": 2}}
    assert divide(1, 2, settings=settings).mine is None
    assert divide(1, 3, settings=settings).mine == range(2, 4)
    assert divide(1, 4, settings=settings).mine is None, "4 ranks do not divide 6 experts"
    table = Table(settings={"whole_experts": {"6x64x48 float32": 2}})
    layer = MixtureOfExperts(48, 32, 6, 2, True, TensorParallel(1, 2), Matmul(table))
    assert layer.experts.gate_up_proj.weight.shape == (3, 64, 48)
    assert layer.products["experts"].row[0].experts == 6, "rows of the table are for the tokens that an expert has"


@pytest.mark.parametrize(
    ("format", "num_columns", "reason"),
    [
        (None, 98, r"must divide the model's moe_size \(98\)"),
        (
            Mxfp4(),
            96,
            "weights in MXFP4 need sizes that are multiples of 32 on each rank, and its moe_size would be 24",
        ),
    ],
)
def test_what_neither_way_divides_is_refused(format, num_columns, reason):
    remedy = r"or use a tensor_parallel_size that divides the number of experts \(6\)"
    with pytest.raises(ValueError, match=f"^tensor_parallel_size=4: {reason}.*; {remedy}"):
        divide(0, 4, format=format, num_columns=num_columns)


def test_experts_that_the_format_cannot_store_are_refused_for_any_number_of_ranks():
    for size in (1, 2):
        with pytest.raises(ValueError, match=r"^quantization: weights in MXFP4 .* moe_size would be 98; use the unq"):
            divide(0, size, format=Mxfp4(), num_columns=98)


@pytest.mark.parametrize("format", [None, Mxfp4(), Int4(), Fp8()], ids=str)
def test_ranks_with_whole_experts_have_their_tensors_and_one_bias(format):
    """Loaded from a layer's tensors, which are quantized on the way: the parts add up to one rank's layer."""
    tensors: dict[tuple, torch.Tensor] = {}

    def make(rank, size, settings):
        with weight_format(format):
            matmul = Matmul(Table(settings={"whole_experts": settings}))
            return MixtureOfExperts(64, 32, 6, 2, True, TensorParallel(rank, size), matmul, biases=True)

    def load(layer):
        for name, param in layer.named_parameters():
            for shard_id, shape in param.shards.items():
                tensor = tensors.setdefault((name, shard_id), torch.randn(shape) / shape[-1] ** 0.5)
                param.weight_loader(param, tensor, shard_id)
        return layer

    whole = load(make(0, 1, {}))
    name = Key.of("experts", False, whole.experts.gate_up_proj.matrix).shape_name
    ranks = [load(make(rank, 3, {name: 2})) for rank in range(3)]
    for rank, layer in enumerate(ranks):
        for ours, theirs in zip(layer.experts.parameters(), whole.experts.parameters(), strict=True):
            assert torch.equal(ours, theirs[2 * rank : 2 * rank + 2])
    x = torch.randn(5, 64)
    expected = whole.part_of_sum("linear", x)
    torch.testing.assert_close(sum(layer.part_of_sum("linear", x) for layer in ranks), expected)
