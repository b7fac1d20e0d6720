"""Processes that this library starts import nothing that lies in the current directory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

import nanovllm
from nanovllm.utils.python_process import python_command

ROOT = str(Path(nanovllm.__file__).parents[1])
NAMES = ("json", "nanovllm", "socket", "signal", "pickle", "queue", "torch", "numpy", "readline")


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A current directory with modules that write down that they have been executed."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'executed')!r}, 'a').write('{name} ')\nraise SystemExit\n"
        )
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    yield folder
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()


def run_python(code: str, *more: str) -> subprocess.CompletedProcess:
    """Code in a process that has not the current directory on its path, as a console script has it."""
    command = [sys.executable, "-c", f"import sys; sys.path.remove(''); {code}", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_command_has_this_processs_path(trap, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, "relative"])
    command = python_command("import json, nanovllm; print(json.dumps([sys.path, nanovllm.__file__, sys.argv[1]]))")
    done = subprocess.run([*command, "word"], capture_output=True, text=True, timeout=300)
    path, file, word = json.loads(done.stdout)
    assert path == [os.path.abspath(entry) for entry in sys.path]
    assert (file, word) == (nanovllm.__file__, "word")


def test_the_reader_of_a_job(trap, tmp_path):
    model = make_checkpoint(tmp_path / "model", tokenizer=True)
    (trap / "a.jsonl").write_text('{"prompt": "a block", "max_tokens": 2}\n')
    code = "from nanovllm.cli import main; sys.exit(main(sys.argv[1:]))"
    batch = ["run-batch", "-i", "a.jsonl", "-o", "answers", "--model", str(model), "--device", "cpu"]
    done = run_python(code, *batch)
    assert done.returncode == 0, done.stderr
    assert list(trap.glob("answers/part-*"))


@pytest.mark.nightly
def test_workers_of_ray(trap, tmp_path):
    pytest.importorskip("ray")
    model = make_checkpoint(tmp_path / "model", tokenizer=True)
    (trap / "a.jsonl").write_text('{"prompt": "a block"}\n')
    code = "from nanovllm.cli import main; sys.exit(main(sys.argv[1:]))"
    batch = ["run-batch", "-i", "a.jsonl", "-o", "answers", "--model", str(model), "--device", "cpu"]
    done = run_python(code, *batch, "--replicas", "1", "--max-tokens", "2")
    assert done.returncode == 0, done.stderr
    assert list(trap.glob("answers/part-*"))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no safe path")
def test_workers_of_other_ranks(trap, tmp_path):
    model = make_checkpoint(tmp_path / "model")
    code = (
        "from nanovllm import LLM, SamplingParams\n"
        f"with LLM({str(model)!r}, device='cpu', tensor_parallel_size=2, skip_tokenizer_init=True) as llm:\n"
        "    print(len(llm.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))[0]['token_ids']))\n"
        "import os; assert 'PYTHONSAFEPATH' not in os.environ\n"
    )
    done = run_python("exec(sys.argv[1])", code)
    assert done.stdout == "3\n", done.stderr


def test_compile_processes(trap):
    code = (
        "from nanovllm.engine.start.package_kernels import CompileProcesses\n"
        "with CompileProcesses(['json']) as processes:\n"
        "    processes.submit([])\n"
        "    processes.wait(lambda done, all: None)\n"
        "    print([process.returncode for process in processes._processes])\n"
    )
    done = run_python("exec(sys.argv[1])", code)
    assert set(json.loads(done.stdout)) == {0}, done.stderr


def test_the_module_as_a_command(trap):
    """Python itself imports nanovllm first, which is found there if it lies there."""
    (trap / "nanovllm.py").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "nanovllm", "run-batch", "--help"], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
