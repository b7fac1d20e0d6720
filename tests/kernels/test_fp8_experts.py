"""The experts' kernels with weights in e4m3 against their plain-torch twins."""

import pytest
import torch

pytest.importorskip("triton")

from gpus import pretend_gpu
from kernel_harness import HALF, apart, nightly
from products import FP8, dequantized, experts_sum, quantized

from nanovllm.kernels.experts import experts_gemv
from nanovllm.kernels.experts.experts import TileConfig, add_pairs, down, gate_up, route, route_torch, sort_by_expert
from nanovllm.kernels.experts.experts_gemv import ExpertsGemvConfig
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.matmul.fp8 import E4M3
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.layers.formats.format import Weight

NUM_EXPERTS, TOP_K, EPS = 6, 3, 1e-6
# Whether in blocks; hidden size and intermediate size. TMA reads rows of a multiple of 16 bytes.
SHAPES = [(False, (64, 48)), (False, (72, 33)), (True, (256, 128)), (True, (128, 256))]


class Case:
    """One batch of tokens, a few of them padding, and experts with very different scales."""

    def __init__(self, num_tokens, in_blocks, sizes, dtype, device):
        torch.manual_seed(num_tokens)
        hidden_size, intermediate = sizes
        self.format, self.dtype, self.device = FP8[in_blocks], dtype, device
        self.x, self.out = (apart(torch.randn(num_tokens, hidden_size, device=device).to(dtype)) for _ in range(2))
        self.logits = torch.randn(num_tokens, NUM_EXPERTS, device=device)
        self.gate_up = self.make_weight(2 * intermediate, hidden_size)
        self.down = self.make_weight(hidden_size, intermediate)
        self.lens = torch.arange(num_tokens, dtype=torch.int32, device=device) % 5
        self.routed = route_torch(self.logits, TOP_K, True, self.lens)

    def make_weight(self, rows, columns) -> Weight:
        weights = torch.randn(NUM_EXPERTS, rows, columns, device=self.device) / columns**0.5
        weights *= torch.logspace(-0.5, 0.5, rows, device=self.device)[:, None]
        return self.format.quantize(weights, self.dtype)

    def assert_close(self, found, total, distance):
        """Rows of padding are as they were, and the others have `total` added, except for rounding."""
        is_padding = (self.lens == 0)[:, None]
        expected = torch.where(is_padding, self.out.float(), self.out.float() + total)
        assert torch.equal(found[self.lens == 0], self.out[self.lens == 0])
        assert (found.float() - expected).norm() <= distance * total.norm()


FEW, MANY = (3, None, True, torch.float32), (20, TileConfig(16, 64, 32, 4, 2), False, HALF)


@pytest.mark.parametrize(
    ("num_tokens", "config", "has_tma", "dtype", "in_blocks", "sizes"),
    [
        *((*FEW, *SHAPES[0]), (*MANY, *SHAPES[1]), (*FEW, *SHAPES[3]), (*MANY, *SHAPES[2])),
        *nightly((*MANY, *SHAPES[0]), (*FEW, *SHAPES[1]), (*MANY, *SHAPES[3]), (*FEW, *SHAPES[2])),
    ],
    ids=str,
)
def test_the_tiles_equal_the_twin(device, num_tokens, in_blocks, sizes, dtype, config, has_tma, monkeypatch):
    if not has_tma:
        pretend_gpu(monkeypatch, GpuFacts.of(torch.device(device)), capability=(8, 0))
    case = Case(num_tokens, in_blocks, sizes, dtype, device)

    def operands(x, weight):
        values, scale = quantized(x, weight)
        return values, {"x_scale": scale, "weight_scale": weight.scale, "dtype": dtype}

    experts, shares = route(case.logits, TOP_K, True, case.lens)
    order, starts = sort_by_expert(experts, NUM_EXPERTS)
    x, options = operands(case.x, case.gate_up)
    hidden = gate_up(x, order, starts, case.gate_up.values, config, **options)
    assert hidden.dtype == dtype
    hidden[starts[-1] :] = 0  # of padding, and perhaps not a number
    x, options = operands(hidden, case.down)
    y = down(x, order, starts, shares, case.down.values, config, **options)
    found = add_pairs(y, case.out.clone(), True, case.lens)
    # Where an intermediate result is rounded to e4m3, one in another order may become the next number.
    case.assert_close(found, experts_sum(case.x, case.routed, case.gate_up, case.down), 0.02)


@pytest.mark.parametrize(
    ("config", "dtype"), [(ExpertsGemvConfig(32, 64, 2), torch.float32), (ExpertsGemvConfig(64, 256, 4), HALF)], ids=str
)
@pytest.mark.parametrize(("in_blocks", "sizes"), [SHAPES[1], SHAPES[3], *nightly(SHAPES[0], SHAPES[2])], ids=str)
def test_the_kernels_for_few_tokens_equal_the_twin(device, in_blocks, sizes, dtype, config):
    case = Case(2, in_blocks, sizes, dtype, device)
    case.lens[:] = torch.tensor([1, 0])
    case.routed = route_torch(case.logits, TOP_K, True, case.lens)
    norm_weight = (1 + 0.5 * torch.randn(sizes[0], device=device)).to(dtype)
    x = rms_norm.twin(case.x, norm_weight, EPS).float()  # The kernels read their inputs as they are.
    total = experts_sum(x, case.routed, dequantized(case.gate_up), dequantized(case.down))
    weights = (case.gate_up.values, case.down.values)
    scales = (case.gate_up.scale, case.down.scale)
    options = {"config": config, "context_lens": case.lens, "top_k": TOP_K, "logits": case.logits}
    hidden = experts_gemv.gate_up(case.x, norm_weight, EPS, weight=weights[0], weight_scale=scales[0], **options)
    options |= {"normalize": True, "out": case.out.clone(), "add": True}
    found = experts_gemv.down(hidden, weight=weights[1], weight_scale=scales[1], **options)
    case.assert_close(found, total, 0.01)


def test_what_does_not_fit_together(device):
    case = Case(4, True, (256, 128), torch.float32, device)
    order, starts = sort_by_expert(case.routed[0], NUM_EXPERTS)
    values, scale = case.gate_up.values, case.gate_up.scale

    def launch(x=case.x, weight=values, config=None, **scales):
        gate_up(x, order, starts, weight, config, **scales)

    with pytest.raises(ValueError, match="weight must have x's dtype"):
        launch()
    with pytest.raises(ValueError, match="weight_scale must be a contiguous float32 of a weight in e4m3"):
        launch(weight=values.float(), weight_scale=scale)
    with pytest.raises(ValueError, match=r"weight_scale must be \[6, 256, 1\] or of blocks of 128, not \[6, 2, 1\]"):
        launch(weight_scale=scale[:, :, :1].contiguous())
    with pytest.raises(ValueError, match=r"x_scale must be \[4, 2\] for an x in e4m3"):
        launch(x=case.x.to(E4M3), weight_scale=scale)
    with pytest.raises(ValueError, match=r"x_scale must be \[4, 2\] for an x in e4m3"):
        launch(x=case.x.to(E4M3), weight_scale=scale, x_scale=torch.ones(4, 1, device=device))
    with pytest.raises(ValueError, match="x must be in e4m3 with an x_scale for a weight in e4m3"):
        launch(weight_scale=scale)
    scales = {"weight_scale": scale, "x_scale": torch.ones(4, 2, device=device)}
    with pytest.raises(ValueError, match="config must have a k of at most 128"):
        launch(x=case.x.to(E4M3), config=TileConfig(16, 16, 256, 4, 2), **scales)
