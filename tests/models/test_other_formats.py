"""Files and folders that are no transformers checkpoint with safetensors: the error says what to do."""

import json

import pytest
import torch
from checkpoints import make_llm
from safetensors.torch import save_file

pytestmark = pytest.mark.usefixtures("no_network")


def test_a_gguf_file(tmp_path):
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    message = r"model-Q4_K_M\.gguf is a GGUF file.*gguf_file='model-Q4_K_M\.gguf'\)\.save_pretrained"
    with pytest.raises(ValueError, match=message):
        make_llm(file)
    with pytest.raises(FileNotFoundError, match=rf"holds no config\.json; {message}"):
        make_llm(tmp_path)


def test_a_folder_that_is_named_gguf(tmp_path):
    (tmp_path / "Some-GGUF").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json; its name says GGUF"):
        make_llm(tmp_path / "Some-GGUF")


def test_a_peft_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}))
    save_file({"base_model.model.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        FileNotFoundError, match=r"a PEFT adapter of Qwen/Qwen3-0\.6B, not a model: LLM\('Qwen/Qwen3-0\.6B', lora='"
    ):
        make_llm(tmp_path)


def test_a_peft_adapter_with_its_models_configuration(copy):
    path = copy()
    (path / "model.safetensors").rename(path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"holds no \*\.safetensors.*a PEFT adapter of a model, not"):
        make_llm(path)


@pytest.mark.parametrize("architecture", ["BertModel", "Qwen3ForCausalLM"])
def test_a_sentence_transformers_folder(copy, architecture):
    """Of a family that generates texts its tensors have other names."""
    path = copy()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    (path / "modules.json").write_text("[]")
    save_file({"norm.weight": torch.ones(64)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"sentence-transformers model, which embeds texts; nanovllm generates"):
        make_llm(path)


def test_a_folder_of_the_hubs_cache(copy):
    path = copy()
    snapshot = path.parent / "models--org--name" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    path.rename(snapshot)
    with pytest.raises(FileNotFoundError, match=r"the model is in a folder of it: .*snapshots/abc"):
        make_llm(snapshot.parents[1])
    make_llm(snapshot).exit()


@pytest.mark.parametrize(
    ("file", "message"),
    [("params.json", "its publisher's own format"), ("model_index.json", "a pipeline of diffusers")],
)
def test_folders_of_other_programs(tmp_path, file, message):
    (tmp_path / file).write_text("{}")
    (tmp_path / "consolidated.00.pth").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=message):
        make_llm(tmp_path)
