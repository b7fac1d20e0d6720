"""`nanovllm eval`: what the harness is asked for, and mistakes. tests/integrations/test_lm_eval.py runs the harness."""

import argparse
import json

import pytest

from nanovllm.cli import main
from nanovllm.commands.eval import harness_words


@pytest.fixture
def read():
    """read(line): the harness's words for those of a line."""
    harness = argparse.ArgumentParser()
    for names in (("--model", "-M"), ("--config", "-C"), ("--num_fewshot", "-f"), ("--limit", "-L"), ("--use_cache",)):
        harness.add_argument(*names)
    for names in (("--tasks", "-t"), ("--model_args", "-a"), ("--gen_kwargs",)):
        harness.add_argument(*names, nargs="+")
    return lambda line: harness_words(line.split(), harness, ("hf", "vllm", "nanovllm"))


def evaluated(model: str, kind: str = "nanovllm") -> list[str]:
    return ["run", "--model", kind, "--model_args", json.dumps({"pretrained": model})]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a,b/c --tasks x y", [*evaluated("a,b/c"), "--tasks", "x", "y"]),
        ("run m -L 4", [*evaluated("m"), "-L", "4"]),
        ("--tasks x --model m", [*evaluated("m"), "--tasks", "x"]),
        ("--model=m -a dtype=float32", [*evaluated("m"), "-a", "dtype=float32"]),
        ("m --model hf", evaluated("m", "hf")),
        ("-M ./hf", evaluated("./hf")),
        ("--model vllm -a a=1,pretrained=m", ["run", "--model", "vllm", "-a", "a=1,pretrained=m"]),
        ("-a a=1 pretrained=m", ["run", "-a", "a=1", "pretrained=m"]),
        ("-C file -L 3", ["run", "-C", "file", "-L", "3"]),
        ("m --gen_kwargs pretrained=5", [*evaluated("m"), "--gen_kwargs", "pretrained=5"]),
    ],
)
def test_the_model_is_an_argument(read, line, words):
    assert read(line) == words


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "nanovllm eval: missing: MODEL (usage: nanovllm eval MODEL --tasks TASK [options])"),
        ("--tasks x", "missing: MODEL"),
        ("m --model n", "the model is given twice"),
        ("m -a dtype=float32 pretrained=n", "the model is given twice"),
        ('m --model_args={"pretrained":"n"}', "the model is given twice"),
        ("m --lim 4", "unknown option --lim: did you mean --limit?"),
        ("m --num-fewshot 4", "unknown option --num-fewshot: did you mean --num_fewshot?"),
        ("m --max-model-len 4", "unknown option --max-model-len: write --model_args max_model_len=..."),
        ("m --tp 2", "unknown option --tp: use --model_args tensor_parallel_size=..."),
        ("m --temperature 1", "unknown option --temperature: write --gen_kwargs temperature=..."),
        ("m --model", "argument --model/-M: expected one argument"),
    ],
)
def test_mistakes_are_named(read, capsys, line, message):
    with pytest.raises(SystemExit) as left:
        read(line)
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) <= 2


def test_the_version(capsys):
    assert main(["eval", "--version"]) == 0
    assert capsys.readouterr().out.startswith("nanovllm ")
