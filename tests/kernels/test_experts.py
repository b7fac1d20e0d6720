"""The experts' kernels against their plain-torch twins, and the twins against the formula."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from gpus import pretend_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_inputs import make_rows
from products import default_result, experts_sum, plain

from nanovllm.kernels.experts import experts_gemv
from nanovllm.kernels.experts.experts import TileConfig, add_pairs, down, gate_up, route, route_torch, sort_by_expert
from nanovllm.kernels.experts.experts_gemv import ExpertsGemvConfig
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.silu_and_mul import GEGLU, Activation
from nanovllm.layers.matmul.problem import ExpertsProblem
from nanovllm.layers.matmul.table import Key

EPS = 1e-6
# Of results of order one.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Triton's interpreter multiplies bfloat16 wrongly.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
dtypes = st.sampled_from([torch.float32, HALF])
# Where tokens go: anywhere, all to the same experts, or none but to a few.
routings = st.sampled_from(["any", "one", "few"])


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    """New tensors hold NaN or -1: an output that is not written can't pass for one that lay in the same memory."""

    def poisoned(*size, dtype, device):
        return torch.full(size, float("nan") if dtype.is_floating_point else -1, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", poisoned)


def make_logits(num_tokens, num_experts, routing, dtype, device):
    logits = torch.randn(num_tokens, num_experts, device=device)
    if routing == "one":
        logits += 20 * torch.arange(num_experts, device=device)
    elif routing == "few":
        logits[:, num_experts // 2 :] -= 20
    return logits.to(dtype)


def make_weights(num_experts, hidden_size, intermediate, dtype, device):
    gate_up_weight = torch.randn(num_experts, 2 * intermediate, hidden_size, device=device) / hidden_size**0.5
    down_weight = torch.randn(num_experts, hidden_size, intermediate, device=device) / intermediate**0.5
    return gate_up_weight.to(dtype), down_weight.to(dtype)


def make_context_lens(num_tokens, has_padding, device):
    return torch.randint(0, 3, (num_tokens,), dtype=torch.int32, device=device) if has_padding else None


def expected_sum(x, logits, top_k, normalize, weights, out, add, context_lens):
    """What `out` must hold: the twins' sum, with rows of padding as they are."""
    total = experts_sum(x, route_torch(logits, top_k, normalize, context_lens), *weights)
    expected = (out.float() + total if add else total).to(out.dtype)
    return expected if context_lens is None else torch.where((context_lens == 0)[:, None], out, expected)


def check_result(out, expected, num_tokens):
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert out._base.isnan().sum() == num_tokens * 24  # what lies between the rows


@settings(max_examples=10)
@given(
    num_tokens=st.integers(0, 40),
    num_experts=st.integers(4, 40),
    top_k=st.integers(1, 8),
    routing=routings,
    normalize=st.booleans(),
    has_padding=st.booleans(),
    has_scales=st.booleans(),
    dtype=dtypes,
    seed=st.integers(0, 1000),
)
def test_tokens_are_routed_as_by_the_twin(
    device, num_tokens, num_experts, top_k, routing, normalize, has_padding, has_scales, dtype, seed
):
    torch.manual_seed(seed)
    top_k = min(top_k, num_experts)
    # Of 16-bit logits many are equal.
    logits = make_logits(num_tokens, num_experts, routing, dtype, device)
    context_lens = make_context_lens(num_tokens, has_padding, device)
    options = top_k, normalize, context_lens, torch.randn(num_experts, device=device) if has_scales else None
    experts, weights = route(logits, *options)
    expected_experts, expected_weights = route_torch(logits, *options)
    torch.testing.assert_close(experts, expected_experts)
    torch.testing.assert_close(weights, expected_weights)

    positions = torch.full((num_tokens * top_k,), -1, dtype=torch.int32, device=device)
    order, starts = sort_by_expert(experts, num_experts, positions)
    flat = experts.flatten().long()
    counts = flat.bincount(minlength=num_experts + 1)[:num_experts]
    torch.testing.assert_close(order.long(), flat.argsort(stable=True))
    torch.testing.assert_close(positions.long(), order.long().argsort())
    torch.testing.assert_close(starts.long(), F.pad(counts.cumsum(0), (1, 0)))


def test_more_pairs_than_a_program_lists(device):
    experts = torch.randint(0, 6, (9000, 4), dtype=torch.int16, device=device)
    order, starts = sort_by_expert(experts, 5)
    torch.testing.assert_close(order.long(), experts.flatten().argsort(stable=True))
    assert starts.tolist() == [(experts < expert).sum() for expert in range(6)]


CONFIGS = [None, TileConfig(16, 16, 16, 4, 2), TileConfig(32, 64, 32, 4, 3), TileConfig(64, 16, 64, 4, 3)]


@settings(max_examples=8)
@given(
    num_tokens=st.integers(1, 40),
    num_experts=st.sampled_from([4, 7, 16, 33]),
    top_k=st.integers(1, 8),
    hidden_size=st.sampled_from([8, 33, 64, 72]),
    intermediate=st.sampled_from([8, 17, 40, 64]),
    config=st.sampled_from(CONFIGS),
    routing=routings,
    normalize=st.booleans(),
    has_padding=st.booleans(),
    add=st.booleans(),
    dtype=dtypes,
    seed=st.integers(0, 1000),
)
@pytest.mark.slow
def test_the_tiles_equal_the_twin(
    device, num_tokens, num_experts, top_k, hidden_size, intermediate, config, routing, normalize, has_padding, add,
    dtype, seed,
):  # fmt: skip
    torch.manual_seed(seed)
    top_k = min(top_k, num_experts)
    x, out = (make_rows(num_tokens, hidden_size, dtype, device) for _ in range(2))
    logits = make_logits(num_tokens, num_experts, routing, dtype, device)
    weights = make_weights(num_experts, hidden_size, intermediate, dtype, device)
    context_lens = make_context_lens(num_tokens, has_padding, device)
    expected = expected_sum(x, logits, top_k, normalize, weights, out, add, context_lens)

    experts, shares = route(logits, top_k, normalize, context_lens)
    order, starts = sort_by_expert(experts, num_experts)
    hidden = gate_up(x, order, starts, weights[0], config)
    y = down(hidden, order, starts, shares, weights[1], config)
    before = out.clone()
    assert add_pairs(y, out, add, context_lens) is out
    check_result(out, expected, num_tokens)

    # As other grouped products leave them: in the order of the experts, without their weights.
    y = down(hidden, order, starts, torch.ones_like(shares), weights[1], config)
    sorted_pairs = y.view(-1, hidden_size)[order.long()].view(y.shape)
    out.copy_(before)
    add_pairs(sorted_pairs, out, add, context_lens, order.argsort().int(), shares)
    check_result(out, expected, num_tokens)


def test_without_the_tensor_memory_accelerator(device, monkeypatch):
    pretend_gpu(monkeypatch, GpuFacts.of(torch.device(device)), capability=(8, 0))
    x, out = (make_rows(20, 64, HALF, device) for _ in range(2))
    logits, weights = make_logits(20, 6, "any", HALF, device), make_weights(6, 64, 40, HALF, device)
    expected = expected_sum(x, logits, 2, True, weights, out, True, None)
    experts, shares = route(logits, 2, True)
    order, starts = sort_by_expert(experts, 6)
    add_pairs(down(gate_up(x, order, starts, weights[0]), order, starts, shares, weights[1]), out, True)
    check_result(out, expected, 20)


GEMV_CONFIGS = [ExpertsGemvConfig(4, 16, 1), ExpertsGemvConfig(8, 64, 2), ExpertsGemvConfig(16, 128, 4)]


@settings(max_examples=8)
@given(
    num_tokens=st.integers(1, 3),
    num_experts=st.sampled_from([4, 7, 33]),
    top_k=st.integers(1, 8),
    hidden_size=st.sampled_from([8, 33, 100]),
    intermediate=st.sampled_from([3, 8, 17]),
    config=st.sampled_from(GEMV_CONFIGS),
    has_norm=st.booleans(),
    routing=routings,
    normalize=st.booleans(),
    has_padding=st.booleans(),
    add=st.booleans(),
    dtype=dtypes,
    seed=st.integers(0, 1000),
)
def test_the_kernels_for_few_tokens_equal_the_twin(
    device, num_tokens, num_experts, top_k, hidden_size, intermediate, config, has_norm, routing, normalize,
    has_padding, add, dtype, seed,
):  # fmt: skip
    torch.manual_seed(seed)
    top_k = min(top_k, num_experts)
    x, out = (make_rows(num_tokens, hidden_size, dtype, device) for _ in range(2))
    norm_weight = (1 + 0.5 * torch.randn(hidden_size, device=device)).to(dtype) if has_norm else None
    logits = make_logits(num_tokens, num_experts, routing, dtype, device)
    weights = make_weights(num_experts, hidden_size, intermediate, dtype, device)
    context_lens = make_context_lens(num_tokens, has_padding, device)
    normed = rms_norm.twin(x, norm_weight, EPS) if has_norm else x
    expected = expected_sum(normed, logits, top_k, normalize, weights, out, add, context_lens)

    hidden = experts_gemv.gate_up(x, norm_weight, EPS, logits, weights[0], top_k, context_lens, config)
    result = experts_gemv.down(hidden, logits, weights[1], top_k, normalize, out, add, context_lens, config)
    assert result is out
    check_result(out, expected, num_tokens)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_disturbs_no_other(device, value):
    x, weights = torch.randn(4, 16, device=device), make_weights(5, 16, 8, torch.float32, device)
    logits = torch.randn(4, 5, device=device)
    out = torch.zeros(4, 16, device=device)
    expected = expected_sum(x, logits, 2, True, weights, out, False, None)
    x[1], logits[1] = value, value
    experts, shares = route(logits, 2, True)
    assert 0 <= experts.min() <= experts.max() < 5
    order, starts = sort_by_expert(experts, 5)
    add_pairs(down(gate_up(x, order, starts, weights[0]), order, starts, shares, weights[1]), out, False)
    torch.testing.assert_close(out[[0, 2, 3]], expected[[0, 2, 3]])
    out.zero_()
    hidden = experts_gemv.gate_up(x, None, 0.0, logits, weights[0], 2, None, GEMV_CONFIGS[0])
    experts_gemv.down(hidden, logits, weights[1], 2, True, out, False, None, GEMV_CONFIGS[0])
    torch.testing.assert_close(out[[0, 2, 3]], expected[[0, 2, 3]])


@pytest.mark.parametrize("normalize", [False, True])
def test_the_twins_are_the_formula(normalize):
    """In float64: each token by itself, with every expert, of which all but its own count nothing."""
    x, (gate_up_weight, down_weight) = torch.randn(9, 12), make_weights(6, 12, 10, torch.float32, "cpu")
    logits = torch.randn(9, 6)
    out = experts_sum(x, route_torch(logits, 2, normalize), gate_up_weight, down_weight)
    for token, row, result in zip(x.double(), logits.double(), out, strict=True):
        share = row.softmax(0)
        share[share.argsort()[:-2]] = 0
        if normalize:
            share /= share.sum()
        total = 0
        for expert in range(6):
            gate, up = (gate_up_weight[expert].double() @ token).chunk(2)
            total += share[expert] * (down_weight[expert].double() @ (F.silu(gate) * up))
        torch.testing.assert_close(result, total.float())


@pytest.mark.parametrize("kernels", ["tiles", "few tokens"])
@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(Activation(alpha=1.702, limit=1.5), HALF), (GEGLU, torch.float32)],
    ids=["clamped", "gelu"],
)
def test_biases_activations_and_scales(activation, dtype, kernels, device):
    """Of gpt-oss and Gemma 4: both kinds of kernels, and their twin, against the formula."""
    num_tokens, num_experts, top_k, hidden_size, intermediate = 5, 6, 2, 40, 24
    x, logits = (torch.randn(num_tokens, n, device=device).to(dtype) for n in (hidden_size, num_experts))
    weights = make_weights(num_experts, hidden_size, intermediate, dtype, device)
    bias, down_bias = (torch.randn(num_experts, w.shape[1], device=device).to(dtype) for w in weights)
    scales = torch.randn(num_experts, device=device).to(dtype)
    experts, shares = route_torch(logits, top_k, True, None, scales)
    expected = torch.zeros(num_tokens, hidden_size, device=device)
    for token in range(num_tokens):
        for expert, share in zip(experts[token].tolist(), shares[token], strict=True):
            gate, up = (weights[0][expert].float() @ x[token].float() + bias[expert].float()).chunk(2)
            if activation.is_gelu:
                hidden = F.gelu(gate, approximate="tanh") * up
            else:
                gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
                hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            expected[token] += share * (weights[1][expert].float() @ hidden + down_bias[expert].float())
    out = torch.zeros(num_tokens, hidden_size, dtype=dtype, device=device)
    if kernels == "tiles":
        order, starts = sort_by_expert(experts, num_experts)
        hidden = gate_up(x, order, starts, weights[0], TileConfig(16, 16, 16, 4, 2), bias=bias, activation=activation)
        y = down(hidden, order, starts, shares, weights[1], TileConfig(16, 32, 16, 4, 2), bias=down_bias)
        add_pairs(y, out, False)
    else:
        options = {"bias": bias, "activation": activation}
        config = ExpertsGemvConfig(4, 16, 4)
        hidden = experts_gemv.gate_up(x, None, 0.0, logits, weights[0], top_k, None, config, **options)
        experts_gemv.down(hidden, logits, weights[1], top_k, True, out, False, None, config, None, down_bias, scales)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    key = Key.of("experts", False, plain(weights[0]))
    options = top_k, True, torch.zeros_like(out), False, None, bias, down_bias, activation, scales
    problem = ExpertsProblem(key, x.cpu(), logits.cpu(), *map(plain, weights), *options)
    if device == "cpu":
        torch.testing.assert_close(default_result(problem).float(), expected, rtol=tolerance, atol=tolerance)


def test_wrong_arguments(device):
    x, logits = torch.randn(3, 8, device=device), torch.randn(3, 4, device=device)
    gate_up_weight, down_weight = make_weights(4, 8, 6, torch.float32, device)
    with pytest.raises(ValueError, match=r"^logits must be .*top_k=5"):
        route(logits, 5, True)
    experts, shares = route(logits, 2, True)
    order, starts = sort_by_expert(experts, 4)
    with pytest.raises(ValueError, match=r"^x must be a \[num_tokens, 8\]"):
        gate_up(x[:, :7], order, starts, gate_up_weight)
    with pytest.raises(ValueError, match=r"^weight must be contiguous"):
        gate_up(x, order, starts, gate_up_weight.transpose(1, 2).contiguous().transpose(1, 2))
    hidden = gate_up(x, order, starts, gate_up_weight)
    with pytest.raises(ValueError, match=r"^x must be a contiguous \[6, 6\]"):
        down(hidden[:5], order, starts, shares, down_weight)
    y = down(hidden, order, starts, shares, down_weight)
    with pytest.raises(ValueError, match=r"^out must be \[3, 8\]"):
        add_pairs(y, x[:2], True)
    with pytest.raises(ValueError, match=r"^logits must be \[1..16"):
        experts_gemv.gate_up(x, None, 0.0, logits[:0], gate_up_weight, 2, None, GEMV_CONFIGS[0])
    with pytest.raises(ValueError, match=r"^weight must be a contiguous \[4, rows, 8\]"):
        experts_gemv.gate_up(x, None, 0.0, logits, down_weight, 2, None, GEMV_CONFIGS[0])
    with pytest.raises(ValueError, match=r"^x must be a contiguous \[6, 6\]"):
        experts_gemv.down(hidden[:5], logits, down_weight, 2, True, x, True, None, GEMV_CONFIGS[0])


@pytest.mark.gpu
@pytest.mark.parametrize("is_prefill", [False, True])
def test_constants_of_the_table(is_prefill):
    from nanovllm.layers.matmul.candidates import make_candidates
    from nanovllm.layers.matmul.problem import ExpertsProblem
    from nanovllm.layers.matmul.table import package_table

    device = torch.device("cuda")
    # tests/gpu/test_gpu_quack.py has those of quack-kernels.
    candidates = {candidate.name: candidate for candidate in make_candidates(device)}
    for key, row in package_table("NVIDIA H200").rows.items():
        if (key.operation, key.format) != ("experts", "bfloat16") or (key.phase == "prefill") != is_prefill:
            continue
        weights = make_weights(key.experts, key.K, key.N // 2, torch.bfloat16, device)
        for bound, choices in zip(row.bounds, row.choices, strict=True):
            num_tokens = min(bound, 3000)
            x, out = (make_rows(num_tokens, key.K, torch.bfloat16, device) for _ in range(2))
            logits = make_logits(num_tokens, key.experts, "any", torch.bfloat16, device)
            lens = None if is_prefill else make_context_lens(num_tokens, True, device)
            expected = expected_sum(x, logits, 8, True, weights, out, True, lens)
            for name, constants in choices:
                if name == "quack-experts":
                    continue
                result = out._base.clone()[:, 8 : 8 + key.K]
                problem = ExpertsProblem(key, x, logits, *map(plain, weights), 8, True, result, True, lens)
                assert candidates[name].supports(key, problem.weight)
                candidates[name].launch(problem, constants)
                check_result(result, expected, num_tokens)
