"""Benchmarks that replace parts of the engine by name find these parts, and run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, needs_family, needs_transformers

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(script: str, *args) -> str:
    command = [sys.executable, f"benchmarks/{script}.py", *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_a_start_is_divided_into_phases(path, tmp_path):
    file = tmp_path / "out.json"
    run("startup", "--model", path, "--json", file)
    report = json.loads(file.read_text())
    assert {"import torch", "config", "weights", "warm-up", "KV cache", "rest"} <= set(report["phases_s"])
    assert 0 < report["phases_s"]["weights"] < report["ready_s"]


def test_the_hosts_time_is_measured_without_a_model():
    assert run("host_batches", "--workload", "laptop", "--passes", 1).splitlines()[-1].startswith("laptop")


@pytest.mark.nightly
def test_what_runs_side_by_side_is_counted_without_a_model():
    rows = run("cache_traffic", "--model", "gemma-3-1b", "--gib", 0.1, "--workload", "long").splitlines()[1:]
    (_, *before), (*_, blocks, of_windows, steps, _, _) = (
        row.replace("windows give back", "windowed").split() for row in rows
    )
    assert int(of_windows) < int(before[1]) < int(blocks)
    assert int(steps) < int(before[3])


def test_texts_are_embedded_beside_transformers(path, tmp_path):
    file = tmp_path / "out.json"
    sizes = "--texts", 20, "--shortest", 3, "--longest", 40, "--passes", 1, "--device", "cpu"
    run("embedding", "--model", path, "--compare", "transformers", "--json", file, *sizes)
    report = json.loads(file.read_text())
    assert set(report["seconds"]) == {"nanovllm", "transformers"}
    assert 60 <= report["tokens"] <= 800
    assert report["share_of_floor"] > 0


@pytest.mark.nightly
@needs_family("qwen3_vl")
@needs_transformers("5")
def test_pages_are_read_and_counted(tmp_path):
    pytest.importorskip("PIL", reason="needs Pillow")
    file = tmp_path / "out.json"
    sizes = "--num-images", 3, "--width", 320, "--height", 448, "--output-tokens", 4, "--max-model-len", 300
    run(
        "images",
        "--model",
        "Qwen3-VL-2B",
        "--layers",
        2,
        "--device",
        "cpu",
        "--kvcache-gib",
        0.1,
        "--json",
        file,
        *sizes,
    )
    report = json.loads(file.read_text())
    assert report["job"]["prompt_tokens_per_image"] == 10 * 14 + 22
    assert report["job"]["output_tokens_per_second"] == pytest.approx(4 * report["job"]["images_per_second"])
    assert 0 < report["encoder"]["share"] < 1
    assert report["preprocessing"]["images_per_second"] > 0


@pytest.mark.nightly
def test_as_many_proposed_tokens_are_right_as_asked(tmp_path):
    model, file = make_checkpoint(tmp_path, vocab_size=10_016), tmp_path / "out.json"
    # The prompt's step gives one token, and the other eight take one token a step, or with two proposed ones three.
    sizes = "--prompt-tokens", 8, "--output-tokens", 9, "--max-speculative-tokens", 2, "--at-once", 1, "--passes", 1
    run("speculation", "--model", model, "--acceptance", 0, 1, "--json", file, *sizes)
    figures = json.loads(file.read_text())["figures"]
    per_step = {name.split(", ")[1]: of_name["tokens_per_step"] for name, of_name in figures.items()}
    assert per_step == {"without": 1, "nothing proposed": 1, "acceptance 0.0": 1, "acceptance 1.0": 9 / 4}


@pytest.mark.nightly
def test_replicas_are_compared_with_one_engine(tmp_path):
    model, file = make_checkpoint(tmp_path, vocab_size=10_016), tmp_path / "out.json"
    run("replicas", "--model", model, "--device", "cpu", "--workload", "laptop", "--replicas", 1, 2, "--json", file)
    one, two = json.loads(file.read_text())["rows"]
    assert two["laptop"]["tokens"] == 2 * one["laptop"]["tokens"]
    assert (one["laptop"]["times"], one["times_start"]) == (1, 1)
    assert two["device"] == "2 x CPU"


@pytest.mark.nightly
def test_the_cost_of_the_same_bits_is_that_of_the_same_work(tmp_path):
    file = tmp_path / "out.json"
    sizes = "--device", "cpu", "--layers", 1, "--dtype", "float32", "--rounds", 2, "--workload", "cpu-decode-1"
    run("deterministic", *sizes, "--json", file)
    report = json.loads(file.read_text())["dtypes"]["float32"]
    found = report["workloads"]["cpu-decode-1"]
    assert {which: len(passes) for which, passes in found["passes"].items()} == {"off": 2, "on": 2}
    assert found["cost"] == min(found["passes"]["on"]) / min(found["passes"]["off"]) - 1
    assert report["off"] == report["on"]
