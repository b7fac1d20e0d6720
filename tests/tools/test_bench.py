"""bench.py from a shell, as README has it."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanovllm.cli import main
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks
from nanovllm.layers.formats.int4 import Int4
from nanovllm.layers.formats.mxfp4 import Mxfp4

ROOT = Path(__file__).parents[2]


def run_bench(*args) -> subprocess.CompletedProcess:
    command = [sys.executable, "bench.py", "--device", "cpu", "--bandwidth", "1", "--flops", "1", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def plain_run(path, tmp_path_factory):
    """A run without options of formats: the process, and what it writes."""
    file = tmp_path_factory.mktemp("bench") / "out.json"
    done = run_bench("--model", path, "--workload", "laptop", "--passes", "2", "--json", file)
    assert done.returncode == 0, done.stderr
    return done, json.loads(file.read_text())


def test_it_runs_a_model_of_few_token_ids_and_writes_its_figures(plain_run):
    """As the demo model, of which the published prompts' ids are out of range."""
    done, report = plain_run
    assert "laptop, pass 1:" in done.stdout
    (figures,) = report["workloads"].values()
    assert 8 * 16 <= figures["tokens"] <= 8 * 32
    # What the engine chose where nothing was asked for, and what it found.
    assert report["engine"]["max_num_batched_tokens"] == 16384
    assert report["engine"]["num_kvcache_blocks"] > 0
    assert "quack-kernels" in report["packages"]


@pytest.fixture
def bench(monkeypatch):
    return importlib.import_module("nanovllm.bench.run")


@pytest.fixture
def refuse(bench, monkeypatch, capsys):
    """Run the command in this process with arguments that end it: what it says."""

    def run(*args) -> str:
        try:
            status = main(["bench", "--device", "cpu", *map(str, args)])
        except SystemExit as left:
            status = left.code
        assert status == 2
        return capsys.readouterr().err

    return run


@pytest.fixture
def no_engine(bench, monkeypatch):
    def refuse(*args, **options):
        raise ValueError("an engine was made")

    monkeypatch.setattr(bench, "LLM", refuse)


def test_a_wrong_option_is_named(refuse, no_engine):
    said = refuse("--workload", "no-such")
    assert "--workload" in said
    assert "laptop" in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--passes", 0), "--passes 0: must be 1 or more"),
        (("--passes", -3), "--passes -3: must be 1 or more"),
        (("--bandwidth", 0), "--bandwidth 0.0: must be a number > 0"),
        (("--bandwidth", "nan"), "--bandwidth nan: must be a number > 0"),
        (("--flops", -1), "--flops -1.0: must be a number > 0"),
        (("--flops", "inf"), "--flops inf: must be a number > 0"),
        (("--temperature", -1), "temperature=-1.0"),
        (("--temperature", "nan"), "temperature=nan"),
        (("--top-p", 0), "top_p=0.0"),
        (("--top-k", -5), "top_k=-5"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_before_the_run(refuse, no_engine, args, message):
    assert message in refuse(*args)


def test_a_report_that_cannot_be_written_is_refused_before_the_run(refuse, no_engine, tmp_path):
    missing, file = tmp_path / "no-such-folder" / "out.json", tmp_path / "file"
    file.write_text("kept")
    assert f"--json {missing}: cannot be written: No such file or directory" in refuse("--json", missing)
    assert f"--json {tmp_path}: cannot be written: Is a directory" in refuse("--json", tmp_path)
    assert "cannot be written: Not a directory" in refuse("--json", file / "out.json")
    # Nothing is left of a look at what can be written.
    for good in (file, tmp_path / "out.json"):
        assert "an engine was made" in refuse("--json", good)
    assert file.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--max-model-len", 10**9), "max_model_len=1000000000: must be an integer in 2..16777216"),
        (("--model", "/no/such/model"), "model='/no/such/model': no such directory"),
        (("--max-model-len", 20), "--workload laptop: has sequences of "),
    ],
    ids=str,
)
def test_what_the_engine_refuses_is_one_line(refuse, path, args, message):
    model = () if "--model" in args else (path,)
    assert message in refuse(*model, "--workload", "laptop", *args)


@pytest.fixture
def asked_options(bench, monkeypatch, path):
    """Run the command in this process up to its engine: the engine's options."""
    asked = []

    def remember(*args, **options):
        asked.append(options)
        raise ValueError("an engine was made")

    def run(*args) -> dict:
        assert main(["bench", str(path), "--device", "cpu", *args]) == 2
        return asked.pop()

    monkeypatch.setattr(bench, "LLM", remember)
    return run


@pytest.mark.parametrize(("names", "most"), [(["laptop"], 512), (["laptop", "throughput"], 1024)])
def test_a_workload_says_how_many_sequences_run_at_once(asked_options, names, most):
    assert asked_options("--workload", *names)["max_num_seqs"] == most


@pytest.mark.parametrize(("args", "is_on"), [((), True), (("--no-enable-prefix-caching",), False)])
def test_the_prefix_cache_can_be_switched_off(asked_options, args, is_on):
    assert asked_options(*args)["enable_prefix_caching"] is is_on


@pytest.mark.parametrize("args", [(), ("--plain",)])
def test_the_plain_model_and_the_simple_loop_can_be_asked_for(asked_options, args):
    options = asked_options(*args)
    assert options["plain"] is bool(args)
    assert options["overlap_steps"]
    assert not asked_options(*args, "--no-overlap-steps")["overlap_steps"]


@pytest.mark.parametrize(("weights", "rate"), [(None, 1), (Fp8(), 2), (Fp8Blocks(), 2), (Int4(), 1), (Mxfp4(), 1)])
def test_only_weights_in_fp8_have_the_rate_of_fp8(bench, weights, rate):
    given = {"bandwidth": 1.0, "flops": 1.0, "fp8_flops": 2.0}
    found = bench.find_ceilings(given, torch.device("cpu"), torch.bfloat16, weights)
    assert found == (1e12, 1e12, rate * 1e12)


@pytest.mark.nightly
def test_formats_are_options_of_the_engine_and_of_the_floor(path, plain_run, tmp_path):
    file, formats = tmp_path / "out.json", ("--quantization", "fp8", "--kv-cache-dtype", "fp8", "--fp8-flops", "2")
    done = run_bench("--model", path, "--workload", "laptop", "--json", file, *formats)
    assert done.returncode == 0, done.stderr
    assert "weights of linear layers: float8_e4m3fn" in done.stderr + done.stdout
    plain, found = (
        report["workloads"]["laptop"]["floor_seconds"] for report in (plain_run[1], json.loads(file.read_text()))
    )
    assert found < plain
