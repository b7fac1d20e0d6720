"""Replicas as the processes that they are: what they compute, how they end, and what they leave behind."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import faulty_replicas
import pytest
from checkpoints import complete, greedy, make_llm

from nanovllm import LLM, SamplingParams, WorkerError
from nanovllm.engine.replicas import replicas as replicas_module
from nanovllm.engine.replicas.replicas import Replicas

TESTS = Path(__file__).parents[1]
PROMPTS = [[1 + i, 2, 3 * i + 1] for i in range(12)]
OPTIONS = {"max_num_seqs": 4, "seed": 3}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def assert_gone(pids: list[int], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a replica is still there"
        time.sleep(0.05)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("nanovllm-replica")}


def test_processes_answer_as_one_engine_until_one_is_killed(spawned, path, capfd, monkeypatch):
    """All in one test, because a start takes seconds."""
    send_all = replicas_module._send_all
    # The end of a thread takes a while, as on a busy machine.
    monkeypatch.setattr(replicas_module, "_send_all", lambda *args: (send_all(*args), time.sleep(0.2)))
    params = [SamplingParams(max_tokens=5 + i, temperature=0.8) for i in range(12)]
    with make_llm(path, **OPTIONS) as one:
        expected = complete(one, PROMPTS, params)
    llm = make_llm(path, data_parallel_size=2, **OPTIONS)
    pids = [process.pid for process in llm.ps]
    assert [parent_of(pid) for pid in pids] == [os.getpid()] * 2, "children of the caller's own process"
    assert complete(llm, PROMPTS, params) == expected
    assert llm.model_runner.device_name == "2 x CPU"
    killed_at = []

    def kill(stats):
        if not killed_at:
            killed_at.append(time.monotonic())
            os.kill(pids[1], signal.SIGKILL)

    message = rf"replica 1 of 2 \(process {pids[1]}\) was killed by SIGKILL"
    with pytest.raises(WorkerError, match=message):
        llm.generate(PROMPTS, greedy(900), use_tqdm=False, on_step=kill)
    assert time.monotonic() - killed_at[0] < 15
    for use in (lambda: complete(llm, PROMPTS, greedy(2)), lambda: llm.add_request([1]), lambda: llm.sleep()):
        with pytest.raises(WorkerError, match=message):
            use()
    assert_gone(pids)
    llm.exit()
    assert not threads()
    with pytest.raises(RuntimeError, match="exited"):
        complete(llm, PROMPTS, greedy(2))
    assert capfd.readouterr().err == "", "the exception says it all"


@pytest.fixture
def faulty(monkeypatch):
    """faulty(kind): the second replica fails so, from here on."""
    start = Replicas._start

    def use(kind):
        monkeypatch.setenv(faulty_replicas.KIND, kind)
        run = faulty_replicas.faulty_main
        monkeypatch.setattr(Replicas, "_start", lambda self, options, _: start(self, options, run))
        # Told apart by their seeds, of which the caller's alone counts.
        seats = replicas_module.ReplicaSeat
        numbers = iter(range(9))
        monkeypatch.setattr(
            replicas_module,
            "ReplicaSeat",
            lambda model, options, *rest: seats(model, options | {"seed": next(numbers)}, *rest),
        )

    return use


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("die-first", WorkerError, r"replica 1 of 2 \(process \d+\) was killed by SIGKILL"),
        ("no-memory", MemoryError, r"data_parallel_size=2: replica 1 of 2 \(.*\) cannot start: no room for the weig"),
        ("bug", WorkerError, r"(?s)data_parallel_size=2: replica 1 .* cannot start: Traceback.*OnPurposeError: a repl"),
        ("step", WorkerError, r"(?s)replica 1 of 2 \(.*\) failed:.*Traceback.*OnPurposeError: a replica fails"),
        ("stop", WorkerError, "replica 1 of 2 .* has not answered for 4 s, which is watchdog_timeout"),
    ],
)
def test_a_fault_of_a_replica_is_an_error_that_names_it(path, faulty, capfd, kind, error, message):
    faulty(kind)
    options = OPTIONS | ({"watchdog_timeout": 4.0} if kind == "stop" else {})
    with pytest.raises(error, match=message):
        complete(make_llm(path, data_parallel_size=2, **options), PROMPTS, greedy(100))
    assert capfd.readouterr().err == ""


@pytest.mark.nightly
def test_replicas_of_two_ranks(path):
    with make_llm(path, **OPTIONS) as one:
        expected = complete(one, PROMPTS, greedy(8))
    with make_llm(path, data_parallel_size=2, tensor_parallel_size=2, **OPTIONS) as llm:
        pids = [process.pid for process in llm.ps]
        workers = [int(pid) for each in pids for pid in children(each)]
        assert len(workers) >= 2
        assert complete(llm, PROMPTS, greedy(8)) == expected
        assert llm.model_runner.device_name == "4 x CPU"
    assert_gone([*pids, *workers])


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


SCRIPT = """
import os, sys, time
from nanovllm import LLM, SamplingParams

if __name__ == "__main__":
    print("start", flush=True)
    llm = LLM(sys.argv[1], device="cpu", skip_tokenizer_init=True, kvcache_block_size=16, num_kvcache_blocks=64,
              data_parallel_size=2)
    print("pids", *(process.pid for process in llm.ps), flush=True)
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    is_told = False
    def tell(stats):
        global is_told
        if not is_told:
            is_told = True
            print("working", flush=True)
    while True:
        try:
            llm.generate([[1, 2, 3], [4, 5]] * 20, params, use_tqdm=False, on_step=tell)
        except KeyboardInterrupt:
            if sys.argv[2] == "goes on":
                out = llm.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
                print("usable", len(out[0]["token_ids"]), flush=True)
                llm.exit()
                break
            raise
"""


@pytest.fixture
def start(tmp_path, path):
    processes = []

    def start(*args, code=SCRIPT):
        script = tmp_path / "script.py"
        script.write_text(code)
        processes.append(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", str(script), str(path), *args],
                env=os.environ | {"PYTHONPATH": str(TESTS.parent)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                # A runner in the background of a shell ignores Ctrl-C, and what it starts inherits that.
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        with process, contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["starting", "working", "goes on", "killed"])
def test_ctrl_c_and_kill_leave_nothing_behind(start, way):
    process = start(way)
    assert process.stdout.readline() == "start\n"
    if way == "starting":
        deadline = time.monotonic() + 100
        while len(pids := children(process.pid)) < 3:  # The third one is multiprocessing's resource tracker.
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(2)
    else:
        name, *pids = process.stdout.readline().split()
        assert name == "pids", process.stderr.read()
        assert process.stdout.readline() == "working\n"
    if way == "killed":
        os.kill(process.pid, signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.stdout.read(), process.stderr.read()
    process.wait()
    assert_gone([*map(int, pids)], 60)
    if way == "goes on":
        assert out == "usable 3\n", err
        assert process.returncode == 0
    elif way != "killed":
        assert err.count("Traceback") == 1, err
        assert "KeyboardInterrupt" in err


@pytest.mark.nightly
def test_a_script_without_a_guard_is_told_so(start):
    code = SCRIPT.replace('if __name__ == "__main__":', "if True:")
    process = start("x", code=code)
    _, err = process.communicate()
    assert "data_parallel_size > 1 starts processes" in err
    assert 'if __name__ == "__main__":' in err


def test_a_daemon_may_not_start_replicas(path, monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(RuntimeError, match="data_parallel_size > 1 starts processes, which a daemonic process may not"):
        LLM(str(path), data_parallel_size=2, device="cpu")
