"""The gated delta rule: twins against transformers' functions, kernels against twins."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from nanovllm.kernels.linear_attention.gated_delta import delta_rule_decode_torch, delta_rule_prefill_torch

EPS = 1e-6
TAPS = 4


class Layer:
    """A layer's weights and random inputs, and a store of `num_slots` slots of which every free one holds NaN."""

    def __init__(self, num_key_heads, num_value_heads, dim, device="cpu", dtype=torch.float32, num_slots=8,
                 state_dtype=torch.float32, seed=0):  # fmt: skip
        self.generator = torch.Generator().manual_seed(seed)
        self.heads, self.dim, self.device, self.dtype = (num_key_heads, num_value_heads), dim, device, dtype
        self.conv_dim = (2 * num_key_heads + num_value_heads) * dim
        self.conv_weight = self.random(self.conv_dim, TAPS) * 0.5
        self.A_log = self.random(num_value_heads, dtype=torch.float32) - 1
        self.dt_bias = self.random(num_value_heads, dtype=torch.float32)
        self.norm_weight = 1 + 0.2 * self.random(dim, dtype=torch.float32)
        options = {"device": device}
        self.tails = torch.full((num_slots, TAPS - 1, self.conv_dim), float("nan"), dtype=dtype, **options)
        self.states = torch.full((num_slots, num_value_heads, dim, dim), float("nan"), dtype=state_dtype, **options)

    def random(self, *shape, dtype=None):
        return torch.randn(shape, generator=self.generator).to(self.device, dtype or self.dtype)

    def fill(self, *slots):
        """Slots of sequences that have begun."""
        for slot in slots:
            self.tails[slot] = self.random(*self.tails.shape[1:])
            self.states[slot] = self.random(*self.states.shape[1:], dtype=self.states.dtype)

    def inputs(self, num_tokens):
        """qkv, z, b, a: slices of one tensor, as a fused projection gives them."""
        num_value_heads = self.heads[1]
        sizes = self.conv_dim, num_value_heads * self.dim, num_value_heads, num_value_heads
        return self.random(num_tokens, sum(sizes) + 8).split((*sizes, 8), dim=1)[:4]

    def run(self, function, inputs, *places):
        """The output, and tails and states after it. The layer's own stay as they are."""
        tails, states = self.tails.clone(), self.states.clone()
        weights = self.conv_weight, self.A_log, self.dt_bias, self.norm_weight, EPS
        places = (torch.tensor(each, dtype=torch.int32, device=self.device) for each in places)
        return function(*inputs, *weights, tails, states, *places, *self.heads), tails, states

    def keep(self, result):
        out, self.tails, self.states = result
        return out


def starts(lens):
    return [0, *torch.tensor(lens).cumsum(0).tolist()]


def transformers_layer(layer, inputs):
    """What transformers computes of one sequence from its start: the output, and the state after it."""
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    qkv, z, b, a = inputs
    num_key_heads, num_value_heads = layer.heads
    size = num_key_heads * layer.dim
    mixed = F.conv1d(qkv.t()[None], layer.conv_weight[:, None], padding=TAPS - 1, groups=layer.conv_dim)
    mixed = F.silu(mixed[0, :, : len(qkv)].t())
    q, k, v = (x.reshape(1, len(x), -1, layer.dim) for x in mixed.split((size, size, num_value_heads * layer.dim), 1))
    g = -layer.A_log.exp() * F.softplus(a + layer.dt_bias)
    out, state = modeling.torch_recurrent_gated_delta_rule(
        q, k, v, g=g[None], beta=b.sigmoid()[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    norm = modeling.Qwen3_5RMSNormGated(layer.dim, EPS)
    norm.weight.data = layer.norm_weight
    return norm(out[0], z.reshape(len(z), num_value_heads, layer.dim)).detach().flatten(1), state[0]


def assert_close(actual, expected, tolerance=2e-5):
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.float(), other.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 3)])
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 130])
def test_twins_equal_transformers(heads, num_tokens):
    layer = Layer(*heads, 16)
    inputs = layer.inputs(num_tokens)
    expected, state = transformers_layer(layer, inputs)
    out, tails, states = layer.run(delta_rule_prefill_torch, inputs, [0, num_tokens], [-1], [3], [-1], [0])
    assert_close((out, states[3]), (expected, state))
    by_rows = layer.run(delta_rule_decode_torch, inputs, [3] * num_tokens, range(1, num_tokens + 1))
    assert_close(by_rows, (out, tails, states))


def test_twins_continue_and_leave_other_slots_alone():
    layer = Layer(2, 4, 8)
    layer.fill(1, 5, 6)
    lens = [70, 1, 2, 129]
    inputs = layer.inputs(sum(lens))
    places = starts(lens), [5, -1, 1, 6], [5, 0, 1, 2], [7, -1, -1, 4], [64, 0, 0, 128]
    out, tails, states = layer.run(delta_rule_prefill_torch, inputs, *places)
    slots = [slot for slot, count in zip((5, 0, 1, 6), lens, strict=True) for _ in range(count)]
    positions = [first + i for first, count in zip((9, 1, 9, 9), lens, strict=True) for i in range(count)]
    by_rows = layer.run(delta_rule_decode_torch, inputs, slots, positions)
    assert_close([out], by_rows[:1])
    for one, other in ((tails, by_rows[1]), (states, by_rows[2])):
        assert_close(one[[0, 1, 5, 2]], other[[0, 1, 5, 6]])
        assert one[3].isnan().all()
    assert torch.equal(states[6], layer.states[6])
    for slot, first, count, read in ((7, 0, 64, 5), (4, 73, 128, 6)):
        rows = [x[first : first + count] for x in inputs]
        _, tail, state = layer.run(delta_rule_prefill_torch, rows, [0, count], [read], [0], [-1], [0])
        assert_close((tails[slot], states[slot]), (tail[0], state[0]))


def test_a_padding_row_gives_zeros():
    layer = Layer(2, 4, 8)
    layer.fill(0, 2)
    inputs = layer.inputs(4)
    out, tails, states = layer.run(delta_rule_decode_torch, inputs, [2, 0, -1, -1], [7, 9, 0, 0])
    assert not out[2:].any()
    assert out[:2].isfinite().all()
    assert states[[1, 3, 7]].isnan().all()
    assert tails[[1, 3, 7]].isnan().all()
