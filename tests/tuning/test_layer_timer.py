"""What the tuner launches on a GPU, on a CPU: the layer's products, and which choices it finds to work."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import launch_everywhere
from products import experts_problem, problem

from nanovllm.kernels.gpu import GpuFacts
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.formats.all_formats import format_of_table
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.candidates import expert_tiles, experts_gemv, gemv, make_candidates, split_k
from nanovllm.layers.matmul.candidates.cublas import Cublas
from nanovllm.layers.matmul.candidates.experts_gemv import ExpertsGemv
from nanovllm.layers.matmul.candidates.gemv import Gemv
from nanovllm.layers.matmul.candidates.split_k import SplitK
from nanovllm.layers.matmul.problem import AnyProblem
from nanovllm.layers.matmul.table import Choice, package_table
from nanovllm.models.layer_facts import LayerProduct
from nanovllm.tuning import layer_timer
from nanovllm.tuning.layer_timer import LayerTimer
from nanovllm.tuning.timed_attention import TimedAttention
from nanovllm.utils.context import step_context

CUBLAS = Choice("cublas")
ATTENTION, HIDDEN, INTERMEDIATE = 48, 32, 64
HALF, CPU = torch.float16, torch.device("cpu")
GEMV, SPLIT_K = Choice("gemv", (16, 64, 1)), Choice("split-k", (32, 32, 1, 3, 0))


def linear(operation: str, N: int, K: int, dtype=HALF, format="float16", has_norm: bool | None = None) -> AnyProblem:
    """A product of a layer, whose tensors mean nothing. has_norm: by default, unless it adds to the residual stream."""
    has_norm = operation not in ("linear_add", "linear_sum") if has_norm is None else has_norm
    x = torch.empty(1, K, dtype=dtype)
    weight = format_of_table(format).quantize(torch.zeros(N, K, dtype=dtype), dtype)
    return problem(operation, Normed(x, RMSNorm(K)) if has_norm else x, weight)


def layer_timer_of(problems: list[AnyProblem], attention: TimedAttention) -> LayerTimer:
    """Of a layer that begins with q, k and v, o, and gate and up or a router. All others read what is before them, if
    no norm is."""
    products = [
        LayerProduct(lambda _, problem=problem: problem, i in (0, 2) or isinstance(problem.x, Normed), i == 0)
        for i, problem in enumerate(problems)
    ]
    return LayerTimer(products, attention)


def problems_of(timer: LayerTimer) -> list[AnyProblem]:
    return [product(1) for product in timer.products]


def timed_attention(num_heads: int, head_dim: int, dtype: torch.dtype) -> TimedAttention:
    shape = AttentionShape(num_heads, 1, head_dim, 16, dtype, torch.device("cpu"))
    return TimedAttention(shape, package_table("NVIDIA H200"), 32)


class Wrong(SplitK):
    """A candidate whose results are no products, or that cannot be launched."""

    name = "wrong"

    def launch(self, problem, constants):
        if constants:
            raise RuntimeError("out of resources: shared memory")
        return super().launch(problem, (32, 32, 1, 3, 0)).mul_(1.1)


@pytest.fixture(params=["linear_add", "linear_sum"])
def timer(request, monkeypatch) -> LayerTimer:
    launch_everywhere(monkeypatch, gemv, split_k)
    monkeypatch.setattr(GpuFacts, "is_hopper", True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(layer_timer, "_MIN_WEIGHT_BYTES", 1)
    monkeypatch.setattr(LayerTimer, "_captured", lambda self, run: run)
    monkeypatch.setattr(layer_timer, "_time", lambda run, num_layers, enough: run() or float(num_layers))
    candidates = [Gemv(), SplitK(CPU), Wrong(CPU), ExpertsGemv(), *make_candidates()]
    monkeypatch.setattr(layer_timer, "make_candidates", lambda *args: candidates)
    add = request.param
    shapes = [("linear", ATTENTION + 32, HIDDEN), (add, HIDDEN, ATTENTION), ("linear_silu", 2 * INTERMEDIATE, HIDDEN)]
    shapes.append((add, HIDDEN, INTERMEDIATE))
    return layer_timer_of([linear(*shape) for shape in shapes], timed_attention(3, 16, HALF))


@pytest.fixture
def experts_timer(monkeypatch, timer) -> LayerTimer:
    """Of a layer with experts."""
    launch_everywhere(monkeypatch, expert_tiles, experts_gemv)
    experts = experts_problem(6, 2 * INTERMEDIATE, HIDDEN, 2, HALF, "float16")
    return layer_timer_of([*problems_of(timer)[:2], linear("linear", 6, HIDDEN), experts], timer.attention)


EXPERTS_GEMV = Choice("experts-gemv", ((64, 32, 1), (32, 64, 1)))
EXPERT_TILES = Choice("expert-tiles", ((16, 64, 64, 4, 2), (16, 64, 64, 4, 2)))


@pytest.mark.parametrize("timer", ["linear_add"], indirect=True)
def test_a_layer_with_experts(experts_timer):
    """What does not work: constants that no tile has."""
    timer, three = experts_timer, (CUBLAS, CUBLAS, CUBLAS)
    for choice in (Choice("expert-tiles"), EXPERTS_GEMV, EXPERT_TILES):
        assert timer("decode", 3, (*three, choice)) == len(timer._layers) == 2
    assert timer("decode", 3, (*three, Choice("expert-tiles", ((16, 64, 48, 4, 2),) * 2))) is None


@pytest.mark.parametrize("timer", ["linear_add"], indirect=True)
def test_products_beside_the_main_ones(experts_timer):
    """A second projection of the input, router and experts after an MLP, and a shared expert: the projection, the
    router and gate and up read the stream, experts and down what came before."""
    mlp, experts = problems_of(experts_timer)[:2], problems_of(experts_timer)[2:]
    mlp += (linear("linear_silu", 2 * INTERMEDIATE, HIDDEN), linear("linear_add", HIDDEN, INTERMEDIATE))
    shared = linear("linear_silu", 32, HIDDEN), linear("linear_add", HIDDEN, 16)
    timer = layer_timer_of([*mlp, linear("linear", 6, HIDDEN), *experts, *shared], experts_timer.attention)
    picks = [*(CUBLAS,) * 6, EXPERTS_GEMV, GEMV, CUBLAS]
    for phase in ("decode", "prefill"):
        assert timer(phase, 3, tuple(picks)) == len(timer._layers) == 2
    seen = []
    launch = timer._launch
    timer._launch = lambda problem, choice: seen.append(problem) or launch(problem, choice)
    with step_context(timer._context("decode", 3)), torch.inference_mode():
        timer._time_layer("decode", 3, tuple(picks))
    *_, extra, router, beside, gate_up, down = seen[-9:]
    stream = extra.x.residual
    assert all(each.x.residual is stream for each in (router, beside, gate_up))
    assert beside.logits.shape == (3, 6)
    assert down.x.shape == (3, 16)
    assert beside.out is down.out is stream


@pytest.mark.parametrize("timer", ["linear_add"], indirect=True)
@pytest.mark.parametrize("dtype", [Fp8.name, Fp8Blocks.name])
def test_layers_in_fp8(experts_timer, monkeypatch, dtype):
    """An MLP, and experts beside a router that is not in fp8; by torch and its twins, since Triton's interpreter
    multiplies bfloat16 wrongly."""
    for module in (expert_tiles, experts_gemv, gemv, split_k):
        monkeypatch.setattr(module, "use_kernels", lambda x: False)
    half, default, experts_default = torch.bfloat16, Choice("scaled-mm"), Choice("expert-tiles")

    def quantized(operation, N, K):
        return linear(operation, N, K, half, dtype)

    attention = [quantized("linear", 384, 128), quantized("linear_add", 128, 128)]
    mlp = [quantized("linear_silu", 512, 128), quantized("linear_add", 128, 256)]
    heads = timed_attention(1, 128, half)
    assert layer_timer_of([*attention, *mlp], heads)("prefill", 3, (default,) * 4) == 2
    router = linear("linear", 6, 128, half, "bfloat16")
    timer = layer_timer_of([*attention, router, experts_problem(6, 256, 128, 2, half, dtype)], heads)
    experts = timer._layers[0][3]
    assert experts.weight.table_name == experts.down.table_name == dtype
    assert (experts.weight.shape, experts.down.shape) == ((6, 256, 128), (6, 128, 128))
    assert timer("decode", 3, (default, default, CUBLAS, experts_default)) == len(timer._layers) == 2


@pytest.mark.parametrize("timer", ["linear_add"], indirect=True)
def test_layers_in_4_bits(timer):
    """An MLP in int4, and experts in MXFP4 beside layers that are not, as gpt-oss has them. What is timed adds to the
    residual stream again and again, what is compared does not."""
    half, default = torch.bfloat16, Choice("dequantized")

    def quantized(operation, N, K):
        return linear(operation, N, K, half, "int4")

    attention = [quantized("linear", 384, 128), quantized("linear_add", 128, 128)]
    mlp = [quantized("linear_silu", 512, 128), quantized("linear_add", 128, 256)]
    heads = timed_attention(1, 128, half)
    in_int4 = layer_timer_of([*attention, *mlp], heads)
    for phase in ("decode", "prefill"):
        assert in_int4(phase, 3, (default,) * 4) == len(in_int4._layers) == 2
    plain = [linear(*shape, half, "bfloat16") for shape in (("linear", 384, 128), ("linear_add", 128, 128))]
    plain[1] = plain[1]._replace(bias=torch.empty(128, dtype=half, device="meta"))
    router = linear("linear", 6, 128, half, "bfloat16")
    biases = {"bias": torch.empty(6, 256, dtype=half, device="meta")}
    biases |= {"down_bias": torch.empty(6, 128, dtype=half, device="meta")}
    biases |= {"scales": torch.empty(6, dtype=half, device="meta")}
    in_mxfp4 = layer_timer_of(
        [*plain, router, experts_problem(6, 256, 128, 2, half, "mxfp4")._replace(**biases)], heads
    )
    _, o, _, experts = in_mxfp4._layers[0]
    assert (o.bias.device, o.bias.shape) == (CPU, (128,)), "what a candidate does with a bias is timed"
    assert (experts.bias.shape, experts.down_bias.shape, experts.scales.shape) == ((6, 256), (6, 128), (6,))
    assert experts.weight.table_name == experts.down.table_name == "mxfp4"
    for phase in ("decode", "prefill"):
        assert in_mxfp4(phase, 3, (CUBLAS, CUBLAS, CUBLAS, default)) == len(in_mxfp4._layers) == 2


@pytest.mark.parametrize(("phase", "num_keys"), [("decode", 32), ("prefill", None)])
def test_a_layer_is_computed_by_the_choices(timer, monkeypatch, phase, num_keys):
    """num_keys: of each of three sequences; None without attention."""
    launched, keys = [], []
    attend = TimedAttention.__call__

    def record_keys(self, qkv, context):
        keys.append(context.context_lens.tolist())
        return attend(self, qkv, context)

    monkeypatch.setattr(TimedAttention, "__call__", record_keys)
    for candidate in timer.candidates.values():
        launch = candidate.launch

        def record(problem, constants, name=candidate.name, launch=launch):
            launched.append((problem.key.operation, name))
            return launch(problem, constants)

        monkeypatch.setattr(candidate, "launch", record)
    picks = GEMV, SPLIT_K, GEMV, CUBLAS
    assert timer(phase, 3, picks) == len(timer._layers) == 2
    operations = ("linear", "linear_add", "linear_silu", "linear_add")
    assert launched[-8:] == [*zip(operations, ("gemv", "split-k", "gemv", "cublas"), strict=True)] * 2
    assert keys == ([] if num_keys is None else [[num_keys] * 3] * 2)


@pytest.mark.parametrize("timer", ["linear_add"], indirect=True)
@pytest.mark.parametrize("has_norm", [True, False])
def test_a_layer_with_norms_after_its_blocks(timer, monkeypatch, has_norm):
    """As Gemma 3 and OLMo 2 have it: o and down are plain products. Gemma's gate and up are one too."""
    launched = []
    launch = Cublas.launch

    def record(self, problem, constants=()):
        launched.append(problem)
        return launch(self, problem)

    monkeypatch.setattr(Cublas, "launch", record)
    gate_up_operation = "linear" if has_norm else "linear_silu"
    problems = [
        linear("linear", ATTENTION + 32, HIDDEN, has_norm=has_norm),
        linear("linear", HIDDEN, ATTENTION, has_norm=False),
        linear(gate_up_operation, 2 * INTERMEDIATE, HIDDEN, has_norm=has_norm),
        linear("linear", HIDDEN, INTERMEDIATE, has_norm=False),
    ]
    timer = layer_timer_of(problems, timer.attention)
    assert timer("decode", 3, (CUBLAS,) * 4) == len(timer._layers) == 2
    layer = launched[-4:]
    assert [each.key.operation for each in layer] == ["linear", "linear", gate_up_operation, "linear"]
    assert [isinstance(each.x, Normed) for each in layer] == [has_norm, False, has_norm, False]
    assert [tuple(each.x.shape) for each in layer[1::2]] == [(3, ATTENTION), (3, INTERMEDIATE)]


def test_what_does_not_work_takes_no_time(timer):
    four = [CUBLAS] * 4
    assert timer("decode", 17, (CUBLAS,) * 4) == 2
    for i in range(4):
        for choice, works in ((GEMV, False), (SPLIT_K, True), (Choice("wrong"), False), (Choice("wrong", (1,)), False)):
            picks = (*four[:i], choice, *four[i + 1 :])
            assert (timer("decode", 17, picks) is not None) == works, "17 tokens are too many for the GEMV kernel"
