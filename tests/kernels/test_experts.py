"""The experts' kernels against their plain-torch twins, and the twins against the formula."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from gpus import pretend_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import HALF, apart, assert_refused, assert_untouched_around, hold, rounding
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
dtypes = st.sampled_from([torch.float32, HALF])
# Where tokens go: anywhere, all to the same experts, or none but to a few.
routings = st.sampled_from(["any", "one", "few"])


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


def close(dtype, hidden_size) -> dict[str, float]:
    """Hidden numbers, the experts' results and their sum are rounded; results are of order one."""
    return rounding(dtype, 8, hidden_size)


class Layer:
    """Random experts, and their sum for each token by the kernels and by the twins.

    Attributes:
        routing: where tokens go: anywhere, all to the same experts, or none but to a few.
        has_norm: whether few tokens' kernels normalize their input.
    """

    def __init__(
        self, num_tokens, num_experts, top_k, hidden_size, intermediate, config, dtype, device, routing="any",
        normalize=True, has_padding=False, add=False, has_norm=False,
    ):  # fmt: skip
        self.top_k, self.normalize, self.add, self.config = min(top_k, num_experts), normalize, add, config
        self.x, self.out = (torch.randn(num_tokens, hidden_size, device=device).to(dtype) for _ in range(2))
        self.logits = make_logits(num_tokens, num_experts, routing, dtype, device)
        self.weights = make_weights(num_experts, hidden_size, intermediate, dtype, device)
        self.lens = make_context_lens(num_tokens, has_padding, device)
        self.norm_weight = (1 + 0.5 * torch.randn(hidden_size, device=device)).to(dtype) if has_norm else None

    def hold(self, kernel) -> None:
        args = self.x, self.logits, self.out
        hold(kernel, self.twin, args, written=(2,), close=close(self.x.dtype, self.x.shape[1]))

    def twin(self, x, logits, out):
        """Rows of padding stay as they are."""
        normed = x if self.norm_weight is None else rms_norm.twin(x, self.norm_weight, EPS)
        total = experts_sum(normed, route_torch(logits, self.top_k, self.normalize, self.lens), *self.weights)
        expected = (out.float() + total if self.add else total).to(out.dtype)
        return out.copy_(expected if self.lens is None else torch.where((self.lens == 0)[:, None], out, expected))

    def tiles(self, x, logits, out, is_sorted=False):
        """is_sorted: pairs are left as other grouped products do: in the experts' order, without their weights."""
        experts, shares = route(logits, self.top_k, self.normalize, self.lens)
        order, starts = sort_by_expert(experts, len(self.weights[0]))
        hidden = gate_up(x, order, starts, self.weights[0], self.config)
        of_pairs = torch.ones_like(shares) if is_sorted else shares
        y = down(hidden, order, starts, of_pairs, self.weights[1], self.config)
        if not is_sorted:
            return add_pairs(y, out, self.add, self.lens)
        sorted_pairs = y.view(-1, x.shape[1])[order.long()].view(y.shape)
        return add_pairs(sorted_pairs, out, self.add, self.lens, order.argsort().int(), shares)

    def few(self, x, logits, out):
        """By the kernels for few tokens."""
        weights, options = self.weights, {"context_lens": self.lens, "config": self.config}
        hidden = experts_gemv.gate_up(x, self.norm_weight, EPS, logits, weights[0], self.top_k, **options)
        return experts_gemv.down(hidden, logits, weights[1], self.top_k, self.normalize, out, self.add, **options)


@settings(max_examples=6)
@given(
    num_tokens=st.integers(0, 40),
    num_experts=st.integers(4, 40),
    top_k=st.integers(1, 8),
    routing=routings,
    normalize=st.booleans(),
    has_padding=st.booleans(),
    has_scales=st.booleans(),
    rank=st.integers(-1, 2),
    dtype=dtypes,
    seed=st.integers(0, 1000),
)
def test_tokens_are_routed_as_by_the_twin(
    device, num_tokens, num_experts, top_k, routing, normalize, has_padding, has_scales, rank, dtype, seed
):
    torch.manual_seed(seed)
    top_k = min(top_k, num_experts)
    # Of 16-bit logits many are equal.
    logits = make_logits(num_tokens, num_experts, routing, dtype, device)
    context_lens = make_context_lens(num_tokens, has_padding, device)
    edges = [i * num_experts // 3 for i in range(4)]
    mine = range(edges[rank], edges[rank + 1]) if rank >= 0 else None
    options = top_k, normalize, context_lens, torch.randn(num_experts, device=device) if has_scales else None, mine
    experts, weights = route(logits, *options)
    expected_experts, expected_weights = route_torch(logits, *options)
    torch.testing.assert_close(experts, expected_experts)
    torch.testing.assert_close(weights, expected_weights)

    num_experts = num_experts if mine is None else len(mine)
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
GEMV_CONFIGS = [ExpertsGemvConfig(4, 16, 1), ExpertsGemvConfig(8, 64, 2), ExpertsGemvConfig(16, 128, 4)]
COMMON = {"routing": routings, "normalize": st.booleans(), "has_padding": st.booleans(), "add": st.booleans()}
COMMON |= {"dtype": dtypes, "top_k": st.integers(1, 8), "seed": st.integers(0, 1000)}

# Each size beyond and below a tile of each configuration; each flag both ways.
TILE_CASES = [
    ((9, 4, 3, 33, 17, CONFIGS[1], torch.float32), {"add": True}),
    ((7, 7, 8, 72, 40, CONFIGS[2], HALF), {"has_padding": True, "routing": "few"}),
    ((12, 17, 2, 8, 8, CONFIGS[3], HALF), {"normalize": False, "add": True, "routing": "one"}),
    ((3, 6, 2, 64, 40, CONFIGS[0], torch.float32), {"has_padding": True, "add": True}),
]


@pytest.mark.parametrize(("sizes", "options"), TILE_CASES)
def test_the_tiles_equal_the_twin(sizes, options, device):
    layer = Layer(*sizes, device, **options)
    layer.hold(layer.tiles if options.get("has_padding") else partial(layer.tiles, is_sorted=True))


@pytest.mark.nightly
@settings(max_examples=30)
@given(
    **COMMON,
    num_tokens=st.integers(1, 40),
    num_experts=st.sampled_from([4, 7, 16, 33]),
    hidden_size=st.sampled_from([8, 33, 64, 72]),
    intermediate=st.sampled_from([8, 17, 40, 64]),
    config=st.sampled_from(CONFIGS),
)
def test_any_tiles_equal_the_twin(device, seed, **options):
    torch.manual_seed(seed)
    layer = Layer(device=device, **options)
    layer.hold(layer.tiles)


def test_without_the_tensor_memory_accelerator(device, monkeypatch):
    pretend_gpu(monkeypatch, GpuFacts.of(torch.device(device)), capability=(8, 0))
    layer = Layer(9, 6, 2, 64, 40, None, HALF, device, add=True)
    layer.hold(layer.tiles)


GEMV_CASES = [
    ((2, 4, 3, 33, 9, GEMV_CONFIGS[0], torch.float32), {"has_norm": True, "add": True}),
    ((2, 7, 6, 100, 8, GEMV_CONFIGS[1], HALF), {"has_padding": True, "routing": "few"}),
    ((1, 33, 2, 8, 3, GEMV_CONFIGS[2], HALF), {"has_norm": True, "normalize": False, "routing": "one"}),
    ((3, 5, 2, 33, 8, GEMV_CONFIGS[2], torch.float32), {"has_padding": True, "add": True, "has_norm": True}),
]


@pytest.mark.parametrize(("sizes", "options"), GEMV_CASES)
def test_the_kernels_for_few_tokens_equal_the_twin(sizes, options, device):
    layer = Layer(*sizes, device, **options)
    layer.hold(layer.few)


@pytest.mark.nightly
@settings(max_examples=30)
@given(
    **COMMON,
    num_tokens=st.integers(1, 3),
    num_experts=st.sampled_from([4, 7, 33]),
    hidden_size=st.sampled_from([8, 33, 100]),
    intermediate=st.sampled_from([3, 8, 17]),
    config=st.sampled_from(GEMV_CONFIGS),
    has_norm=st.booleans(),
)
def test_any_kernels_for_few_tokens_equal_the_twin(device, seed, **options):
    torch.manual_seed(seed)
    layer = Layer(device=device, **options)
    layer.hold(layer.few)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_disturb_no_other_row(device, value):
    layer = Layer(4, 5, 2, 16, 8, GEMV_CONFIGS[0], torch.float32, device)
    others, x, logits = [0, 2, 3], layer.x.clone(), layer.logits.clone()
    x[1], logits[1] = value, value
    experts, _ = route(logits, 2, True)
    assert torch.equal(experts, route_torch(logits, 2, True)[0])
    expected = layer.twin(layer.x, layer.logits, layer.out.clone())
    found = [layer.few(x, logits, layer.out.clone())]
    layer.config = None
    found.append(layer.tiles(x, logits, layer.out.clone()))
    for out in found:
        torch.testing.assert_close(out[others], expected[others], **close(torch.float32, 16))


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
        config = ExpertsGemvConfig(16, 16, 4)
        hidden = experts_gemv.gate_up(x, None, 0.0, logits, weights[0], top_k, None, config, **options)
        experts_gemv.down(hidden, logits, weights[1], top_k, True, out, False, None, config, None, down_bias, scales)
    allowed = close(dtype, hidden_size)
    torch.testing.assert_close(out.float(), expected, **allowed)
    key = Key.of("experts", False, plain(weights[0]))
    options = top_k, True, torch.zeros_like(out), False, None, bias, down_bias, activation, scales
    problem = ExpertsProblem(key, x.cpu(), logits.cpu(), *map(plain, weights), *options)
    if device == "cpu":
        torch.testing.assert_close(default_result(problem).float(), expected, **allowed)


def test_wrong_arguments(device):
    x, logits = torch.randn(3, 8, device=device), torch.randn(3, 4, device=device)
    gate_up_weight, down_weight = make_weights(4, 8, 6, torch.float32, device)
    with pytest.raises(ValueError, match=r"^logits must be .*top_k=5"):
        route(logits, 5, True)
    for mine in (range(3, 5), range(2, 2), range(0, 4, 2)):
        with pytest.raises(ValueError, match=r"^mine must be a range within 4 experts, not range"):
            route(logits, 2, True, mine=mine)
    experts, shares = route(logits, 2, True)
    order, starts = sort_by_expert(experts, 4)
    given = {"x": x, "order": order, "starts": starts, "weight": gate_up_weight}
    transposed = gate_up_weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert_refused(gate_up, given, {"x": x[:, :7], "weight": transposed})
    hidden = gate_up(**given)
    with pytest.raises(ValueError, match=r"^x must be a contiguous \[6, 6\]"):
        down(hidden[:5], order, starts, shares, down_weight)
    y = down(hidden, order, starts, shares, down_weight)
    assert_refused(add_pairs, {"y": y, "out": x, "add": True}, {"out": x[:2]})
    options = {"logits": logits, "top_k": 2, "context_lens": None, "config": GEMV_CONFIGS[0]}
    given = options | {"x": x, "norm_weight": None, "eps": 0.0, "weight": gate_up_weight}
    assert_refused(experts_gemv.gate_up, given, {"logits": logits[:0], "weight": down_weight})
    given = options | {"x": hidden, "weight": down_weight, "normalize": True, "out": x, "add": True}
    assert_refused(experts_gemv.down, given, {"x": hidden[:5]})


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
            sizes = min(bound, 3000), key.experts, 8, key.K, 8
            layer = Layer(*sizes, None, torch.bfloat16, device, add=True, has_padding=not is_prefill)
            layer.weights = weights
            expected = layer.twin(layer.x, layer.logits, layer.out.clone())
            for name, constants in choices:
                if name == "quack-experts":
                    continue
                result, options = apart(layer.out), (8, True)
                values = layer.x, layer.logits, *map(plain, weights), *options
                problem = ExpertsProblem(key, *values, result, True, layer.lens)
                assert candidates[name].supports(key, problem.weight)
                candidates[name].launch(problem, constants)
                torch.testing.assert_close(result, expected, **close(torch.bfloat16, key.K))
                assert_untouched_around(result)
