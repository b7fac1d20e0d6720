"""Decode steps of 9 to 128 sequences: who takes them, and that the model computes the same with the kernels."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels import decode_linear as kernels
from nanovllm.layers import decode_linear, skinny_linear
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backend import TorchBackend
from nanovllm.layers.layernorm import rms_norm_torch
from nanovllm.models.presets import preset_config
from nanovllm.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM, Qwen3Model
from nanovllm.utils.context import Context, step_context
from nanovllm.utils.loader import load_dummy
from nanovllm.utils.parallel import TensorParallel

BLOCK_SIZE, CONTEXT = 16, 5
DECODE, PREFILL = Context(), Context(is_prefill=True)


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """CPU tensors count as a Hopper's: Triton's interpreter runs the kernels."""
    if torch.cuda.is_available():
        pytest.skip("the kernels would be compiled for a GPU")
    monkeypatch.setattr(decode_linear, "use_kernels", lambda x: True)
    monkeypatch.setattr(decode_linear, "_is_hopper", lambda device: True)


@pytest.mark.parametrize(
    ("num_tokens", "K", "dtype", "context", "taken"),
    [
        (8, 32, torch.float16, DECODE, False),
        (9, 32, torch.float16, DECODE, True),
        (64, 32, torch.bfloat16, DECODE, True),
        (128, 32, torch.float16, DECODE, True),
        (129, 32, torch.float16, DECODE, False),
        (40, 32, torch.float32, DECODE, False),
        (40, 36, torch.float16, DECODE, False),
        (40, 32, torch.float16, PREFILL, False),
    ],
)
def test_who_is_a_small_batch(kernels_everywhere, num_tokens, K, dtype, context, taken):
    with step_context(context):
        assert decode_linear.is_small_batch(num_tokens, torch.zeros(8, K, dtype=dtype)) == taken


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1024, 128), (1025, 64), (4096, 64)])
def test_batches_may_be_larger_where_rows_are_few(kernels_everywhere, num_rows, num_tokens):
    weight = torch.zeros(1).half().expand(num_rows, 32)
    assert decode_linear.is_small_batch(num_tokens, weight)
    assert not decode_linear.is_small_batch(num_tokens + 1, weight)


@pytest.mark.parametrize(("num_rows", "taken"), [(6144, True), (8192, False)])
def test_large_weights_are_cublas_s(kernels_everywhere, num_rows, taken):
    """By benchmarks/decode_linear.py: Qwen3-0.6B's largest, and one of Qwen3-8B's smallest over two GPUs."""
    weight = torch.zeros(1).half().expand(num_rows, 1024)
    assert decode_linear.is_small_batch(40, weight) == taken


def test_a_cpu_has_no_small_batches():
    assert not decode_linear.is_small_batch(40, torch.zeros(8, 32).half())


class AloneReducer:
    """Stands in for a ResidualReducer whose rank is alone."""

    long_sums = None

    def begin_step(self, num_sums):
        pass

    def takes(self, num_tokens):
        return True

    def takes_parts(self, num_tokens):
        return False

    def partial(self, num_tokens):
        return torch.full((num_tokens, 32), float("nan"), dtype=torch.float16)

    def add_norm(self, residual, partial, weight, eps):
        residual += partial
        return rms_norm_torch(residual, weight, eps)


@pytest.fixture(params=["alone", "reducer"])
def model(request):
    config = preset_config("Qwen3-0.6B")
    # The down projection is long enough to be split.
    config.update({"hidden_size": 32, "intermediate_size": 1040, "num_hidden_layers": 2, "vocab_size": 50})
    config.update({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True})
    tp = TensorParallel(reducer=AloneReducer() if request.param == "reducer" else None)
    model = Qwen3ForCausalLM(config, 64, TorchBackend(), tp).requires_grad_(False)
    load_dummy(model, seed=1)
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
    context = Context(
        slot_mapping=blocks * BLOCK_SIZE + CONTEXT - 1,
        context_lens=torch.full((num_seqs,), CONTEXT, dtype=torch.int32),
        block_tables=blocks[:, None],
    )
    with step_context(context):
        input_ids = torch.randint(50, (num_seqs,), generator=generator)
        return model(input_ids, torch.full((num_seqs,), CONTEXT - 1))


@pytest.mark.parametrize("num_seqs", [9, 17, 64, 100])
def test_a_step_by_kernels_is_the_same_step(kernels_everywhere, monkeypatch, model, num_seqs):
    # What a GPU says: nine are few enough for the skinny kernels too.
    monkeypatch.setattr("nanovllm.models.qwen3.is_skinny", lambda x: len(x) <= 16)
    calls = []

    def counted(name):
        function = getattr(kernels, name)
        return lambda *args, **options: calls.append((name, options)) or function(*args, **options)

    for name in ("linear", "linear_silu", "linear_add"):
        monkeypatch.setattr(kernels, name, counted(name))
    found = decode(model, num_seqs)
    # After the q, k, v product and the gate, up one; a residual that others add to as well is the reducer's.
    after_attention = "linear_add" if model.model.tp.reducer is None else "linear"
    # The gate and up projection alone has more rows than a large batch may have.
    gate_up = ["linear_silu"] if num_seqs <= 64 else []
    assert [name for name, _ in calls] == ["linear", after_attention, *gate_up, after_attention] * 2
    assert all(options["pdl"] for _, options in calls)
    arrivals = [options["arrivals"] for _, options in calls]
    assert len({each.data_ptr() for each in arrivals}) == len(calls), "layers share their counters"
    assert not any(each.any() for each in arrivals)
    calls.clear()
    monkeypatch.setattr(decode_linear, "use_kernels", lambda x: False)
    monkeypatch.setattr("nanovllm.models.qwen3.is_skinny", lambda x: False)
    expected = decode(model, num_seqs)
    assert not calls
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    # By the twins too, which nothing else runs.
    monkeypatch.setattr(decode_linear, "is_small_batch", lambda num_tokens, weight: True)
    monkeypatch.setattr("nanovllm.models.qwen3.is_small_batch", lambda num_tokens, weight: True)
    torch.testing.assert_close(decode(model, num_seqs), expected, rtol=2e-2, atol=2e-2)


WEIGHT = 2080 * 32  # the model's largest


@pytest.mark.parametrize(
    ("num_seqs", "limit", "max_columns", "skinny"),
    [
        (8, WEIGHT + 1, 32, True),
        (9, WEIGHT + 1, 32, False),
        (16, WEIGHT, 32, True),
        (17, 1, 32, False),
        (2, 1, 31, True),
        (3, 1, 31, False),
    ],
)
def test_who_is_skinny(kernels_everywhere, monkeypatch, model, num_seqs, limit, max_columns, skinny):
    """Up to 8 sequences; 16 where the layers' weight is too large for these kernels, and 2 where the model is wide."""
    taken = []
    monkeypatch.setattr(skinny_linear, "_MAX_COLUMNS", max_columns)
    monkeypatch.setattr("nanovllm.models.qwen3.is_skinny", lambda x: len(x) <= 16)
    monkeypatch.setattr(decode_linear, "MAX_WEIGHTS", limit)
    monkeypatch.setattr(Qwen3DecoderLayer, "forward_skinny", lambda *args: taken.append(args))
    decode(model, num_seqs)
    assert bool(taken) == skinny


@pytest.mark.parametrize(
    ("model", "size", "reducer", "most_tokens"),
    [
        ("Qwen3-0.6B", 1, None, 16),
        ("Qwen3-1.7B", 1, None, 2),
        ("Qwen3-8B", 1, None, 2),
        ("Qwen3-0.6B", 2, AloneReducer(), 16),
        ("Qwen3-1.7B", 2, AloneReducer(), 2),
        ("Qwen3-8B", 8, AloneReducer(), 2),
        ("Qwen3-0.6B", 2, None, 0),  # Nobody posts the sums.
    ],
)
def test_up_to_how_many_sequences_a_model_is_skinny(model, size, reducer, most_tokens):
    """Without the kernels for small batches, which Hopper alone has."""
    config = preset_config(model)
    weight = torch.empty(2 * config.intermediate_size // size, config.hidden_size, device="meta")
    mlp = SimpleNamespace(gate_up_proj=SimpleNamespace(weight=weight))
    qwen = SimpleNamespace(tp=SimpleNamespace(size=size, reducer=reducer), layers=[SimpleNamespace(mlp=mlp)])
    taken = [n for n in range(1, 17) if Qwen3Model._takes_skinny(qwen, n)]
    assert taken == list(range(1, most_tokens + 1))
