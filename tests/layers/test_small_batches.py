"""Decode steps of few sequences: who supports their products, and that the model computes the same with the kernels."""

import pytest
import torch

pytest.importorskip("triton")

from backends import decode_context, prepare
from kernel_harness import launch_everywhere, nightly, rounding
from products import matmul_with, problem

from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.matmul import gemv as gemv_kernels
from nanovllm.kernels.matmul import split_k as split_k_kernels
from nanovllm.kernels.matmul.gemv import GemvConfig
from nanovllm.kernels.matmul.split_k import SplitKConfig
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.layers.attention import Attention
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.formats.format import value_of
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.candidates import gemv, split_k
from nanovllm.layers.matmul.candidates.cublas import Cublas
from nanovllm.layers.matmul.candidates.gemv import Gemv
from nanovllm.layers.matmul.candidates.split_k import SplitK
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.matmul.row import Row
from nanovllm.layers.matmul.table import Choice, Key, Table, package_table
from nanovllm.layers.parallel.rank_sums import posted_constants
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.layer_facts import layer_products
from nanovllm.models.loader import load_dummy
from nanovllm.models.olmo2 import Olmo2ForCausalLM
from nanovllm.models.presets import preset_config
from nanovllm.models.qwen3_decoder import Qwen3ForCausalLM
from nanovllm.utils.context import step_context

BLOCK_SIZE, CONTEXT = 16, 5
# Of two layers with ten roundings each.
STEP = rounding(torch.float16, 20, 1040)


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """CPU tensors count as a Hopper's."""
    launch_everywhere(monkeypatch, gemv, split_k)
    monkeypatch.setattr(GpuFacts, "is_hopper", True)
    monkeypatch.setattr(GpuFacts, "has_pdl", False)


@pytest.mark.parametrize(
    ("N", "K", "dtype", "is_supported"),
    [
        (8, 32, torch.float16, True),
        (8, 32, torch.bfloat16, True),
        (8192, 32, torch.float16, True),
        (8208, 32, torch.float16, False),
        (8, 32, torch.float32, False),
        (8, 36, torch.float16, False),
    ],
)
def test_what_the_split_k_kernel_supports(kernels_everywhere, N, K, dtype, is_supported):
    for operation in ("linear", "linear_silu", "linear_add", "linear_sum"):
        asked = problem(operation, torch.zeros(1, K), torch.zeros(N, K, dtype=dtype))
        assert SplitK(torch.device("cpu")).supports(asked.key, asked.weight) == is_supported


@pytest.mark.parametrize(("num_rows", "most_tokens"), [(72, 128), (8, 1024)])
def test_the_split_k_kernel_takes_few_tokens_or_few_rows(kernels_everywhere, num_rows, most_tokens):
    candidate, weight = SplitK(torch.device("cpu")), torch.zeros(num_rows, 32).half()
    for num_tokens, is_taken in ((most_tokens, True), (most_tokens + 1, False)):
        found = candidate.launch(problem("linear", torch.zeros(num_tokens, 32).half(), weight), (16, 32, 1, 2, 0))
        assert (found is not None) == is_taken


@pytest.mark.parametrize("num_rows", [32, 64])
def test_the_tuner_tries_the_splits_that_the_table_has_for_few_rows(num_rows):
    rows = {key: row for key, row in package_table("NVIDIA H200").rows.items() if num_rows == key.N}
    chosen = {
        (key, num_tokens, SplitKConfig(*choice.constants))
        for key, row in rows.items()
        for num_tokens, choices in zip(row.bounds, row.choices, strict=True)
        for choice in choices
        if choice.candidate == SplitK.name
    }
    assert chosen
    for key, num_tokens, config in chosen:
        assert config in set(SplitK.challengers(key, num_tokens, 1, 132))
    assert not list(SplitK.challengers(next(iter(rows)), 1025, 1, 132))


def test_what_the_gemv_kernel_takes(kernels_everywhere):
    def takes(operation, num_tokens=1, K=32, has_norm=True, out=None):
        x, weight = torch.zeros(num_tokens, K), torch.zeros(8, K)
        asked = problem(operation, Normed(x, RMSNorm(K)) if has_norm else x, weight, out=out)
        assert Gemv().supports(asked.key, asked.weight)
        return Gemv().launch(asked, (8, 32, 1)) is not None

    assert takes("linear", 4)
    assert takes("linear_silu", 4)
    assert takes("linear_add", 4, has_norm=False, out=torch.zeros(4, 8))
    assert not takes("linear", 5)
    assert not takes("linear_add", 5, has_norm=False, out=torch.zeros(5, 8))
    assert takes("linear", K=8208), "a norm so wide does not fit, and is computed first"
    assert takes("linear", out=torch.zeros(1, 8))
    assert not takes("linear_sum", has_norm=False, out=torch.zeros(1, 8)), "the reducer launches it"


@pytest.mark.parametrize(("K", "has_norm"), [(48, True), (48, False), (8208, True)])
@pytest.mark.parametrize("operation", ["linear", "linear_silu"])
def test_the_gemv_kernel_needs_no_norm(kernels_everywhere, operation, K, has_norm):
    """Norms behind attention and MLP leave the products without one before them."""
    x, weight, norm = torch.randn(3, K), torch.randn(8, K) * K**-0.5, RMSNorm(K)
    norm.weight.data.normal_()
    found, expected = (
        each.launch(problem(operation, Normed(x, norm) if has_norm else x, weight), constants)
        for each, constants in ((Gemv(), (8, 32, 1)), (Cublas(), ()))
    )
    torch.testing.assert_close(value_of(found), value_of(expected), **rounding(torch.float32, 4, K))


def test_a_cpu_has_no_kernels():
    asked = problem("linear_add", torch.zeros(4, 32).half(), torch.zeros(8, 32).half(), out=torch.zeros(4, 8).half())
    assert not Gemv().supports(asked.key, asked.weight)
    assert not SplitK(torch.device("cpu")).supports(asked.key, asked.weight)


class AloneReducer:
    """Stands in for a ResidualReducer whose rank is alone."""

    is_posting = False

    def __init__(self):
        self.num_posted = []

    def begin_pass(self, num_sums, is_posting):
        self.is_posting = is_posting
        self.num_posted.append(0)

    def takes(self, num_tokens):
        return True

    def partial(self, num_tokens):
        return torch.full((num_tokens, 32), float("nan"), dtype=torch.float16)

    def add_norm(self, residual, partial, weight, eps):
        residual += partial
        return rms_norm.twin(residual, weight, eps)

    def add_linear(self, residual, x, weight, bias, constants):
        self.num_posted[-1] += 1
        gemv_kernels.gemv(x, weight.values, residual, bias, GemvConfig(*constants), add=True)


@pytest.fixture(params=["alone", "reducer"])
def make_model(request):
    """make_model(matmul): always the same one."""
    return lambda matmul=None: model_with(matmul or Matmul(), request.param)


def model_with(matmul: Matmul, kind: str, family=Qwen3ForCausalLM, preset: str = "Qwen3-0.6B"):
    config = preset_config(preset)
    # The down projection is long enough to be split.
    config.update({"hidden_size": 32, "intermediate_size": 1040, "num_hidden_layers": 2, "vocab_size": 50})
    config.update({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True})
    tp = TensorParallel(reducer=AloneReducer() if kind == "reducer" else None)
    model = family(config, 64, TorchBackend(), tp, matmul).requires_grad_(False)
    load_dummy(model, seed=1)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 or name.endswith("bias"):
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model.half()


def decode(model, num_seqs: int) -> torch.Tensor:
    """Hidden states of a step in which each sequence has a block of its own and CONTEXT tokens, the last one new."""
    generator = torch.Generator().manual_seed(num_seqs)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    for layer in layers:
        cache = torch.randn(2, num_seqs, BLOCK_SIZE, 2, 16, generator=generator).half()
        layer.k_cache, layer.v_cache = cache
    blocks = torch.arange(num_seqs, dtype=torch.int32)
    shape = AttentionShape(4, 2, 16, BLOCK_SIZE, torch.float16, torch.device("cpu"))
    backend = prepare(layers[0].backend, shape, [None], num_seqs)
    context_lens = torch.full((num_seqs,), CONTEXT, dtype=torch.int32)
    context = decode_context(backend, context_lens, blocks[:, None], blocks * BLOCK_SIZE + CONTEXT - 1)
    with step_context(context):
        input_ids = torch.randint(50, (num_seqs,), generator=generator)
        return model(input_ids, torch.full((num_seqs,), CONTEXT - 1))


def make_matmul(model, candidate: str, *constants, operations=("linear", "linear_silu", "linear_add", "linear_sum")):
    """Every product of the model by that candidate."""
    shapes = [make(1).weight.shape for make in layer_products(model.model.layers[0])]
    rows = {
        Key(operation, "decode", N, K, "bfloat16"): Row({1: [Choice(candidate, constants)]})
        for operation in operations
        for N, K in shapes
    }
    return matmul_with(Table(rows), [Gemv(), SplitK(torch.device("cpu"))])


@pytest.fixture
def calls(monkeypatch) -> list[dict]:
    """The options of the kernels' launches by candidates."""
    calls = []

    def count(module, name):
        function = getattr(module, name)

        def record(*args, **options):
            if "pdl" in options:  # AloneReducer's have none.
                calls.append(options | {"arrivals": args[-1]})
            return function(*args, **options)

        monkeypatch.setattr(module, name, record)

    count(split_k_kernels, "split_k")
    count(gemv_kernels, "gemv")
    return calls


def operations(calls) -> list[str]:
    return ["silu" if options["silu"] else "add" if options["add"] else "linear" for options in calls]


@pytest.mark.parametrize(
    ("make_model", "num_seqs"),
    [("alone", 17), ("reducer", 9), *nightly(("alone", 100), ("alone", 64), ("reducer", 17), ("reducer", 100))],
    indirect=["make_model"],
)
def test_a_step_by_the_split_k_kernel_is_the_same_step(kernels_everywhere, make_model, calls, num_seqs):
    model = make_model()
    expected = decode(model, num_seqs)
    assert not calls
    model = make_model(make_matmul(model, "split-k", 64, 128, 2, 3, 0))
    found = decode(model, num_seqs)
    torch.testing.assert_close(found, expected, **STEP)
    # A residual that others add to as well is the reducer's.
    add = "add" if model.model.tp.reducer is None else "linear"
    assert operations(calls) == ["linear", add, "silu", add] * 2
    assert all(options["pdl"] for options in calls)
    assert not any(options["arrivals"].any() for options in calls)


@pytest.mark.parametrize("num_seqs", [4, *nightly(1, 2)])
def test_a_step_by_the_gemv_kernel_is_the_same_step(kernels_everywhere, make_model, calls, num_seqs):
    """The norms are computed inside the products, and the sums over ranks are posted."""
    model = make_model()
    expected = decode(model, num_seqs)
    model = make_model(make_matmul(model, "gemv", 64, 512, 4))
    found = decode(model, num_seqs)
    torch.testing.assert_close(found, expected, **STEP)
    reducer = model.model.tp.reducer
    add = [] if reducer else ["add"]
    assert operations(calls) == ["linear", *add, "silu", *add] * 2
    assert all(("norm_weight" in options) != options["add"] for options in calls)
    assert reducer is None or reducer.num_posted == [4]


@pytest.mark.parametrize("num_seqs", [4, *nightly(1)])
def test_a_step_whose_norms_come_after_the_products(kernels_everywhere, calls, num_seqs):
    """Of OLMo 2: no product has a norm before it."""

    def model(matmul=None):
        return model_with(matmul or Matmul(), "alone", Olmo2ForCausalLM, "OLMo-2-1124-7B")

    plain = model()
    expected = decode(plain, num_seqs)
    found = decode(model(make_matmul(plain, "gemv", 64, 512, 4)), num_seqs)
    torch.testing.assert_close(found, expected, **STEP)
    assert operations(calls) == ["linear", "linear", "silu", "linear"] * 2
    assert not any("norm_weight" in options for options in calls)


def test_sums_are_posted_all_or_none(kernels_everywhere, make_model, calls):
    """Two inboxes take turns, so a step with an odd number of sums would write to one that is still read."""
    model = make_model()
    if model.model.tp.reducer is None:
        pytest.skip("no ranks")
    matmul = make_matmul(model, "gemv", 64, 512, 4)
    _, down = model.model.layers[0].summed_projections()
    matmul.table.rows[Key.of("linear_sum", False, down.matrix)] = Row({1: []})
    model = make_model(matmul)
    attention, _ = model.model.layers[0].summed_projections()
    assert posted_constants(attention, 1) is not None
    decode(model, 1)
    assert model.model.tp.reducer.num_posted == [0]


def test_a_norm_is_computed_once_and_late():
    norm, residual = RMSNorm(32), torch.randn(3, 32)
    normed = Normed(residual, norm)
    assert not normed.is_computed
    assert len(normed) == 3
    value = normed.value()
    assert normed.is_computed
    assert normed.value() is value
    torch.testing.assert_close(value, rms_norm.twin(residual, norm.weight, norm.eps))
