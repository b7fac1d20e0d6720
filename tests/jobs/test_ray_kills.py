"""Jobs on Ray whose processes are killed at random moments, if NANOVLLM_RAY_KILLS says how many of each kind.

    NANOVLLM_RAY_KILLS=20 pytest -n 0 -s tests/jobs/test_ray_kills.py

Each kind of kill has its own job of NANOVLLM_RAY_LINES lines (by default 2,000), which must end with the answers of an
undisturbed greedy run.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from job_files import by_id, num_rows, prompts, read_folder, read_lines, write_lines

pytest.importorskip("ray")
NUM_KILLS = int(os.environ.get("NANOVLLM_RAY_KILLS", "0"))
pytestmark = pytest.mark.skipif(NUM_KILLS == 0, reason="NANOVLLM_RAY_KILLS=20 kills 20 processes of each kind")

NUM_LINES = int(os.environ.get("NANOVLLM_RAY_LINES", "2000"))
SECONDS_BETWEEN = 8.0


def command(path, prompts_file, answers, *more):
    options = ["--temperature", "0", "--max-tokens", "24", "--device", "cpu", "--max-model-len", "200"]
    options += ["--max-num-seqs", "8", "--kvcache-gib", "0.05", *more]
    return ["run-batch", "-i", str(prompts_file), "-o", str(answers), "--model", str(path), *options]


def start(arguments, log):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen([sys.executable, "-m", "nanovllm", *arguments], env=environment, stdout=log, stderr=log)


def descendants(pid: int) -> dict[int, str]:
    """Process ids below this one, with their titles."""
    children, titles = defaultdict(list), {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            titles[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (OSError, ValueError):
            continue
        children[parent].append(int(process.name))
    found, left = {}, [pid]
    while left:
        for child in children[left.pop()]:
            found[child] = titles[child]
            left.append(child)
    return found


def victims(job, kind: str) -> list[int]:
    if kind == "driver":
        return [job.pid]
    title = "ray::RayEngine"
    names = descendants(job.pid).items()
    return [pid for pid, name in names if name.startswith(title) and not name.endswith("Agent")]  # its raylet dies too


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["driver", "engine"])
def test_a_job_on_ray_survives_kills(path, tmp_path, kind):
    file = write_lines(tmp_path / "prompts.jsonl", [*prompts(NUM_LINES), "not json", {"id": "no prompt"}])
    answers, expected = tmp_path / "answers", tmp_path / "expected"
    with open(tmp_path / "log", "wb") as log:
        assert start(command(path, file, expected), log).wait() == 3
        rng, num_killed, num_starts, num_before, num_lines = random.Random(kind), 0, 1, 0, 0
        arguments = command(path, file, answers, "--replicas", "2")
        job = start(arguments, log)
        # Status 1: the job stopped half-way.
        while (status := job.poll()) is None or status in (-signal.SIGKILL, 1):
            if status is not None:
                assert num_starts <= num_killed, (tmp_path / "log").read_text()[-5000:]
                job, num_starts = start(arguments, log), num_starts + 1
            time.sleep(rng.uniform(0.1, SECONDS_BETWEEN))
            num_lines = num_rows(answers)
            found = victims(job, kind) if num_killed < NUM_KILLS else []
            # What is always killed while it starts makes no progress.
            if found and (num_lines > num_before or rng.random() < 0.05):
                os.kill(rng.choice(found), signal.SIGKILL)
                num_killed, num_before = num_killed + 1, num_lines
                if kind == "driver":
                    job.wait()
                print(f"{kind} {num_killed}: {num_lines} lines", flush=True)
    assert status == 3, (tmp_path / "log").read_text()[-5000:]
    print(f"{kind}: {num_killed} kills, {num_starts} starts, {len(list(answers.glob('part-*')))} parts")
    assert by_id(read_folder(answers)) == by_id(read_folder(expected))
    assert by_id(read_lines(answers / "_errors.jsonl")) == by_id(read_lines(expected / "_errors.jsonl"))
    assert not list(answers.glob("*.tmp"))
