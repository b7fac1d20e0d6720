"""Tasks in processes beside this one: all are tried, whatever becomes of some, and nothing is left running."""

import os
from pathlib import Path

import pytest

from nanovllm.engine.runner.package_kernels import CompileProcesses


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


@pytest.fixture
def processes():
    before = children()
    with CompileProcesses(["json", "no_such_module"]) as processes:
        yield processes
    assert children() <= before


def test_tasks_run_elsewhere_and_are_counted(processes, tmp_path):
    for i in range(5):
        processes.submit(Path.touch, tmp_path / str(i))
    told = []
    processes.wait(lambda done, total: told.append((done, total)))
    assert sorted(path.name for path in tmp_path.iterdir()) == list("01234")
    assert set(told) <= {(i, 5) for i in range(5)}
    assert told[0][0] <= told[-1][0]


def test_a_task_that_fails_and_one_that_prints(processes, tmp_path):
    processes.submit(os.rmdir, tmp_path / "missing")
    processes.submit(print, "not an answer\n" * 3)
    processes.submit(Path.touch, tmp_path / "last")
    processes.wait(lambda done, total: None)
    assert (tmp_path / "last").exists()


def test_processes_that_die(processes):
    """The wait ends where nobody is left to do the tasks."""
    for _ in range(40):
        processes.submit(os._exit, 1)
    processes.wait(lambda done, total: None)


def interrupted(path: Path) -> None:
    with CompileProcesses([]) as processes:
        processes.submit(os.system, f"echo $$ > {path}; exec sleep 1000")
        while not (path.exists() and path.read_text()):
            pass
        raise KeyboardInterrupt


def test_an_exception_ends_them_and_what_they_have_started(tmp_path):
    before = children()
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "pid")
    assert children() <= before
    compiler = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    # Its parent has ended: whoever collects it now may take a moment.
    assert not compiler.exists() or compiler.read_text().split()[2] == "Z"
