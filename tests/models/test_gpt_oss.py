"""What is gpt-oss's own: checkpoints in MXFP4, changes of their weights, and what is refused."""

import shutil

import pytest
import torch
from checkpoints import (
    Reference,
    assert_idle,
    complete,
    edit_json,
    edit_tensors,
    greedy,
    make_checkpoint,
    make_llm,
    needs_family,
    random_prompt,
)
from safetensors.torch import load_file
from thread_ranks import make_llm_of_ranks

from nanovllm.config import Config
from nanovllm.kernels.matmul.four_bit import FourBit, codes_torch, dequantize_torch
from nanovllm.kernels.matmul.mxfp4 import quantize_torch
from nanovllm.layers.formats.mxfp4 import Mxfp4
from nanovllm.models.loader import load_model
from nanovllm.models.model_size import meta_model

pytestmark = needs_family("gpt_oss")

SHAPE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
SHAPE |= {"rope_scaling": YARN | {"original_max_position_embeddings": 32}, "rope_theta": 150000.0}
# As published.
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
    ],
}


def pack_experts(tensors: dict[str, torch.Tensor]) -> None:
    """As the published checkpoints have them."""
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        values, scales = quantize_torch(tensors.pop(name).transpose(1, 2))
        codes = codes_torch(values)
        pairs = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{name}_blocks"] = pairs.unflatten(-1, (-1, 16))
        tensors[f"{name}_scales"] = scales


def unpack_experts(tensors: dict[str, torch.Tensor]) -> None:
    """As transformers does it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        packed = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
        tensors[name] = convert_moe_packed_tensors(*packed, dtype=torch.float32).contiguous()


def make_packed(directory, **fields):
    """A checkpoint in MXFP4, and one of the same numbers in float32."""
    packed, plain = directory / "packed", directory / "plain"
    make_checkpoint(packed, family="gpt_oss", **SHAPE | {"sliding_window": 16} | fields)
    edit_tensors(packed, pack_experts)
    shutil.copytree(packed, plain)
    edit_tensors(plain, unpack_experts)
    edit_json(packed / "config.json", quantization_config=MXFP4)
    return packed, plain


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return make_packed(tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture(scope="module")
def reference(checkpoints):
    return Reference(checkpoints[1])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tokens_of_a_packed_checkpoint_are_those_of_transformers(checkpoints, reference, num_ranks):
    prompts = reference.draw_prompts((10, 26, 90), 12)
    options = {"num_kvcache_blocks": 9, "max_num_batched_tokens": 20}
    with make_llm_of_ranks(checkpoints[0], num_ranks, max_model_len=128, **options) as llm:
        assert complete(llm, prompts, greedy(12)) == reference.greedy(prompts, 12)
        layer = llm.model_runner.model.model.layers[0]
        assert layer.mlp.experts.gate_up_proj.weight.dtype == torch.uint8
        assert layer.self_attn.o_proj.weight.dtype == torch.float32
        assert_idle(llm)


def test_changed_weights(checkpoints, reference, tmp_path):
    """As trainers have them: under the names and in the layout of transformers."""
    prompts = reference.draw_prompts((20, 30), 8)
    other = make_checkpoint(tmp_path, family="gpt_oss", seed=5, **SHAPE | {"sliding_window": 16})
    with make_llm(other, max_model_len=128) as llm:
        assert complete(llm, prompts, greedy(8)) != reference.greedy(prompts, 8)
        llm.update_weights(reference.model.state_dict().items())
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)


def test_random_weights_of_a_published_shape_are_in_mxfp4(checkpoints):
    with make_llm(checkpoints[0], load_format="dummy", max_model_len=128) as llm:
        experts = llm.model_runner.model.model.layers[1].mlp.experts
        for weight in (experts.gate_up_proj.matrix, experts.down_proj.matrix):
            assert (weight.format.dequantized(weight).std((1, 2)) - 0.02).abs().max() < 0.002
        assert len(complete(llm, [random_prompt(20, 1)], greedy(4))[0]) == 4


def test_rounded_while_loaded(checkpoints):
    """Biases, sinks and the router stay as they are. The experts of this checkpoint are in MXFP4 already."""
    prompt, completion = random_prompt(20, 1), random_prompt(20, 2)
    reference = Reference(checkpoints[1])
    for name, module in reference.model.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
            module.weight.data = dequantize_torch(FourBit(*quantize_torch(module.weight.data)))
    with make_llm(checkpoints[1], quantization="mxfp4", max_model_len=128) as llm:
        (score,) = llm.score([prompt], [completion], use_tqdm=False)
    difference = torch.tensor(score["logprobs"]) - reference.logprobs(prompt, completion)
    assert difference.abs().max() < 2 * reference.rounding(prompt, completion)


@pytest.fixture(scope="module")
def odd_groups(tmp_path_factory):
    """Three groups of 32 columns in each expert: neither two nor four ranks have whole ones."""
    return make_packed(tmp_path_factory.mktemp("odd"), intermediate_size=96)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_whole_experts_on_each_rank_where_columns_would_cut_a_group(odd_groups, num_ranks):
    reference = Reference(odd_groups[1])
    prompts = reference.draw_prompts((10, 26, 40), 8)
    with make_llm_of_ranks(odd_groups[0], num_ranks, max_model_len=64, max_num_batched_tokens=20) as llm:
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)
        experts = llm.model_runner.model.model.layers[0].mlp.experts
        assert len(experts.gate_up_proj.weight) == 4 // num_ranks
        assert_idle(llm)


def test_changed_weights_of_whole_experts_on_each_rank(odd_groups, tmp_path):
    """As the checkpoint has them: of the tensors of all experts every rank keeps its own."""
    other, _ = make_packed(tmp_path, intermediate_size=96, seed=5)
    reference = Reference(odd_groups[1])
    prompts = reference.draw_prompts((20, 30), 8)
    with make_llm_of_ranks(other, 2, max_model_len=64) as llm:
        assert complete(llm, prompts, greedy(8)) != reference.greedy(prompts, 8)
        llm.update_weights(load_file(odd_groups[0] / "model.safetensors").items())
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)


def test_no_rank_reads_the_scales_of_others_experts(odd_groups, monkeypatch):
    """They need not even be right there: each rank checks what it holds."""
    checked = []
    monkeypatch.setattr(Mxfp4, "are_scales", lambda format, scales: bool(checked.append(scales.shape)) or True)
    for num_ranks in (1, 2):
        config = Config(str(odd_groups[0]), device="cpu", tensor_parallel_size=num_ranks)
        checked.clear()
        load_model(meta_model(config, num_ranks - 1), str(odd_groups[0]))
        assert len(checked) == config.hf_config.num_hidden_layers * 3 * 4 // num_ranks


def test_random_weights_of_whole_experts_on_each_rank(odd_groups):
    """The router is the same on all ranks, and no expert is another one."""
    with make_llm_of_ranks(odd_groups[0], 2, load_format="dummy", max_model_len=64) as llm:
        assert len(complete(llm, [random_prompt(20, 1)], greedy(4))[0]) == 4


def test_experts_that_neither_way_divides(odd_groups):
    message = (
        r"tensor_parallel_size=8: weights in MXFP4 .*its intermediate_size would be 12; .*"
        r"tensor_parallel_size that divides the number of experts \(4\)"
    )
    with pytest.raises(ValueError, match=message):
        Config(str(odd_groups[0]), tensor_parallel_size=8, device="cpu")


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_published_models_fit_two_four_and_eight_ranks(num_ranks):
    """A rank's part of 2,880 columns is 45 groups of 32; of four it would be 22 and a half."""
    for name in ("gpt-oss-20b", "gpt-oss-120b"):
        Config(name, tensor_parallel_size=num_ranks, load_format="dummy", device="cpu")


def test_scales_that_are_no_numbers(tmp_path):
    packed, _ = make_packed(tmp_path)
    edit_tensors(packed, lambda tensors: tensors["model.layers.1.mlp.experts.down_proj_scales"].fill_(255))
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts.*must hold finite scales"):
        make_llm(packed)
