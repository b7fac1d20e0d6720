"""A family that only this file knows: whatever asks a model for its facts finds them without an edit elsewhere."""

import pytest
import torch
from checkpoints import edit_json, make_llm, random_prompt
from safetensors.torch import save_file
from transformers import AutoConfig

from nanovllm.bench.floor import AttentionSize, ModelSize
from nanovllm.config import Config
from nanovllm.fit import needs, print_fit
from nanovllm.layers.experts.experts import MixtureOfExperts
from nanovllm.models import registry
from nanovllm.models.decoder import DecoderForCausalLM, DecoderMLP
from nanovllm.models.hf_config import rope_of_layers
from nanovllm.models.loader import num_checkpoint_params, wanted_tensors
from nanovllm.models.model_size import make_meta_model
from nanovllm.models.spec import DecoderSpec, LayerHeads
from nanovllm.tuning.tune_model import layer_problems, meta_layers

HIDDEN, WIDTH, MLP, VOCABULARY, NUM_HEADS = 64, 32, 128, 320, 4
HEADS = [[2, 32], [1, 64], [2, 32]]  # of keys and values, and their size
EXPERTS = [[0, 0], [4, 1], [8, 3]]  # how many there are, and how many a token has
ODD_EXPERTS = [[0, 0], [4, 1], [5, 3]]  # which two ranks cannot divide
FIELDS = {
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 3,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "heads_of_layers": HEADS,
    "experts_of_layers": EXPERTS,
    "expert_width": WIDTH,
}


class OddForCausalLM(DecoderForCausalLM):
    """Heads and experts differ from layer to layer, and the first layer has an MLP."""

    switches = frozenset({"num_experts", "num_local_experts"})

    @staticmethod
    def spec(config) -> DecoderSpec:
        return DecoderSpec(
            rope_of_layers(config), heads=tuple(LayerHeads(*each) for each in config.heads_of_layers), qk_norm="head"
        )

    @staticmethod
    def mlp(config, spec, layer, tp, matmul):
        num_experts, top_k = config.experts_of_layers[layer]
        if not num_experts:
            return DecoderMLP(config, spec, tp, matmul)
        sizes = config.hidden_size, config.expert_width, num_experts, top_k
        return MixtureOfExperts(*sizes, True, tp, matmul, size_name="expert_width")


@pytest.fixture
def path(monkeypatch, tmp_path):
    """A checkpoint of the family, which is registered."""
    monkeypatch.setitem(registry.ARCHITECTURES, "OddForCausalLM", __name__)
    config = AutoConfig.for_model("qwen3_moe", architectures=["OddForCausalLM"], **FIELDS)
    config.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(wanted.shape, generator=generator) * 0.15 + ("norm" in name)
        for name, wanted in wanted_tensors(make_meta_model(config, torch.float32)).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def attention_params(num_kv_heads: int, head_dim: int) -> int:
    return HIDDEN * head_dim * (2 * NUM_HEADS + 2 * num_kv_heads)


def test_whether_it_fits(path, capsys):
    config = Config(str(path), device="cpu", kvcache_block_size=16)
    found = needs(config)
    assert found.per_block == 16 * 4 * sum(2 * num_heads * size for num_heads, size in HEADS)
    num_params = num_checkpoint_params(make_meta_model(config.hf_config, torch.float32))
    tables = 4 * 256 * sum({size for _, size in HEADS})
    assert found.weights == 4 * num_params + tables
    assert print_fit(str(path), [8])
    assert "weights" in capsys.readouterr().out


def test_the_floor_of_its_time(path):
    size = ModelSize.of(Config(str(path), device="cpu").hf_config, torch.bfloat16)
    assert size.attentions == {AttentionSize(None, 4, 32, 256): 2, AttentionSize(None, 4, 64, 256): 1}
    of_expert = 3 * HIDDEN * WIDTH
    assert size.expert_params == {1 / 4: 4 * of_expert, 3 / 8: 8 * of_expert}
    others = sum(attention_params(*each) for each in HEADS) + 3 * HIDDEN * MLP + (4 + 8) * HIDDEN
    assert size.layer_params == others + (1 + 3) * of_expert
    assert size.params_read(10**6) == others + (4 + 8) * of_expert + VOCABULARY * HIDDEN


def test_its_weights_are_quantized_while_they_are_loaded(path):
    prompt, completion = random_prompt(20, seed=1), random_prompt(30, seed=2)
    found = {}
    for name in (None, "fp8", "int4"):
        with make_llm(path, quantization=name, max_model_len=128) as llm:
            (score,) = llm.score([prompt], [completion], use_tqdm=False)
            found[name] = torch.tensor(score["logprobs"])
            experts = [layer.mlp.experts for layer in llm.model_runner.model.model.layers[1:]]
            assert [len(each.gate_up_proj.weight) for each in experts] == [4, 8]
    for name in ("fp8", "int4"):
        assert 0 < (found[name] - found[None]).abs().median() < found[None].std()


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_its_products_are_tuned(path, quantization):
    products = [
        [(key.operation, key.N, key.K, key.experts) for key in (each.key for each in layer_problems(layer))]
        for layer in meta_layers(str(path), quantization=quantization)
    ]
    small = [("linear", 8 * 32, HIDDEN, 1), ("linear_add", HIDDEN, 4 * 32, 1)]
    large = [("linear", 6 * 64, HIDDEN, 1), ("linear_add", HIDDEN, 4 * 64, 1)]
    assert products == [
        [*small, ("linear_silu", 2 * MLP, HIDDEN, 1), ("linear_add", HIDDEN, MLP, 1)],
        [*large, ("linear", 4, HIDDEN, 1), ("experts", 2 * WIDTH, HIDDEN, 4)],
        [*small, ("linear", 8, HIDDEN, 1), ("experts", 2 * WIDTH, HIDDEN, 8)],
    ]


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        (
            {"expert_width": 48},
            {"quantization": "int4"},
            "quantization: .* of 32 .* its expert_width would be 48",
        ),
        (
            {"expert_width": 33, "experts_of_layers": ODD_EXPERTS},
            {"tensor_parallel_size": 2},
            r"_size=2: must divide the model's expert_width \(33\).* the number of experts \(5\)",
        ),
        (
            {"experts_of_layers": ODD_EXPERTS},
            {"tensor_parallel_size": 2, "quantization": "int4"},
            r"_size=2: .* 32 .* its expert_width would be 16.* the number of experts \(5\)",
        ),
    ],
)
def test_sizes_that_do_not_fit(path, fields, options, message):
    edit_json(path / "config.json", **fields)
    with pytest.raises(ValueError, match=message):
        Config(str(path), device="cpu", **options)
