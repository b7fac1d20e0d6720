"""The lines of docs/integrations.md for Hugging Face datasets and pandas."""

import re
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

import nanovllm

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the block of Python under a heading, with a tiny model; returns its variables."""
    path = str(make_checkpoint(tmp_path / "model", tokenizer=True))
    llm_class = nanovllm.LLM
    engines = []

    def make(model):
        engines.append(llm_class(path, device="cpu", num_kvcache_blocks=16))
        return engines[-1]

    monkeypatch.setattr(nanovllm, "LLM", make)
    monkeypatch.chdir(tmp_path)

    def run(heading):
        code = re.search(rf"^## {heading}$.*?```python\n(.*?)```", PAGE.read_text(), re.M | re.S)[1]
        names = {}
        exec(code, names)
        return names

    yield run
    for engine in engines:
        engine.exit()


def test_datasets(run, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "questions.jsonl").write_text('{"question": "a block"}\n{"question": "a row of slots"}\n')
    answered = run("Hugging Face datasets")["answered"]
    assert answered.column_names == ["question", "answer"]
    assert all(isinstance(row["answer"], str) for row in answered)
    assert len(answered) == 2


def test_pandas(run, tmp_path):
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    pandas.DataFrame({"question": ["a block", "a row of slots"]}).to_csv(tmp_path / "questions.csv")
    table = run("pandas")["table"]
    assert set(table["finish_reason"]) <= {"stop", "length"}
    assert all(isinstance(text, str) for text in table["answer"])
