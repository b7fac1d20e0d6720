"""Config: which model is meant, and what it takes from the model's files and from the machine."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from checkpoints import edit_json
from configs import NEW_STYLE, OLD_STYLE, TUNED, dummy
from gpus import HOPPER, pretend_gpu
from huggingface_hub.utils import filter_repo_objects

from nanovllm.config import Config
from nanovllm.engine.length_limit import LengthLimit
from nanovllm.engine.ranks.ranks import device_of_rank
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.layers.rope_parameters import rope_parameters
from nanovllm.models.presets import preset_config

pytestmark = pytest.mark.usefixtures("no_network")


# -- the model: a directory, a published shape, one of the hub -----------------------------------------------------


@pytest.mark.parametrize("name", TUNED)
def test_a_published_shape_needs_no_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = preset_config(name)
    for prefix in ("", "Qwen/"):
        config = Config(prefix + name, load_format="dummy", max_model_len=10**6)
        assert (config.max_model_len, config.eos) == (40960, (151645,))
        found = config.hf_config
        assert (found.hidden_size, found.num_hidden_layers) == (shape.hidden_size, shape.num_hidden_layers)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match=name):
        Config(name)
    (others,) = [[preset_config(other).to_dict() for other in TUNED if other != name]]
    assert shape.to_dict() not in others


def test_a_directory(model_dir, tmp_path, monkeypatch):
    directory = model_dir(name="Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (directory, Path(directory), "~/Qwen3-0.6B"):
        config = Config(name)
        assert (config.model, config.hf_config.hidden_size, config.hf_config.vocab_size) == (directory, 64, 300)
    assert dummy().hf_config.hidden_size == 64, "a directory goes before a published shape of its name"
    given = preset_config("Qwen3-1.7B")
    assert Config(directory, hf_config=given).hf_config is given
    assert Config("my own shape", load_format="dummy", hf_config=given).hf_config is given


@pytest.mark.parametrize("model", ["/no/such/model", "./no-such-model", "~/no/such/model", "a/b/c", "~no-such-user/m"])
def test_a_missing_directory(model):
    with pytest.raises(FileNotFoundError, match=f"{model!r}: no such directory"):
        Config(model)


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


@pytest.fixture
def hub(model_dir, monkeypatch):
    """What is asked of a hub whose every id is one model: [(id, revision, patterns)]; and the patterns left out."""
    directory, asked, ignored = model_dir(name="snapshot"), [], []

    def snapshot_download(repo_id, *, revision, allow_patterns, ignore_patterns, tqdm_class):
        asked.append((repo_id, revision, allow_patterns))
        ignored.append(ignore_patterns)
        return directory

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return SimpleNamespace(directory=directory, asked=asked, ignored=ignored)


def patterns_asked(hub) -> list[str]:
    return [pattern for _, _, patterns in hub.asked for pattern in patterns]


@pytest.mark.parametrize("revision", [None, "v1.0"])
def test_a_hub_id_is_downloaded(hub, revision):
    config = Config("someone/some-model", load_format="dummy", revision=revision)
    assert "*.safetensors" not in patterns_asked(hub), "random weights cost no download of weights"
    config = Config("someone/some-model", revision=revision)
    assert [asked[:2] for asked in hub.asked] == [("someone/some-model", revision)] * 3
    assert (config.model, config.hf_config.hidden_size) == (hub.directory, 64)
    assert "*.safetensors" in patterns_asked(hub)
    # Those in the format of Mistral, whose repositories have them beside those that are read, are left there.
    files = ["model-00001-of-00003.safetensors", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors"]
    assert list(filter_repo_objects(files, ignore_patterns=hub.ignored[-1])) == files[:1]


@pytest.mark.parametrize("changes", [{"quantization_config": {"quant_method": "fp8"}}, {"num_hidden_layers": 0}])
def test_what_is_refused_costs_no_download_of_weights(hub, changes):
    edit_json(Path(hub.directory, "config.json"), **changes)
    with pytest.raises(ValueError, match=r"config\.json"):
        Config("someone/some-model")
    assert "*.json" in patterns_asked(hub)
    assert "*.safetensors" not in patterns_asked(hub)


def test_what_cannot_be_downloaded_says_why(model_dir):
    with pytest.raises(FileNotFoundError, match=r"'someone/some-model'.*\(revision 'v9'\) it cannot be downloaded"):
        Config("someone/some-model", revision="v9")
    with pytest.raises(FileNotFoundError, match=r"'someone/some-model'.*no network in this test"):
        Config("someone/some-model")
    for model, options in ((model_dir(), {}), ("Qwen3-0.6B", {"load_format": "dummy"})):
        with pytest.raises(ValueError, match=rf"revision='v1.0': must be None: model='{model}' is not downloaded"):
            Config(model, revision="v1.0", **options)


def test_the_tokenizer_is_the_models_unless_given(model_dir, hub):
    directory, other = model_dir(), model_dir(name="other")
    assert Config(directory).tokenizer == directory
    for given in (other, Path(other)):
        assert Config(directory, tokenizer=given).tokenizer == dummy(tokenizer=given).tokenizer == other
    assert Config(directory, skip_tokenizer_init=True).tokenizer is None
    assert hub.asked == []
    assert Config(directory, tokenizer="someone/else").tokenizer == hub.directory
    assert [name for name, _, _ in hub.asked] == ["someone/else"]
    assert "*.safetensors" not in patterns_asked(hub)
    with pytest.raises(FileNotFoundError, match=r"tokenizer='/no/such': no such directory"):
        dummy(tokenizer="/no/such")


# -- its config.json -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", [NEW_STYLE, OLD_STYLE], ids=["new", "old"])
def test_both_styles_of_config_are_read(model_dir, style):
    hf_config = Config(model_dir(style)).hf_config
    assert rope_parameters(hf_config).base == 5_000_000.0
    assert (hf_config.head_dim, hf_config.num_key_value_heads) == (16, 2)


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 1240\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: download"),
        (b"{", "is not valid JSON"),
        (b"\xef\xbb\xbf{}", "is not valid JSON"),
        (b'{"a": "\xff"}', "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "must hold a JSON object, not a list"),
        (b"null", "must hold a JSON object"),
        (b"{}", "architectures=None"),
        (LFS_POINTER.encode(), "is a Git LFS pointer.*git lfs pull"),
        (b'{"hidden_size": 64}', "architectures=None"),
        (b'{"model_type": "no-such-model"}', "no-such-model"),
    ],
    ids=lambda content: str(content)[:20],
)
def test_a_config_that_cannot_be_read(tmp_path, content, message):
    for load_format in ("auto", "dummy"):
        with pytest.raises(FileNotFoundError, match=rf"'{tmp_path}'.*no config\.json"):
            Config(str(tmp_path), load_format=load_format)
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{file}.*{message}"):
        Config(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_that_is_no_file(model_dir, name):
    directory = Path(model_dir())
    file = directory / name
    file.write_text("{")
    with pytest.raises(ValueError, match=str(file)):
        Config(str(directory))
    file.unlink()
    file.mkdir()
    with pytest.raises(ValueError, match=rf"{name}: cannot be read: Is a directory"):
        Config(str(directory))
    file.rmdir()
    file.symlink_to("blobs/gone")
    with pytest.raises(FileNotFoundError, match=rf"{name}: is a link to blobs/gone, which is not there"):
        Config(str(directory))


SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings", "head_dim"),
)


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_is_none(model_dir, name):
    file = Path(model_dir(), "config.json")
    says = rf"must be an integer in 1\.\.{1024 if name == 'num_hidden_layers' else 2147483647}"
    for value in ("4", 0, -1, 2.5, 2.0, True, [2], 2**40):
        edit_json(file, **{name: value})
        with pytest.raises(ValueError, match=says) as error:
            Config(str(file.parent))
        assert str(error.value).startswith(f"{file}: {name}={value!r}: ")
        given = preset_config("Qwen3-0.6B")
        vars(given)[name] = value
        with pytest.raises(ValueError, match=f"hf_config: {name}=.* {says}"):
            dummy(hf_config=given)


QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": ...}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, r"num_key_value_heads=3: must divide num_attention_heads \(4\)"),
        ({"num_key_value_heads": 8}, r"num_key_value_heads=8: must divide num_attention_heads \(4\)"),
        (QWEN2 | {"hidden_size": 66}, r"hidden_size=66: .*num_attention_heads \(4\)"),
        (QWEN2 | {"hidden_size": 20}, r"hidden_size=20: .*num_attention_heads \(4\)"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0: must be a finite number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small': must be a finite number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': must be true or false"),
        ({"attention_bias": 1}, "attention_bias=1: must be true or false"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures='Qwen3ForCausalLM': must be a list of names"),
        ({"architectures": 5}, "architectures=5: must be a list of names"),
        (
            {"architectures": ["GPT2LMHeadModel"], "hidden_size": "x"},
            r"architectures=\['GPT2LMHeadModel'\].*supported are .*Llama, .*Qwen3, .*docs/adding-a-model.md",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -5.0}}, r"rope_theta=-5\.0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2.0}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "a"}}, "cannot be used"),
        ({"rope_parameters": "x"}, "rope_parameters|RoPE"),
        ({"dual_chunk_attention_config": "x"}, "dual_chunk_attention_config='x': must be an object with a chunk_size"),
        ({"dual_chunk_attention_config": {"chunk_size": 8, "local_size": 8}}, "dual_chunk_attention_config=.*smaller"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config=.*local_size"),
        ({"layer_types": ["a"]}, r"layer_types=\['a'\]: must be a list of full_attention, sliding_attention, linear"),
        ({"layer_types": "full_attention"}, "layer_types='full_attention': must be a list of full_attention"),
    ],
    ids=str,
)
def test_a_config_that_fits_no_model(model_dir, changes, message):
    directory = model_dir(**changes)
    with pytest.raises(ValueError, match=f"^{Path(directory, 'config.json')}: .*({message})"):
        Config(directory)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors", None])
def test_a_quantized_checkpoint_is_refused_by_name(model_dir, method):
    directory = model_dir(quantization_config={"bits": 3} | ({"quant_method": method} if method else {}))
    for load_format in ("auto", "dummy"):
        says = rf"^{directory}/config.json: quantization_config .*{method!r}: .*use the unquantized checkpoint"
        with pytest.raises(ValueError, match=says) as error:
            Config(directory, load_format=load_format)
        if method not in ("gptq", "awq"):  # Their error says that it is the bits.
            assert all(dtype in str(error.value) for dtype in ("bfloat16", "float16", "float32"))


# -- lengths -------------------------------------------------------------------------------------------------------


def test_max_model_len_is_lowered_to_what_the_model_supports(model_dir):
    directory = model_dir()
    for asked, expected in ((100, 100), (512, 512), (513, 512), (4096, 512), (None, 512)):
        config = Config(directory, max_model_len=asked)
        assert (config.max_model_len, config.supported_model_len) == (expected, 512)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    new = model_dir(name="new", rope_parameters={"rope_theta": 1e6, **yarn})
    old = model_dir(OLD_STYLE, name="old", rope_scaling=yarn)
    assert [Config(each, max_model_len=4096).max_model_len for each in (new, old)] == [2048, 2048]


@pytest.mark.parametrize(("local_size", "expected"), [(100, 300), (0, 400)])
def test_a_sequence_has_one_chunk_of_dual_chunk_attention(model_dir, local_size, expected):
    """Longer ones would need attention that we do not have (Qwen2.5-7B-Instruct-1M: 262,144 - 8,192 tokens)."""
    chunks = {"chunk_size": 400, "local_size": local_size, "original_max_position_embeddings": 400}
    directory = model_dir(dual_chunk_attention_config=chunks)
    assert [Config(directory, max_model_len=n).max_model_len for n in (4096, None, 200)] == [expected, expected, 200]
    config = Config(directory)
    config.num_kvcache_blocks = 1000
    with pytest.raises(ValueError, match=f"longest sequence of {expected} tokens, .*dual_chunk_attention_config"):
        LengthLimit(config).check(expected)


# -- end-of-sequence tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "generation", "own", "expected"),
    [
        ((), {"eos_token_id": [9, 5]}, 17, (5, 9)),
        ((), {"eos_token_id": 9}, 17, (9,)),
        ((), {"eos_token_id": 0}, 17, (0,)),
        ((), {"eos_token_id": [9, 9, 5]}, 17, (5, 9)),
        ((), {"temperature": 0.6}, 17, (17,)),
        ((), {"eos_token_id": None}, 17, (17,)),
        ((), None, 17, (17,)),
        ((), None, 0, (0,)),
        ((), None, [18, 17], (17, 18)),
        ((), None, None, ()),
        ((), {}, None, ()),
        (3, {"eos_token_id": [9, 5]}, 17, (3,)),
        (0, {"eos_token_id": [9, 5]}, 17, (0,)),
        ([4, 3], {"eos_token_id": [9, 5]}, 17, (3, 4)),
        (299, None, 17, (299,)),
    ],
)
def test_where_the_end_of_sequence_tokens_come_from(model_dir, given, generation, own, expected):
    directory = model_dir(generation_config=generation, eos_token_id=own)
    assert Config(directory, eos=given).eos == expected


@pytest.mark.parametrize(
    ("generation", "own", "expected", "file"),
    [
        ({"eos_token_id": [5, 300]}, 17, (5,), "generation_config.json"),
        ({"eos_token_id": 5000}, 17, (), "generation_config.json"),
        (None, [17, 10**12], (17,), "config.json"),
    ],
)
def test_end_of_sequence_tokens_outside_the_vocabulary(model_dir, caplog, generation, own, expected, file):
    """Those of the files are ignored, and those of an option refused."""
    directory = model_dir(generation_config=generation, eos_token_id=own)
    assert Config(directory).eos == expected
    (record,) = [record for record in caplog.records if record.name == "nanovllm.config"]
    assert str(Path(directory, file)) in record.message
    assert "outside the vocabulary, 0..299" in record.message
    for eos in ([300], [2, 300], [10**12]):
        with pytest.raises(ValueError, match=rf"eos=.*{eos[-1]}.* 0\.\.299"):
            Config(directory, eos=eos)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_end_of_sequence_tokens_that_are_none_are_named_with_their_file(model_dir, name):
    file = Path(model_dir(), name)
    for value in ("a", "2", [[1]], -1, [1, -2], 1.0, [1.5], True, [False], {"id": 1}):
        edit_json(file, eos_token_id=value)
        with pytest.raises(ValueError, match=r"eos_token_id=.*must be a token id >= 0, or a list") as error:
            Config(str(file.parent))
        assert str(error.value).startswith(f"{file}: eos_token_id={value!r}")


# -- device and dtype ----------------------------------------------------------------------------------------------


@pytest.fixture
def a_gpu(monkeypatch):
    """There seem to be two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    pretend_gpu(monkeypatch, total_memory=24 * 2**30)


def test_without_a_gpu(model_dir, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = Config(model_dir())
    assert (config.device, config.dtype) == ("cpu", torch.float32)
    with pytest.raises(ValueError, match=r"device='cuda'.*cpu"):
        dummy(device="cuda")


@pytest.mark.parametrize(
    ("own", "expected"),
    [("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.bfloat16), (..., torch.bfloat16)],
)
@pytest.mark.parametrize(("style", "key"), [(NEW_STYLE, "dtype"), (OLD_STYLE, "torch_dtype")], ids=["new", "old"])
def test_auto_on_a_gpu_is_the_checkpoints_dtype(model_dir, a_gpu, style, key, own, expected):
    directory = model_dir(style, **{key: own})
    config = Config(directory)
    assert (config.device, config.dtype) == ("cuda", expected)
    assert Config(directory, device="cpu").dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert Config(directory, dtype=dtype).dtype is dtype


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        *[("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cpu", None)],
        *[(torch.device("cuda", 1), 1), (torch.device("cuda"), 0), (torch.device("cpu"), None)],
    ],
)
def test_the_device_can_be_chosen(a_gpu, monkeypatch, device, expected):
    kind = "cpu" if expected is None else "cuda"
    config = dummy(device=device)
    assert (config.device, config.device_index) == (kind, expected)
    assert device_of_rank(config, 0) == torch.device(kind, expected)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    names_none = str(device) in ("auto", "cuda")
    assert dummy(device=device).device_index == (1 if names_none else expected)


def test_a_gpu_that_is_not_there_is_refused(a_gpu, monkeypatch):
    for device in ("cuda:2", "cuda:99999999999999999999"):
        says = rf"device='{device}': must be one of cuda:0\.\.cuda:1: 2 GPUs are visible"
        with pytest.raises(ValueError, match=says):
            dummy(device=device)
    # Ranks take the GPUs after the chosen one.
    assert dummy(device="cuda:0", tensor_parallel_size=2).device_index == 0
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2: must be at most 1: 2 GPUs .* cuda:1"):
        dummy(device="cuda:1", tensor_parallel_size=2)
    # So do replicas, each as many as one has ranks.
    assert dummy(device="cuda:0", data_parallel_size=2).data_parallel_size == 2
    says = r"data_parallel_size={}: must be at most {} with tensor_parallel_size={}: 2 GPUs are visible, and the first "
    for number, size, first in ((3, 1, 0), (2, 1, 1), (2, 2, 0)):
        most = (2 - first) // size
        with pytest.raises(ValueError, match=says.format(number, most, size) + rf"to use is cuda:{first}"):
            dummy(device=f"cuda:{first}", data_parallel_size=number, tensor_parallel_size=size)
    # The facts of the chosen one count.
    facts = [replace(HOPPER, capability=capability) for capability in ((8, 0), (9, 0))]
    monkeypatch.setattr(GpuFacts, "of", lambda device: facts[device.index])
    assert dummy(device="cuda:1", kv_cache_dtype="fp8").kv_cache_dtype == torch.float8_e4m3fn
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        dummy(device="cuda:0", kv_cache_dtype="fp8")
