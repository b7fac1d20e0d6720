"""README and the documentation have tables of speed: they say what the data say, and one command measures the data."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In the place of an interpreter: it writes a report of bench.py without an engine.
INTERPRETER = f"""#!{sys.executable}
import json, os, sys
script, *args = sys.argv[1:]
assert os.path.basename(script) == "bench.py"
model = args[args.index("--model") + 1]
workloads = args[args.index("--workload") + 1 : args.index("--passes")]
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([model, os.environ["CUDA_VISIBLE_DEVICES"], args]) + "\\n")
measured = dict(passes=[dict(seconds=0.5)], tokens=100, seconds=0.5, throughput=200.0, share_of_floor=0.25)
is_extra = args[args.index("--json") + 1].endswith("_extra.draft")
report = dict(device="NVIDIA H200", host={{}}, engine={{}}, bandwidth=1e12, flops=1e14, layer_flops=1e14)
report["packages"] = {{name: "1.0" if is_extra else None for name in os.environ["EXTRA"].split()}}
report["workloads"] = {{name: measured for name in workloads}}
with open(args[args.index("--json") + 1], "w") as file:
    json.dump(report, file)
sys.exit(model in os.environ["FAILS"].split())
"""


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """benchmarks/ is no package: its files import each other by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """measure_speed.py with an interpreter that measures nothing: (exit status, what was called)."""
    from measure_speed import main

    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(INTERPRETER)
    python.chmod(0o755)

    def run(*args, fails="", extra="flash-attn-4 quack-kernels", install=("--plain",)):
        calls.write_text("")
        monkeypatch.setenv("CALLS", str(calls))
        monkeypatch.setenv("FAILS", fails)
        monkeypatch.setenv("EXTRA", extra)
        pythons = [each for name in install for each in (name, str(python))]
        status = main([str(tmp_path / "out"), *pythons, "--commit", "abc1234", *args])
        return status, [json.loads(line) for line in calls.read_text().splitlines()]

    return run


def test_the_documents_have_the_figures_of_the_data(capsys):
    from speed_tables import main

    assert main(["--check"]) == 0, f"run benchmarks/speed_tables.py: {capsys.readouterr().out}"


def test_all_that_was_measured_has_a_place_in_the_tables():
    from measure_speed import BLOCKS
    from speed_data import load_figures, load_peers
    from speed_tables import CHOSEN, GLANCE, WORKLOADS

    places = {block.setup for block in BLOCKS}
    figures, peers = load_figures(), load_peers()
    assert {setup._replace(card="H200") for setup, _ in figures} <= places
    assert {workload for of_setup in figures.values() for workload in of_setup} <= set(WORKLOADS)
    assert {setup for setup, _ in peers} <= places
    for (setup, workload), engines in peers.items():
        ours = [figures[setup, install] for install in ("plain", "extra") if (setup, install) in figures]
        assert any(workload in each for each in ours), f"{setup} {workload}: only {engines} have a figure"
    assert set(CHOSEN) | {setup for _, setup, _ in GLANCE} <= {setup for setup, _ in figures}


def test_figures_go_from_the_command_into_the_tables(measure, tmp_path, monkeypatch):
    from measure_speed import read_reports
    from speed_data import Setup, load_figures, put

    status, _ = measure("--models", "Qwen3-4B", "gpt-oss-20b", install=("--plain", "--extra"))
    assert status == 0
    file = tmp_path / "speed.json"
    old = {"throughput": 1.0, "share_of_floor": 0.5}
    kept = {
        "install": "plain",
        "model": "Qwen3-4B",
        "gpus": 1,
        "commit": "old",
        "workloads": {"bench": old, "long": old},
    }
    other = {
        "install": "plain",
        "model": "Qwen3-4B",
        "quantization": "fp8",
        "commit": "old",
        "workloads": {"bench": old},
    }
    file.write_text(json.dumps({"rows": [kept, other]}))
    put(read_reports(tmp_path / "out", "H200"), file)
    found = load_figures(file)
    small, by_fp8 = Setup("Qwen3-4B"), Setup("Qwen3-4B", quantization="fp8")
    assert found[small, "plain"]["bench"] == (200.0, 800.0, "abc1234")
    assert found[small, "extra"]["prefill"] == (0.5, 0.125, "abc1234"), "seconds"
    assert found[small, "plain"]["long"] == (1.0, 2.0, "old"), "it was not measured again"
    assert found[by_fp8, "plain"]["bench"].commit == "old", "another format"
    assert found[Setup("gpt-oss-20b", kv_cache_dtype="fp8"), "extra"]["bench"].value == 200
    rows = json.loads(file.read_text())["rows"]
    assert all(row["workloads"] for row in rows)


def test_each_gpu_measures_both_installs_of_a_model_and_several_gpus_come_last(measure):
    status, calls = measure(
        *("--models", "Qwen3-8B", "gemma-4-31B", "--gpus", "3", "5", "--bandwidth", "4.27"),
        install=("--plain", "--extra"),
    )
    assert status == 0
    by_run: dict = {}
    for _, gpus, args in calls:
        report = Path(args[args.index("--json") + 1]).name
        by_run.setdefault(report.rsplit("_", 1)[0], []).append((report.rsplit("_", 1)[1], gpus))
        assert args[args.index("--bandwidth") + 1] == "4.27"
        assert "--flops" not in args, "measured by bench.py"
    for name, runs in by_run.items():
        assert [install for install, _ in runs] == ["plain.draft", "extra.draft"], name
        assert len({gpus for _, gpus in runs}) == 1, name
    assert {gpus for runs in by_run.values() for _, gpus in runs} == {"3", "5", "3,5"}
    of_several = [args for _, gpus, args in calls if gpus == "3,5"]
    assert of_several == [args for *_, args in calls[-len(of_several) :]]
    assert all("--tensor-parallel-size" in args for args in of_several)


def test_it_goes_on_where_it_was_and_names_what_is_missing(measure, capsys):
    models = "--models", "Qwen3-4B", "Llama-3.1-8B", "Qwen2.5-7B"
    status, calls = measure(*models, fails="Llama-3.1-8B")
    assert (status, len(calls)) == (1, 3)
    assert capsys.readouterr().err.split() == ["not", "measured:", "Llama-3.1-8B_plain.json"]
    status, calls = measure(*models, "--minutes", "0")
    assert (status, calls) == (1, [])
    status, calls = measure(*models)
    assert (status, [model for model, *_ in calls]) == (0, ["Llama-3.1-8B"])
    with pytest.raises(SystemExit):
        measure(*models, "--commit", "def5678")
    assert "is of commit abc1234, and the tree of def5678: name another folder" in capsys.readouterr().err


def test_an_interruption_starts_nothing_more(tmp_path):
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(f"#!/bin/sh\necho started >> {calls}\nexec sleep 60\n")
    python.chmod(0o755)
    script = str(ROOT / "benchmarks" / "measure_speed.py")
    command = [sys.executable, script, str(tmp_path / "out"), "--plain", str(python), "--commit", "abc1234"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        while not (calls.exists() and calls.read_text()) and process.poll() is None:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # As a terminal does: to the script and to what it has started.
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "interrupted: the same command goes on" in errors
    assert calls.read_text() == "started\n"
    assert not list((tmp_path / "out").glob("*.json"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--models", "Qwen3-5B"), "--models: the tables have no Qwen3-5B"),
        ((), "give --plain, --extra or both"),
        (("--extra", "no/python"), "--extra no/python: there is no such program"),
        (("--plain", sys.executable, "--gpus", "1", "1"), "--gpus 1 1: names a GPU twice"),
    ],
)
def test_what_cannot_be_measured_is_refused(measure, capsys, args, message):
    with pytest.raises(SystemExit):
        measure(*args, install=())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no reports of these models"),
        ('{"install": "plain", "com', "Qwen3-4B_plain.json: is no report"),
        ("[]", "Qwen3-4B_plain.json: is no report"),
        ('{"commit": "abc1234"}', "Qwen3-4B_plain.json: is no report"),
    ],
)
def test_what_is_no_report_is_not_put(tmp_path, text, message):
    from measure_speed import read_reports

    if text is not None:
        (tmp_path / "Qwen3-4B_plain.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_reports(tmp_path, "H200")


def test_reports_of_other_packages_are_not_put(measure, tmp_path):
    from measure_speed import read_reports

    measure("--models", "Qwen3-4B", extra="quack-kernels", install=("--plain", "--extra"))
    with pytest.raises(ValueError, match="with quack-kernels, and --extra is for flash-attn-4 and quack-kernels"):
        read_reports(tmp_path / "out", "H200")
    report = tmp_path / "out" / "Qwen3-4B_extra.json"
    report.replace(report.with_stem("Qwen3-4B_plain"))
    with pytest.raises(ValueError, match="with quack-kernels, and --plain is for no extra packages"):
        read_reports(tmp_path / "out", "H200")


def test_reports_of_another_card_are_not_put(measure, tmp_path):
    from measure_speed import read_reports

    measure("--models", "Qwen3-4B")
    with pytest.raises(ValueError, match="was measured on NVIDIA H200, not on H100: give --card"):
        read_reports(tmp_path / "out", "H100")


def test_a_document_without_a_place_for_its_table():
    from speed_tables import with_tables

    with pytest.raises(ValueError, match="needs one line '<!-- speed: written by"):
        with_tables("# Speed\n<!-- end of speed -->\n", {"speed": lambda: ["| a |"]})
    text = "a\n<!-- speed: written by benchmarks/speed_tables.py -->\nold\n<!-- end of speed -->\nb\n"
    new = with_tables(text, {"speed": lambda: ["| a |"]})
    assert new.split("\n\n")[1] == "| a |"
    assert with_tables(new, {"speed": lambda: ["| a |"]}) == new


def test_an_engine_without_a_figure_leaves_its_cell_empty():
    from speed_data import Setup
    from speed_tables import Speeds, label

    line = next(line for line in Speeds().of_card("H200", ("LMDeploy",)) if line.startswith("| Qwen3-1.7B | bench | |"))
    assert line.count("|") == 9
    assert label(Setup("Qwen3-8B", 2, "fp8", "fp8")) == "Qwen3-8B, weights and KV cache in fp8, 2 GPUs"
    assert label(Setup("Olmo-3-1025-7B", state_dtype="bfloat16")) == "Olmo-3-7B, states in bfloat16"
