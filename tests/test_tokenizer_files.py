"""The tokenizer's files: another model's, and what is said of those that are damaged or not there."""

import shutil
from pathlib import Path

import pytest
from checkpoints import EOS, complete, edit_json, greedy, make_checkpoint, make_llm, make_tokenizer
from configs import needs_transformers_5
from transformers import AutoConfig

from nanovllm import SamplingParams

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
    [("tokenizer.json", "{}"), pytest.param("tokenizer_config.json", '{"eos_token": 5}', marks=needs_transformers_5)],
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
