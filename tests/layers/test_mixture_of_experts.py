"""A layer with experts: the same result by every candidate, over ranks, and beside rows of padding."""

import pytest
import torch
import torch.nn.functional as F
from checkpoints import make_checkpoint
from fake_quack import CpuQuack, Package, make_config

pytest.importorskip("triton")

from kernel_harness import launch_everywhere, rounding
from products import experts_sum, matmul_with

from nanovllm.engine.start.kernel_compilation import trace_products
from nanovllm.kernels.experts.experts import route_torch
from nanovllm.layers import activation
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.experts.experts import MixtureOfExperts
from nanovllm.layers.formats.all_formats import weight_format
from nanovllm.layers.formats.fp8 import Fp8
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates import expert_tiles, experts_gemv, quack_experts
from nanovllm.layers.matmul.candidates import quack as quack_module
from nanovllm.layers.matmul.candidates.cublas import Cublas
from nanovllm.layers.matmul.candidates.expert_tiles import ExpertTiles
from nanovllm.layers.matmul.candidates.experts_gemv import ExpertsGemv
from nanovllm.layers.matmul.candidates.quack_experts import QuackExperts
from nanovllm.layers.matmul.matmul import Matmul, Product
from nanovllm.layers.matmul.problem import ExpertsProblem
from nanovllm.layers.matmul.row import Row
from nanovllm.layers.matmul.table import Choice, Key, Table, package_table
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.layer_facts import num_layer_params
from nanovllm.models.loader import load_dummy, load_model
from nanovllm.models.presets import preset_config
from nanovllm.models.qwen3_moe import Qwen3MoeForCausalLM
from nanovllm.utils.context import Context, step_context

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 48, 40, 6, 2
TILES = (16, 16, 16, 4, 2)
CHOICES = [
    Choice(ExpertTiles.name, (TILES, (32, 32, 64, 4, 2))),
    Choice(ExpertsGemv.name, ((16, 64, 1), (16, 64, 2))),
    Choice(QuackExperts.name, ((128, 256, (1, 1), False), (128, 192, (2, 1), True))),
]


def close(dtype) -> dict[str, float]:
    """Hidden numbers, the experts' results and their sum are rounded. The terms of a result are of order 16."""
    return rounding(dtype, 4, HIDDEN, terms=16)


def make_layer(tp=None, dtype=torch.float32, seed=0, matmul=None, shared_size=0):
    sizes = HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K
    layer = MixtureOfExperts(*sizes, True, tp or TensorParallel(), matmul or Matmul(), shared_size).to(dtype)
    torch.manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.3)
    return layer


def make_input(num_tokens, dtype=torch.float32):
    norm = RMSNorm(HIDDEN).to(dtype)
    norm.weight.data.normal_(1, 0.2)
    return torch.randn(num_tokens, HIDDEN).to(dtype), norm.requires_grad_(False)


def expected_result(layer, residual, norm):
    x = norm(residual)
    routed = route_torch(F.linear(x, layer.gate.weight), TOP_K, True)
    experts = layer.experts
    total = experts_sum(x, routed, experts.gate_up_proj.matrix, experts.down_proj.matrix)
    return (residual.float() + total).to(residual.dtype)


@pytest.fixture
def kernels_everywhere(monkeypatch):
    launch_everywhere(monkeypatch, expert_tiles, experts_gemv)
    monkeypatch.setattr(activation, "silu_and_mul", activation.silu_and_mul.kernel)


def record_launches(candidates) -> list[str]:
    """The names of those that will be launched, in a list that grows."""
    asked = []
    for candidate in candidates:
        launch = candidate.launch
        candidate.launch = lambda *args, launch=launch, name=candidate.name: asked.append(name) or launch(*args)
    return asked


def key_of(is_prefill=False, format="bfloat16", intermediate=INTERMEDIATE):
    phase = "prefill" if is_prefill else "decode"
    return Key("experts", phase, 2 * intermediate, HIDDEN, format, NUM_EXPERTS)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.candidate)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_every_candidate_computes_the_same(kernels_everywhere, choice, num_tokens):
    # Triton's interpreter multiplies bfloat16 wrongly.
    candidates = [ExpertTiles(), ExpertsGemv(), QuackExperts(CpuQuack(Package(), make_config))]
    matmul = matmul_with(Table({key_of(): Row({512: [choice]})}), candidates)
    layer = make_layer(dtype=torch.float16, matmul=matmul)
    residual, norm = make_input(num_tokens + 2, torch.float16)
    expected = expected_result(layer, residual, norm)
    context_lens = torch.tensor([3] * num_tokens + [0] * 2, dtype=torch.int32)
    expected[num_tokens:] = residual[num_tokens:]  # padding
    asked = record_launches(candidates)
    with step_context(Context(context_lens=context_lens)):
        result = layer.add(residual, Normed(residual, norm), norm)
    assert asked == [choice.candidate]
    torch.testing.assert_close(residual, expected, **close(torch.float16))
    assert result.residual is residual
    torch.testing.assert_close(result.value(), norm(residual))


FP8_CHOICES = [
    Choice(ExpertTiles.name, (TILES, (32, 32, 64, 4, 2))),
    Choice(ExpertsGemv.name, ((16, 64, 1), (16, 64, 2))),
    CHOICES[-1],
]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("choice", FP8_CHOICES, ids=lambda choice: choice.candidate)
def test_every_candidate_with_weights_in_fp8(kernels_everywhere, choice):
    # Triton's interpreter rounds to e4m3 wrongly, so the inputs are quantized by the twin.
    candidates = [ExpertTiles(), ExpertsGemv(), QuackExperts(CpuQuack(Package(), make_config))]
    key = key_of(format=Fp8.name, intermediate=32)
    matmul = matmul_with(Table({key: Row({512: [choice]})}), candidates)
    with weight_format(Fp8()):
        layer = MixtureOfExperts(48, 32, NUM_EXPERTS, TOP_K, True, TensorParallel(), matmul)
    load_dummy(layer, seed=0)
    residual, norm = make_input(7)
    for weight in (layer.experts.gate_up_proj, layer.experts.down_proj):
        weight.weight_scale.data *= 20
    x, experts = norm(residual), layer.experts
    routed = route_torch(F.linear(x, layer.gate.weight), TOP_K, True)
    total = experts_sum(x, routed, experts.gate_up_proj.matrix, experts.down_proj.matrix)
    before = residual.clone()
    asked = record_launches(candidates)
    with step_context(Context(context_lens=torch.ones(7, dtype=torch.int32))):
        layer.add(residual, Normed(residual, norm), norm)
    found = residual.float() - before.float()
    assert asked == [choice.candidate]
    # What reads inputs as they are differs by the rounding of these, which is 3 % of each product. Otherwise sums in
    # another order may round an input of the second product to the next e4m3 number. That changes one of a pair's 32
    # inputs by an eighth at most: the pair's result by 1 / 8 / sqrt(32), and the sum of 14 pairs by 0.006 of its norm.
    assert (found - total).norm() < (0.08 if choice.candidate == ExpertsGemv.name else 0.01) * total.norm()


@pytest.mark.parametrize("failing_call", [1, 2])
def test_experts_when_quack_kernels_fails(kernels_everywhere, failing_call):
    """At the first product or at the second: the row's next candidate computes the layer, now and from then on."""

    class FailingPackage(Package):
        def __call__(self, *args, **options):
            self.error = RuntimeError("launch failed") if len(self.calls) == failing_call - 1 else None
            super().__call__(*args, **options)

    package = FailingPackage()
    key = key_of(is_prefill=True, format="float32")
    table = Table({key: Row({512: [CHOICES[-1], CHOICES[0]]})})
    matmul = matmul_with(table, [QuackExperts(CpuQuack(package, make_config))])
    layer, (residual, norm) = make_layer(matmul=matmul), make_input(7)
    for _ in range(2):
        expected = expected_result(layer, residual, norm)
        with step_context(Context(is_prefill=True)):
            layer.add(residual, Normed(residual, norm), norm)
        torch.testing.assert_close(residual, expected, **close(torch.float32))
    assert len(package.calls) == failing_call


@pytest.mark.parametrize("in_fp8", [False, True])
def test_grouped_products_of_quack_kernels_are_loaded_after_the_trace(monkeypatch, kernels_everywhere, in_fp8):
    """A kernel for each product and format. A trace launches nothing: nothing has sorted the pairs."""
    package = Package()
    quack = CpuQuack(package, make_config)
    with weight_format(Fp8() if in_fp8 else None):
        layer = MixtureOfExperts(64, 32, NUM_EXPERTS, TOP_K, True, TensorParallel(), Matmul())
    load_dummy(layer, seed=0)
    gate_up, down = layer.experts.gate_up_proj.matrix, layer.experts.down_proj.matrix
    garbage = torch.full((9 * TOP_K,), 2**30, dtype=torch.int32)
    monkeypatch.setattr(quack_experts, "sort_by_expert", lambda *args: (garbage, garbage[: NUM_EXPERTS + 1]))
    monkeypatch.setattr(quack_experts, "add_pairs", lambda y, out, *args, **options: out)
    x, logits = torch.randn(9, 64), torch.randn(9, NUM_EXPERTS)
    with monkeypatch.context() as tracing:
        tracing.setattr(quack_module, "is_compiling_ahead", lambda: True)
        for _ in range(2):
            key = Key.of("experts", True, gate_up)
            problem = ExpertsProblem(key, x, logits, gate_up, down, TOP_K, True, x.clone(), True)
            assert QuackExperts(quack).launch(problem, CHOICES[-1].constants) is problem.out
    assert not package.calls
    for product in quack.wanted.values():
        quack.load(product, torch.device("cpu"))
    assert [config.tile_n for config in package.calls] == [256, 192]
    assert quack.works


def test_kernels_without_a_row_of_the_table(kernels_everywhere):
    layer, (residual, norm) = make_layer(), make_input(7)
    expected = expected_result(layer, residual, norm)
    with step_context(Context(is_prefill=True)):
        layer.add(residual, Normed(residual, norm), norm)
    torch.testing.assert_close(residual, expected, **close(torch.float32))


def test_rows_of_padding_get_no_expert(monkeypatch):
    layer, (residual, norm) = make_layer(), make_input(6)
    expected = expected_result(layer, residual, norm)
    expected[4:] = residual[4:]
    lens = torch.tensor([1, 2, 3, 4, 0, 0, 0], dtype=torch.int32)
    asked = []
    launch = ExpertTiles.launch
    monkeypatch.setattr(ExpertTiles, "launch", lambda *args: asked.append(args[1]) or launch(*args))
    with step_context(Context(context_lens=lens)):  # The layer may have fewer rows than the step.
        layer.add(residual, Normed(residual, norm), norm)
    torch.testing.assert_close(residual, expected)
    logits, context_lens = asked[-1].logits, asked[-1].context_lens
    experts, _ = route_torch(logits, TOP_K, True, context_lens)
    assert (experts[4:] == NUM_EXPERTS).all()
    assert (experts[:4] < NUM_EXPERTS).all()


class InOneProcess(TensorParallel):
    """A rank whose sums stay its own parts."""

    def all_reduce(self, x):
        return x


def shards_of(whole, size):
    """The layers of several ranks, loaded from the tensors of a whole one; and the largest part that was read."""
    largest = 0

    class Slice:
        def __init__(self, tensor):
            self.tensor = tensor

        def __getitem__(self, index):
            nonlocal largest
            largest = max(largest, self.tensor[index].numel())
            return self.tensor[index]

    layers = [make_layer(InOneProcess(rank, size), seed=1 + rank) for rank in range(size)]
    gate_up, down = whole.experts.gate_up_proj.weight, whole.experts.down_proj.weight
    for layer in layers:
        layer.gate.weight.weight_loader(layer.gate.weight, whole.gate.weight.data)
        for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
            param = getattr(layer.experts, name).weight
            for (expert, part), shape in param.shards.items():
                rows = slice(None) if part is None else slice(part * INTERMEDIATE, (part + 1) * INTERMEDIATE)
                tensor = weight.data[expert, rows]
                assert tensor.shape == shape
                param.weight_loader(param, Slice(tensor), (expert, part))
    return layers, largest


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_have_columns_of_every_expert(size):
    whole, (residual, norm) = make_layer(), make_input(9)
    layers, largest = shards_of(whole, size)
    assert largest == HIDDEN * INTERMEDIATE // size, "a rank reads its own part only, one expert at a time"
    expected = expected_result(whole, residual, norm)
    parts = []
    for layer in layers:
        out = residual.clone()
        layer.add(out, Normed(out, norm), None)
        parts.append(out)
    torch.testing.assert_close(sum(parts), expected)


def test_the_result_is_normalized_before_it_is_added():
    class OutputNorm:
        def add_to(self, residual, y):
            return residual.add_(2 * y)

    layer, (residual, norm) = make_layer(), make_input(9)
    expected = residual + 2 * (expected_result(layer, residual, norm) - residual)
    layer.add(residual, Normed(residual, norm), norm, OutputNorm())
    torch.testing.assert_close(residual, expected)


def test_weights_are_loaded_into_place(tmp_path):
    fields = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    path = make_checkpoint(tmp_path, family="qwen3_moe", **fields)
    config = preset_config("Qwen3-30B-A3B")
    config.update({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2})
    config.update({"vocab_size": 320, **fields})
    config.update({"head_dim": 16})
    model = Qwen3MoeForCausalLM(config, 64, TorchBackend(), TensorParallel(), Matmul())
    load_dummy(model, seed=0)
    places = {name: param.data_ptr() for name, param in model.named_parameters()}
    before = {name: param.data.clone() for name, param in model.named_parameters()}
    load_model(model, str(path))
    for name, param in model.named_parameters():
        assert param.data_ptr() == places[name]
        assert (param.data != before[name]).all(-1).any()


class Recorder(Candidate):
    """Stands in for a candidate: says which constants it is asked to launch, and whether rows may be padding."""

    operations, formats, is_default = ("experts",), (Unquantized.name,), True

    def __init__(self, name, asked):
        self.name, self.asked = name, asked

    def launch(self, problem, constants):
        self.asked.add((self.name, constants, problem.context_lens is None))
        return problem.out


class Unkept(Normed):
    """Computed anew for each product, as by kernels that contain the norm."""

    def value(self):
        return RMSNorm.forward(self._norm, self.residual)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_shared_expert_reads_the_residual_stream_before_it_changes(num_ranks):
    residual, norm = make_input(5)
    x, total, out = norm(residual), residual.clone(), residual.clone()
    for rank in range(num_ranks):
        layer = make_layer(TensorParallel(rank, num_ranks), seed=rank, shared_size=32)
        experts, shared, logits = layer.experts, layer.shared_expert, F.linear(x, layer.gate.weight)
        routed = route_torch(logits[:, :NUM_EXPERTS], TOP_K, True)
        total += experts_sum(x, routed, experts.gate_up_proj.matrix, experts.down_proj.matrix)
        gate, up = F.linear(x, shared.gate_up_proj.weight).chunk(2, dim=1)
        weight = logits[:, NUM_EXPERTS].sigmoid().unsqueeze(1)
        total += weight * F.linear(F.silu(gate) * up, shared.down_proj.weight)
        if num_ranks == 1:
            layer.part_of_sum("linear_add", Unkept(out, norm), out)
        else:
            out += layer.part_of_sum("linear", Unkept(residual, norm))
    torch.testing.assert_close(out, total)


@pytest.mark.parametrize("everywhere", [False, True], ids=["twins", "kernels"])
def test_a_shared_expert_in_fp8_is_added_with_the_experts(everywhere, request, monkeypatch):
    """In one pass, or in one of its own."""
    real = Product.addend
    if everywhere:
        request.getfixturevalue("kernels_everywhere")
    with weight_format(Fp8()):
        layer = MixtureOfExperts(64, 64, NUM_EXPERTS, TOP_K, True, TensorParallel(), Matmul(), 64)
    load_dummy(layer, seed=0)
    for part in (layer.experts, layer.shared_expert):
        for projection in (part.gate_up_proj, part.down_proj):
            projection.weight_scale.data *= 20
    x, norm = torch.randn(9, 64), RMSNorm(64).requires_grad_(False)
    sums, addends = [], []
    for addend in (lambda *args: addends.append(real(*args)) or addends[0], lambda *args: None):
        monkeypatch.setattr(Product, "addend", addend)
        sums.append(layer.add(x.clone(), Normed(x, norm), None).value())
    assert addends[0].norm() > 0.01 * x.norm()
    torch.testing.assert_close(*sums, **rounding(torch.float32, 3, 64, terms=4))


def test_a_shared_expert_is_added_where_the_first_candidate_leaves_the_problem(kernels_everywhere, monkeypatch):
    """The next one adds nothing but its experts."""
    key = Key("experts", "decode", 128, 64, Fp8().table_name(torch.float32), NUM_EXPERTS)
    table = Table({key: Row({512: [CHOICES[0], CHOICES[1]]})})
    with weight_format(Fp8()):
        options = True, TensorParallel(), matmul_with(table, [ExpertsGemv()]), 64
        layer = MixtureOfExperts(64, 64, NUM_EXPERTS, TOP_K, *options)
    load_dummy(layer, seed=0)
    for part in (layer.experts, layer.shared_expert):
        for projection in (part.gate_up_proj, part.down_proj):
            projection.weight_scale.data *= 20
    x, norm = torch.randn(3, 64), RMSNorm(64).requires_grad_(False)
    launched = []
    monkeypatch.setattr(ExpertTiles, "launch", lambda self, problem, constants: launched.append(problem))
    y = layer.add(x.clone(), Normed(x, norm), None).value()
    assert launched, "the table's first candidate is asked"
    layer.shared_expert.down_proj.weight_scale.data.zero_()
    without = layer.add(x.clone(), Normed(x, norm), None).value()
    assert (y - without).norm() > 0.01 * x.norm()


def test_every_kernel_of_the_table_is_compiled_at_the_start():
    config = preset_config("Qwen3-30B-A3B")
    config.update({"num_hidden_layers": 2, "vocab_size": 64, "mlp_only_layers": [0]})
    compiled = set()
    recorders = [Recorder(each.name, compiled) for each in (ExpertsGemv, ExpertTiles, QuackExperts)]
    matmul = Matmul(package_table("NVIDIA H200"), [Cublas(), *recorders])
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config, 64, TorchBackend(), TensorParallel(), matmul).bfloat16()
    trace_products(model, 512, 16384)
    layer, launched = model.model.layers[1].mlp, set()
    for recorder in recorders:
        recorder.asked = launched
    norm = RMSNorm(config.hidden_size).bfloat16().to("meta")
    for is_prefill, num_tokens in [(False, n) for n in range(1, 513)] + [(True, n) for n in range(1, 16385, 37)]:
        residual = torch.empty(num_tokens, config.hidden_size, dtype=torch.bfloat16, device="meta")
        lens = None if is_prefill else torch.empty(num_tokens, dtype=torch.int32, device="meta")
        with step_context(Context(is_prefill=is_prefill, context_lens=lens)):
            layer.add(residual, Normed(residual, norm, residual), norm)
    assert launched <= compiled
    assert len(launched) > 4


def test_parameters_that_a_token_uses():
    config = preset_config("Qwen3-30B-A3B")
    config.update({"num_hidden_layers": 1, "vocab_size": 64})
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config, 64, TorchBackend(), TensorParallel(), Matmul())
    attention = 2048 * 128 * (2 * 32 + 2 * 4) + 2 * 128 + 2 * 2048
    assert num_layer_params(model) == attention + 2048 * 128 + 8 * 3 * 2048 * 768


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9, "num_experts": 8}, r"num_experts_per_tok=9: must be an integer in 1\.\.8"),
        ({"num_experts": 2000}, "num_experts=2000: must be an integer in 0"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size=0: must be an integer > 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0: must be an integer > 0"),
    ],
)
def test_a_configuration_that_no_layer_can_be_built_from(changes, message):
    config = preset_config("Qwen3-30B-A3B")
    config.update(changes)
    with pytest.raises(ValueError, match=message):
        Qwen3MoeForCausalLM.checked_spec(config)
