"""`nanovllm fit`: what it says of a model, and that a real engine agrees."""

import re

import pytest
import torch
from checkpoints import make_checkpoint

from nanovllm import LLM
from nanovllm.cli import main
from nanovllm.config import Config
from nanovllm.fit import GIB, needs


def fit(capsys, *arguments: str) -> tuple[int, str]:
    status = main(["fit", *arguments])
    return status, capsys.readouterr().out


def test_a_published_shape_on_common_cards(capsys):
    """Qwen3-8B: 8.19 billion parameters of two bytes; keys and values of 36 layers, 8 heads, 128 dimensions."""
    status, out = fit(capsys, "Qwen3-8B")
    assert status == 0
    assert float(re.search(r"weights +([\d.]+) GiB", out)[1]) == pytest.approx(8.19e9 * 2 / GIB, abs=0.05)
    assert "144.0 KiB a token" in out
    answers = dict(re.findall(r"(\d+) GiB +(yes|no)", out))
    assert answers["16"] == "no"
    assert answers["24"] == "yes"


def test_formats_and_gpus_change_the_answer(capsys):
    assert fit(capsys, "Qwen3-8B", "--gpu-memory", "12")[0] == 1
    assert fit(capsys, "Qwen3-8B", "--gpu-memory", "12", "--quantization", "fp8", "--kv-cache-dtype", "fp8")[0] == 0
    assert fit(capsys, "Qwen3-8B", "--gpu-memory", "12", "--tensor-parallel-size", "2")[0] == 0


def test_a_checkpoint_of_ones_own(capsys, tmp_path):
    status, out = fit(capsys, str(make_checkpoint(tmp_path)), "--gpu-memory", "8", "--max-model-len", "64")
    assert status == 0
    assert "sequences of 64 tokens" in out


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-8B", "gemma-3-4b"])
def test_a_real_engine_has_room_for_about_as_many_tokens(model):
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "gpu_memory_utilization": 0.8, "dtype": "bfloat16"}
    expected = needs(Config(model, **options, device="cpu"))
    with LLM(model, **options) as llm:
        memory = torch.cuda.get_device_properties(0).total_memory
        manager = llm.scheduler.block_manager
        real = len(manager.blocks) * manager.block_size
        assert real == pytest.approx(expected.on(memory, llm.config).num_tokens, rel=0.05)
