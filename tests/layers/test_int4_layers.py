"""Layers that the packages of the formats made (scripts/int4_layers.py), read as checkpoints are."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nanovllm.layers.formats.all_formats import weight_format
from nanovllm.layers.formats.int4_checkpoints import AwqInt4, CompressedInt4, Gptq2Int4, GptqInt4, StoredInt4
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.models.loader import load_tensors

FORMATS: dict[str, StoredInt4] = {
    "compressed": CompressedInt4(32),
    "compressed with zeros": CompressedInt4(32, has_zeros=True),
    "compressed in rows": CompressedInt4(None, has_zeros=True),
    "awq": AwqInt4(32, has_zeros=True),
    "gptq with zeros": GptqInt4(32, has_zeros=True),
    "gptq_v2": Gptq2Int4(32, has_zeros=True),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_numbers_are_those_of_the_package(name):
    file = load_file(Path(__file__).parents[1] / "data" / "int4_layers.safetensors")
    tensors = {key.removeprefix(f"{name}."): tensor for key, tensor in file.items() if key.startswith(f"{name}.")}
    expected = tensors.pop("weight")
    model = nn.Module()
    with weight_format(FORMATS[name]):
        model.layer = ReplicatedLinear(expected.shape[1], expected.shape[0], matmul=Matmul())
    load_tensors(model, [(f"layer.{key}", tensor) for key, tensor in tensors.items()])
    assert torch.equal(FORMATS[name].dequantized(model.layer.matrix), expected)
    x = torch.randn(3, expected.shape[1])
    torch.testing.assert_close(model.layer(x), x @ expected.t(), atol=1e-5, rtol=1e-5)
