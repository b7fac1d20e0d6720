"""Config: which model is meant, a directory, one of the hub or a published shape, and what is said if there is none."""

from pathlib import Path

import huggingface_hub
import pytest
from configs import dummy

from nanovllm.config import Config
from nanovllm.models.presets import PRESET_NAMES, preset_config

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.mark.parametrize("prefix", ["", "Qwen/"])
@pytest.mark.parametrize("name", PRESET_NAMES)
def test_a_published_shape_needs_no_file(name, prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config.create(prefix + name, load_format="dummy", max_model_len=10**6)
    assert config.hf_config.hidden_size == preset_config(name).hidden_size
    assert config.max_model_len == 40960
    assert config.eos == (151645,)
    assert list(tmp_path.iterdir()) == []


def test_the_shapes_differ():
    shapes = {(c.hidden_size, c.num_hidden_layers, c.num_attention_heads) for c in map(preset_config, PRESET_NAMES)}
    assert len(shapes) == len(PRESET_NAMES)


def test_a_directory_of_a_published_shapes_name_goes_first(model_dir, tmp_path, monkeypatch):
    model_dir(name="Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)
    assert dummy().hf_config.hidden_size == 64


def test_a_published_shapes_name_alone_is_not_read_as_a_shape():
    with pytest.raises(FileNotFoundError, match=r"Qwen3-0\.6B"):
        Config.create("Qwen3-0.6B")


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_directory(model_dir, as_path):
    directory = model_dir()
    config = Config.create(as_path(directory))
    assert config.model == directory
    assert config.hf_config.hidden_size == 64
    assert config.hf_config.vocab_size == 300


def test_the_tilde_is_expanded(model_dir, tmp_path, monkeypatch):
    directory = model_dir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config.create("~/model").model == directory


@pytest.mark.parametrize("model", ["/no/such/model", "./no-such-model", "~/no/such/model", "a/b/c", "~no-such-user/m"])
def test_a_missing_directory(model):
    with pytest.raises(FileNotFoundError, match="no such directory") as error:
        Config.create(model)
    assert repr(model) in str(error.value)


def test_a_file_instead_of_a_directory(model_dir):
    file = Path(model_dir(), "config.json")
    with pytest.raises(ValueError, match=r"file.*directory") as error:
        Config.create(str(file))
    assert repr(str(file)) in str(error.value)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_directory_without_a_config(tmp_path, load_format):
    with pytest.raises(FileNotFoundError, match=r"no config\.json") as error:
        Config.create(str(tmp_path), load_format=load_format)
    assert repr(str(tmp_path)) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", '{"hidden_size": 64}', '{"model_type": "no-such-model"}'])
def test_a_config_that_cannot_be_read(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json") as error:
        Config.create(str(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_a_hub_id_is_downloaded(model_dir, monkeypatch):
    directory = model_dir()
    asked = []

    def snapshot_download(repo_id, **options):
        asked.append(repo_id)
        return directory

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    config = Config.create("someone/some-model")
    assert asked == ["someone/some-model"]
    assert config.model == directory
    assert config.hf_config.hidden_size == 64


def test_a_hub_id_that_cannot_be_downloaded_says_why():
    with pytest.raises(FileNotFoundError, match="no network in this test") as error:
        Config.create("someone/some-model")
    assert "'someone/some-model'" in str(error.value)


def test_a_given_hf_config_is_used_as_it_is(model_dir):
    given = preset_config("Qwen3-1.7B")
    assert Config.create(model_dir(), hf_config=given).hf_config is given
    assert Config.create("my own shape", load_format="dummy", hf_config=given).hf_config is given
