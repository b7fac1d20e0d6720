"""MXFP4: rounding, the order of a checkpoint's halves, and products of dense layers."""

import pytest
import torch
import torch.nn.functional as F
from checkpoints import edit_json, edit_tensors, make_checkpoint, make_llm, random_prompt
from products import default_result, problem
from transformers import AutoModelForCausalLM

from nanovllm.kernels.matmul.four_bit import FourBit, codes_torch, dequantize_torch
from nanovllm.kernels.matmul.mxfp4 import pack_pairs, quantize_torch
from nanovllm.layers.formats.all_formats import weight_format
from nanovllm.layers.formats.mxfp4 import Mxfp4
from nanovllm.layers.formats.parameters import scale_while_loading
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.matmul.matmul import Matmul

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return dequantize_torch(FourBit(*quantize_torch(weight)))


def test_numbers_that_mxfp4_has_stay_as_they_are():
    row = torch.tensor([sign * number for sign in (1, -1) for number in NUMBERS] * 2)
    weight = row * torch.exp2(torch.tensor([[-127.0], [-20.0], [0.0], [100.0]]))
    assert torch.equal(rounded(weight), weight)
    assert torch.equal(rounded(torch.zeros(2, 64)), torch.zeros(2, 64))


def test_others_go_to_the_nearest_and_from_the_middle_to_the_even_one():
    row = torch.tensor([0.25, 0.26, 0.75, 1.25, 1.3, 1.75, 2.5, 2.6, 3.5, 5.0, 5.1, 7.9, -0.25, -0.74, -5.5, 4.0])
    expected = [0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0, -0.0, -0.5, -6.0, 4.0]
    assert rounded(row.repeat(2)[None])[0, :16].tolist() == expected


def test_pairs_of_a_checkpoint_become_halves():
    codes = torch.randint(16, (3, 96), dtype=torch.uint8)
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    assert torch.equal(codes_torch(pack_pairs(pairs)), codes)


@pytest.mark.parametrize("operation", ["linear", "linear_silu", "linear_add", "linear_sum"])
def test_products_are_those_of_the_dequantized_weight(operation):
    weight = Mxfp4().quantize(torch.randn(48, 64), torch.float32)
    assert weight.shape == (48, 64)
    x, bias = torch.randn(5, 64), None if operation == "linear_silu" else torch.randn(48)
    out = torch.randn(5, 48) if operation in ("linear_add", "linear_sum") else None
    expected = F.linear(x, dequantize_torch(FourBit(weight.values, weight.scale)), bias)
    if operation == "linear_silu":
        gate, up = expected.chunk(2, dim=-1)
        expected = F.silu(gate) * up
    if operation == "linear_add":
        expected = expected + out
    torch.testing.assert_close(default_result(problem(operation, x, weight, bias, out)), expected)


def test_scales_of_a_checkpoint():
    assert Mxfp4().are_scales(torch.tensor([0, 254], dtype=torch.uint8))
    assert not Mxfp4().are_scales(torch.tensor([3, 255], dtype=torch.uint8))


def test_stored_weights_refuse_a_factor():
    for is_stored in (True, False):
        with weight_format(Mxfp4(is_stored=is_stored)):
            layer = RowParallelLinear(64, 32, True, matmul=Matmul())
        if is_stored:
            with pytest.raises(ValueError, match="cannot be multiplied by"):
                scale_while_loading([layer], 0.5)
        else:
            scale_while_loading([layer], 0.5)
            assert layer.weight.stored.loading_factor == 0.5


def test_a_model_without_experts_refuses_the_format_of_experts(tmp_path):
    path = make_checkpoint(tmp_path)
    edit_json(path / "config.json", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ValueError, match="'mxfp4': is of experts alone, and this model has none"):
        make_llm(path)


@pytest.mark.parametrize("is_stored", [False, True], ids=["rounded while loaded", "packed"])
def test_dense_models(is_stored, tmp_path):
    """Logits are those of transformers' model of the dequantized weights, over two ranks too."""
    path = make_checkpoint(tmp_path, head_dim=32, intermediate_size=192)
    llm_options = {} if is_stored else {"quantization": "mxfp4"}
    reference = AutoModelForCausalLM.from_pretrained(path).float().eval()
    for name, module in reference.named_modules():
        if name.endswith("_proj"):
            module.weight.data = rounded(module.weight.data)
    prompt, completion = random_prompt(20, 1), random_prompt(20, 2)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).flatten()
    if is_stored:
        edit_tensors(path, pack_tensors)
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        settings = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"]}
        edit_json(path / "config.json", quantization_config=settings | {"config_groups": {"group_0": group}})
    for num_ranks in (1, 2):
        with make_llm(path, tensor_parallel_size=num_ranks, **llm_options) as llm:
            (score,) = llm.score([prompt], [completion], use_tqdm=False)
        torch.testing.assert_close(torch.tensor(score["logprobs"]), expected, atol=1e-4, rtol=1e-4)


def pack_tensors(tensors: dict[str, torch.Tensor]) -> None:
    """As compressed-tensors stores them."""
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        values, scale = quantize_torch(tensors.pop(name))
        codes = codes_torch(values)
        tensors[f"{name}_packed"] = codes[:, ::2] | codes[:, 1::2] << 4
        tensors[f"{name}_scale"] = scale
