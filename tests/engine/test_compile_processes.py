"""Tasks in processes beside this one: all are tried, whatever becomes of some, and nothing is left running."""

import os
from pathlib import Path

import pytest

from nanovllm.engine.start.package_kernels import CompileProcesses


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


@pytest.fixture
def processes():
    before = children()
    with CompileProcesses(["json", "no_such_module"]) as processes:
        yield processes
    assert children() <= before


def test_tasks_run_elsewhere(processes, tmp_path):
    processes.submit([(Path.touch, tmp_path / str(i)) for i in range(5)])
    told = []
    processes.wait(lambda done, total: told.append((done, total)))
    assert sorted(path.name for path in tmp_path.iterdir()) == list("01234")
    assert told == [(i, len(told)) for i in range(len(told))]


def test_a_task_that_fails_and_one_that_prints(processes, tmp_path):
    tasks = [(os.rmdir, tmp_path / "missing"), (print, "not for the caller\n" * 3), (Path.touch, tmp_path / "last")]
    processes.submit(tasks)
    processes.wait(lambda done, total: None)
    assert (tmp_path / "last").exists()


def test_processes_that_die(processes):
    """The wait ends where nobody is left to do the tasks."""
    processes.submit([(os._exit, 1)] * 40)
    processes.wait(lambda done, total: None)


def test_processes_that_have_died_before_there_is_a_task(processes):
    for process in processes._processes:
        process.kill()
        process.wait()
    processes.submit([(print, "x" * 10**6)] * 40)
    processes.wait(lambda done, total: None)


def interrupted(path: Path) -> None:
    with CompileProcesses([]) as processes:
        processes.submit([(os.system, f"echo $$ > {path}; exec sleep 1000")])
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
