"""What an engine leaves as it was in its caller's process: torch's defaults, threads, logging and output."""

import gc
import logging
import multiprocessing
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from checkpoints import complete, edit_tensors, greedy, make_checkpoint, make_llm

from nanovllm import StructuredOutputsParams
from nanovllm.layers.sampler import Sampler
from nanovllm.models.qwen3_decoder import Qwen3ForCausalLM
from nanovllm.utils import threads


def torch_defaults():
    x = torch.ones(1)
    return torch.get_default_dtype(), torch.get_default_device(), x.dtype, x.device, torch.is_grad_enabled()


@pytest.mark.parametrize("default", [torch.float64, torch.float32])
def test_torch_defaults_are_the_callers_and_do_not_change_the_model(path, reference, default):
    prompts = reference.draw_prompts((20,), 6)
    torch.set_default_dtype(default)
    try:
        before, threads, random_state = torch_defaults(), torch.get_num_threads(), torch.get_rng_state()
        for options in ({}, {"dtype": "bfloat16", "load_format": "dummy"}):
            with make_llm(path, **options) as llm:
                assert torch_defaults() == before
                tokens = complete(llm, prompts, greedy(6))
                assert torch_defaults() == before
                assert options or tokens == reference.greedy(prompts, 6)
            assert torch_defaults() == before
        assert torch.get_num_threads() == threads
        assert torch.equal(torch.get_rng_state(), random_state)
    finally:
        torch.set_default_dtype(torch.float32)


def test_old_objects_are_the_collectors_again_after_a_batch(path):
    prompts, frozen = [[1, 2, 3]] * 3, gc.get_freeze_count()
    num_old, seen = len(gc.get_objects()), []
    with make_llm(path) as llm:
        llm.generate(prompts, greedy(4), use_tqdm=False, on_step=lambda stats: seen.append(gc.get_freeze_count()))
        assert min(seen, default=0) > num_old
        assert gc.get_freeze_count() <= frozen
        with pytest.raises(ZeroDivisionError):
            llm.generate(prompts, greedy(4), use_tqdm=False, on_step=lambda stats: 1 / 0)
        assert gc.get_freeze_count() <= frozen
        deltas = llm.stream(prompts, greedy(4))
        next(deltas)
        assert gc.get_freeze_count() > num_old
        deltas.close()
        assert gc.get_freeze_count() <= frozen


def test_exit_looks_through_no_objects_of_the_callers(path):
    """A full collection takes longer, the more of them there are: a third of a second with what torch brings along."""
    llm, collections = make_llm(path), []
    complete(llm, [[1, 2, 3]], greedy(2))
    gc.disable()
    gc.callbacks.append(lambda phase, info: collections.append(info))
    try:
        llm.exit()
    finally:
        gc.callbacks.pop()
        gc.enable()
    assert not collections


def test_torch_defaults_after_a_failing_init(tmp_path, path, monkeypatch):
    def fail(*args):
        raise ValueError("no such MLP")

    before, damaged = torch_defaults(), make_checkpoint(tmp_path)
    edit_tensors(damaged, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        make_llm(damaged, dtype="bfloat16")
    assert torch_defaults() == before
    monkeypatch.setattr(Qwen3ForCausalLM, "mlp", fail)  # There the default dtype is ours.
    with pytest.raises(ValueError, match="no such MLP"):
        make_llm(path, dtype="bfloat16")
    assert torch_defaults() == before


def test_no_threads_and_no_processes_are_left(path):
    threads = set(threading.enumerate())
    llm = make_llm(path)
    complete(llm, [[1, 2, 3]], greedy(4))
    llm.exit()
    assert set(threading.enumerate()) <= threads
    assert multiprocessing.active_children() == []


def test_logging_is_left_to_the_caller(path, caplog, capfd):
    with caplog.at_level(logging.INFO, logger="nanovllm"), make_llm(path) as llm:
        complete(llm, [[1]], greedy(2))
    # What a user needs to know at start-up: what runs, where it runs, on what, and the longest sequence.
    for fact in (
        r"model: .*float32",
        r"device: CPU",
        r"attention back end: .*torch",
        r"KV cache: 128 blocks x 16 = 2048 tokens.*longest sequence: 1024",
        r"CUDA graphs: none",
    ):
        lines = [record.getMessage() for record in caplog.records if re.match(fact, record.getMessage())]
        assert len(lines) == 1, fact
    for name in [None, "nanovllm", *(n for n in logging.root.manager.loggerDict if n.startswith("nanovllm."))]:
        handlers = logging.getLogger(name).handlers
        assert not [handler for handler in handlers if type(handler).__module__.startswith("nanovllm")]
        assert name is None or handlers == []
    assert "nanovllm" not in capfd.readouterr().out


FRESH_PROCESS = """
import logging, sys, torch
import nanovllm
assert logging.root.handlers == [] and logging.getLogger("nanovllm").handlers == []
assert torch.get_default_dtype() == torch.float32
llm = nanovllm.LLM(sys.argv[1], device="cpu", skip_tokenizer_init=True, num_kvcache_blocks=4, enforce_eager=True)
params = nanovllm.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
outputs = llm.generate([[1, 2, 3]], params, use_tqdm=False)
assert len(outputs[0]["token_ids"]) == 5
"""


@pytest.mark.slow
def test_a_process_that_never_calls_exit_ends_in_silence(path):
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FRESH_PROCESS, str(path)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    # Libraries may have something to say on some machine; neither we nor an interpreter that ends badly may.
    for word in ("nanovllm", "Traceback", "Exception", "Error"):
        assert word not in result.stderr


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_step_takes_the_threads_that_pay_and_the_others_come_back(path, monkeypatch, is_busy):
    """Where other programs want the cores, threads that wait for each other wait for those too."""
    seen, trials = [], []

    def try_out(num_threads):
        trials.append(num_threads)
        return -num_threads if is_busy else num_threads

    def record(cls):
        forward = cls.forward

        def recording(self, *args, **kwargs):
            seen.append((cls, torch.get_num_threads()))
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", recording)

    def used(prompt, params):
        seen.clear()
        complete(llm, [prompt], params)
        assert [cls for cls, _ in seen] == [Qwen3ForCausalLM, Sampler] * params.max_tokens
        return [num_threads for _, num_threads in seen[::2]], [num_threads for _, num_threads in seen[1::2]]

    monkeypatch.setattr(threads, "_products_per_second", try_out)
    monkeypatch.setattr(threads, "_TRIAL_SHARE", 1e-9)
    record(Qwen3ForCausalLM)
    record(Sampler)
    form = StructuredOutputsParams(regex="[a-z]{9}")  # Drawn in a call of its own.
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with make_llm(path, skip_tokenizer_init=False) as llm:
            monkeypatch.setattr(threads, "_MIN_WORK", 20 * llm.model_runner.num_layer_params)
            num = 1 if is_busy else 3
            assert used(list(range(1, 21)), greedy(2)) == ([num, 1], [num, 1])
            assert used(list(range(21, 41)), greedy(2, structured_outputs=form)) == ([num, 1], [num, 1])
            assert used(list(range(41, 60)), greedy(1)) == ([1], [1])
            assert trials == [3, 1], "one trial is enough for a while"
            assert torch.get_num_threads() == 3
            monkeypatch.setattr(Sampler, "forward", lambda *args, **kwargs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                complete(llm, [[1]], greedy(1))
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_trial_of_threads_leaves_the_callers():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert threads._products_per_second(1) > 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
