"""The plain loader: a loop over all tensors, which nothing may be missing from or added to."""

from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nanovllm.utils.loader import default_weight_loader, load_model


class Stacked(nn.Module):
    """Two matrices in one parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((5, 2), torch.nan))
        self.weight.weight_loader = self.load
        self.weight.shards = {"a": (2, 2), "b": (3, 2), None: (5, 2)}

    @staticmethod
    def load(param, loaded_weight, shard_id):
        rows = {"a": slice(2), "b": slice(2, 5)}[shard_id]
        param.data[rows] = loaded_weight


class Model(nn.Module):
    packed_modules_mapping: ClassVar = {"a_proj": ("ab_proj", "a"), "b_proj": ("ab_proj", "b")}

    def __init__(self, is_tied=False):
        super().__init__()
        self.layer = nn.Module()
        self.layer.ab_proj = Stacked()
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.full((3,), torch.nan))
        self.scale = nn.Parameter(torch.tensor(torch.nan))
        self.head = nn.Module()
        self.head.weight = self.norm.weight if is_tied else nn.Parameter(torch.full((3,), torch.nan))


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    shapes = {"layer.a_proj.weight": (2, 2), "layer.b_proj.weight": (3, 2), "norm.weight": (3,), "head.weight": (3,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()} | {"scale": torch.tensor(2.0)}


def test_parts_and_several_files(tensors, tmp_path):
    first = {name: tensors[name] for name in ("layer.b_proj.weight", "scale")}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if name not in first}
    save_file(rest, tmp_path / "model-00002-of-00002.safetensors")
    model = Model()
    load_model(model, str(tmp_path))
    expected = torch.cat([tensors["layer.a_proj.weight"], tensors["layer.b_proj.weight"]])
    assert torch.equal(model.layer.ab_proj.weight, expected)
    assert torch.equal(model.norm.weight, tensors["norm.weight"])
    assert torch.equal(model.head.weight, tensors["head.weight"])
    assert model.scale == 2


def test_a_shared_parameter_is_filled_once_or_twice(tensors, tmp_path):
    for names in (["norm.weight"], ["head.weight", "norm.weight"]):
        content = {name: tensor for name, tensor in tensors.items() if name not in ("norm.weight", "head.weight")}
        save_file(content | dict.fromkeys(names[:1], tensors["norm.weight"]), tmp_path / "model.safetensors")
        model = Model(is_tied=True)
        load_model(model, str(tmp_path))
        assert torch.equal(model.head.weight, tensors["norm.weight"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": None}, "the checkpoint lacks 'scale'"),
        ({"layer.a_proj.weight": None}, "lacks 'layer.a_proj.weight'"),
        ({"layer.c_proj.weight": torch.zeros(1)}, "model.safetensors: the model has no tensor 'layer.c_proj.weight'"),
        ({"layer.ab_proj.weight": torch.zeros(5, 2)}, "no tensor 'layer.ab_proj.weight'"),
        ({"norm.weight": torch.zeros(1)}, r"'norm.weight' has shape \[1\], the model needs \[3\]"),
        ({"layer.b_proj.weight": torch.zeros(2, 2)}, r"has shape \[2, 2\], the model needs \[3, 2\]"),
        ({"norm.weight": torch.zeros(3, dtype=torch.int32)}, "has dtype torch.int32: must be a float"),
        ({"norm.weight": torch.zeros(3).to(torch.float8_e4m3fn)}, "has dtype torch.float8_e4m3fn"),
    ],
)
def test_what_is_wrong_is_named(tensors, tmp_path, changes, message):
    content = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    save_file(content, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_model(Model(), str(tmp_path))


def test_files_that_are_not_there_or_damaged_or_repeat_themselves(tensors, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no \*.safetensors file"):
        load_model(Model(), str(tmp_path))
    file = tmp_path / "a.safetensors"
    save_file(tensors, file)
    save_file({"scale": tensors["scale"]}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"b.safetensors: tensor 'scale' is in a.safetensors as well"):
        load_model(Model(), str(tmp_path))
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match="damaged or truncated"):
        load_model(Model(), str(tmp_path))


def test_the_default_copies():
    param = nn.Parameter(torch.zeros(3))
    default_weight_loader(param, torch.tensor([1, 2, 3]))
    assert param.tolist() == [1, 2, 3]
