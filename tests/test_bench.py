"""bench.py from a shell, as README has it."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_bench(*args) -> subprocess.CompletedProcess:
    command = [sys.executable, "bench.py", "--device", "cpu", "--bandwidth", "1", "--flops", "1", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_it_runs_a_model_of_few_token_ids_and_writes_its_figures(path, tmp_path):
    """As the demo model, of which the published prompts' ids are out of range."""
    done = run_bench("--model", path, "--workload", "laptop", "--passes", "2", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    assert "laptop, pass 1:" in done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    (figures,) = report["workloads"].values()
    assert 8 * 16 <= figures["tokens"] <= 8 * 32
    # What the engine chose where nothing was asked for, and what it found.
    assert report["engine"]["max_num_batched_tokens"] == 16384
    assert report["engine"]["num_kvcache_blocks"] > 0
    assert "quack-kernels" in report["packages"]


def test_a_wrong_option_is_named():
    done = run_bench("--workload", "no-such")
    assert done.returncode == 2
    assert "--workload" in done.stderr
    assert "laptop" in done.stderr
