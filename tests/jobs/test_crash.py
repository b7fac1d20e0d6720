"""A job in processes that are killed, interrupted and starved of disk: in the end every line has one answer.

By hand, on the demo model: JOB_KILLS=50 JOB_LINES=2000 python -m pytest -n 0 tests/jobs/test_crash.py -k kill
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_files import ReadHere, by_id, num_rows, prompts, read_folder, write_lines

from nanovllm.jobs import run_batch, work
from nanovllm.jobs.lines import LineFormat
from nanovllm.jobs.reader import ReadAhead, ReadPlan

DEMO_MODEL = Path(__file__).parents[2] / "assets" / "demo-model"
NUM_KILLS, NUM_LINES = int(os.environ.get("JOB_KILLS", 1)), int(os.environ.get("JOB_LINES", 200))
OPTIONS = {
    "temperature": 0,
    "max_tokens": 24,
    "kvcache_gib": 0.1,
    "max_num_seqs": 4,
    "device": "cpu",
}  # They take a while.


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(the input, the answers of an undisturbed job, its seconds)"""
    root = tmp_path_factory.mktemp("job")
    rows = [{"id": i, "prompt": f"def {('read', 'write', 'is_')[i % 3]}_{i}("} for i in range(NUM_LINES)]
    file = write_lines(root / "prompts.jsonl", rows)
    start = time.monotonic()
    finish(file, root / "undisturbed")
    return file, read_folder(root / "undisturbed"), time.monotonic() - start


def finish(file, folder, ordered=False) -> None:
    """Run the job to its end, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "ReadAhead", ReadHere)
        assert run_batch(file, folder, DEMO_MODEL, ordered=ordered, **OPTIONS)[:3] == (NUM_LINES, NUM_LINES, 0)


def command(file, folder, *more) -> list[str]:
    options = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", value)]
    files = ["-i", file, "-o", folder, "--model", DEMO_MODEL]
    return list(map(str, [sys.executable, "-m", "nanovllm", "run-batch", *files, *options, *more]))


def start(*args, **options) -> subprocess.Popen:
    return subprocess.Popen(command(*args), stderr=subprocess.PIPE, text=True, **options)


def wait_for_rows(process, folder, num) -> None:
    while process.poll() is None and num_rows(folder) < num:
        time.sleep(0.01)


@pytest.mark.parametrize("ordered", [False, True])
def test_killed_at_random_moments(files, tmp_path, ordered):
    file, expected, seconds = files
    answers, rng, num_killed = tmp_path / "answers", random.Random(), 0
    while num_killed < NUM_KILLS:
        process = start(file, answers, *(["--ordered"] if ordered else []))
        if rng.random() < 0.3:  # at any moment, the start included
            time.sleep(rng.uniform(0, seconds))
        else:  # while it works
            wait_for_rows(process, answers, num_rows(answers) + rng.randint(1, max(2, NUM_LINES // NUM_KILLS)))
            time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.communicate()
        num_killed += 1
        if num_rows(answers) == NUM_LINES:  # Begin another one.
            finish(file, answers, ordered)
            assert by_id(read_folder(answers)) == by_id(expected)
            answers = tmp_path / f"answers-{num_killed}"
    finish(file, answers, ordered)
    found = read_folder(answers)
    assert by_id(found) == by_id(expected)
    assert not ordered or [row["id"] for row in found] == list(range(NUM_LINES))


def test_interrupted_and_starved(files, tmp_path):
    """A limit of the size of files stands for a full disk. Then SIGTERM, then Ctrl-C."""
    file, expected, _ = files
    answers = tmp_path / "answers"
    limit = len(json.dumps(expected[0])) * 20
    process = start(file, answers, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1, said
    assert f"{answers}: cannot be written: [Errno 27] File too large" in said
    assert "The same command goes on with the job." in said
    assert 0 < num_rows(answers) < NUM_LINES

    for number in (signal.SIGTERM, signal.SIGINT):
        process = start(file, answers, "--retry-errors")
        wait_for_rows(process, answers, num_rows(answers) + 1)
        process.send_signal(number)
        _, said = process.communicate(timeout=300)
        assert process.returncode == 130, said
        assert f"Interrupted. To go on: nanovllm run-batch -i {file} -o {answers} --model {DEMO_MODEL}" in said
        assert said.rstrip().endswith("--device cpu")
        assert "Traceback" not in said
        assert not list(answers.glob("*.tmp"))
        assert 0 < num_rows(answers) < NUM_LINES
    finish(file, answers)
    assert by_id(read_folder(answers)) == by_id(expected)


def test_the_reading_process(tmp_path):
    """What it raises is raised here, as is its death, and it does not outlive the job."""
    file = write_lines(tmp_path / "prompts.jsonl", prompts(3))
    plan = ReadPlan([str(file)], LineFormat(), str(tmp_path), None, None, 256, None)
    with ReadAhead(plan) as lines, pytest.raises(FileNotFoundError, match=r"holds no tokenizer\.json"):
        list(lines)
    with ReadAhead(plan) as lines:
        lines._process.kill()
        with pytest.raises(RuntimeError, match="the process that reads the input has died"):
            list(lines)
    with ReadAhead(plan) as lines:
        pass
    assert lines._process.returncode is not None
