"""What a user finds who has only the package: names, pages, and what an engine says of itself."""

import logging
import runpy
import sys
from pathlib import Path

import pytest
from checkpoints import EOS, make_checkpoint, make_llm, make_tokenizer
from setuptools import Distribution

import nanovllm
from nanovllm.cli import main
from nanovllm.utils.pages import page

ROOT = Path(__file__).parents[1]


def test_dir_shows_the_public_names_only():
    assert dir(nanovllm) == sorted([*nanovllm.__all__, "__version__"])
    assert all(hasattr(nanovllm, name) for name in dir(nanovllm))


def test_the_wheel_has_the_pages(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files(["pyproject.toml"])
    assert distribution.metadata.project_urls
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    build.manifest_files = {}  # of files that are in no wheel
    found = {Path(file).name for file in build.find_data_files("nanovllm", "nanovllm")}
    assert found >= {file.name for file in (ROOT / "docs").glob("*.md")}
    assert not [package for package in distribution.packages if "docs" in package]
    assert Path(page("reference.md")).samefile(ROOT / "docs" / "reference.md")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert page() in capsys.readouterr().out.replace("\n", "")


def test_an_engine_says_what_it_is(path):
    with make_llm(path, dtype="float16") as llm:
        assert repr(llm) == f"LLM({str(path)!r}, device='cpu', dtype='float16')"
    assert repr(nanovllm.LLM.__new__(nanovllm.LLM)).startswith("<nanovllm.llm.LLM object at ")


def test_the_example_begins_prompts_once(tmp_path, monkeypatch, capsys, caplog):
    """With a tokenizer that adds a token at the beginning, which the template writes too, as Llama's."""
    path = make_checkpoint(tmp_path)
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    make_tokenizer(path, ("<s>", "<|endoftext|>", EOS), bos_token="<s>", chat_template=template)
    prompts = []

    class Small(nanovllm.LLM):
        def __init__(self, model):
            super().__init__(model, device="cpu", num_kvcache_blocks=4, max_model_len=100)

        def generate(self, given, *arguments):
            prompts.extend(given)
            return super().generate(given, *arguments)

    monkeypatch.setattr(nanovllm, "LLM", Small)
    monkeypatch.setattr(sys, "argv", ["example.py", str(path)])
    with caplog.at_level(logging.WARNING):
        runpy.run_path(str(ROOT / "example.py"), run_name="__main__")
    assert capsys.readouterr().out.count("Completion: ") == 2
    assert [prompt[:2].count(0) for prompt in prompts] == [1, 1]
    assert "twice" not in caplog.text
