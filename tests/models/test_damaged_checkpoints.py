"""Checkpoints that are damaged, not supported or not there: the error says so before anything is loaded."""

import json

import pytest
import torch
import transformers
from checkpoints import edit_json, edit_tensors, make_llm, poisoned_model
from safetensors.torch import load_file, save_file

from nanovllm.models.loader import load_model

LAYER = "model.layers.1"


def assert_nothing_loaded(path, error, match):
    """Loading fails with this message, and has not touched a parameter; LLM passes the error on."""
    model = poisoned_model(path)
    with pytest.raises(error, match=match):
        load_model(model, str(path))
    assert all(parameter.isnan().all() for parameter in model.parameters())
    with pytest.raises(error, match=match):
        make_llm(path)


def test_no_safetensors(copy):
    path = copy()
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    message = r"plain: holds no \*\.safetensors.*pytorch_model\.bin is a pickle.*never opened.*save_pretrained"
    assert_nothing_loaded(path, FileNotFoundError, message)


UP = f"{LAYER}.mlp.up_proj"
PLAIN = r"plain/model\.safetensors: tensor"
DTYPES = {"I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "BOOL": torch.bool}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
CUTS = [lambda t: t[:-1], lambda t: t[:, 1:], lambda t: t.T, lambda t: t.flatten()]


def lacking(tensor, checkpoint="plain"):
    return checkpoint, lambda t: t.pop(tensor), f"lacks '{tensor}'"


def changed(tensor, change, message):
    return "plain", lambda t: t.update({tensor: change(t[tensor]).contiguous()}), message


@pytest.mark.parametrize(
    ("checkpoint", "edit", "message"),
    [
        lacking(f"{LAYER}.self_attn.k_proj.weight"),
        lacking(f"{UP}.weight"),
        lacking(f"{LAYER}.self_attn.q_norm.weight"),
        lacking("model.norm.weight"),
        lacking("lm_head.weight"),
        lacking("model.embed_tokens.weight", "tied"),
        lacking(f"{LAYER}.self_attn.o_proj.bias", "bias"),
        lacking(f"{LAYER}.self_attn.v_proj.bias", "qwen2"),
        (
            "plain",
            lambda t: t.update({f"{LAYER}.self_attn.q_proj.bias": torch.ones(128)}),
            rf"'{LAYER}.self_attn.q_proj.bias' in model\.safetensors",
        ),
        *(
            changed(name, cut, rf"{PLAIN} '{name}' has shape \[\d+(, \d+)?\], the model needs")
            for name in (f"{LAYER}.self_attn.q_proj.weight", "model.embed_tokens.weight", "lm_head.weight")
            for cut in CUTS
        ),
        changed("model.norm.weight", lambda t: torch.ones(()), "'model.norm.weight' has shape"),
        *(
            changed(
                f"{UP}.weight",
                lambda t, dtype=dtype: (100 * t).to(dtype),
                rf"{PLAIN} '{UP}.weight' has dtype {name}: quantized.*use the unquantized",
            )
            for name, dtype in DTYPES.items()
        ),
        # As GPTQ has them.
        (
            "plain",
            lambda t: t.update({f"{UP}.qweight": t.pop(f"{UP}.weight").int()}),
            rf"'{UP}.qweight' has dtype I32: quantized",
        ),
    ],
)
def test_tensors_that_are_wrong_or_not_there(copy, checkpoint, edit, message):
    path = copy(checkpoint)
    edit_tensors(path, edit)
    assert_nothing_loaded(path, ValueError, message)


def test_missing_tensor_of_a_shard(copy):
    path, tensor = copy("sharded"), f"{LAYER}.mlp.down_proj.weight"
    name = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"][tensor]
    save_file({n: t for n, t in load_file(path / name).items() if n != tensor}, path / name)
    assert_nothing_loaded(path, ValueError, f"lacks '{tensor}', which the index places in {name}")


def test_layer_beyond_the_configurations(copy):
    path = copy()
    edit_json(path / "config.json", num_hidden_layers=1, layer_types=None)
    assert_nothing_loaded(path, ValueError, f"does not have: '{LAYER}")


def test_an_empty_file_of_weights_is_named(copy):
    path = copy()
    (path / "model.safetensors").write_bytes(b"")
    assert_nothing_loaded(path, ValueError, r"plain/model\.safetensors: is empty: download it again")


@pytest.mark.parametrize(
    ("checkpoint", "name"), [("plain", "model.safetensors"), ("sharded", "model.safetensors.index.json")]
)
def test_git_lfs_pointer(copy, checkpoint, name):
    path = copy(checkpoint)
    (path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 1240\n")
    assert_nothing_loaded(path, ValueError, rf"{checkpoint}/{name}: is a Git LFS pointer.*git lfs pull")


@pytest.mark.parametrize("checkpoint", ["plain", "sharded"])
def test_link_to_a_file_that_is_gone(copy, checkpoint):
    path = copy(checkpoint)
    file = sorted(path.glob("*.safetensors"))[0]
    file.unlink()
    file.symlink_to("../blobs/gone")
    assert_nothing_loaded(path, FileNotFoundError, rf"{file.name}: is a link to \.\./blobs/gone, .*download")


def test_directory_in_place_of_a_file(copy):
    path = copy()
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").mkdir()
    assert_nothing_loaded(path, ValueError, r"plain/model\.safetensors: cannot be read: Is a directory")


def test_quantized_shard_among_others(copy):
    path, tensor = copy("sharded"), f"{LAYER}.mlp.down_proj.weight"
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    file = path / weight_map[tensor]
    save_file(load_file(file) | {tensor: torch.zeros(64, 96, dtype=torch.int8)}, file)
    assert_nothing_loaded(path, ValueError, rf"{file.name}: tensor '{tensor}' has dtype I8")


@pytest.mark.parametrize("keep", [0.00001, 0.5, 0.999])
def test_truncated_file(copy, keep):
    path = copy()
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    assert_nothing_loaded(path, ValueError, "model.safetensors: damaged or truncated")


def test_truncated_last_shard_is_found_before_the_first_is_loaded(copy, four_threads):
    path = copy("sharded")
    last = sorted(path.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    assert_nothing_loaded(path, ValueError, f"{last.name}: damaged or truncated")


def test_file_that_is_not_safetensors(copy):
    path = copy()
    (path / "model.safetensors").write_bytes(b"<!DOCTYPE html><html>not found</html>" * 40)
    assert_nothing_loaded(path, ValueError, "model.safetensors: damaged or truncated")


def test_index_names_a_file_that_is_not_there(copy):
    path = copy("sharded")
    lost = sorted(path.glob("*.safetensors"))[1]
    lost.unlink()
    assert_nothing_loaded(path, FileNotFoundError, lost.name)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"lm_head.weight": 3}}']
)
def test_index_that_is_none(copy, content):
    path = copy("sharded")
    (path / "model.safetensors.index.json").write_text(content)
    assert_nothing_loaded(path, ValueError, r"model\.safetensors\.index\.json")


def test_shard_that_the_index_leaves_out(copy):
    path = copy("sharded")
    index = path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    left_out = weight_map[f"{LAYER}.mlp.down_proj.weight"]
    edit_json(index, weight_map={name: file for name, file in weight_map.items() if file != left_out})
    assert_nothing_loaded(path, ValueError, f"lacks .*{LAYER}.mlp.down_proj.weight")


def test_tensor_in_two_files(copy):
    path = copy("sharded")
    (path / "model.safetensors.index.json").unlink()
    save_file({"model.norm.weight": torch.ones(64)}, path / "more.safetensors")
    assert_nothing_loaded(path, ValueError, r"more\.safetensors: tensor 'model\.norm\.weight' is in")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM"),
        ({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}, "Gemma2ForCausalLM"),
        ({"architectures": None}, r'architectures=None .*write "architectures": \["Qwen3ForCausalLM"\], if'),
        ({"architectures": None, "model_type": "gpt2"}, "architectures=None .*supported are "),
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
    ids=["moe", "gemma2", "no-architecture", "no-architecture-of-ours", "unknown-type", "gelu"],
)
def test_model_that_is_not_supported(copy, changes, message):
    path = copy()
    edit_json(path / "config.json", **changes)
    with pytest.raises(ValueError, match=message) as raised:
        make_llm(path)
    assert len(str(raised.value).replace(str(path), "")) < 700, "a few lines of a terminal"


@pytest.mark.parametrize("family", ["GPT2", "Qwen2VL", "Mamba", "T5"])
def test_config_of_another_family(tmp_path, family):
    """Whose fields have other names."""
    config = getattr(transformers, f"{family}Config")(architectures=[f"{family}Model"])
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"architectures=\['{family}Model'\].*supported are .* Qwen3, "):
        make_llm(tmp_path)


def test_rope_scaling_that_is_not_supported(copy):
    path, scaling = copy(), {"rope_type": "dynamic", "factor": 2.0}
    edit_json(path / "config.json", rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    with pytest.raises(ValueError, match=r"dynamic.*supported: default, linear, proportional, yarn, llama3, longrope"):
        make_llm(path)
