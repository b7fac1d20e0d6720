"""A job in processes that are killed, interrupted and starved of disk. (test_faulty_disk.py looks at every moment.)"""

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_files import ReadHere, num_rows, prompts, read_folder, write_lines
from kernel_harness import nightly

from nanovllm.jobs import run_batch, work
from nanovllm.jobs.lines import LineFormat
from nanovllm.jobs.reader import ReadAhead, ReadPlan
from nanovllm.jobs.tasks.generate import Generate

DEMO_MODEL = Path(__file__).parents[2] / "assets" / "demo-model"
NUM_LINES, MAX_BYTES = 120, 5000  # The answers take more.
OPTIONS = {
    "temperature": 0,
    "max_tokens": 24,
    "kvcache_gib": 0.1,
    "max_num_seqs": 4,
    "device": "cpu",
}  # They take a while.


def command(file, folder, *more) -> list[str]:
    options = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", value)]
    files = ["-i", file, "-o", folder, "--model", DEMO_MODEL]
    return list(map(str, [sys.executable, "-m", "nanovllm", "run-batch", *files, *options, *more]))


def start(*args, **options) -> subprocess.Popen:
    return subprocess.Popen(command(*args), stderr=subprocess.PIPE, text=True, **options)


def wait_for_rows(process, folder, num) -> None:
    while process.poll() is None and num_rows(folder) < num:
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGTERM, *nightly(signal.SIGINT)])
def test_starved_killed_and_interrupted(tmp_path, monkeypatch, second):
    """A limit of the size of files stands for a full disk."""
    rows = [{"id": i, "prompt": f"def {('read', 'write', 'is_')[i % 3]}_{i}("} for i in range(NUM_LINES)]
    file, answers = write_lines(tmp_path / "prompts.jsonl", rows), tmp_path / "answers"
    limits = (MAX_BYTES, MAX_BYTES)
    process = start(file, answers, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1, said
    assert f"{answers}: cannot be written: [Errno 27] File too large: '{answers}/_part-00000.jsonl.tmp'" in said
    assert "The same command goes on with the job." in said
    assert 0 < num_rows(answers) < NUM_LINES

    for number in (signal.SIGKILL, second):
        process = start(file, answers, "--retry-errors")
        wait_for_rows(process, answers, num_rows(answers) + 1)
        process.send_signal(number)
        _, said = process.communicate(timeout=300)
        assert 0 < num_rows(answers) < NUM_LINES
        if number == signal.SIGKILL:
            continue
        assert process.returncode == 130, said
        assert f"Interrupted. To go on: nanovllm run-batch -i {file} -o {answers} --model {DEMO_MODEL}" in said
        assert said.rstrip().endswith("--device cpu")
        assert "Traceback" not in said
        assert not list(answers.glob("*.tmp"))

    monkeypatch.setattr(work, "ReadAhead", ReadHere)
    assert run_batch(file, answers, DEMO_MODEL, **OPTIONS)[:3] == (NUM_LINES, NUM_LINES, 0)
    assert sorted(row["id"] for row in read_folder(answers)) == list(range(NUM_LINES))


def test_the_reading_process(tmp_path):
    """What it raises is raised here, as is its death, and it does not outlive the job."""
    file = write_lines(tmp_path / "prompts.jsonl", prompts(3))
    plan = ReadPlan([str(file)], Generate(LineFormat()), str(tmp_path), None, None, 256, None)
    with ReadAhead(plan) as lines, pytest.raises(FileNotFoundError, match=r"holds no tokenizer\.json"):
        list(lines)
    with ReadAhead(plan) as lines:
        lines._process.kill()
        with pytest.raises(RuntimeError, match="the process that reads the input has died"):
            list(lines)
    with ReadAhead(plan) as lines:
        pass
    assert lines._process.returncode is not None
