"""The lines of docs/integrations.md for Hugging Face datasets, pandas, datatrove and Ray Data."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from checkpoints import make_checkpoint, make_llm

import nanovllm

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def blocks(heading: str) -> list[str]:
    """The blocks of Python under a heading."""
    section = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)[1]
    return re.findall(r"```python\n(.*?)```", section, re.S)


@pytest.fixture
def model(tmp_path):
    path = make_checkpoint(tmp_path / "model", tokenizer=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Runs the block of Python under a heading, with a tiny model; returns its variables."""
    llm_class = nanovllm.LLM
    engines = []

    def make(name):
        engines.append(llm_class(model, device="cpu", num_kvcache_blocks=16))
        return engines[-1]

    monkeypatch.setattr(nanovllm, "LLM", make)
    monkeypatch.chdir(tmp_path)

    def run(heading):
        (code,) = blocks(heading)
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


def run_script(directory: Path, code: str, model: str) -> str:
    """Run a block in a process of its own, with a model of ours; returns what it printed."""
    script = directory / "script.py"
    script.write_text(code.replace("Qwen/Qwen3-0.6B", model))
    done = subprocess.run([sys.executable, script], cwd=directory, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.nightly
def test_datatrove(model, tmp_path):
    for package in ("datatrove", "uvicorn", "starlette", "httpx", "orjson", "aiosqlite", "aiofiles"):
        pytest.importorskip(package, reason="needs datatrove and a server: pip install '.[datatrove]'")
    server, pipeline = blocks("datatrove")
    (tmp_path / "serve.py").write_text(server.replace("Qwen/Qwen3-0.6B", model))
    pipeline = pipeline.replace('"max-model-len": 4096', '"max-model-len": 400, "device": "cpu"')
    pipeline = pipeline.replace("config = InferenceConfig(", "config = InferenceConfig(server_ready_delay_sec=0.5,")
    texts = {str(i): f"a block of {i} rows" for i in range(30)} | {"too long": "a row of slots " * 400}
    (tmp_path / "documents").mkdir()
    lines = [json.dumps({"id": id, "text": text}) for id, text in texts.items()]
    (tmp_path / "documents" / "all.jsonl").write_text("\n".join(lines))

    said = run_script(tmp_path, pipeline, model)
    assert "Skipping document too long" in said
    assert "400" in said.split("Skipping document too long")[1].splitlines()[0], "the reason is shown"
    answered = [json.loads(line) for file in (tmp_path / "answers").iterdir() for line in file.read_text().splitlines()]
    results = {document["id"]: document["metadata"]["rollout_results"][0] for document in answered}
    assert results.keys() == texts.keys() - {"too long"}
    params = nanovllm.SamplingParams(temperature=0, max_tokens=64)
    with make_llm(model, skip_tokenizer_init=False, max_model_len=400) as llm:
        for id, result in results.items():
            (expected,) = llm.chat([{"role": "user", "content": texts[id]}], params, use_tqdm=False)
            assert (result["text"], result["finish_reason"]) == (expected["text"], expected["finish_reason"])
    (log,) = (tmp_path / "server-logs").iterdir()
    assert log.read_text().endswith("the server has ended\n")


@pytest.mark.nightly
def test_ray_data(cluster, model, tmp_path):
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    (code,) = blocks("Ray Data")
    (tmp_path / "questions.jsonl").write_text('{"question": "a block"}\n{"question": "a row of slots"}\n')
    code = code.replace("Qwen/Qwen3-0.6B", model).replace("max_tokens=64", 'max_tokens=64, device="cpu"')
    for name in ("questions.jsonl", "answers"):  # The cluster's processes have another working directory.
        code = code.replace(f'"{name}"', repr(str(tmp_path / name)))
    exec(code, {})
    table = pandas.read_parquet(tmp_path / "answers")
    assert sorted(table["prompt"]) == ["a block", "a row of slots"]
    assert set(table["finish_reason"]) <= {"stop", "length"}
    assert all(isinstance(text, str) for text in table["text"])
