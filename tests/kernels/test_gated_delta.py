"""The gated delta rule: twins against transformers' functions, kernels against twins."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from delta_layers import EPS, TAPS, Layer, assert_close, starts
from kernel_harness import nightly

from nanovllm.kernels.linear_attention import chunked_delta, chunks
from nanovllm.kernels.linear_attention.gated_delta import (
    delta_rule_decode,
    delta_rule_prefill,
)
from nanovllm.kernels.linear_attention.gated_norm import gated_rms_norm
from nanovllm.kernels.linear_attention.state_order import by_dims
from nanovllm.kernels.triton_stub import tl


def transformers_layer(layer, inputs):
    """What transformers computes of one sequence from its start: the output, and the state after it."""
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    qkv, z, b, a = inputs
    num_key_heads, num_value_heads = layer.heads
    size = num_key_heads * layer.dim
    mixed = F.conv1d(qkv.t()[None], layer.conv_weight[:, None], padding=TAPS - 1, groups=layer.conv_dim)
    mixed = F.silu(mixed[0, :, : len(qkv)].t())
    q, k, v = (x.reshape(1, len(x), -1, layer.dim) for x in mixed.split((size, size, num_value_heads * layer.dim), 1))
    # Some versions' function does it, and some versions' layer.
    q, k = (x.repeat_interleave(num_value_heads // num_key_heads, dim=2) for x in (q, k))
    g = -layer.A_log.exp() * F.softplus(a + layer.dt_bias)
    out, state = modeling.torch_recurrent_gated_delta_rule(
        q, k, v, g=g[None], beta=b.sigmoid()[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    norm = modeling.Qwen3_5RMSNormGated(layer.dim, EPS)
    norm.weight.data = layer.norm_weight
    return norm(out[0], z.reshape(len(z), num_value_heads, layer.dim)).detach().flatten(1), state[0]


@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 3)])
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 130])
def test_twins_equal_transformers(heads, num_tokens):
    layer = Layer(*heads, 16)
    inputs = layer.inputs(num_tokens)
    expected, state = transformers_layer(layer, inputs)
    out, tails, states = layer.run(delta_rule_prefill.twin, inputs, [0, num_tokens], [-1], [3], [-1], [0])
    assert_close((out, by_dims(states[3])), (expected, state))
    by_rows = layer.run(delta_rule_decode.twin, inputs, [3] * num_tokens, range(1, num_tokens + 1))
    assert_close(by_rows, (out, tails, states))


def test_twins_continue_and_leave_other_slots_alone():
    layer = Layer(2, 4, 8)
    layer.fill(1, 5, 6)
    lens = [70, 1, 2, 129]
    inputs = layer.inputs(sum(lens))
    places = starts(lens), [5, -1, 1, 6], [5, 0, 1, 2], [7, -1, -1, 4], [64, 0, 0, 128]
    out, tails, states = layer.run(delta_rule_prefill.twin, inputs, *places)
    cells = [cell for cell, count in zip((5, 0, 1, 6), lens, strict=True) for _ in range(count)]
    positions = [first + i for first, count in zip((9, 1, 9, 9), lens, strict=True) for i in range(count)]
    by_rows = layer.run(delta_rule_decode.twin, inputs, cells, positions)
    assert_close([out], by_rows[:1])
    for one, other in ((tails, by_rows[1]), (states, by_rows[2])):
        assert_close(one[[0, 1, 5, 2]], other[[0, 1, 5, 6]])
        assert one[3].isnan().all()
    assert torch.equal(states[6], layer.states[6])
    for cell, first, count, read in ((7, 0, 64, 5), (4, 73, 128, 6)):
        rows = [x[first : first + count] for x in inputs]
        _, tail, state = layer.run(delta_rule_prefill.twin, rows, [0, count], [read], [0], [-1], [0])
        assert_close((tails[cell], states[cell]), (tail[0], state[0]))


def test_a_padding_row_gives_zeros():
    layer = Layer(2, 4, 8)
    layer.fill(0, 2)
    inputs = layer.inputs(4)
    out, tails, states = layer.run(delta_rule_decode.twin, inputs, [2, 0, -1, -1], [7, 9, 0, 0])
    assert not out[2:].any()
    assert out[:2].isfinite().all()
    assert states[[1, 3, 7]].isnan().all()
    assert tails[[1, 3, 7]].isnan().all()


# Sums in another order. In 16 bits also the rounding of q, k, v, states and corrections for the products.
TOLERANCE = {torch.float32: 5e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
STATE_DTYPES = [F32, F16, BF16]
# Of states that are rounded at other places.
ROUNDING = {F32: 2e-5, F16: 8e-3, BF16: 6e-2}


@pytest.mark.parametrize(
    ("heads", "state_dtype", "dtype"),
    [((2, 2), F32, F16), ((2, 4), F16, F32), *nightly(*product([(2, 2), (2, 4), (1, 3)], STATE_DTYPES, [F32, F16]))],
)
def test_decode_kernels_equal_twin(heads, state_dtype, dtype, device):
    """Rows that continue and rows that begin, prompts of 2 to 9 rows, padding."""
    layer = Layer(*heads, 16, device, dtype, state_dtype=state_dtype, seed=heads[1])
    layer.fill(0, 2, 5, 7)
    cells = [0, 1, 1, 2, 3, 3, 3, 5, 5, 4, 4, 4, 4, *[7] * 9, -1, -1]
    lens = [9, 1, 2, 3, 1, 2, 3, 2, 3, 1, 2, 3, 4, *range(4, 13), 0, 0]
    inputs = layer.inputs(len(cells))
    expected = layer.run(delta_rule_decode.twin, inputs, cells, lens)
    actual = layer.run(delta_rule_decode.kernel, inputs, cells, lens)
    assert_close(actual[1:2], expected[1:2], 0)
    # The twin rounds a state after every row, the kernel after a sequence's last one.
    rounding = ROUNDING[state_dtype]
    assert_close(actual[:1], expected[:1], max(TOLERANCE[dtype] / 8, rounding))
    assert_close(actual[2:], expected[2:], rounding)


@pytest.mark.parametrize(("dim", "state_dtype"), [(32, F32), (64, F16), (128, F32), *nightly((32, BF16), (128, F16))])
def test_decode_kernels_of_other_sizes_equal_twin(dim, state_dtype, device):
    """Two rows of a prompt, a row with two proposed tokens, one that begins."""
    layer = Layer(1, 2, dim, device, state_dtype=state_dtype)
    layer.fill(0, 2)
    inputs = layer.inputs(7)
    places, is_proposed = ([2, 2, 0, 5, 1, 6, -1], [3, 4, 9, 10, 11, 1, 0]), [0, 0, 0, 1, 1, 0, 0]
    expected = layer.run(delta_rule_decode.twin, inputs, *places, is_proposed=is_proposed)
    actual = layer.run(delta_rule_decode.kernel, inputs, *places, is_proposed=is_proposed)
    assert_close(actual, expected, ROUNDING[state_dtype])


@pytest.mark.parametrize(
    ("function", "state_dtype"),
    [
        *product([delta_rule_decode.twin], STATE_DTYPES),
        (delta_rule_decode.kernel, F16),
        *nightly(*product([delta_rule_decode.kernel], [F32, BF16])),
    ],
)
def test_proposed_tokens_equal_steps_of_one(function, state_dtype, device):
    """Of sequences with 0 to 5 proposed tokens, one at its start: every output, and every state on the way."""
    layer = Layer(1, 2, 16, device, num_cells=32, state_dtype=state_dtype)
    layer.fill(3, 7, 9, 11, 20, 22)
    firsts, num_proposed, lens = [7, 3, 9, 5, 11, 20, 22], [0, 3, 5, 2, 1, 0, 4], [9, 2, 30, 1, 3, 4, 3]
    lent = iter((0, 1, 2, 4, 6, 8, 10, 12, 13, 14, 15, 16, 17, 18, 19))
    groups = [[first, *(next(lent) for _ in range(n))] for first, n in zip(firsts, num_proposed, strict=True)]
    cells = [cell for group in groups for cell in group] + [-1, -1]
    is_proposed = [min(i, 1) for group in groups for i in range(len(group))] + [0, 0]
    context_lens = [n + i for group, n in zip(groups, lens, strict=True) for i in range(len(group))] + [0, 0]
    inputs = layer.inputs(len(cells))
    out, tails, states = layer.run(function, inputs, cells, context_lens, is_proposed=is_proposed)
    assert not out[-2:].any()
    # A compiled loop may fuse other operations than its first pass, and what is rounded to 16 bits may then differ.
    tolerance = {F32: 1e-5, F16: 3e-3, BF16: 2e-2}[state_dtype]
    if function is delta_rule_decode.kernel and device == "cpu":
        tolerance = 0
    for i in range(max(map(len, groups))):
        rows = [sum(map(len, groups[:g])) + i for g, group in enumerate(groups) if len(group) > i]
        own = [group[0] for group in groups if len(group) > i]
        step = layer.run(function, [x[rows] for x in inputs], own, [context_lens[row] for row in rows])
        written = [group[i] for group in groups if len(group) > i]
        assert_close((out[rows], tails[written], states[written]), (step[0], step[1][own], step[2][own]), tolerance)
        layer.keep(step)
    others = sorted(set(range(32)).difference(*groups))
    assert states[others].isnan().all()
    assert tails[others].isnan().all()


@pytest.mark.parametrize(
    ("heads", "state_dtype", "dtype"),
    [((1, 3), F16, F16), *nightly(*product([(2, 2), (1, 3)], STATE_DTYPES, [F32, F16]))],
)
def test_prefill_kernels_equal_twin(heads, state_dtype, dtype, device):
    layer = Layer(*heads, 16, device, dtype, state_dtype=state_dtype, seed=heads[1])
    layer.fill(0, 2, 5)
    lens = [1, 70, 2, 64, 0, 129]
    inputs = layer.inputs(sum(lens))
    places = starts(lens), [0, -1, 2, -1, -1, 5], [0, 1, 3, -1, -1, 5], [-1, 4, -1, 7, -1, 6], [0, 64, 0, 64, 0, 128]
    expected = layer.run(delta_rule_prefill.twin, inputs, *places)
    actual = layer.run(delta_rule_prefill.kernel, inputs, *places)
    assert_close(actual[1:2], expected[1:2], 0)
    tolerance = TOLERANCE[dtype]
    assert_close(actual[:1], expected[:1], tolerance)
    assert_close(actual[2:], expected[2:], max(tolerance, ROUNDING[state_dtype] / 6))


@pytest.mark.parametrize("name", ["twin", "kernel"])
def test_the_norm_of_a_prefill_may_be_left_to_the_caller(name, device):
    layer = Layer(1, 2, 16, device, F16)
    inputs = layer.inputs(70)
    places = [0, 70], [-1], [3], [-1], [0]
    rule = getattr(delta_rule_prefill, name)
    expected, *_ = layer.run(rule, inputs, *places)
    out, *_ = layer.run(lambda *args: rule(*args[:7], None, *args[8:]), inputs, *places)
    found = getattr(gated_rms_norm, name)(out, inputs[1], layer.norm_weight, EPS)
    assert found is out
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="must be alike"):
        gated_rms_norm.kernel(out, inputs[1][:9], layer.norm_weight, EPS)


@pytest.mark.parametrize(("seed", "state_dtype"), [(0, F16), *nightly((1, F32), (2, F32), (3, BF16))])
def test_random_lengths_in_wide_slices(seed, state_dtype, device, monkeypatch):
    """Heads of 64 in several slices of columns, and more sequences than a program compares at a time."""
    monkeypatch.setattr(chunked_delta, "choose_scan", lambda *args: chunked_delta.ScanConfig(32, 4, 1))
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 150, (3,), generator=generator).tolist()
    layer = Layer(1, 2, 64, device, state_dtype=state_dtype, seed=seed)
    layer.fill(1)
    places = starts(lens), [-1, 1, -1], [0, 2, 3], [4, 5, 6], [max(n // 64 * 64, 64) for n in lens]
    places[3][:] = [cell if n >= 64 else -1 for cell, n in zip(places[3], lens, strict=True)]
    inputs = layer.inputs(sum(lens))
    expected = layer.run(delta_rule_prefill.twin, inputs, *places)
    actual = layer.run(delta_rule_prefill.kernel, inputs, *places)
    assert_close(actual, expected, max(TOLERANCE[F32], ROUNDING[state_dtype]))


@pytest.mark.parametrize(("count", "at_a_time"), [(20, 8), *nightly((300, 256))])
def test_many_short_sequences(count, at_a_time, device, monkeypatch):
    """More than a program compares at a time."""
    if at_a_time < 256:
        if device == "cuda":
            pytest.skip("a compiled kernel keeps its constants")
        monkeypatch.setattr(chunks, "_SEQS", tl.constexpr(at_a_time))
    lens = [1 + i % 2 for i in range(count)]
    layer = Layer(1, 1, 16, device, num_cells=count)
    places = starts(lens), [-1] * count, range(count), [-1] * count, [0] * count
    inputs = layer.inputs(sum(lens))
    expected = layer.run(delta_rule_prefill.twin, inputs, *places)
    assert_close(layer.run(delta_rule_prefill.kernel, inputs, *places), expected, TOLERANCE[torch.float32])


def test_equal_tokens_without_decay(device):
    """All keys of a chunk are equal, the hardest case for the inverse."""
    layer = Layer(1, 2, 16, device)
    layer.A_log.fill_(-20)
    qkv, z, b, a = (x[:1].expand(200, -1).contiguous() for x in layer.inputs(200))
    places = [0, 200], [-1], [0], [-1], [0]
    expected = layer.run(delta_rule_prefill.twin, (qkv, z, b + 8, a), *places)
    assert_close(layer.run(delta_rule_prefill.kernel, (qkv, z, b + 8, a), *places), expected, TOLERANCE[torch.float32])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN, in Triton's interpreter
def test_a_sequence_of_nan_spoils_no_other(device):
    layer = Layer(1, 2, 16, device)
    layer.fill(0, 1, 2)
    lens = [40, 70, 50]
    inputs = layer.inputs(sum(lens))
    places = starts(lens), [0, 1, 2], [0, 1, 2], [-1] * 3, [0] * 3
    expected, *_ = layer.run(delta_rule_prefill.kernel, inputs, *places)
    for x in inputs:
        x[40:110] = float("nan")
    out, *_ = layer.run(delta_rule_prefill.kernel, inputs, *places)
    assert torch.equal(out[:40], expected[:40])
    assert torch.equal(out[110:], expected[110:])
    assert out[40:110].isnan().all()


def test_wrong_arguments_are_refused(device):
    layer = Layer(2, 4, 16, device)
    layer.fill(0)
    qkv, z, b, a = layer.inputs(1)
    for inputs, message in (
        ((qkv[:, 1:], z, b, a), "qkv must be"),
        ((qkv, z[:, ::2], b, a), "z must be"),
        ((qkv, z, b[:, :1], a), "b must be"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.run(delta_rule_decode, inputs, [0], [3])
        with pytest.raises(ValueError, match=message):
            layer.run(delta_rule_prefill, inputs, [0, 1], [0], [0], [-1], [0])
    layer = Layer(2, 4, 24, device)
    for function, places in (
        (delta_rule_decode.kernel, ([0], [1])),
        (delta_rule_prefill.kernel, ([0, 1], [-1], [0], [-1], [0])),
    ):
        with pytest.raises(ValueError, match="values of one size"):
            layer.run(function, layer.inputs(1), *places)


@pytest.mark.gpu
@pytest.mark.parametrize("num_value_heads", [16, 32, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_published_sizes(num_value_heads, dtype):
    layer = Layer(16, num_value_heads, 128, "cuda", dtype)
    layer.fill(0, 1)
    lens = [300, 1, 64, 513]
    inputs = layer.inputs(sum(lens))
    places = starts(lens), [0, -1, -1, 1], [0, 2, 3, 1], [4, -1, -1, 5], [256, 0, 0, 512]
    expected = layer.run(delta_rule_prefill.twin, inputs, *places)
    actual = layer.run(delta_rule_prefill, inputs, *places)
    assert_close(actual[1:2], expected[1:2], 0)
    assert_close(actual[:1], expected[:1], max(TOLERANCE[dtype], 1e-3))
    assert_close(actual[2:], expected[2:], max(TOLERANCE[dtype], 1e-3))
    rows = [x[:6] for x in inputs]
    places = [0, 1, 6, 6, 6, -1], [301, 514, 1, 2, 3, 0]
    expected = layer.run(delta_rule_decode.twin, rows, *places)
    actual = layer.run(delta_rule_decode, rows, *places)
    assert_close(actual[1:], expected[1:], 1e-4)
    assert_close(actual[:1], expected[:1], max(TOLERANCE[dtype] / 8, 1e-4))


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_states_after_4000_tokens(state_dtype):
    """Of a prefill, and of a prefill that decodes half of them, against the twin in float32."""
    layer = Layer(16, 32, 128, "cuda", torch.bfloat16, state_dtype=state_dtype)
    inputs = layer.inputs(4000)
    exact = Layer(16, 32, 128, "cuda")
    exact.conv_weight = layer.conv_weight.float()
    places = [0, 4000], [-1], [0], [-1], [0]
    _, _, expected = exact.run(delta_rule_prefill.twin, [x.float() for x in inputs], *places)
    _, _, actual = layer.run(delta_rule_prefill, inputs, *places)
    half = [x[:2000] for x in inputs]
    layer.keep(layer.run(delta_rule_prefill, half, [0, 2000], [-1], [0], [-1], [0]))
    for i in range(2000, 4000):
        layer.keep(layer.run(delta_rule_decode, [x[i : i + 1] for x in inputs], [0], [i + 1]))
    for states in (actual, layer.states):
        error = (by_dims(states[0]).float() - by_dims(expected[0])).norm() / expected[0].norm()
        assert error < {F32: 0.01, F16: 0.015, BF16: 0.03}[state_dtype]
