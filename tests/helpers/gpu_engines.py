"""Engines and checkpoints of the tests on a CUDA device."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checkpoints import make_llm
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from nanovllm import LLM
from nanovllm.engine.start import build
from nanovllm.layers.matmul.table import Key, Table, load_table

HAS_FLASH_ATTN = find_spec("flash_attn_2_cuda") is not None
DEMO_MODEL = Path(__file__).parents[2] / "assets" / "demo-model"

# Logits below the best that rounding may choose; they spread by 1.7. Measured likewise: 0, 0.05 and 0.
REGRET = {"bfloat16": 0.2, "float16": 0.03}
SHAPES = {
    64: {"num_attention_heads": 8, "num_key_value_heads": 2},
    128: {"num_attention_heads": 4, "num_key_value_heads": 4},
}
needs_flash_attn = pytest.mark.skipif(not HAS_FLASH_ATTN, reason="needs flash-attn")
needs_demo_model = pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="needs assets/demo-model")


DEMO_PROMPTS = [
    "import os\nimport sys\n\n\ndef main():\n",
    "def read_file(path):\n    with open(path) as f:\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n",
    "    def __repr__(self):\n        return ",
    "for i in range(10):\n    print(",
    "try:\n    import json\nexcept ImportError:\n",
    "    def test_simple(self):\n        self.assertEqual(",
    'def add(a, b):\n    """Return the sum of a and b."""\n    return ',
    "if not isinstance(value, str):\n    raise TypeError(",
    "import threading\n\nlock = threading.Lock()\n\nwith lock:\n",
    "    while True:\n        line = self.readline()\n        if not line:\n",
    "def parse_args():\n    parser = argparse.ArgumentParser(",
    "result = []\nfor name, value in sorted(items.items()):\n    result.append(",
    "    @property\n    def name(self):\n        return self.",
    'if __name__ == "__main__":\n    ',
    "class ParseError(Exception):\n    ",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return ",
    "    try:\n        return self._cache[key]\n    except KeyError:\n        ",
    "from collections import namedtuple\n\nPoint = namedtuple(",
    "    def close(self):\n        if self._file is not None:\n            self._file.",
]


def cases(names, *rows):
    """Parameters that vary together, as a start of an engine takes seconds. Rows of flash_attn need the package;
    `shaped` is a head_dim for the fixture."""
    params = []
    for row in rows:
        words = (
            ("" if value else "not-") + name if isinstance(value, bool) else str(value)
            for name, value in zip(names.split(), row, strict=True)
        )
        params.append(pytest.param(*row, id="-".join(words), marks=needs_flash_attn if "flash_attn" in row else ()))
    return pytest.mark.parametrize(names.split(), params, indirect=["shaped"] if "shaped" in names else False)


@cache
def flash_attn_has(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether this build of flash-attn computes such heads: one built for fewer kinds returns nonsense for others."""
    from flash_attn import flash_attn_func

    q, k, v = torch.randn(3, 1, 40, 2, head_dim, device="cuda", dtype=dtype)
    expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    return torch.allclose(flash_attn_func(q, k, v, causal=True), expected, atol=3e-2)


def keys_of(path) -> list[Key]:
    """What a table has rows for, of a checkpoint's model on one GPU."""
    config = AutoConfig.from_pretrained(path)
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    shapes = [("linear", q + 2 * kv, hidden), ("linear_add", hidden, q), ("linear_add", hidden, intermediate)]
    shapes.append(("linear_silu", 2 * intermediate, hidden))
    return [Key(name, phase, N, K, "bfloat16") for name, N, K in shapes for phase in ("decode", "prefill")]


def use_table(monkeypatch, table: Table) -> None:
    """Have engines find these rows before all others."""
    monkeypatch.setattr(build, "load_table", lambda device: load_table(device).updated(table))


def gpu_llm(path, **options) -> LLM:
    if options.get("attention_backend") == "flash_attn" and options.get("dtype") in REGRET:
        dtype, head_dim = getattr(torch, options["dtype"]), AutoConfig.from_pretrained(path).head_dim
        if not flash_attn_has(dtype, head_dim):
            pytest.skip(f"this build of flash-attn has no kernels for heads of {head_dim} in {dtype}")
    defaults = {"device": "cuda", "kvcache_block_size": 256, "num_kvcache_blocks": 24, "max_num_batched_tokens": 2048}
    return make_llm(path, **defaults | options)


def assert_replays_repeat(run, residual: torch.Tensor, start: torch.Tensor, count: int) -> None:
    """`run`, which changes a residual and has been run once, gives the same bits in every replay of a CUDA graph."""
    expected = residual.clone()
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        residual.copy_(start)
        run()
    for _ in range(count):
        graph.replay()
        assert torch.equal(residual, expected)
