"""A worker that dies or fails ends its engine with an error that says so, and nothing else."""

import os
import signal
import threading
from pathlib import Path

import faulty_workers
import pytest
from checkpoints import Reference, complete, edit_tensors, greedy, make_checkpoint, make_llm
from kernel_harness import nightly

from nanovllm import SamplingParams, StructuredOutputsParams, WorkerError
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.ranks import workers as workers_module
from nanovllm.engine.ranks.workers import Workers

PROMPTS = [[1, 2, 3], [4, 5], [6] * 20]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("failures"), tokenizer=True)


@pytest.fixture
def started(monkeypatch):
    """The Workers of every engine that the test makes, those included that never came up."""
    started = []
    original = Workers._start

    def start(self, run):
        started.append(self)
        original(self, run)

    monkeypatch.setattr(Workers, "_start", start)
    return started


def assert_gone(workers: Workers) -> None:
    for process in workers._processes.values():
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)
    assert not Path("/dev/shm", workers._channel.name).exists()
    names = {thread.name for thread in threading.enumerate()}
    assert "nanovllm-workers" not in names


def assert_works(path) -> None:
    reference = Reference(path)
    prompts = reference.draw_prompts((5, 20), 8)
    with make_llm(path, tensor_parallel_size=2) as llm:
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)


def test_a_worker_killed_in_the_middle_of_a_batch(path, started):
    llm = make_llm(path, tensor_parallel_size=4)
    assert not Path("/dev/shm", started[0]._channel.name).exists(), "it outlives no crash"

    def kill(stats):
        if stats["steps"] == 20:
            os.kill(started[0]._processes[2].pid, signal.SIGKILL)

    with pytest.raises(WorkerError, match=r"rank 2 of 4 \(process \d+\) was killed by SIGKILL"):
        llm.generate(PROMPTS, greedy(900), use_tqdm=False, on_step=kill)
    assert_gone(started[0])
    for use in (lambda: llm.generate(PROMPTS, greedy(2)), lambda: llm.add_request([1]), llm.step):
        with pytest.raises(WorkerError, match="rank 2 of 4"):
            use()
    llm.exit()
    with pytest.raises(RuntimeError, match="exited"):
        llm.generate(PROMPTS, greedy(2), use_tqdm=False)
    assert_works(path)


def test_a_worker_killed_between_two_batches(path, started):
    with make_llm(path, tensor_parallel_size=2) as llm:
        complete(llm, PROMPTS, greedy(3))
        os.kill(started[0]._processes[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"rank 1 of 2 .*SIGKILL"):
            llm.generate(PROMPTS, greedy(3), use_tqdm=False)
        assert_gone(started[0])


FAILS = r"(?s)rank 1 of 2 .* failed:.*Traceback.*in fail\n.*OnPurposeError: a worker fails"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("die-first", "rank 1 of 2 .* was killed by SIGKILL"),
        ("die-loading", "rank 1 of 2 .* was killed by SIGKILL"),
        ("fail-launch", FAILS),
        ("quit-launch", "rank 1 of 2 .* ended with exit code 3"),
        *nightly(
            ("die-meeting", "rank 1 of 2 .* was killed by SIGKILL"), ("fail-loading", FAILS), ("fail-sampling", FAILS)
        ),
    ],
)
def test_a_fault_of_a_worker_is_an_error_that_names_it(path, started, monkeypatch, capfd, fault, message):
    monkeypatch.setattr(workers_module, "worker_main", faulty_workers.faulty_main)
    monkeypatch.setenv(faulty_workers.KIND, fault)
    monkeypatch.setenv(faulty_workers.RANK, "1")
    params, options = greedy(100), {"tensor_parallel_size": 2}
    if fault == "fail-sampling":
        params = SamplingParams(max_tokens=100, structured_outputs=StructuredOutputsParams(regex="[a-z]{100}"))
        options["skip_tokenizer_init"] = False
    with pytest.raises(WorkerError, match=message):
        make_llm(path, **options).generate(PROMPTS, params, use_tqdm=False)
    assert_gone(started[0])
    assert capfd.readouterr().err == "", "the exception says it all"


def test_an_exception_of_rank_0_ends_the_engine(path, started, monkeypatch):
    with make_llm(path, tensor_parallel_size=2) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm.model_runner.model, "forward", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate(PROMPTS, greedy(3), use_tqdm=False)
        assert_gone(started[0])
        with pytest.raises(RuntimeError, match="ended: make a new LLM"):
            llm.generate(PROMPTS, greedy(3), use_tqdm=False)


@pytest.mark.parametrize(
    ("cls", "step", "error"),
    [(Workers, "wait_ready", KeyboardInterrupt), (ModelRunner, "allocate_kv_cache", RuntimeError)],
)
def test_an_exception_while_rank_0_starts(path, started, monkeypatch, cls, step, error):
    def failing(self):
        raise error("on purpose")

    monkeypatch.setattr(cls, step, failing)
    with pytest.raises(error, match="on purpose"):
        make_llm(path, tensor_parallel_size=2)
    assert_gone(started[0])


def test_a_fault_of_the_checkpoint_is_found_before_a_worker_is_started(tmp_path, started):
    path = make_checkpoint(tmp_path)
    edit_tensors(path, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        make_llm(path, tensor_parallel_size=2)
    assert not started


def test_a_worker_that_hangs_is_named_by_the_watchdog(path, started):
    with make_llm(path, tensor_parallel_size=2) as llm:
        started[0]._timeout = 2.0

        def stop(stats):
            if stats["steps"] == 20:
                os.kill(started[0]._processes[1].pid, signal.SIGSTOP)

        with pytest.raises(
            WorkerError, match=r"rank 1 of 2 \(process \d+\) has not answered for 2 s.*watchdog_timeout"
        ):
            llm.generate(PROMPTS, greedy(900), use_tqdm=False, on_step=stop)
        assert_gone(started[0])


def test_exit_kills_a_worker_that_hangs(path, started, monkeypatch):
    monkeypatch.setattr(workers_module, "EXIT_SECONDS", 2.0)
    llm = make_llm(path, tensor_parallel_size=2)
    complete(llm, PROMPTS, greedy(3))
    os.kill(started[0]._processes[1].pid, signal.SIGSTOP)
    llm.exit()
    assert_gone(started[0])


def test_an_engine_that_is_dropped_ends_its_workers(path, started):
    llm = make_llm(path, tensor_parallel_size=2)
    llm.add_request([1, 2, 3], greedy(8))
    llm.step()
    del llm
    assert_gone(started[0])
    assert {process.exitcode for process in started[0]._processes.values()} == {0}
