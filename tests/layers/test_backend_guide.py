"""The code of docs/adding-an-attention-backend.md does what the page says."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backends import decode_context
from checkpoints import complete, greedy, make_checkpoint, make_llm, random_prompt

from nanovllm.config import Config
from nanovllm.layers.attention import Attention
from nanovllm.layers.backends import choice
from nanovllm.layers.backends.backend import AttentionBackend, AttentionShape, StepSizes
from nanovllm.layers.backends.torch_backend import decode_attention_torch
from nanovllm.layers.matmul.table import Table
from nanovllm.utils import rules
from nanovllm.utils.rules import one_of

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "adding-an-attention-backend.md").read_text()
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def code() -> SimpleNamespace:
    """What the page's Python defines."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", GUIDE, re.S):
        exec(block, names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("window", [None, 20])
def test_the_back_end_of_the_guide_decodes(code, window):
    torch.manual_seed(0)
    shape = AttentionShape(4, 2, 16, 16, torch.float32, CPU)
    backend = code.DenseBackend()
    backend.prepare(shape, [window], StepSizes(0, 64, 3, num_layer_params=1), Table())
    layer = Attention(4, 16, 0.25, 2, backend, window)
    layer.k_cache, layer.v_cache = torch.randn(2, 12, 16, 2, 16)
    lens, tables = torch.tensor([37, 0, 64], dtype=torch.int32), torch.randperm(12).int().view(3, 4)
    q = torch.randn(3, 4, 16)
    out = layer.attend(q, q, q, decode_context(backend, lens, tables))
    expected = decode_attention_torch(q, layer.k_cache, layer.v_cache, lens, tables, layer.scale, window)
    torch.testing.assert_close(out, expected)


def test_the_back_end_of_the_guide_generates(code, tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "BACKENDS", (*choice.BACKENDS, code.DenseBackend))
    option = Config.__dataclass_fields__["attention_backend"]
    monkeypatch.setattr(option, "metadata", {"rules": (one_of("auto", "dense"),)})
    monkeypatch.setattr(rules, "rules_of", rules.rules_of.__wrapped__)  # without its cache
    path, prompts = make_checkpoint(tmp_path), [random_prompt(n, seed=n) for n in (3, 20, 90)]
    found = []
    for name in ("auto", "dense"):
        with make_llm(path, attention_backend=name, max_model_len=128, num_kvcache_blocks=20) as llm:
            assert llm.model_runner.backend.name == ("torch" if name == "auto" else name)
            found.append(complete(llm, prompts, greedy(12)))
    assert found[0] == found[1]
    with pytest.raises(ValueError, match="attention_backend='dense': reads no fp8 KV cache; use torch"):
        make_llm(path, attention_backend="dense", kv_cache_dtype="fp8")


def test_the_store_of_the_guide(code):
    layers = [SimpleNamespace() for _ in range(3)]
    store = code.StateStore(layers, 10, CPU)
    store.allocate(num_blocks=5, num_cells=4)
    assert sum(layer.states.nbytes for layer in layers) == 4 * store.bytes_per_cell
    layers[1].states[0] = 7
    store.copy(0, 3)
    assert layers[1].states[3].eq(7).all()
    assert len({layer.states.data_ptr() for layer in layers}) == 3
    store.allocate(1, 4, is_shared=True)
    assert len({layer.states.data_ptr() for layer in layers}) == 1
    store.free()
    assert layers[0].states is None


def test_the_guide_names_every_back_end_and_method():
    for backend in choice.BACKENDS:
        file = f"{backend.__module__.rpartition('.')[2]}.py"
        assert f"| `{backend.name}` | `{file}`" in GUIDE
    for name in [*AttentionBackend.__abstractmethods__, "prepare", "layout", "host_arrays", "arguments"]:
        assert f"| `{name}(" in GUIDE, name
    for file in re.findall(r"`([\w/]+/\w+\.py)`", GUIDE):
        assert (ROOT / file).is_file(), file


def test_the_options_values_are_the_back_ends():
    allowed = Config.__dataclass_fields__["attention_backend"].metadata["choices"]
    assert set(allowed) == {"auto", *(backend.name for backend in choice.BACKENDS)}
    assert Config.attention_backend == "auto"
