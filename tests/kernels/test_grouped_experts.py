"""The experts' kernels for long prefills on Hopper: their plan, their copies and their products against plain torch."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import HALF, apart, assert_refused, poisoned_memory, rounding
from products import FP8

from nanovllm.kernels.experts.grouped import GroupedTile, group_rows, grouped_product, plan_tiles
from nanovllm.kernels.matmul.fp8 import dequantize_torch
from nanovllm.kernels.silu_and_mul import GEGLU, Activation, gated_torch

NUM_EXPERTS, TOKENS = 5, 64
TILE = GroupedTile(TOKENS, 32, 32, 4, 3)


def draw_experts(num_tokens, top_k, device) -> torch.Tensor:
    """Of each token several, one of which may be none. One expert has many tokens, one has none."""
    scores = torch.rand(num_tokens, NUM_EXPERTS + 1) + torch.tensor([0, 1, 0, -9, 0, 0])
    return scores.topk(top_k).indices.short().to(device)


def grouped(x, experts, x_scale=None):
    """The rows of each expert, in the plan's order."""
    plan = plan_tiles(experts, NUM_EXPERTS, TOKENS)
    rows, scales, positions = group_rows(x, x_scale, experts, plan)
    return plan, rows, scales, positions


@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (90, 4), (600, 3)])
def test_a_plan_has_all_rows_of_all_experts(num_tokens, top_k, device):
    experts = draw_experts(num_tokens, top_k, device)
    plan = plan_tiles(experts, NUM_EXPERTS, TOKENS)
    counts = experts.flatten().long().bincount(minlength=NUM_EXPERTS + 1)[:NUM_EXPERTS].tolist()
    expected, first = [], 0
    for expert, count in enumerate(counts):
        expected += [(expert, row) for row in range(first, first + count, TOKENS)]
        first += count
        assert plan.ends[expert] == first
        assert plan.next_rows[expert] == first - count
    assert all(part.data_ptr() % 16 == 0 for part in plan), "a kernel would be compiled again, in mid-run"
    num_tiles = int(plan.num_tiles)
    assert list(zip(plan.experts[:num_tiles].tolist(), plan.first_rows[:num_tiles].tolist(), strict=True)) == expected


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_each_pair_has_a_row_among_its_experts(groups, device):
    num_tokens, top_k, K = 50, 3, 24
    experts = draw_experts(num_tokens, top_k, device)
    x = apart(torch.randn(num_tokens, K, device=device).to(HALF))
    x_scale = torch.rand(groups, num_tokens, device=device).t() if groups else None
    with poisoned_memory():
        plan, rows, scales, positions = grouped(x, experts, x_scale)
    pairs = (experts.flatten() < NUM_EXPERTS).nonzero().flatten()
    positions = positions[pairs].long()
    assert sorted(positions.tolist()) == list(range(len(pairs))), "no row has two pairs"
    starts = torch.cat((plan.ends.new_zeros(1), plan.ends))
    expert = experts.flatten()[pairs].long()
    assert ((positions >= starts[expert]) & (positions < starts[expert + 1])).all()
    assert torch.equal(rows[positions], x[pairs // top_k])
    if x_scale is None:
        assert scales is None
    else:
        assert torch.equal(scales[positions], x_scale[pairs // top_k])


# Parts of tiles in every direction.
@pytest.mark.parametrize(
    ("activation", "has_bias"),
    [(None, False), (GEGLU, False), (Activation(alpha=1.702, limit=1.5), True), (None, True)],
)
def test_products_equal_the_twin(activation, has_bias, device):
    num_tokens, K, N = 60, 72, 80
    experts = draw_experts(num_tokens, 3, device)
    x = torch.randn(num_tokens, K, device=device).to(HALF)
    weight = (torch.randn(NUM_EXPERTS, N, K, device=device) / K**0.5).to(HALF)
    bias = torch.randn(NUM_EXPERTS, N, device=device).to(HALF) if has_bias else None
    with poisoned_memory():
        plan, rows, _, _ = grouped(x, experts)
        found = grouped_product(rows, weight, plan, TILE, bias=bias, activation=activation)
    assert found.shape == (experts.numel(), N if activation is None else N // 2)
    starts = [0, *plan.ends.tolist()]
    for expert in range(NUM_EXPERTS):
        part = slice(starts[expert], starts[expert + 1])
        expected = rows[part].float() @ weight[expert].float().T
        if bias is not None:
            expected += bias[expert].float()
        if activation is not None:
            expected = gated_torch(expected, activation)
        torch.testing.assert_close(found[part], expected.to(HALF), **rounding(HALF, 1, K))


@pytest.mark.parametrize("has_activation", [False, True])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_products_in_e4m3_equal_the_twin(in_blocks, has_activation, device):
    num_tokens, K, N = 60, 256, 256
    format, tile = FP8[in_blocks], TILE._replace(columns=64)
    experts = draw_experts(num_tokens, 3, device)
    x = torch.randn(num_tokens, K, device=device) * torch.logspace(-1, 1, num_tokens, device=device)[:, None]
    weight = torch.randn(NUM_EXPERTS, N, K, device=device) * torch.logspace(-1, 1, N, device=device)[:, None] / K**0.5
    weight = format.quantize(weight, HALF)
    values, scale = format.quantize_input(x.to(HALF))
    with poisoned_memory():
        plan, rows, scales, _ = grouped(values, experts, scale)
        options = {"x_scale": scales, "weight_scale": weight.scale, "dtype": HALF}
        activation = Activation() if has_activation else None
        found = grouped_product(rows, weight.values, plan, tile, **options, activation=activation).float()
    starts = [0, *plan.ends.tolist()]
    for expert in range(NUM_EXPERTS):
        part = slice(starts[expert], starts[expert + 1])
        expected = dequantize_torch(rows[part], scales[part]) @ format.dequantized(weight.of_expert(expert)).T
        if activation is not None:
            expected = gated_torch(expected, activation)
        assert (found[part] - expected).norm() <= torch.finfo(HALF).eps / 2 * expected.norm()


def test_wrong_arguments(device):
    experts = draw_experts(8, 2, device)
    x = torch.randn(8, 24, device=device).to(HALF)
    plan, rows, _, _ = grouped(x, experts)
    weight = torch.randn(NUM_EXPERTS, 16, 24, device=device).to(HALF)
    assert_refused(group_rows, {"x": x, "x_scale": None, "experts": experts, "plan": plan}, {"x": x[:7]})
    given = {"x": rows, "weight": weight, "plan": plan, "tile": TILE}
    narrow = {"x": rows[:, :20].contiguous(), "weight": weight[:, :, :20].contiguous()}
    assert_refused(grouped_product, given, {"x": rows[:, :16]})
    with pytest.raises(ValueError, match=r"^x must be .* 16 bytes"):
        grouped_product(**given | narrow)
    scale = torch.ones(NUM_EXPERTS, 1, 2, device=device)
    values, x_scale = FP8[True].quantize_input(torch.randn(8, 256, device=device).to(HALF))
    weight = FP8[True].quantize(torch.randn(NUM_EXPERTS, 128, 256), HALF).values.to(device)
    plan, rows, x_scale, _ = grouped(values, experts, x_scale)
    with pytest.raises(ValueError, match=r"^tile must have at most 128 for k and columns"):
        grouped_product(rows, weight, plan, TILE._replace(k=256), x_scale=x_scale, weight_scale=scale, dtype=HALF)


def test_what_a_tile_needs():
    device = torch.device("cpu")  # Triton's interpreter plays Hopper.
    assert GroupedTile(128, 256, 64, 8, 3).shared_bytes(1, 2) == (3 * 48 + 64) * 1024
    assert GroupedTile(128, 128, 64, 8, 4).is_fitting(2, 2, device)
    assert not GroupedTile(128, 128, 64, 8, 5).is_fitting(2, 2, device)
