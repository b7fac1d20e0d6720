"""LLM.generate, add_request and step: what a user may rely on, and what a wrong argument does."""

import random
import re
import sys

import numpy as np
import pytest
import torch
from checkpoints import (
    EOS,
    VOCAB_SIZE,
    assert_idle,
    complete,
    complete_by_steps,
    edit_json,
    edit_tensors,
    greedy,
    make_checkpoint,
    make_llm,
    random_prompt,
)

from nanovllm import LLM, RequestOutput, SamplingParams

TEXT = "def block(i): # Üb€r 漢字\n    return i"


def assert_usable(llm, reference):
    assert_idle(llm)
    prompt = [5, 6, 7]
    assert complete(llm, [prompt], greedy(4)) == reference.greedy([prompt], 4)


# -- results -----------------------------------------------------------------------------------------------------


def test_texts_and_token_lists_mixed(llm, reference):
    encoded = llm.tokenizer(TEXT)["input_ids"]
    prompts = [[3, 1, 2], TEXT, encoded, "the table", [9]]
    ids = [[3, 1, 2], encoded, encoded, llm.tokenizer("the table")["input_ids"], [9]]
    outputs = llm.generate(prompts, greedy(10), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == reference.greedy(ids, 10)
    for output in outputs:
        assert set(output) == {*RequestOutput.__required_keys__}
        assert output["text"] == llm.tokenizer.decode(output["token_ids"], skip_special_tokens=True)
        assert output["finish_reason"] == "length"
        assert all(type(token) is int for token in output["token_ids"])


def test_one_text_is_a_batch_of_one(llm):
    (alone,), (listed,) = (llm.generate(prompt, greedy(5), use_tqdm=False) for prompt in (TEXT, [TEXT]))
    assert (alone["text"], alone["token_ids"]) == (listed["text"], listed["token_ids"])


def test_nothing_to_do(llm):
    assert llm.generate([], greedy(5), use_tqdm=False) == []
    assert llm.generate([], [], use_tqdm=False) == []


def test_results_keep_the_order_of_prompts_that_finish_out_of_order(llm, reference):
    prompts = [random_prompt(length, seed=length) for length in (40, 2, 17, 9)]
    params = [greedy(n) for n in (2, 20, 1, 7)]
    outputs = complete(llm, prompts, params)
    assert [len(tokens) for tokens in outputs] == [2, 20, 1, 7]
    assert outputs == [reference.greedy([p], s.max_tokens)[0] for p, s in zip(prompts, params, strict=True)]


def test_prompts_and_parameters_may_be_any_iterable(llm):
    prompts, params = [[1, 2], [3]], [greedy(3), greedy(2)]
    expected = complete(llm, prompts, params)
    assert complete(llm, (prompt for prompt in prompts), tuple(params)) == expected


@pytest.mark.parametrize("convert", [np.array, lambda ids: list(np.array(ids, np.int32)), tuple])
def test_token_ids_of_other_integer_types(llm, convert):
    assert complete(llm, [convert([5, 6, 7]), [8]], greedy(4)) == complete(llm, [[5, 6, 7], [8]], greedy(4))


def test_arguments_are_left_alone(llm):
    prompts, params = [[1, 2, 3], "text"], [greedy(3), greedy(3)]
    llm.generate(prompts, params, use_tqdm=False)
    assert prompts == [[1, 2, 3], "text"]
    assert params == [greedy(3), greedy(3)]


def test_defaults_sample_at_most_64_tokens(llm):
    (output,) = llm.generate([[1, 2]], use_tqdm=False)
    assert len(output["token_ids"]) <= 64
    assert (len(output["token_ids"]) == 64) == (output["finish_reason"] == "length")


def test_progress_bar(llm, capsys):
    llm.generate([[1, 2], [3]], greedy(4), use_tqdm=True)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert re.search(r"prefill=\d+tok/s, decode=\d+tok/s", shown)
    llm.generate([[1, 2], [3]], greedy(4), use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_unseeded_requests_draw_apart_and_repeat_with_the_engines_seed(path):
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    batches = []
    for seed in (0, 0, 1):
        with make_llm(path, seed=seed) as llm:
            batches.append(complete(llm, [[1, 2, 3]] * 2, params))
    assert batches[0] == batches[1] != batches[2]
    assert batches[0][0] != batches[0][1]


# -- the end of a sequence ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endings(reference):
    """Two prompts, their greedy completions, and a token of each that the other lacks, not the first one."""
    for seed in range(100):
        prompts = [random_prompt(8, seed), random_prompt(11, seed + 100)]
        a, b = reference.greedy(prompts, 16)
        ends = [next((t for t in x[2:] if t not in x[:2] and t not in y), None) for x, y in ((a, b), (b, a))]
        if None not in ends:
            return prompts, (a, b), ends
    pytest.fail("no such prompts")


def cut(tokens, ends):
    """What of a completion is left with these end-of-sequence tokens, and its finish reason."""
    for i, token in enumerate(tokens):
        if token in ends:
            return tokens[: i + 1], "stop"
    return tokens, "length"


@pytest.mark.parametrize("source", ["generation_config", "config", "option", "option-of-one"])
def test_each_end_of_sequence_token_stops(tmp_path, reference, endings, source):
    prompts, completions, ends = endings
    path = make_checkpoint(tmp_path)
    options = {}
    if source == "generation_config":
        edit_json(path / "generation_config.json", eos_token_id=ends)
    elif source == "config":
        (path / "generation_config.json").unlink(missing_ok=True)
        edit_json(path / "config.json", eos_token_id=ends)
    elif source == "option":
        # Replaces what the files say.
        edit_json(path / "generation_config.json", eos_token_id=[completions[0][0], completions[1][0]])
        options["eos"] = ends
    else:
        ends = ends[:1]
        options["eos"] = ends[0]
    with make_llm(path, **options) as llm:
        stopping = SamplingParams(temperature=0, max_tokens=16)
        outputs = llm.generate([*prompts, *prompts], [stopping] * 2 + [greedy(16)] * 2, use_tqdm=False)
        assert_idle(llm)
    found = [(output["token_ids"], output["finish_reason"]) for output in outputs]
    assert found == [cut(tokens, ends) for tokens in completions] + [(tokens, "length") for tokens in completions]
    assert {reason for _, reason in found[:2]} == ({"stop"} if len(ends) == 2 else {"stop", "length"})


def test_end_of_sequence_as_the_last_allowed_token_is_a_stop(path, endings):
    prompts, completions, ends = endings
    tokens, _ = cut(completions[0], ends)
    with make_llm(path, eos=ends) as llm:
        params = SamplingParams(temperature=0, max_tokens=len(tokens))
        (output,) = llm.generate(prompts[:1], params, use_tqdm=False)
    assert (output["token_ids"], output["finish_reason"]) == (tokens, "stop")


def test_the_tokenizers_end_of_sequence_stops_and_stays_out_of_the_text(tmp_path, endings):
    prompts, completions, ends = endings
    path = make_checkpoint(tmp_path, tokenizer=True)

    def swap(tensors, eos=1, other=ends[0]):
        head = tensors["lm_head.weight"]
        head[[eos, other]] = head[[other, eos]]

    edit_tensors(path, swap)
    with make_llm(path, skip_tokenizer_init=False) as llm:
        assert llm.tokenizer.eos_token_id == 1
        assert llm.tokenizer.eos_token == EOS
        (output,) = llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    kept = cut(completions[0], ends[:1])[0][:-1]
    assert output["token_ids"] == [*kept, 1]
    assert output["finish_reason"] == "stop"
    assert output["text"] == llm.tokenizer.decode(kept)


def test_completion_ends_where_the_engine_does(llm, reference):
    prompts = [random_prompt(length, seed=length) for length in (150, 198, 199)]
    outputs = llm.generate(prompts, greedy(100), use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [50, 2, 1]
    assert {output["finish_reason"] for output in outputs} == {"length"}
    assert [output["token_ids"] for output in outputs] == [
        tokens[:n] for tokens, n in zip(reference.greedy(prompts, 50), (50, 2, 1), strict=True)
    ]


def test_max_model_len_is_lowered_to_the_models(path):
    with make_llm(path, max_model_len=1_000_000) as llm:
        assert llm.config.max_model_len == 1024
        with pytest.raises(ValueError, match=r"1024 tokens"):
            llm.generate([[1] * 1024], use_tqdm=False)


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
        (7, TypeError, "integer token ids"),
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


def test_ids_that_are_not_nested(llm, reference):
    with pytest.raises(TypeError, match=r"prompts\[0\]: .*list of integer token ids"):
        llm.generate([1, 2, 3], greedy(3), use_tqdm=False)
    assert_usable(llm, reference)


@pytest.mark.parametrize("prompts", [None, 5])
def test_prompts_that_are_none(llm, reference, prompts):
    with pytest.raises(TypeError, match="prompts"):
        llm.generate(prompts, greedy(3), use_tqdm=False)
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
    with pytest.raises(ValueError, match=r"prompts\[1\]: cannot be encoded: .*surrogates not allowed"):
        llm.generate([[1], "a lone surrogate: \ud800"], greedy(3), use_tqdm=False)
    assert_usable(llm, reference)


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

    files = ("llm_engine.py", "step_loop.py", "scheduler.py", "block_manager.py", "sequence.py")

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


def test_grad_mode_is_the_callers(llm):
    seen = []
    hook = llm.model_runner.model.register_forward_hook(lambda *args: seen.append(torch.is_grad_enabled()))
    complete(llm, [[1, 2]], greedy(2))
    hook.remove()
    assert torch.is_grad_enabled()
    assert not any(seen)


# -- by hand -----------------------------------------------------------------------------------------------------


def test_steps_by_hand_are_generate(path, reference):
    prompts = reference.draw_prompts((20, 3, 45), 10)
    with make_llm(path) as llm:
        assert llm.is_finished()
        tokens, num_tokens = complete_by_steps(llm, prompts, greedy(10))
        assert tokens == reference.greedy(prompts, 10)
        assert sum(num for num in num_tokens if num > 0) == 68
        assert sum(num for num in num_tokens if num < 0) == -3 * 9
        assert_idle(llm)
        assert complete(llm, prompts, greedy(10)) == tokens


def test_an_aborted_request_leaves_the_others_alone(llm, reference):
    prompts = reference.draw_prompts((20, 30, 40), 9)
    ids = [llm.add_request(prompt, greedy(9)) for prompt in prompts]
    llm.step()
    llm.abort_request(ids[1])
    llm.abort_request(ids[1])
    llm.abort_request(10**9)
    done = {}
    while not llm.is_finished():
        done |= dict(llm.step()[0])
    expected = reference.greedy(prompts, 9)
    assert done == {ids[0]: expected[0], ids[2]: expected[2]}
    assert_idle(llm)


def test_a_reset_prefix_cache_gives_nothing(llm, reference):
    (prompt,) = reference.draw_prompts((100,), 3)
    cached = []
    for _ in range(2):
        llm.reset_prefix_cache()
        cached += [llm.generate([prompt], greedy(3), use_tqdm=False)[0]["num_cached_tokens"] for _ in range(2)]
    assert cached == [0, 96, 0, 96]
    assert complete(llm, [prompt], greedy(3)) == reference.greedy([prompt], 3)


def test_requests_that_arrive_later(llm, reference):
    prompts = [llm.tokenizer(TEXT)["input_ids"], [1, 2, 3], [4]]
    ids, done = [llm.add_request(TEXT, greedy(9))], {}
    steps = 0
    while not llm.is_finished():
        done |= dict(llm.step()[0])
        steps += 1
        if steps in (2, 4):
            ids.append(llm.add_request(prompts[len(ids)], greedy(9)))
    assert len(set(ids)) == 3
    assert [done[i] for i in ids] == reference.greedy(prompts, 9)


def test_generate_while_requests_are_queued(llm):
    request = llm.add_request([1, 2, 3], greedy(3))
    with pytest.raises(RuntimeError, match="add_request"):
        llm.generate([[1]], greedy(3), use_tqdm=False)
    assert not llm.is_finished()
    done = {}
    while not llm.is_finished():
        done |= dict(llm.step()[0])
    assert list(done) == [request]


def test_step_without_requests(llm):
    with pytest.raises(RuntimeError, match="add_request"):
        llm.step()


# -- without a tokenizer -----------------------------------------------------------------------------------------


def test_skip_tokenizer_init(tmp_path):
    with make_llm(make_checkpoint(tmp_path), skip_tokenizer_init=True) as llm:
        assert llm.tokenizer is None
        outputs = llm.generate([[1, 2]], greedy(3), use_tqdm=False)
        assert outputs[0]["text"] is None
        assert len(outputs[0]["token_ids"]) == 3
        with pytest.raises(ValueError, match=r"prompts\[1\].*skip_tokenizer_init"):
            llm.generate([[1], "text"], greedy(3), use_tqdm=False)
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            llm.add_request("text", greedy(3))
        assert_idle(llm)


def test_checkpoint_without_a_tokenizer(tmp_path):
    # transformers 5 makes an empty tokenizer up, whose end of sequence is token 0.
    with pytest.raises(ValueError, match=r"tokenizer.*skip_tokenizer_init"):
        make_llm(make_checkpoint(tmp_path), skip_tokenizer_init=False)


def test_unknown_option_names_the_nearest(path):
    with pytest.raises(TypeError, match=r"'kvcache_blocksize'.*'kvcache_block_size'"):
        LLM(str(path), kvcache_blocksize=16)
