"""scripts/gpu_tests.py and what it rests on, without a GPU: commands, counts, and who else uses a device."""

import re
import sys
from contextlib import suppress
from types import SimpleNamespace

import gpu_tests
import lone_gpu
import pytest
import torch
from gpu_tests import Group, Machine, Result, groups, main, read_summary
from lone_gpu import Usage, others, read_pids

H100 = Machine("NVIDIA H100 80GB HBM3", 1, 78, 16)
GIB = 2**30


@pytest.mark.parametrize(
    ("machine", "num_processes"),
    [
        (H100, 8),
        (H100._replace(num_cores=4), 2),
        (H100._replace(num_cores=1), 1),
        (H100._replace(free_gib=20), 2),
        (H100._replace(free_gib=3), 1),
        (H100._replace(num_cores=224, free_gib=139), 12),
    ],
)
def test_as_many_processes_as_cores_and_memory_allow(machine, num_processes):
    assert machine.num_processes == num_processes


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_every_test_is_in_one_group(num_gpus, kernels):
    """And those of two GPUs in none where there is one."""
    found = groups(H100._replace(num_gpus=num_gpus), kernels)
    names = ("gpu", "kernel", "alone", "two_gpus")
    for bits in range(16):
        marks = dict(zip(names, (bool(bits & 1 << i) for i in range(4)), strict=True))
        if (marks["two_gpus"] or marks["alone"]) and not marks["gpu"]:
            continue
        chosen = [group.name for group in found if eval(group.marks, {}, marks)]
        is_missing = marks["two_gpus"] and num_gpus == 1 and not marks["alone"]
        is_wanted = marks["gpu"] or (marks["kernel"] and kernels)
        assert len(chosen) == (is_wanted and not is_missing), marks
        assert (chosen == ["alone"]) == marks["alone"]
    assert {group.name: group.num_processes for group in found}["alone"] == 1


def test_a_command():
    command = Group("all", "gpu and not alone", 8).command(["-k", "quack"])
    assert command[:3] == [sys.executable, "-m", "pytest"]
    assert command[command.index("-m", 3) + 1] == "gpu and not alone"
    assert "-n8" in command
    assert command[-2:] == ["-k", "quack"]
    assert "-n0" in Group("all", "gpu", 1).command()


@pytest.mark.parametrize(
    ("output", "code", "result"),
    [
        ("....\n12 passed in 3.21s\n", 0, Result(12, 0, 0)),
        ("== 1 failed, 2 passed, 3 skipped, 9 deselected, 1 warning in 62.00s (0:01:02) ==\n", 1, Result(2, 1, 3)),
        ("2 passed, 1 error in 0.10s\n", 1, Result(2, 1, 0)),
        ("3 failed, 2 errors in 0.10s\n", 1, Result(0, 5, 0)),
        ("5 passed in 1.00s\n[gw0] died\n1 failed, 7 passed in 2.00s\n", 1, Result(7, 1, 0)),
        ("400 deselected in 9.00s\n", 5, Result()),
        ("no tests ran in 0.01s\n", 5, Result()),
        ("Fatal Python error: Aborted\n", -6, Result(0, 1, 0)),
        ("3 passed in 1.00s\n", 3, Result(3, 1, 0)),
    ],
)
def test_the_counts_are_pytests(output, code, result):
    assert read_summary(output, code) == result


@pytest.fixture
def fake(monkeypatch):
    """Groups that end as they should, or as `fake.results` says."""
    fake = SimpleNamespace(machine=H100, results=[Result(300, 0, 4), Result(40, 0, 1)], commands=[])
    monkeypatch.setattr(gpu_tests, "find_machine", lambda: fake.machine)

    def run_group(command):
        fake.commands.append(command)
        return fake.results[len(fake.commands) - 1]

    monkeypatch.setattr(gpu_tests, "run_group", run_group)
    return fake


def test_the_row_of_the_table(fake, capsys):
    assert main(["--commit", "abc1234", "--", "-k", "quack"]) == 0
    assert all(command[-2:] == ["-k", "quack"] for command in fake.commands)
    *_, row = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\| \d{4}-\d\d-\d\d \| NVIDIA H100 80GB HBM3 \| abc1234 \| 340 \| 0 \| 5 \| \d+ s \|", row)


@pytest.mark.parametrize("results", [[Result(300, 0, 4), Result(39, 1, 1)], [Result(), Result()]])
def test_a_failure_or_no_test_at_all_is_an_exit_code(fake, results):
    fake.results = results
    assert main([]) == 1


def test_fewer_processes(fake):
    main(["--processes", "3"])
    assert ["-n3" in command for command in fake.commands] == [True, False]
    assert "-n0" in fake.commands[1]


def test_without_a_gpu_nothing_runs(fake, capsys):
    fake.machine = None
    assert main([]) == 2
    assert fake.commands == []
    assert "there is no GPU" in capsys.readouterr().err


def test_a_dry_run_shows_the_commands(fake, capsys):
    assert main(["--dry-run"]) == 0
    assert fake.commands == []
    assert "-m 'gpu and alone'" in capsys.readouterr().out


def test_this_machine_is_asked_in_another_process(monkeypatch):
    def answer(command, **options):
        assert command[:2] == [sys.executable, "-c"]
        compile(command[2], "ask", "exec")
        return SimpleNamespace(stdout="a warning\n2 78 NVIDIA H100 80GB HBM3\n")

    monkeypatch.setattr(gpu_tests.subprocess, "run", answer)
    assert gpu_tests.find_machine()[:3] == ("NVIDIA H100 80GB HBM3", 2, 78)


def test_counts_of_a_real_run(tmp_path):
    file = tmp_path / "test_three.py"
    file.write_text("def test_a(): pass\ndef test_b(): pass\ndef test_c(): assert 0\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n0", f"--rootdir={tmp_path}", str(file)]
    assert gpu_tests.run_group(command) == Result(2, 1, 0)


# -- alone on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "who"),
    [
        (Usage([10], 3 * GIB, 2 * GIB), None),
        (Usage([10, 11], 3 * GIB, 2 * GIB), None),  # a process of ours
        (Usage([10, 99], 3 * GIB, 2 * GIB), "process 99"),
        (Usage([777], 3 * GIB, 2 * GIB), None),  # ours, by its id outside the container
        (Usage([777, 778, 779], 3 * GIB, 2 * GIB), "1 other processes"),
        (Usage([], 3 * GIB, 2 * GIB), None),
        (Usage([], 9 * GIB, 2 * GIB), "others, 5.0 GiB"),
    ],
)
def test_who_else_uses_a_gpu(usage, who):
    assert others(usage, [10, 11]) == who


def test_processes_of_a_gpu():
    said = "GPU-aa, 10\nGPU-bb, 11\nGPU-aa, 12\nGPU-aa, [N/A]\n\n"
    assert read_pids(said, "aa") == [10, 12]
    assert read_pids("No devices were found\n", "aa") == []


@pytest.fixture
def disturb(monkeypatch):
    """disturb(who): another process uses the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def disturb(who):
        monkeypatch.setattr(lone_gpu, "others_on_gpu", lambda: who)

    return disturb


def item(*marks):
    return SimpleNamespace(get_closest_marker=lambda name: name in marks)


def run(item, error=None):
    """Run a test, which may raise an error."""
    lone_gpu.pytest_runtest_setup(item)
    call = lone_gpu.pytest_runtest_call(item)
    next(call)
    with suppress(StopIteration):
        next(call) if error is None else call.throw(error)


def test_a_test_that_needs_a_gpu_alone_is_skipped_where_it_is_not(disturb):
    disturb(None)
    run(item("gpu", "alone"))
    disturb("process 99")
    run(item("gpu"))
    with pytest.raises(pytest.skip.Exception, match="needs the GPU alone, and process 99 uses it too"):
        run(item("gpu", "alone"))


def test_a_failure_is_no_skip_unless_another_process_has_come(disturb):
    alone = item("gpu", "alone")
    disturb(None)
    with pytest.raises(AssertionError):
        run(alone, AssertionError())
    call = lone_gpu.pytest_runtest_call(alone)
    next(call)
    disturb("process 99")
    with pytest.raises(pytest.skip.Exception, match="failed while process 99 used the GPU too"):
        call.throw(AssertionError())


def test_nvidia_smi_that_is_missing_shows_nobody(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert lone_gpu._pids("aa") == []
