"""LLM.generate, add_request and step gone wrong: what is raised, and that the engine is as good as before."""

import random
import sys

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, assert_idle, complete, greedy, make_checkpoint, make_llm, random_prompt

from nanovllm import LLM


def assert_usable(llm, reference):
    assert_idle(llm)
    prompt = [5, 6, 7]
    assert complete(llm, [prompt], greedy(4)) == reference.greedy([prompt], 4)


# -- wrong arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", ValueError, "is empty"),
        ([], ValueError, "is empty"),
        (np.array([], int), ValueError, "is empty"),
        ([1, VOCAB_SIZE], ValueError, f"token id {VOCAB_SIZE} is outside the vocabulary, 0..{VOCAB_SIZE - 1}"),
        ([2**40], ValueError, f"token id {2**40} is outside"),
        ([2**70, 1], ValueError, f"token id {2**70} is outside"),
        (np.array([1, VOCAB_SIZE]), ValueError, f"token id {VOCAB_SIZE} is outside"),
        ([3, -1, 2], ValueError, "token id -1 is outside"),
        ([1, True], TypeError, "integer token ids"),
        (np.array([True, False]), TypeError, "integer token ids"),
        ([1, 2.0], TypeError, "integer token ids"),
        ([float("nan")], TypeError, "integer token ids"),
        (np.array([1.0, 2.0]), TypeError, "integer token ids"),
        ([1, None], TypeError, "integer token ids"),
        (["a", "b"], TypeError, "integer token ids"),
        ([[1, 2]], TypeError, "integer token ids"),
        (None, TypeError, "integer token ids"),
        ([1] * 200, ValueError, "200 tokens.* 200 tokens"),
        ("é" * 1000, ValueError, "2000 tokens.* 200 tokens"),
    ],
    ids=lambda value: None if isinstance(value, type) else repr(value)[:16],
)
def test_wrong_prompt(llm, reference, prompt, error, message):
    for batch, index in (([prompt], 0), ([[1, 2], "text", prompt, [3]], 2)):
        with pytest.raises(error, match=rf"prompts\[{index}\]: .*{message}"):
            llm.generate(batch, greedy(3), use_tqdm=False)
        assert_usable(llm, reference)
    with pytest.raises(error, match=f"prompt: .*{message}"):
        llm.add_request(prompt, greedy(3))
    assert_usable(llm, reference)


def test_prompt_that_the_cache_cannot_hold(path, reference):
    with make_llm(path, num_kvcache_blocks=3) as llm:
        with pytest.raises(ValueError, match=r"prompts\[1\]: .*48 tokens.* 48 tokens.*3 blocks x 16"):
            llm.generate([[1], [1] * 48], greedy(3), use_tqdm=False)
        assert_usable(llm, reference)
        assert len(complete(llm, [[1] * 47], greedy(3))[0]) == 1


@pytest.mark.parametrize("num", [0, 1, 3])
def test_another_number_of_sampling_params(llm, reference, num):
    with pytest.raises(ValueError, match=f"sampling_params: {num} .*2 prompts"):
        llm.generate([[1], [2]], [greedy(3)] * num, use_tqdm=False)
    assert_usable(llm, reference)


@pytest.mark.parametrize("params", [{"temperature": 0}, 0.5, "greedy"])
def test_sampling_params_of_another_type(llm, reference, params):
    with pytest.raises(TypeError, match="sampling_params: must be a SamplingParams or a list"):
        llm.generate([[1]], params, use_tqdm=False)
    with pytest.raises(TypeError, match="sampling_params"):
        llm.add_request([1], params)
    assert_usable(llm, reference)


def test_on_step_that_is_no_function(llm, reference):
    with pytest.raises(TypeError, match="on_step=5: must be callable"):
        llm.generate([[1]], greedy(3), use_tqdm=False, on_step=5)
    assert_usable(llm, reference)


@pytest.mark.parametrize("params", [{}, [], 0, ""])
def test_an_empty_something_is_no_sampling_params(llm, reference, params):
    with pytest.raises(TypeError, match="sampling_params: must be a SamplingParams"):
        llm.add_request([1], params)
    assert_usable(llm, reference)


def test_one_of_the_sampling_params_of_another_type(llm, reference):
    with pytest.raises(TypeError, match=r"sampling_params\[1\]"):
        llm.generate([[1], [2]], [greedy(3), None], use_tqdm=False)
    assert_usable(llm, reference)


def test_text_that_cannot_be_encoded(llm, reference):
    with pytest.raises(ValueError, match=r"prompts\[1\]: holds half of a surrogate pair"):
        llm.generate([[1], "a lone surrogate: \ud800"], greedy(3), use_tqdm=False)
    assert_usable(llm, reference)


def test_checkpoint_without_a_tokenizer(tmp_path):
    # transformers 5 makes an empty tokenizer up, whose end of sequence is token 0.
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer\.json; .*skip_tokenizer_init"):
        make_llm(make_checkpoint(tmp_path), skip_tokenizer_init=False)


def test_unknown_option_names_the_nearest(path):
    with pytest.raises(TypeError, match=r"'kvcache_blocksize'.*'kvcache_block_size'"):
        LLM(str(path), kvcache_blocksize=16)


# -- half-way ----------------------------------------------------------------------------------------------------


class Interruption(Exception):
    pass


@pytest.mark.parametrize("error", [Interruption, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 2, 4, 9])
def test_exception_half_way(path, reference, monkeypatch, error, at):
    # Chunks, a cached beginning, preemption: whatever the state, nothing of it may survive.
    head = random_prompt(32, seed=0)
    prompts = reference.draw_prompts((50, 45, 40), 20, prefix=head)
    with make_llm(path, num_kvcache_blocks=8, max_num_batched_tokens=30) as llm:
        model = llm.model_runner.model
        forward, calls = model.forward, []

        def failing(*args):
            calls.append(0)
            if len(calls) == at:
                raise error
            return forward(*args)

        monkeypatch.setattr(model, "forward", failing)
        with pytest.raises(error):
            llm.generate(prompts, greedy(20), use_tqdm=False)
        assert_idle(llm)
        assert complete(llm, prompts, greedy(20)) == reference.greedy(prompts, 20)
        assert_idle(llm)


class CtrlC:
    """Counts the lines that the engine's own files run, and raises KeyboardInterrupt before one of them."""

    files = ("llm_engine.py", "scheduler.py", "block_manager.py", "sequence.py")

    def __init__(self, at: int | None = None):
        self.at = at
        self.lines = 0

    def trace(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self.trace

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *exc_info):
        sys.settrace(self.before)


def test_ctrl_c_at_any_line_of_the_engine(path, reference):
    # A signal strikes between any two lines, also where a sequence is in no queue or a block in no table.
    prompts = reference.draw_prompts((15, 14, 16), 12)
    expected = reference.greedy(prompts, 12)
    with make_llm(path, num_kvcache_blocks=4, max_num_batched_tokens=10) as llm:
        with CtrlC() as whole_run:
            assert complete(llm, prompts, greedy(12)) == expected
        assert llm.scheduler.num_preemptions > 0
        # Up to the middle, so that it strikes for sure however much the prefix cache saves.
        for at in sorted(random.Random(0).sample(range(1, whole_run.lines // 2), 50)):
            with pytest.raises(KeyboardInterrupt), CtrlC(at):
                complete(llm, prompts, greedy(12))
            assert_idle(llm)
        assert complete(llm, prompts, greedy(12)) == expected


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_exception_in_a_step_by_hand(path, reference, monkeypatch, steps_before):
    prompts = reference.draw_prompts((20, 30), 8)
    with make_llm(path) as llm:
        ids = [llm.add_request(prompt, greedy(8)) for prompt in prompts]
        expected = dict(zip(ids, reference.greedy(prompts, 8), strict=True))
        for _ in range(steps_before):
            assert llm.step()[0] == []
        with monkeypatch.context() as patch:
            patch.setattr(llm.model_runner.model, "forward", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.step()
        # Dropped or completed, as the engine likes, but nothing wrong may come out.
        done = {}
        while not llm.is_finished():
            done |= dict(llm.step()[0])
        assert done == {request: expected[request] for request in done}
        assert_idle(llm)
        assert complete(llm, prompts, greedy(8)) == list(expected.values())
