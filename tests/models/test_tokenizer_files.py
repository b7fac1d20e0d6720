"""The tokenizer's files: another model's, and what is said of those that are damaged or not there."""

import io
import json
import shutil
from pathlib import Path

import pytest
from checkpoints import (
    EOS,
    complete,
    edit_json,
    greedy,
    make_checkpoint,
    make_llm,
    make_tokenizer,
    needs_transformers,
)
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from nanovllm import SamplingParams
from nanovllm.models.tokenizer_files import load_tokenizer

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.fixture
def directory(path, tmp_path):
    """A checkpoint with a tokenizer that the test may damage."""
    return Path(shutil.copytree(path, tmp_path / "model"))


def test_another_tokenizer(tmp_path, reference):
    """Of a model that has none itself."""
    model, other = make_checkpoint(tmp_path / "model"), tmp_path / "other"
    make_tokenizer(other)
    with make_llm(model, skip_tokenizer_init=False, tokenizer=other) as llm:
        assert llm.tokenizer.eos_token == EOS
        assert llm.config.eos == (1,)
        ids = llm.tokenizer("a table of blocks")["input_ids"]
        assert complete(llm, ["a table of blocks"], greedy(4)) == complete(llm, [ids], greedy(4))


def test_a_published_shape_takes_a_tokenizer(directory):
    with pytest.raises(ValueError, match=r"model='Qwen3-0.6B': a published shape has no tokenizer; tokenizer="):
        make_llm("Qwen3-0.6B", load_format="dummy", skip_tokenizer_init=False)
    options = {"load_format": "dummy", "skip_tokenizer_init": False, "hf_config": AutoConfig.from_pretrained(directory)}
    with make_llm("a shape", tokenizer=directory, **options) as llm:
        assert llm.generate("a table", greedy(3), use_tqdm=False)[0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "", "is empty: download it again"),
        ("tokenizer.json", '{"version": "1.0", "model"', "is not valid JSON"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer.*git lfs pull"),
        ("tokenizer.json", "[]", "must hold a JSON object, not a list"),
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object, not a list"),
    ],
)
def test_a_damaged_file_is_named(directory, name, content, message):
    (directory / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        make_llm(directory, skip_tokenizer_init=False)
    assert str(error.value).startswith(str(directory / name))


def test_a_link_to_a_file_that_is_gone(directory):
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").symlink_to("../blobs/gone")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: is a link to \.\./blobs/gone, which is not there"):
        make_llm(directory, skip_tokenizer_init=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        pytest.param("tokenizer_config.json", '{"eos_token": 5}', marks=needs_transformers("5")),
    ],
)
def test_files_that_make_no_tokenizer_are_named(directory, name, content):
    (directory / name).write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json, tokenizer_config\.json.*skip_tokenizer_init") as error:
        make_llm(directory, skip_tokenizer_init=False)
    assert str(error.value).startswith(str(directory))
    assert "\n" not in str(error.value)


def test_files_that_are_not_there(directory):
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"its tokenizer \(tokenizer_config\.json\) cannot be loaded.*tokenizer="):
        make_llm(directory, skip_tokenizer_init=False)
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer\.json; tokenizer= takes another's"):
        make_llm(directory, skip_tokenizer_init=False)


def test_an_end_of_sequence_token_that_the_model_lacks_is_ignored(directory, caplog):
    """The id goes into what the sampler indexes logits with."""
    vocabulary = 100
    path = make_checkpoint(directory.parent / "small", vocab_size=vocabulary)
    edit_json(path / "generation_config.json", eos_token_id=None)
    edit_json(path / "config.json", eos_token_id=None)
    for file in directory.glob("tokenizer*"):
        shutil.copy(file, path)
    edit_json(path / "tokenizer_config.json", eos_token="<new>")
    with make_llm(path, skip_tokenizer_init=False) as llm:
        assert llm.tokenizer.eos_token_id >= vocabulary
        assert llm.config.eos == ()
        params = SamplingParams(temperature=0, max_tokens=4, min_tokens=2)
        assert len(complete(llm, [[1, 2, 3]], params)[0]) == 4
    assert any("outside the vocabulary, 0..99" in record.getMessage() for record in caplog.records)


# -- code of a checkpoint ----------------------------------------------------------------------------------------------

CODE = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedTokenizerFast
Path(__file__).with_name("has_run").touch()
class OwnConfig(PretrainedConfig):
    model_type = "own"
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def own_code(directory, monkeypatch):
    """A checkpoint with code, which must not run, whatever standard input says."""
    (directory / "own.py").write_text(CODE)
    monkeypatch.setenv("HF_HOME", str(directory.parent))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    yield directory
    assert not list(directory.parent.rglob("has_run"))


@pytest.mark.parametrize("names", [["own.OwnTokenizer", None], {"AutoTokenizer": [None, "own.OwnTokenizer"]}])
def test_code_of_a_tokenizer_is_not_run(own_code, names):
    """Nor is it needed, where there is a tokenizer.json."""
    edit_json(own_code / "tokenizer_config.json", auto_map=names, tokenizer_class="PreTrainedTokenizerFast")
    with make_llm(own_code, skip_tokenizer_init=False) as llm:
        assert llm.tokenizer.decode(llm.tokenizer("a table of blocks")["input_ids"]) == "a table of blocks"


def test_a_tokenizer_that_is_code_alone(own_code):
    (own_code / "tokenizer.json").unlink()
    edit_json(
        own_code / "tokenizer_config.json",
        auto_map={"AutoTokenizer": "own.OwnTokenizer"},
        tokenizer_class="OwnTokenizer",
    )
    with pytest.raises(ValueError, match=r"auto_map names code.*own\.OwnTokenizer, which is never run.*tokenizer="):
        make_llm(own_code, skip_tokenizer_init=False)


@pytest.mark.parametrize("model_type", ["own", "qwen3"])
def test_code_of_a_configuration_is_not_run(own_code, model_type):
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_json(own_code / "config.json", auto_map=names, model_type=model_type)
    if model_type == "qwen3":
        with make_llm(own_code, skip_tokenizer_init=False) as llm:
            assert len(complete(llm, ["a table"], greedy(2))[0]) == 2
        return
    message = r"config\.json: cannot be used: auto_map names code.*which is never run.*'own'"
    with pytest.raises(ValueError, match=message) as error:
        make_llm(own_code)
    assert "trust_remote_code" not in str(error.value)  # an option that there is not


def test_code_beside_another_tokenizer_is_not_run(own_code, path):
    edit_json(own_code / "config.json", auto_map={"AutoConfig": "own.OwnConfig"}, model_type="own")
    with make_llm(path, skip_tokenizer_init=False, tokenizer=own_code) as llm:
        assert len(complete(llm, ["a table"], greedy(2))[0]) == 2


# -- what transformers makes of tokenizer.json -------------------------------------------------------------------------


def byte_level() -> Tokenizer:
    """DeepSeek-R1-Distill's kind."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, [], ignore_merges=True))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """Llama 2's kind: every text gets a space before it, also one that has a space already."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁▁", *map(chr, range(33, 127))]
    model = models.BPE({piece: i for i, piece in enumerate(vocabulary)}, [("▁", "▁")], unk_token="<unk>", fuse_unk=True)
    model.byte_fallback = True
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(joined)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "GPT2Tokenizer", "PreTrainedTokenizerFast", None])
def test_a_tokenizer_is_that_of_its_tokenizer_json(directory, make, name):
    """Whatever class of transformers tokenizer_config.json names: some replace all but the vocabulary."""
    stored = make()
    stored.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").unlink()
    edit_json(directory / "tokenizer_config.json", tokenizer_class=name, legacy=False, add_bos_token=False)
    with make_llm(directory, skip_tokenizer_init=False) as llm:
        for text in ("The capital is Paris", " 2025\n\n  if x:", "  ", "Grüße 🙂"):
            ids = stored.encode(text, add_special_tokens=False).ids
            assert llm.tokenizer(text, add_special_tokens=False)["input_ids"] == ids
            assert llm.tokenizer.decode(ids) == stored.decode(ids)


def test_a_class_that_replaces_a_tokenizer_is_named(directory, monkeypatch, caplog):
    """And the file is used as it is. If no class takes it so, that is an error."""
    wrong = PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like())
    byte_level().save(str(directory / "tokenizer.json"))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: wrong)
    tokenizer = load_tokenizer("model", str(directory))
    assert tokenizer("2025")["input_ids"] == byte_level().encode("2025").ids
    assert "tokenizes otherwise than tokenizer.json, which is used as it is" in caplog.text
    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", lambda *_, **__: wrong)
    with pytest.raises(ValueError, match=r"tokenizes otherwise than tokenizer\.json; tokenizer= takes another's"):
        load_tokenizer("model", str(directory))


def test_the_order_in_tokenizer_json_does_not_matter(directory):
    stored = json.loads(byte_level().to_str())
    file = directory / "tokenizer.json"
    stored = {"model": stored.pop("model"), **stored}
    file.write_text(json.dumps(stored, indent=1))
    assert load_tokenizer("model", str(directory))("2025")["input_ids"] == byte_level().encode("2025").ids


# -- SentencePiece -----------------------------------------------------------------------------------------------------


def test_a_sentencepiece_model_alone_names_the_packages(directory, monkeypatch):
    """transformers' message speaks of tiktoken."""
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    monkeypatch.setattr("nanovllm.models.tokenizer_files.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"a SentencePiece model.*pip install sentencepiece protobuf.*tokenizer\.json"):
        make_llm(directory, skip_tokenizer_init=False)


@pytest.mark.parametrize(("add_bos_token", "warns"), [(None, True), (False, False)])
def test_a_sentencepiece_vocabulary_without_a_beginning_of_texts(directory, caplog, add_bos_token, warns):
    sentencepiece_like().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer.model").write_bytes(b"\n\x0e")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "add_bos_token": add_bos_token}
    edit_json(directory / "tokenizer_config.json", **config)
    load_tokenizer("model", str(directory))
    assert ("puts no beginning of a text (<s>) before a prompt" in caplog.text) == warns
