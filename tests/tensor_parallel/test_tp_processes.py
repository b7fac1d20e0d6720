"""Whole programs with workers: how they end, and what they leave behind."""

import contextlib
import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from checkpoints import Reference, assert_idle, complete, greedy, make_checkpoint, make_llm
from listeners import LOOPBACK, listening_addresses

from nanovllm.engine.ranks.workers import Workers

TESTS = Path(__file__).parents[1]
PREAMBLE = """
import os, sys
from nanovllm import LLM, SamplingParams

def make_llm(size):
    llm = LLM(sys.argv[1], device="cpu", skip_tokenizer_init=True, kvcache_block_size=16, num_kvcache_blocks=64,
              tensor_parallel_size=size)
    if size > 1:
        workers = llm.model_runner.event
        print("workers", *(process.pid for process in workers._processes.values()), flush=True)
    return llm

def run(llm, prompt, max_tokens):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate([prompt], params, use_tqdm=False)[0]["token_ids"]
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="module")
def reference(path):
    return Reference(path)


@pytest.fixture
def start(tmp_path, path):
    """Runs a script in a session of its own, which ends with the test."""
    processes = []

    def start(code, *args):
        script = tmp_path / f"script{len(processes)}.py"
        script.write_text(PREAMBLE + code)
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(path), *map(str, args)],
            env=os.environ | {"PYTHONPATH": str(TESTS.parent)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A runner in the background of a shell ignores Ctrl-C, and what it starts inherits that.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        with process, contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def worker_pids(process) -> list[int]:
    name, *pids = process.stdout.readline().split()
    assert name == "workers", rest(process)
    return [int(pid) for pid in pids]


def rest(process) -> tuple[str, str]:
    """What the process still says until it ends: (stdout, stderr). Not by `communicate`, which passes over what
    `readline` has read ahead."""
    process.stdin.close()
    said = process.stdout.read(), process.stderr.read()
    process.wait()
    return said


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def child_pids(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """At once on a quiet machine; on a busy one a process may first have to import torch."""
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)), "a worker is still there")


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("nanovllm-", "sem.mp-"))}


@pytest.mark.slow
@pytest.mark.parametrize("moment", [pytest.param("starting", marks=pytest.mark.nightly), "working"])
def test_workers_end_with_a_caller_that_is_killed(start, moment):
    before = shared_memory()
    process = start(
        """
if __name__ == "__main__":
    print("main", os.getpid(), flush=True)
    llm = make_llm(2)
    while True:
        run(llm, [1, 2, 3], 900)
"""
    )
    process.stdout.readline()
    if moment == "starting":
        pids = []
        while not pids:
            pids = child_pids(process.pid)
        time.sleep(1.0)
        pids = child_pids(process.pid)
    else:
        pids = worker_pids(process)
        time.sleep(0.3)
    process.kill()
    left = shared_memory() - before  # some of it perhaps another test's, which goes as well
    wait_until_gone(pids)
    wait_until(lambda: not left & shared_memory(), "shared memory is still there")


INTERRUPTED = """
if __name__ == "__main__":
    llm = make_llm(2)
    answer = "on\\n"
    while answer == "on\\n":
        try:
            print("running", flush=True)
            while True:
                run(llm, [4] * 40, 300)
        except KeyboardInterrupt:
            print("interrupted", *run(llm, [1, 2, 3], 12), flush=True)
        answer = sys.stdin.readline()
    llm.exit()
    print("exited", flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_leaves_a_usable_engine(start, reference):
    process = start(INTERRUPTED)
    pids = worker_pids(process)
    expected = ["interrupted", *map(str, reference.greedy([[1, 2, 3]], 12)[0])]
    rng = random.Random(0)
    for answer in ["on\n"] * 11 + ["off\n"]:
        assert process.stdout.readline() == "running\n"
        time.sleep(rng.uniform(0.0, 0.25))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
        assert process.stdout.readline().split() == expected
        process.stdin.write(answer)
        process.stdin.flush()
    assert rest(process) == ("exited\n", "")
    assert process.returncode == 0
    wait_until_gone(pids)


@pytest.mark.nightly
def test_ctrl_c_in_a_script_is_said_once(start):
    process = start(
        """
if __name__ == "__main__":
    llm = make_llm(2)
    while True:
        run(llm, [1, 2, 3], 900)
"""
    )
    pids = worker_pids(process)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, err = rest(process)
    # Python forgets that Ctrl-C ended it, and says 1, if any library compiles code from a string while it exits.
    assert process.returncode in (-signal.SIGINT, 1), err
    assert err.count("Traceback") == err.count("KeyboardInterrupt") == 1
    wait_until_gone(pids)


HUNG = """
if __name__ == "__main__":
    llm = make_llm(2)
    try:
        print("running", flush=True)
        while True:
            run(llm, [4] * 40, 300)
    except KeyboardInterrupt as error:
        print("interrupted:", error, flush=True)
    try:
        run(llm, [1], 2)
    except RuntimeError as error:
        print(type(error).__name__, flush=True)
"""


@pytest.mark.nightly
def test_a_second_ctrl_c_ends_an_engine_whose_worker_hangs(start):
    process = start(HUNG)
    (pid,) = worker_pids(process)
    assert process.stdout.readline() == "running\n"
    os.kill(pid, signal.SIGSTOP)
    for _ in range(2):
        time.sleep(1.0)  # for rank 0 to wait in a collective; closer together they would count as one
        os.kill(process.pid, signal.SIGINT)
    said = "interrupted: Ctrl-C has ended the engine while it waited for its other ranks\nWorkerError\n"
    assert rest(process) == (said, "")
    assert process.returncode == 0
    wait_until_gone([pid])


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_so(start):
    process = start("make_llm(2)\n")
    out, err = rest(process)
    assert process.returncode == 1
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert re.search(r"WorkerError: rank 1 of 2 .*`if __name__ == \"__main__\":`", last)
    assert err.count("RuntimeError: tensor_parallel_size > 1") == 1


@pytest.mark.nightly
def test_a_script_from_standard_input_is_told_to_become_a_file(path):
    code = PREAMBLE + 'if __name__ == "__main__":\n    make_llm(2)\n'
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-", str(path)],
        env=os.environ | {"PYTHONPATH": str(TESTS.parent)},
        input=code,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1
    assert re.search(r"RuntimeError: .*<stdin> is no file: save the script as one", process.stderr.splitlines()[-1])


@pytest.mark.nightly
def test_two_engines_in_each_of_two_programs(start, path, reference):
    process = start(
        """
if __name__ == "__main__":
    llm = make_llm(2)
    print(*run(llm, [1, 2, 3], 200))
"""
    )
    prompts = reference.draw_prompts((30, 4, 17), 20)
    expected = reference.greedy(prompts, 20)
    engines = [make_llm(path, tensor_parallel_size=2, num_kvcache_blocks=n) for n in (7, 64)]
    ids = [[llm.add_request(prompt, greedy(20)) for prompt in prompts] for llm in engines]
    done = [{}, {}]
    while not all(llm.is_finished() for llm in engines):
        for llm, results in zip(engines, done, strict=True):
            if not llm.is_finished():
                results |= dict(llm.step()[0])
    for llm, requests, results in zip(engines, ids, done, strict=True):
        assert [results[i] for i in requests] == expected
        assert_idle(llm)
    engines[0].exit()
    assert complete(engines[1], prompts, greedy(20)) == expected
    engines[1].exit()
    # The other program never calls exit, and ends in silence all the same.
    pids = worker_pids(process)
    tokens = " ".join(map(str, reference.greedy([[1, 2, 3]], 200)[0]))
    assert rest(process) == (f"{tokens}\n", "")
    assert process.returncode == 0
    wait_until_gone(pids)


def test_the_ranks_meet_where_no_other_user_and_no_other_host_can_reach_them(path, monkeypatch):
    meet, folders, before = Workers.meet, [], listening_addresses(os.getpid())

    def look(self, run):
        tp = meet(self, run)
        folders.append(self._store_folder)
        assert stat.S_IMODE(os.stat(self._store_folder).st_mode) == 0o700
        assert os.listdir(self._store_folder) == ["store"]
        return tp

    monkeypatch.setattr(Workers, "meet", look)
    with make_llm(path, tensor_parallel_size=2) as llm:
        complete(llm, [[1, 2, 3]], greedy(2))
        pids = [os.getpid(), *(process.pid for process in llm.ps)]
        addresses = [address for pid in pids for address in listening_addresses(pid)]
    for address in before:
        addresses.remove(address)
    assert addresses == [LOOPBACK[0]] * 2, "gloo's, one a rank"
    assert len(folders) == 1
    assert not os.path.exists(folders[0])
