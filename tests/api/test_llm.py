"""LLM.generate, add_request and step: what a user may rely on."""

import functools
import io
import re
import subprocess
import sys

import torch
from checkpoints import EOS, assert_idle, complete, complete_by_steps, greedy, make_llm, random_prompt
from tqdm import tqdm

from nanovllm import RequestOutput, SamplingParams

TEXT = "def block(i): # Üb€r 漢字\n    return i"


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


def test_results_keep_the_order_of_prompts_that_finish_out_of_order(llm, reference):
    prompts = [random_prompt(length, seed=length) for length in (40, 2, 17, 9)]
    params = [greedy(n) for n in (2, 20, 1, 7)]
    outputs = complete(llm, prompts, params)
    assert [len(tokens) for tokens in outputs] == [2, 20, 1, 7]
    assert outputs == [reference.greedy([p], s.max_tokens)[0] for p, s in zip(prompts, params, strict=True)]


def test_long_completions_begin_first(path, reference):
    """Two sequences at a time, a long one and three short ones: its decode steps are all that there need be. The first
    tokens come from two prefills."""
    prompts = [random_prompt(5, seed=i) for i in range(4)]
    lengths = [3, 3, 3, 9]
    with make_llm(path, max_num_seqs=2) as llm:
        outputs = complete(llm, prompts, [greedy(n) for n in lengths])
        assert llm.stats()["steps"] == 2 + 8
        assert outputs == [reference.greedy([p], n)[0] for p, n in zip(prompts, lengths, strict=True)]


def test_arguments_are_left_alone_and_may_be_empty_or_any_iterable(llm):
    prompts, params = [[1, 2, 3], "text"], [greedy(3), greedy(2)]
    expected = complete(llm, prompts, params)
    assert prompts == [[1, 2, 3], "text"]
    assert params == [greedy(3), greedy(2)]
    assert complete(llm, (prompt for prompt in prompts), tuple(params)) == expected
    assert llm.generate([], greedy(5), use_tqdm=False) == llm.generate([], [], use_tqdm=False) == []
    assert list(llm.stream([], greedy(3))) == list(llm.generate_iter([], greedy(3))) == []
    outputs = llm.generate(["", []], greedy(2), use_tqdm=False, on_error="return")
    assert [output["finish_reason"] for output in outputs] == ["error", "error"]


def test_defaults_sample_at_most_64_tokens(llm):
    """Drawn without a seed, so the 64th token may be the end of the sequence."""
    (output,) = llm.generate([[1, 2]], use_tqdm=False)
    tokens = output["token_ids"]
    has_ended = tokens[-1] == llm.tokenizer.convert_tokens_to_ids(EOS)
    assert len(tokens) == 64 or (len(tokens) < 64 and has_ended)
    assert output["finish_reason"] == ("stop" if has_ended else "length")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_bar_in_a_terminal_of_the_callers_own_and_none_in_a_file(llm, monkeypatch, capsys):
    llm.generate([[1, 2], [3]], greedy(4), use_tqdm=True)
    assert capsys.readouterr() == ("", "")
    shown = io.StringIO()
    llm.generate([[1, 2], [3]], greedy(4), use_tqdm=functools.partial(tqdm, file=shown, unit=" answers"))
    assert "2/2" in shown.getvalue()
    assert "answers/s" in shown.getvalue()
    monkeypatch.setattr(sys, "stderr", Terminal())
    llm.generate([[1, 2], [3]], greedy(4), use_tqdm=False)
    assert sys.stderr.getvalue() == ""
    llm.generate([[1, 2], [3]], greedy(4))
    assert re.search(r"2/2.*prefill=\d+tok/s, decode=\d+tok/s", sys.stderr.getvalue())


def test_progress_bar_in_a_notebook_without_widgets():
    """Importing says nothing about what is missing, and the bar is there, though a notebook's stderr is no terminal."""
    code = """
import sys, types, warnings
sys.modules["ipywidgets"] = None  # not installed
sys.modules["ipykernel.zmqshell"] = types.ModuleType("ipykernel.zmqshell")  # how tqdm finds that this is a notebook
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython"].get_ipython = lambda: None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from nanovllm.utils.progress_bar import progress_bar
    import tqdm.auto
print([str(w.message) for w in caught if "IProgress" in str(w.message)])
with progress_bar(True, 2) as show:
    show(2, -2)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
    assert "2/2" in run.stderr


def test_get_tokenizer(llm):
    assert llm.get_tokenizer() is llm.tokenizer
    assert llm.get_tokenizer().eos_token == EOS


def test_unseeded_requests_draw_apart_and_repeat_with_the_engines_seed(path):
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    batches = []
    for seed in (0, 0, 1):
        with make_llm(path, seed=seed) as llm:
            batches.append(complete(llm, [[1, 2, 3]] * 2, params))
    assert batches[0] == batches[1] != batches[2]
    assert batches[0][0] != batches[0][1]


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
