"""benchmarks/continuous_batching.py gives transformers and the engine the same work."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from transformers import AutoModelForCausalLM

if not hasattr(pytest.importorskip("transformers.generation.continuous_batching.utils"), "WorkloadHints"):
    pytest.skip("this transformers has no hints for continuous batching", allow_module_level=True)
PROMPTS, LENGTHS = [[1, 2, 3, 4], [5, 6], [7, 8, 9]], [3, 7, 1]
SMALL = {"num_blocks": 16, "max_batch_tokens": 64}  # Otherwise it takes more than half of the machine's memory.


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import continuous_batching

    return continuous_batching


@torch.no_grad()
def test_each_request_gets_the_tokens_of_its_own_length(script, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint(tmp_path), dtype=torch.float32)
    # No token may end a completion, also the one that the model would end with.
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False, eos_token_id=None)[0]
        for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
    ]
    with script.continuous_batching(model, PROMPTS, LENGTHS, **SMALL) as batching:
        found = batching.complete(PROMPTS, LENGTHS)
    assert [prompt + tokens for prompt, tokens in zip(PROMPTS, found, strict=True)] == [e.tolist() for e in expected]


@pytest.mark.nightly
def test_both_run(script, tmp_path, monkeypatch, capsys):
    model, file = make_checkpoint(tmp_path, vocab_size=10_016), tmp_path / "out.json"
    options = ["--device", "cpu", "--dtype", "float32", "--workload", "laptop", "--passes", "1", "--json"]
    monkeypatch.setattr("sys.argv", ["continuous_batching.py", str(model), *options, str(file)])
    script.main()
    results = json.loads(file.read_text())["results"]["laptop"]
    assert all(results[engine]["tokens_per_second"] > 0 for engine in ("transformers", "nanovllm"))
    assert "| laptop |" in capsys.readouterr().out
