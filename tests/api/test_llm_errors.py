"""Wrong arguments, exceptions and Ctrl-C half-way, requests that are aborted: what is raised, and that the engine is as
good as before."""

import random
import sys

import pytest
from checkpoints import assert_idle, complete, generate, greedy, make_checkpoint, make_llm, random_prompt

from nanovllm import LLM, SamplingParams, StructuredOutputsParams


def assert_usable(llm, reference):
    assert_idle(llm)
    prompt = [5, 6, 7]
    assert complete(llm, [prompt], greedy(4)) == reference.greedy([prompt], 4)


# -- wrong arguments ---------------------------------------------------------------------------------------------

TWO = [[1], [2]]
BAD_SCHEMA = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "foo"}))
NO_PARAMS = "sampling_params: must be a SamplingParams or a list"
MISPLACED = r"'temperature': pass sampling_params=SamplingParams\(temperature=0\)"
IDS_ARE_PROMPTS = "'prompt_token_ids': lists of token ids are prompts too"
# (arguments of generate, stream and generate_iter beside the two prompts, the error of all)
WRONG = [
    ({"sampling_params": {"temperature": 0}}, TypeError, NO_PARAMS),
    ({"sampling_params": 0.5}, TypeError, NO_PARAMS),
    ({"sampling_params": "greedy"}, TypeError, NO_PARAMS),
    ({"sampling_params": [greedy(3), None]}, TypeError, r"sampling_params\[1\]"),
    ({"sampling_params": [greedy(3), "greedy"]}, TypeError, r"sampling_params\[1\]"),
    ({"sampling_params": [greedy(3), BAD_SCHEMA]}, ValueError, r"(?s)sampling_params\[1\]: json=.*Invalid type: foo"),
    ({"temperature": 0}, TypeError, MISPLACED),
    ({"prompt_token_ids": [[1]]}, TypeError, IDS_ARE_PROMPTS),
    ({"use_tqm": False}, TypeError, r"'use_tqm': (did you mean 'use_tqdm'|known: )"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=str)
def test_wrong_arguments(llm, reference, options, error, message):
    for method in (llm.generate, llm.stream, llm.generate_iter):
        with pytest.raises(error, match=message):
            list(method(TWO, **options))
        assert_idle(llm)
    if "sampling_params" not in options:
        with pytest.raises(error, match=message):
            llm.add_request([1], **options)
        with pytest.raises(error, match=message):
            llm.score(TWO, TWO, **options)
    elif isinstance(options["sampling_params"], list):
        good, params = greedy(3), options["sampling_params"]
        for output in (
            llm.generate(TWO, params, use_tqdm=False, on_error="return"),
            [each for _, each in llm.generate_iter(TWO, params, on_error="return", ordered=True)],
        ):
            assert [each["finish_reason"] for each in output] == ["length", "error"]
            assert "sampling_params[1]" in output[1]["error"]
            assert output[0]["token_ids"] == complete(llm, TWO[:1], good)[0]
    assert_usable(llm, reference)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *[
            (lambda llm, num=num: llm.generate(TWO, [greedy(3)] * num, on_error="return"), ValueError, f": {num} .*2 p")
            for num in (0, 1, 3)
        ],
        (lambda llm: llm.stream(TWO, [greedy(3)]), ValueError, "sampling_params: 1 .*2 prompts"),
        (lambda llm: list(llm.generate_iter([[1]] * 6, [greedy(1)] * 5)), ValueError, "sampling_params ended after 5"),
        (lambda llm: list(llm.generate_iter([[1]] * 6, [greedy(1)] * 7)), ValueError, "prompts ended after 6"),
        *[(lambda llm, one=one: llm.add_request([1], one), TypeError, NO_PARAMS[:41]) for one in ({}, [], 0, "", "a")],
        (lambda llm: llm.generate(TWO, on_step=5), TypeError, "on_step=5: must be callable"),
        (lambda llm: llm.generate(TWO, on_error="ignore"), ValueError, r"on_error='ignore'.*raise, return"),
        (lambda llm: llm.generate_iter(TWO, None, False, "ignore"), ValueError, r"on_error='ignore'.*raise, return"),
        *[
            (lambda llm, it=it: llm.generate(TWO, use_tqdm=it), TypeError, f"use_tqdm={it!r}: must be True, False")
            for it in (None, 1, "yes")
        ],
        (lambda llm: llm.abort_request(10**9), ValueError, "request_id=1000000000: there is no such .* are: none"),
        (lambda llm: llm.abort_request(10**5000), ValueError, "request_id=an integer of 16610 bits"),
        *[
            (lambda llm, wrong=wrong: llm.abort_request(wrong), TypeError, "request_id=.*must be an id")
            for wrong in ("1", 1.0, True, [1])
        ],
        (lambda llm: llm.score(TWO, [[1]]), ValueError, "completions: 1 of them for 2 prompts"),
        (lambda llm: llm.step(), RuntimeError, "add_request"),
        (lambda llm: llm.step_deltas(), RuntimeError, "no request queued"),
        (
            lambda llm: LLM(llm.config.model, kvcache_blocksize=16),
            TypeError,
            "'kvcache_blocksize'.*'kvcache_block_size'",
        ),
    ],
)
def test_wrong_arguments_of_one_method(llm, reference, call, error, message):
    with pytest.raises(error, match=message):
        call(llm)
    assert_usable(llm, reference)


def test_what_needs_a_tokenizer(path, tmp_path):
    # transformers 5 makes an empty tokenizer up, whose end of sequence is token 0.
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer\.json; .*skip_tokenizer_init"):
        make_llm(make_checkpoint(tmp_path), skip_tokenizer_init=False)
    with make_llm(path) as llm:
        assert llm.tokenizer is None
        assert llm.generate([[1, 2]], greedy(3), use_tqdm=False)[0]["text"] == ""
        assert {delta["text"] for delta in llm.stream([[1, 2], [3]], greedy(4))} == {""}
        for call in (
            lambda: llm.generate([[1], "text"], greedy(3)),
            lambda: llm.add_request("text", greedy(3)),
            lambda: llm.get_tokenizer(),
        ):
            with pytest.raises(ValueError, match="skip_tokenizer_init"):
                call()
        with pytest.raises(ValueError, match=r"sampling_params\[1\]: stop=.*tokenizer"):
            generate(llm, [[1], [2]], [greedy(3), greedy(3, stop="a")])
        assert_idle(llm)


# -- half-way ----------------------------------------------------------------------------------------------------


class Interruption(Exception):
    pass


def by_hand(llm, prompts, params):
    for prompt, each in zip(prompts, params, strict=True):
        llm.add_request(prompt, each)
    while not llm.is_finished():
        llm.step()


CALLS = {
    "generate": lambda llm, prompts, params: llm.generate(prompts, params, use_tqdm=False),
    "stream": lambda llm, prompts, params: list(llm.stream(prompts, params)),
    "generate_iter": lambda llm, prompts, params: list(llm.generate_iter(prompts, params)),
    "steps by hand": by_hand,
}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *[("generate", Interruption), ("generate", KeyboardInterrupt), ("stream", KeyboardInterrupt)],
        *[("generate_iter", KeyboardInterrupt), ("steps by hand", Interruption)],
    ],
)
def test_exception_half_way(path, reference, monkeypatch, name, error):
    """Chunks, a cached beginning, preemption: whatever the state, nothing of it may survive."""
    prompts = reference.draw_prompts((50, 45, 40), 12, prefix=random_prompt(32, seed=0))
    expected = reference.greedy(prompts, 12)
    with make_llm(path, num_kvcache_blocks=7, max_num_batched_tokens=30) as llm:
        model, calls = llm.model_runner.model, []
        forward = model.forward
        for at in (1, 2, 4, 9):

            def failing(*args, at=at):
                calls.append(0)
                if len(calls) == at:
                    raise error
                return forward(*args)

            calls.clear()
            with monkeypatch.context() as patch:
                patch.setattr(model, "forward", failing)
                with pytest.raises(error):
                    CALLS[name](llm, prompts, [greedy(12), greedy(2), greedy(12)])
            # By hand, requests are dropped or completed, as the engine likes, but nothing wrong may come out.
            done = [] if name == "steps by hand" else None
            while not llm.is_finished():
                done += [tokens for _, tokens in llm.step()[0]]
            assert all(tokens in (expected[0], expected[1][:2], expected[2]) for tokens in done or ())
            assert_idle(llm)
            assert complete(llm, prompts, greedy(12)) == expected
        assert llm.scheduler.num_preemptions > 0


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


def test_an_exception_in_a_callback_or_in_the_prompts_ends_the_batch(llm, reference):
    def prompts():
        yield from [[1]] * 9
        raise ZeroDivisionError

    for call in (
        lambda: llm.generate([[1, 2]], greedy(5), use_tqdm=False, on_step=lambda stats: 1 / 0),
        lambda: list(llm.generate_iter(prompts(), greedy(2))),
    ):
        with pytest.raises(ZeroDivisionError):
            call()
        assert_usable(llm, reference)


def test_a_wrong_prompt_leaves_the_prefix_cache_alone(llm):
    prompt = random_prompt(100, seed=9)
    complete(llm, [prompt], greedy(2))
    with pytest.raises(ValueError, match="empty"):
        generate(llm, [""], greedy(2))
    assert generate(llm, [prompt], greedy(2))[0]["num_cached_tokens"] == 96


# -- abort -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_abort_from_a_callback_gives_what_there_is(path, reference, overlap):
    prompts = reference.draw_prompts((10, 30, 20), 20)
    expected = reference.greedy(prompts, 20)
    steps = []

    def on_step(stats):
        steps.append(stats)
        if len(steps) == 5:
            llm.abort_request()

    with make_llm(path, skip_tokenizer_init=False, overlap_steps=overlap) as llm:
        outputs = llm.generate(prompts, [greedy(2), greedy(20), greedy(20, n=2)], use_tqdm=False, on_step=on_step)
        assert [output["finish_reason"] for output in outputs] == ["length", "abort", "abort"]
        assert [sample["finish_reason"] for sample in outputs[2]["samples"]] == ["abort", "abort"]
        for output, tokens in zip(outputs, expected, strict=True):
            num_tokens = len(output["token_ids"])
            assert 2 <= num_tokens < 20
            assert output["token_ids"] == tokens[:num_tokens]
            assert output["text"] == llm.tokenizer.decode(tokens[:num_tokens], skip_special_tokens=True)
            assert output["metrics"]["total"] > 0
        assert complete(llm, prompts, greedy(20)) == expected


def test_abort_before_anything_was_computed(path):
    with make_llm(path, max_num_seqs=1) as llm:
        outputs = llm.generate([[1, 2]] * 3, greedy(9), use_tqdm=False, on_step=lambda stats: llm.abort_request())
        assert [output["finish_reason"] for output in outputs] == ["abort"] * 3
        assert outputs[2]["token_ids"] == []
        assert outputs[2]["metrics"]["time_to_first_token"] is None
        assert_idle(llm)


def test_an_aborted_request_with_all_its_samples_leaves_the_others_alone(llm, reference):
    prompts = reference.draw_prompts((20, 30, 40), 9)
    ids = [llm.add_request(prompt, greedy(9, n=n)) for prompt, n in zip(prompts, (1, 3, 2), strict=True)]
    llm.step()
    llm.abort_request(ids[1])
    llm.abort_request(ids[1])
    done = []
    while not llm.is_finished():
        done += llm.step()[0]
    first, _, third = reference.greedy(prompts, 9)
    assert sorted(done) == [(ids[0], first), (ids[2], third), (ids[2], third)]
    assert_idle(llm)
    llm.abort_request(ids[0])  # One that has finished, as it may while the caller decides.
    ids = [llm.add_request([1 + i], greedy(2)) for i in range(12)]
    for wrong in (-1, ids[-1] + 1):
        with pytest.raises(ValueError, match=rf"request_id={wrong}: .*unfinished are: {ids[0]}, {ids[1]}, .*, \.\.\.$"):
            llm.abort_request(wrong)
    assert llm.stats()["waiting"] == 12
    llm.abort_request()
