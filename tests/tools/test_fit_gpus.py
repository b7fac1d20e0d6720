"""`nanovllm fit MODEL --gpus N`: which divisions a model allows, and which is the fastest."""

import re

import pytest
from checkpoints import make_checkpoint

from nanovllm.cli import main
from nanovllm.fit_gpus import divisions


def test_a_model_that_fits_one_gpu_runs_fastest_with_an_engine_on_each(capsys):
    assert main(["fit", "Qwen3-8B", "--gpus", "4"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"4 x 1 .* the fastest\n", out)
    assert out.count("the fastest") == 1
    assert "LLM('Qwen3-8B', data_parallel_size=4, tensor_parallel_size=1)" in out


def test_one_that_leaves_little_cache_is_divided():
    found = {each.num_engines: each for each in divisions("Qwen3-32B", 4, 80.0)}
    assert found[2].tokens_per_second > found[1].tokens_per_second > found[4].tokens_per_second > 0
    assert found[4].num_at_once < 20 < found[2].num_at_once


def test_one_that_fits_no_single_gpu(capsys):
    assert main(["fit", "Qwen3-32B", "--gpus", "2", "--gpu-memory", "40"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"2 x 1 +does not fit", out)
    assert re.search(r"1 x 2 .* the fastest", out)
    assert main(["fit", "Qwen3-32B", "--gpus", "2", "--gpu-memory", "20"]) == 1
    assert "fastest" not in capsys.readouterr().out


def test_a_number_that_does_not_divide_the_heads_says_so(tmp_path):
    path = make_checkpoint(tmp_path)  # It has 4 heads.
    one, three = divisions(str(path), 3, 80.0, max_model_len=200)
    assert one.tokens_per_second > 0
    assert three.num_gpus == 3
    assert "3" in three.problem
    assert not three.tokens_per_second


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpus", "0"], "gpus=0: must be in 1..64"),
        (["--gpus", "4", "--tensor-parallel-size", "2"], "tensor_parallel_size=2: with gpus, every number is tried"),
    ],
)
def test_wrong_calls(capsys, arguments, says):
    assert main(["fit", "Qwen3-8B", *arguments]) == 2
    assert says in capsys.readouterr().err
