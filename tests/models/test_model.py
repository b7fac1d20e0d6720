"""What the model computes beyond what parity with transformers shows: which rows it returns, and in-place sums."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from backends import decode_context, prepare

from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.layers.rope_parameters import RopeParameters
from nanovllm.models.layer_facts import few_layers, num_layer_params
from nanovllm.models.loader import load_dummy
from nanovllm.models.presets import preset_config
from nanovllm.models.qwen3_decoder import Qwen3ForCausalLM
from nanovllm.models.spec import DecoderSpec
from nanovllm.utils.context import Context, step_context


@pytest.fixture(scope="module")
def model():
    config = preset_config("Qwen3-0.6B")
    config.update({"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 50})
    config.update({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8})
    model = Qwen3ForCausalLM(config, 64, TorchBackend(), TensorParallel(), Matmul())
    load_dummy(model, seed=1)
    return model.requires_grad_(False)


@pytest.mark.parametrize("lens", [[1], [5], [3, 1, 7], [2, 2]])
def test_last_tokens_alone_come_out_as_among_all(model, lens):
    """The last layer then attends from these alone: it must be the same attention."""
    ends = torch.tensor([0, *lens]).cumsum(0)
    cu_seqlens = ends.int()
    input_ids = torch.randint(50, (sum(lens),))
    positions = torch.cat([torch.arange(n) for n in lens])
    outputs = []
    for last_tokens in (None, ends[1:] - 1):
        with step_context(Context(True, cu_seqlens, cu_seqlens, max(lens), max(lens), last_tokens=last_tokens)):
            outputs.append(model(input_ids, positions))
    everything, last = outputs
    assert everything.shape == (sum(lens), 32)
    torch.testing.assert_close(last, everything[ends[1:] - 1])


@pytest.mark.parametrize("num_sampled", [1, 2, 4])
def test_rows_that_are_drawn_from_come_out_as_among_all(model, num_sampled):
    """Of a mixed step; the others leave their keys and values all the same."""
    tables = torch.tensor([[0, 1], [2, 3], [2, 3], [2, 3]], dtype=torch.int32)  # the latter three: a prompt's tokens
    positions = torch.tensor([5, 4, 2, 3])
    slots = (tables[range(4), positions // 4] * 4 + positions % 4).int()
    shape = AttentionShape(4, 2, 8, 4, torch.float32, torch.device("cpu"))
    backend = prepare(model.model.layers[0].self_attn.attn.backend, shape, [None], 4)
    context = decode_context(backend, positions.int() + 1, tables, slots)
    caches, outputs = torch.randn(3, 2, 4, 4, 2, 8), []
    for asked in (None, num_sampled):
        layers = [layer.self_attn.attn for layer in model.model.layers]
        used = caches.clone()
        for layer, (k_cache, v_cache) in zip(layers, used, strict=True):
            layer.k_cache, layer.v_cache = k_cache, v_cache
        try:
            with step_context(replace(context, num_sampled=asked)):
                outputs.append((model(torch.arange(4), positions), used))
        finally:
            for layer in layers:
                layer.k_cache = layer.v_cache = torch.empty(0)
    (everything, written), (drawn, written_alike) = outputs
    assert (len(everything), len(drawn)) == (4, num_sampled)
    torch.testing.assert_close(drawn, everything[:num_sampled])
    torch.testing.assert_close(written, written_alike)
    assert not torch.equal(written, caches)


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_added_to_the_residual_in_place(bias):
    layer = RowParallelLinear(12, 7, bias, matmul=Matmul()).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_()
    x, residual = torch.randn(5, 12), torch.randn(5, 7)
    expected = residual + F.linear(x, layer.weight, layer.bias)
    assert layer.add(residual, x, None).value() is residual
    torch.testing.assert_close(residual, expected)


def test_parameters_of_a_layer(model):
    projections = 32 * (4 + 2 * 2) * 8 + 4 * 8 * 32 + 3 * 32 * 48
    norms = 2 * 32 + 2 * 8
    assert num_layer_params(model) == projections + norms


@pytest.mark.parametrize(
    ("ropes", "expected"),
    [
        ([1], [0]),
        ([1, 1, 1, 1], [0, 3]),
        ([1, 1, 0, 1, 0, 1], [0, 2, 5]),
        ([0, 1, 1, 0], [0, 1, 3]),
        ([0, 0, 0, 1, 0, 0, 0, 1], [0, 1, 3, 7]),
        ([0, 1, 0, 1], [0, 1, 2, 3]),
        ([0, 1, 1], [0, 1, 2]),
    ],
)
def test_few_layers_have_one_of_each_kind(ropes, expected):
    """For CUDA graphs and compilation: they must launch every variant of the kernels. One of the first layer's kind is
    behind another, whose result it may have to add, and one of each other kind is not the last, which computes fewer
    rows."""
    rope = RopeParameters()

    class Family(Qwen3ForCausalLM):
        @staticmethod
        def spec(config):
            return DecoderSpec(tuple(rope if has_rope else None for has_rope in ropes))

    config = preset_config("Qwen3-0.6B")
    config.update({"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": len(ropes), "vocab_size": 50})
    config.update({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8})
    model = Family(config, 64, TorchBackend(), TensorParallel(), Matmul())
    layers = list(model.model.layers)
    with few_layers(model):
        assert list(model.model.layers) == [layers[i] for i in expected]
    assert list(model.model.layers) == layers
