"""`nanovllm fit MODEL --gpus N`: which divisions a model allows, and which is the fastest."""

import re

import pytest
from checkpoints import make_checkpoint

from nanovllm.cli import main
from nanovllm.fit import Question
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


def test_experts_are_divided_by_whole_ones_where_columns_cannot_be():
    """gpt-oss on four GPUs; the weights of one of eight are half of those of one of four, apart from the embedding."""
    found = {each.num_gpus: each for each in divisions("gpt-oss-120b", 8, 80.0)}
    assert all(each.tokens_per_second > 0 and not each.problem for each in found.values())
    weights = {n: Question("gpt-oss-120b", tensor_parallel_size=n).needs().weights for n in (2, 4, 8)}
    embedding = 201_088 * 2880 * 2
    assert weights[4] - embedding == pytest.approx((weights[2] - embedding) / 2, rel=0.01)
    assert weights[8] - embedding == pytest.approx((weights[4] - embedding) / 2, rel=0.01)


def test_neither_columns_nor_whole_experts(tmp_path):
    fields = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "max_window_layers": 0}
    path = make_checkpoint(tmp_path, family="qwen3_moe", **fields, num_key_value_heads=4)
    found = {each.num_gpus: each for each in divisions(str(path), 4, 80.0, quantization="mxfp4", max_model_len=200)}
    assert "tensor_parallel_size that divides the number of experts (3)" in found[2].problem


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
