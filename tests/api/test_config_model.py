"""Config: which model is meant, a directory, one of the hub or a published shape, and what is said if there is none."""

import os
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from checkpoints import edit_json
from configs import TUNED, dummy, needs_transformers_5
from huggingface_hub.utils import filter_repo_objects

from nanovllm.config import Config
from nanovllm.models.presets import preset_config

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.mark.parametrize("prefix", ["", "Qwen/"])
@pytest.mark.parametrize("name", TUNED)
def test_a_published_shape_needs_no_file(name, prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config(prefix + name, load_format="dummy", max_model_len=10**6)
    assert config.hf_config.hidden_size == preset_config(name).hidden_size
    assert config.max_model_len == 40960
    assert config.eos == (151645,)
    assert list(tmp_path.iterdir()) == []


def test_the_shapes_differ():
    shapes = {(c.hidden_size, c.num_hidden_layers, c.num_attention_heads) for c in map(preset_config, TUNED)}
    assert len(shapes) == len(TUNED)


def test_a_directory_of_a_published_shapes_name_goes_first(model_dir, tmp_path, monkeypatch):
    model_dir(name="Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)
    assert dummy().hf_config.hidden_size == 64


def test_a_published_shapes_name_alone_is_not_read_as_a_shape():
    with pytest.raises(FileNotFoundError, match=r"Qwen3-0\.6B"):
        Config("Qwen3-0.6B")


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_directory(model_dir, as_path):
    directory = model_dir()
    config = Config(as_path(directory))
    assert config.model == directory
    assert config.hf_config.hidden_size == 64
    assert config.hf_config.vocab_size == 300


def test_the_tilde_is_expanded(model_dir, tmp_path, monkeypatch):
    directory = model_dir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config("~/model").model == directory


@pytest.mark.parametrize("model", ["/no/such/model", "./no-such-model", "~/no/such/model", "a/b/c", "~no-such-user/m"])
def test_a_missing_directory(model):
    with pytest.raises(FileNotFoundError, match="no such directory") as error:
        Config(model)
    assert repr(model) in str(error.value)


def test_a_file_instead_of_a_directory(model_dir):
    file = Path(model_dir(), "config.json")
    with pytest.raises(ValueError, match=r"file.*directory") as error:
        Config(str(file))
    assert repr(str(file)) in str(error.value)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_directory_without_a_config(tmp_path, load_format):
    with pytest.raises(FileNotFoundError, match=r"no config\.json") as error:
        Config(str(tmp_path), load_format=load_format)
    assert repr(str(tmp_path)) in str(error.value)


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 1240\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: download"),
        ("{", "is not valid JSON"),
        ("\ufeff{}", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "must hold a JSON object, not a list"),
        (LFS_POINTER, "is a Git LFS pointer.*git lfs pull"),
        ('{"hidden_size": 64}', "architectures=None"),
        ('{"model_type": "no-such-model"}', "no-such-model"),
    ],
    ids=lambda text: text[:20],
)
def test_a_config_that_cannot_be_read(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        Config(str(tmp_path))
    assert str(error.value).startswith(str(tmp_path / "config.json"))


def test_a_config_of_bytes_that_are_no_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"config\.json: is not valid JSON"):
        Config(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_that_is_no_file(model_dir, name):
    directory = Path(model_dir())
    file = directory / name
    file.unlink(missing_ok=True)
    file.mkdir()
    with pytest.raises(ValueError, match=rf"{name}: cannot be read: Is a directory"):
        Config(str(directory))
    file.rmdir()
    file.symlink_to("blobs/gone")
    with pytest.raises(FileNotFoundError, match=rf"{name}: is a link to blobs/gone, which is not there"):
        Config(str(directory))


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "head_dim",
)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", ["4", 0, -1, 2.5, 2.0, True, [2], 2**40], ids=repr)
def test_a_size_that_is_none(model_dir, name, value):
    directory = model_dir(**{name: value})
    most = 1024 if name == "num_hidden_layers" else 2147483647
    with pytest.raises(ValueError, match=rf"must be an integer in 1\.\.{most}") as error:
        Config(directory)
    assert str(error.value).startswith(f"{Path(directory, 'config.json')}: {name}={value!r}: ")
    given = preset_config("Qwen3-0.6B")
    vars(given)[name] = value
    with pytest.raises(ValueError, match=rf"hf_config: {name}=.* must be an integer"):
        dummy(hf_config=given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, r"num_key_value_heads=3: must divide num_attention_heads \(4\)"),
        ({"num_key_value_heads": 8}, r"num_key_value_heads=8: must divide num_attention_heads \(4\)"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0: must be a finite number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small': must be a finite number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': must be true or false"),
        ({"attention_bias": 1}, "attention_bias=1: must be true or false"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures='Qwen3ForCausalLM': must be a list of names"),
        ({"architectures": 5}, "architectures=5: must be a list of names"),
        (
            {"architectures": ["GPT2LMHeadModel"], "hidden_size": "x"},
            r"architectures=\['GPT2LMHeadModel'\].*supported are .*Llama.*Qwen3ForCausalLM.*docs/adding-a-model.md",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -5.0}}, r"rope_theta=-5\.0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2.0}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "a"}}, "cannot be used"),
        ({"rope_parameters": "x"}, "rope_parameters|RoPE"),
        ({"dual_chunk_attention_config": "x"}, "dual_chunk_attention_config='x': must be an object with a chunk_size"),
        ({"dual_chunk_attention_config": {"chunk_size": 8, "local_size": 8}}, "dual_chunk_attention_config=.*smaller"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config=.*local_size"),
        pytest.param({"layer_types": ["a"]}, "cannot be used", marks=needs_transformers_5),
    ],
    ids=str,
)
def test_a_config_that_fits_no_model(model_dir, changes, message):
    directory = model_dir(**changes)
    with pytest.raises(ValueError, match=message) as error:
        Config(directory)
    assert str(error.value).startswith(f"{Path(directory, 'config.json')}: ")


def test_heads_that_do_not_divide_the_hidden_size(model_dir):
    qwen2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": ...}
    for hidden_size in (66, 20):
        directory = model_dir(**qwen2, hidden_size=hidden_size, name=f"model-{hidden_size}")
        with pytest.raises(ValueError, match=rf"hidden_size={hidden_size}: .*num_attention_heads \(4\)"):
            Config(directory)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors", None])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_quantized_checkpoint_is_refused_by_name(model_dir, method, load_format):
    settings = {"bits": 3} | ({"quant_method": method} if method else {})
    directory = model_dir(quantization_config=settings)
    with pytest.raises(
        ValueError, match=rf"quantization_config .*{method!r}: .*use the unquantized checkpoint"
    ) as error:
        Config(directory, load_format=load_format)
    assert str(error.value).startswith(f"{Path(directory, 'config.json')}: ")
    if method not in ("gptq", "awq"):  # Their error says that it is the bits.
        assert all(dtype in str(error.value) for dtype in ("bfloat16", "float16", "float32"))


# Names


@pytest.mark.parametrize("option", ["model", "tokenizer"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 5000, r"'xxxx+'\.\.\. \(5000 characters\): cannot be opened \(File name too long\)"),
        ("/" + "a/" * 5000, r"\(10001 characters\): cannot be opened"),
        ("Qwen3\0", r"'Qwen3\\x00': holds a NUL byte"),
        (__file__, "is a file; must be the directory that holds it"),
    ],
    ids=["long", "deep", "nul", "file"],
)
def test_a_name_that_no_directory_has(model_dir, option, name, message):
    options = {"model": model_dir()} | {option: name}
    with pytest.raises(ValueError, match=f"^{option}=.*{message}") as error:
        Config(**options)
    assert len(str(error.value)) < 400


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_model_that_may_not_be_read(model_dir):
    directory = Path(model_dir())
    (directory / "config.json").chmod(0)
    with pytest.raises(ValueError, match=r"config\.json: cannot be read: Permission denied"):
        Config(str(directory))
    directory.chmod(0)
    try:
        with pytest.raises(ValueError, match=r"Permission denied"):
            Config(str(directory / "model"))
    finally:
        directory.chmod(0o755)


def test_a_model_that_may_not_be_looked_up(monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refuse)
        with pytest.raises(ValueError, match=r"^model='/secret/model': cannot be opened \(Permission denied\)"):
            Config("/secret/model")


# The hub


@pytest.fixture
def hub(model_dir, monkeypatch):
    """What is asked of a hub whose every id is one model: [(id, revision, patterns)]; and the patterns left out."""
    directory, asked, ignored = model_dir(name="snapshot"), [], []

    def snapshot_download(repo_id, *, revision, allow_patterns, ignore_patterns):
        asked.append((repo_id, revision, allow_patterns))
        ignored.append(ignore_patterns)
        return directory

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return SimpleNamespace(directory=directory, asked=asked, ignored=ignored)


def test_a_hub_id_is_downloaded(hub):
    config = Config("someone/some-model")
    assert [(name, revision) for name, revision, _ in hub.asked] == [("someone/some-model", None)] * 2
    assert config.model == hub.directory
    assert config.hf_config.hidden_size == 64


def test_weights_in_the_format_of_mistral_are_not_downloaded(hub):
    """Its repositories have them beside those that are read."""
    Config("someone/some-model")
    files = ["model-00001-of-00003.safetensors", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors"]
    assert "*.safetensors" in patterns_asked(hub)
    assert list(filter_repo_objects(files, ignore_patterns=hub.ignored[-1])) == files[:1]


def test_a_revision_is_downloaded(hub):
    config = Config("someone/some-model", revision="v1.0")
    assert {revision for _, revision, _ in hub.asked} == {"v1.0"}
    assert config.model == hub.directory


@pytest.mark.parametrize("options", [{}, {"load_format": "dummy"}], ids=["local", "shape"])
def test_a_revision_of_what_is_not_downloaded_is_refused(model_dir, options):
    model = "Qwen3-0.6B" if options else model_dir()
    with pytest.raises(ValueError, match=rf"revision='v1.0': must be None: model='{model}' is not downloaded"):
        Config(model, revision="v1.0", **options)


def test_a_revision_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match=r"'someone/some-model'.*\(revision 'v9'\) it cannot be downloaded"):
        Config("someone/some-model", revision="v9")


def patterns_asked(hub) -> list[str]:
    return [pattern for _, _, patterns in hub.asked for pattern in patterns]


@pytest.mark.parametrize("changes", [{"quantization_config": {"quant_method": "fp8"}}, {"num_hidden_layers": 0}])
def test_what_is_refused_costs_no_download_of_weights(hub, changes):
    edit_json(Path(hub.directory, "config.json"), **changes)
    with pytest.raises(ValueError, match=r"config\.json"):
        Config("someone/some-model")
    assert "*.json" in patterns_asked(hub)
    assert "*.safetensors" not in patterns_asked(hub)


def test_random_weights_cost_no_download_of_weights(hub):
    Config("someone/some-model", load_format="dummy")
    assert "*.safetensors" not in patterns_asked(hub)
    Config("someone/some-model")
    assert "*.safetensors" in patterns_asked(hub)


# The tokenizer


def test_the_tokenizer_is_the_models_unless_given(model_dir):
    directory, other = model_dir(), model_dir(name="other")
    assert Config(directory).tokenizer == directory
    assert Config(directory, tokenizer=other).tokenizer == other
    assert Config(directory, tokenizer=Path(other)).tokenizer == other
    assert dummy(tokenizer=other).tokenizer == other
    assert Config(directory, skip_tokenizer_init=True).tokenizer is None


def test_a_tokenizer_of_the_hub_is_downloaded_without_weights(hub, model_dir):
    assert Config(model_dir(), tokenizer="someone/else").tokenizer == hub.directory
    assert [name for name, _, _ in hub.asked] == ["someone/else"]
    assert "*.safetensors" not in patterns_asked(hub)


def test_a_tokenizer_that_is_not_there():
    with pytest.raises(FileNotFoundError, match=r"tokenizer='/no/such': no such directory"):
        dummy(tokenizer="/no/such")


def test_a_tokenizer_that_nobody_loads_is_refused(model_dir):
    with pytest.raises(ValueError, match=r"tokenizer=.* must be None with skip_tokenizer_init=True"):
        dummy(tokenizer=model_dir(), skip_tokenizer_init=True)


def test_a_hub_id_that_cannot_be_downloaded_says_why():
    with pytest.raises(FileNotFoundError, match="no network in this test") as error:
        Config("someone/some-model")
    assert "'someone/some-model'" in str(error.value)


def test_a_given_hf_config_is_used_as_it_is(model_dir):
    given = preset_config("Qwen3-1.7B")
    assert Config(model_dir(), hf_config=given).hf_config is given
    assert Config("my own shape", load_format="dummy", hf_config=given).hf_config is given
