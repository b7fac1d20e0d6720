"""Results before the batch is done: stream and generate_iter, read to the end or left half-way."""

import contextlib
import gc
import itertools

import pytest
from checkpoints import assert_idle, both_ways, complete, greedy, make_llm, random_prompt

from nanovllm import SamplingParams, StructuredOutputsParams

shared_llm = both_ways(max_num_seqs=4)


def join(deltas) -> dict[tuple[int, int], dict]:
    """(prompt, sample) -> what its deltas come to."""
    results = {}
    for delta in deltas:
        result = results.setdefault((delta["index"], delta["sample"]), {"text": "", "token_ids": [], "num_deltas": 0})
        assert "finish_reason" not in result, "a delta after the last one"
        result["text"] += delta["text"]
        result["token_ids"] += delta["token_ids"]
        result["num_deltas"] += 1
        if delta["finish_reason"] is not None:
            result |= {name: delta[name] for name in ("finish_reason", "stop_reason")}
    return results


# -- stream ------------------------------------------------------------------------------------------------------


def test_deltas_add_up_to_what_generate_gives(llm):
    prompts = [random_prompt(30, seed=1), "the table names a block", [5]]
    params = [
        SamplingParams(max_tokens=20, seed=1, ignore_eos=True, n=3),
        greedy(12, skip_special_tokens=False),
        greedy(15),
    ]
    expected = llm.generate(prompts, params, use_tqdm=False)
    results = join(llm.stream(prompts, params))
    assert sorted(results) == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)]
    for (index, sample), result in results.items():
        whole = expected[index]["samples"][sample] if index == 0 else expected[index]
        assert result["num_deltas"] == len(whole["token_ids"]), "one delta a token"
        for name in ("text", "token_ids", "finish_reason", "stop_reason"):
            assert result[name] == whole[name]


def test_deltas_carry_their_tokens_logprobs(llm):
    prompts, params = [[5, 6, 7], [8] * 20], SamplingParams(max_tokens=8, ignore_eos=True, seed=2, n=2, logprobs=2)
    found = {}
    for delta in llm.stream(prompts, params):
        assert [next(iter(each)) for each in delta["logprobs"]] == delta["token_ids"]
        found.setdefault((delta["index"], delta["sample"]), []).extend(delta["logprobs"])
    for i, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
        assert [found[i, sample] for sample in range(2)] == [
            [pytest.approx(each, abs=1e-5) for each in sample["logprobs"]] for sample in output["samples"]
        ]


def test_a_bad_form_in_a_stream_and_in_an_iterable(llm):
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a(b"))
    good = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[ab]{3}"))
    with pytest.raises(ValueError, match=r"sampling_params\[1\]: regex="):
        llm.stream([[1], [2]], [good, bad])
    assert_idle(llm)
    with pytest.raises(ValueError, match=r"sampling_params\[2\]: regex="):
        list(llm.generate_iter([[1], [2], [3]], [good, greedy(2), bad]))
    assert_idle(llm)
    results = dict(llm.generate_iter([[1], [2], [3]], [bad, good, greedy(2)], on_error="return"))
    assert [results[i]["finish_reason"] for i in range(3)] == ["error", "stop", "length"]
    assert results[0]["error"].startswith("sampling_params[0]: regex=")
    assert len(results[1]["text"]) == 3
    assert join(llm.stream([[2]], good))[0, 0]["text"].strip("ab") == ""


def test_deltas_come_as_the_tokens_do(llm):
    stream = llm.stream([[5, 6, 7]], greedy(8))
    next(stream)
    assert llm.stats()["running"] == 1
    assert len(list(stream)) == 7


def test_deltas_never_show_the_beginning_of_a_stop_string(llm):
    (plain,) = llm.generate("a table of blocks", greedy(40), use_tqdm=False)
    stop = plain["text"][12:18]
    (whole,) = llm.generate("a table of blocks", greedy(40, stop=stop), use_tqdm=False)
    shown = ""
    for delta in llm.stream("a table of blocks", greedy(40, stop=stop)):
        shown += delta["text"]
        assert plain["text"].startswith(shown)
        assert whole["text"].startswith(shown)
    assert shown == whole["text"]
    assert delta["stop_reason"] == whole["stop_reason"] == stop


def test_stream_without_a_tokenizer(path):
    with make_llm(path) as llm:
        deltas = list(llm.stream([[1, 2], [3]], greedy(4)))
        assert {delta["text"] for delta in deltas} == {None}
        expected = complete(llm, [[1, 2], [3]], greedy(4))
        tokens = [[t for d in deltas if d["index"] == i for t in d["token_ids"]] for i in range(2)]
        assert tokens == expected


def test_a_stream_checks_its_arguments_at_once(llm):
    with pytest.raises(ValueError, match=r"prompts\[1\]: .*empty"):
        llm.stream([[1], []], greedy(3))
    with pytest.raises(ValueError, match="sampling_params: 1"):
        llm.stream([[1], [2]], [greedy(3)])
    assert list(llm.stream([], greedy(3))) == []


def leave_by_break(stream):
    for _ in stream:
        break


def leave_by_exception(stream):
    with contextlib.suppress(ZeroDivisionError):
        for _ in stream:
            raise ZeroDivisionError


def leave_by_close(stream):
    next(stream)
    stream.close()


def leave_unread(stream):
    pass


LEAVING = [leave_by_break, leave_by_exception, leave_by_close, leave_unread]


@pytest.mark.parametrize("num_read", [0, 1, 5])
@pytest.mark.parametrize("leave", LEAVING)
def test_a_stream_left_half_way_frees_its_blocks(llm, reference, leave, num_read):
    prompts = reference.draw_prompts((40, 9, 20), 12)
    stream = llm.stream(prompts, greedy(12))
    for _ in range(num_read):
        next(stream)
    leave(stream)
    del stream
    gc.collect()
    assert_idle(llm)
    assert complete(llm, prompts, greedy(12)) == reference.greedy(prompts, 12)


def test_what_a_left_stream_computed_stays_in_the_prefix_cache(llm):
    llm.reset_prefix_cache()
    prompt = random_prompt(100, seed=5)
    leave_by_close(llm.stream([prompt], greedy(12)))
    assert llm.generate([prompt], greedy(1), use_tqdm=False)[0]["num_cached_tokens"] == 96


def test_abort_within_a_stream(llm, reference):
    prompts = reference.draw_prompts((10, 12, 14), 12)
    expected = reference.greedy(prompts, 12)
    deltas = []
    for delta in llm.stream(prompts, greedy(12)):
        deltas.append(delta)
        if delta["index"] == 1 and sum(d["index"] == 1 for d in deltas) == 3:
            llm.abort_request(delta["request_id"])
    results = join(deltas)
    assert [results[i, 0]["finish_reason"] for i in range(3)] == ["length", "abort", "length"]
    assert [results[i, 0]["token_ids"] for i in range(3)] == [expected[0], expected[1][:3], expected[2]]
    aborted = [i for i, d in enumerate(deltas) if d["finish_reason"] == "abort"]
    assert aborted[0] < len(deltas) - 6, "it is told at once, not at the end"


def test_abort_of_everything_ends_the_stream(llm):
    reasons = []
    for delta in llm.stream([[1], [2, 3]], greedy(50)):
        llm.abort_request()
        reasons.append(delta["finish_reason"])
    assert reasons.count("abort") == 2
    assert len(reasons) < 6


# -- one user at a time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.generate([[1]], greedy(2)),
        lambda llm: llm.chat([{"role": "user", "content": "hi"}]),
        lambda llm: llm.stream([[1]], greedy(2)),
        lambda llm: llm.generate_iter([[1]], greedy(2)),
        lambda llm: llm.score([[1]], [[2]]),
        lambda llm: llm.add_request([1], greedy(2)),
        lambda llm: llm.step(),
    ],
    ids=["generate", "chat", "stream", "generate_iter", "score", "add_request", "step"],
)
@pytest.mark.parametrize("method", ["stream", "generate_iter"])
def test_nobody_else_while_a_stream_is_half_read(llm, reference, method, use):
    prompts = reference.draw_prompts((20, 5), 9)
    half_read = getattr(llm, method)(prompts, [greedy(3), greedy(9)])
    next(half_read)
    with pytest.raises(RuntimeError, match=r"while other requests are unfinished.*close\(\)"):
        use(llm)
    # Nothing has happened to those that are under way.
    rest = list(half_read)
    if method == "stream":
        assert [t for d in rest if d["index"] == 1 for t in d["token_ids"]] in (
            reference.greedy(prompts, 9)[1],
            reference.greedy(prompts, 9)[1][1:],
        )
    else:
        assert [output["token_ids"] for _, output in rest] == reference.greedy(prompts, 9)[1:]


def test_two_streams_one_of_which_is_not_begun(llm):
    first, second = llm.stream([[1]], greedy(3)), llm.stream([[2]], greedy(3))
    next(first)
    with pytest.raises(RuntimeError, match=r"stream\(\) while other requests"):
        next(second)
    assert len(list(first)) == 2


def test_a_stream_while_requests_wait_for_steps(llm):
    request = llm.add_request([1, 2], greedy(3))
    with pytest.raises(RuntimeError, match="add_request"):
        llm.stream([[1]], greedy(2))
    done = {}
    while not llm.is_finished():
        done |= dict(llm.step()[0])
    assert list(done) == [request]


def test_a_batch_between_the_last_results_of_an_iterator(llm, reference):
    # When all that it has taken is done, others may have a turn.
    prompts = reference.draw_prompts((6, 7), 3)
    expected = reference.greedy(prompts, 3)
    stream = llm.stream(prompts[:1], greedy(3))
    tokens = next(stream)["token_ids"] + next(stream)["token_ids"] + next(stream)["token_ids"]
    assert complete(llm, prompts, greedy(3)) == expected
    assert list(stream) == []
    assert tokens == expected[0]


def test_nobody_else_while_the_last_token_is_on_its_way(llm):
    stream = llm.stream([[1]], greedy(3))
    read = [next(stream), next(stream)]
    for others in (lambda: llm.generate([[2]], greedy(1)), lambda: next(llm.stream([[2]], greedy(1)))):
        with pytest.raises(RuntimeError, match="while other requests"):
            others()
    assert len([*read, *stream]) == 3


def test_nobody_else_before_what_was_aborted_is_told(llm):
    results = llm.generate_iter([[1], [2], [3], [4], [5], [6]], [greedy(1), *[greedy(9)] * 5], ordered=True)
    assert next(results)[0] == 0
    llm.abort_request()
    with pytest.raises(RuntimeError, match=r"read a stream\(\) or generate_iter\(\) to its end"):
        llm.generate([[1]], greedy(2), use_tqdm=False)
    rest = list(results)
    assert [index for index, _ in rest] == [1, 2, 3, 4, 5]
    assert "abort" in {output["finish_reason"] for _, output in rest}


def test_prompts_that_ask_the_engine_itself(llm, reference):
    """A chain of prompts: refused while others are at work, and no request is left behind."""
    prompts = reference.draw_prompts((6, 7, 8), 3)
    answers = ([*prompt, *complete(llm, [prompt], greedy(3))[0]] for prompt in prompts)
    # All are taken before the first step: the engine is free for each.
    assert len(list(llm.generate_iter(answers, greedy(3)))) == 3
    late = (complete(llm, [[1]], greedy(2)) and [1 + i] for i in range(60))
    with pytest.raises(RuntimeError, match="while other requests"):
        list(llm.generate_iter(late, greedy(5)))
    assert complete(llm, prompts, greedy(3)) == reference.greedy(prompts, 3)


def test_requests_added_from_on_step(llm, reference):
    """Refused in every step that leaves something to do, and the batch goes on."""
    refused = []

    def on_step(stats):
        try:
            request = llm.add_request([1], greedy(1))
        except RuntimeError:
            refused.append(True)
        else:
            refused.append(False)
            llm.abort_request(request)

    prompts = reference.draw_prompts((6, 7), 3)
    outputs = llm.generate(prompts, greedy(3), use_tqdm=False, on_step=on_step)
    assert [output["token_ids"] for output in outputs] == reference.greedy(prompts, 3)
    assert refused == [True, True, False]


@pytest.mark.parametrize("method", ["stream", "generate_iter"])
def test_an_engine_that_exits_ends_its_streams(path, method):
    llm = make_llm(path)
    half_read = getattr(llm, method)([[1], [2]], [greedy(2), greedy(9)])
    next(half_read)
    llm.exit()
    with pytest.raises(RuntimeError, match="exited"):
        list(half_read)


# -- generate_iter -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
def test_the_results_of_generate_whatever_the_iterable(llm, ordered):
    prompts = [random_prompt(3 + i % 11, seed=i) for i in range(70)]
    params = [greedy(1 + (7 * i) % 13, n=1 + i % 2) for i in range(70)]
    expected = llm.generate(prompts, params, use_tqdm=False)
    results = list(llm.generate_iter((p for p in prompts), (p for p in params), ordered=ordered))
    assert sorted(index for index, _ in results) == list(range(70))
    if ordered:
        assert [index for index, _ in results] == list(range(70))
    for index, output in results:
        for name in ("text", "token_ids", "finish_reason", "num_prompt_tokens"):
            assert output[name] == expected[index][name]
        assert [s["token_ids"] for s in output.get("samples", [])] == [
            s["token_ids"] for s in expected[index].get("samples", [])
        ]


def test_results_come_as_they_finish(llm):
    results = llm.generate_iter([[1]] * 4, [greedy(30), greedy(2), greedy(9), greedy(2)])
    assert [index for index, _ in results] == [1, 3, 2, 0]


class Endless:
    """Prompts without end, which count how many of them were taken."""

    def __init__(self):
        self.num_taken = 0

    def __iter__(self):
        for i in itertools.count():
            self.num_taken += 1
            yield [1 + i % 300, 2]


@pytest.mark.parametrize("ordered", [False, True])
def test_an_endless_iterable_is_taken_as_there_is_room(llm, ordered):
    prompts = Endless()
    results = llm.generate_iter(prompts, greedy(3), ordered=ordered)
    assert prompts.num_taken == 0
    for num_given, _ in enumerate(itertools.islice(results, 100), 1):
        # At most twice what a step computes is under way, and a step's worth of results may be on their way out.
        assert prompts.num_taken <= num_given + 3 * 4
    results.close()
    assert_idle(llm)


def test_the_engine_is_kept_full(llm):
    batch_sizes = []
    call = llm.model_runner.call

    def spy(method, seqs, is_prefill):
        if not is_prefill:
            batch_sizes.append(len(seqs))
        return call(method, seqs, is_prefill)

    llm.model_runner.call = spy
    try:
        list(llm.generate_iter(([1 + i] for i in range(60)), (greedy(2 + i % 5) for i in range(60))))
    finally:
        del llm.model_runner.call
    assert batch_sizes.count(4) > 0.9 * len(batch_sizes)


def test_results_that_wait_for_a_slow_one_are_few(llm):
    prompts = Endless()
    # The first takes 150 steps, in which hundreds of the others could be done.
    params = itertools.chain([greedy(150)], itertools.repeat(greedy(1)))
    results = llm.generate_iter(prompts, params, ordered=True)
    index, output = next(results)
    assert (index, len(output["token_ids"])) == (0, 150)
    assert prompts.num_taken <= 8 * 4
    assert [index for index, _ in itertools.islice(results, 50)] == list(range(1, 51))
    results.close()


@pytest.mark.parametrize("ordered", [False, True])
def test_faulty_prompts_among_the_results(llm, ordered):
    prompts = [[], [1], "", [2], [10**6], *[[]] * 40, [3]]
    results = dict(llm.generate_iter(iter(prompts), greedy(2), ordered=ordered, on_error="return"))
    assert sorted(results) == list(range(46))
    served = {index for index, output in results.items() if output["finish_reason"] == "length"}
    assert served == {1, 3, 45}
    assert "prompts[4]: token id 1000000" in results[4]["error"]


@pytest.mark.parametrize("ordered", [False, True])
def test_faults_without_end_do_not_pile_up(llm, ordered):
    prompts = itertools.chain([[1]], itertools.repeat([]))
    results = llm.generate_iter(prompts, greedy(9), ordered=ordered, on_error="return")
    reasons = [output["finish_reason"] for _, output in itertools.islice(results, 100)]
    assert reasons.count("length") == 1
    results.close()


def test_a_faulty_prompt_ends_the_iterator_with_its_index(llm, reference):
    prompts = ([5, 6, 7] if i != 33 else "" for i in range(100))
    results = llm.generate_iter(prompts, greedy(2))
    with pytest.raises(ValueError, match=r"prompts\[33\]: is empty"):
        list(results)
    assert_idle(llm)
    assert complete(llm, [[5, 6, 7]], greedy(4)) == reference.greedy([[5, 6, 7]], 4)


def test_an_iterable_that_fails(llm):
    def prompts():
        yield from [[1]] * 9
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(llm.generate_iter(prompts(), greedy(2)))
    assert_idle(llm)


@pytest.mark.parametrize(("num_params", "first"), [(5, "sampling_params"), (7, "prompts")])
def test_another_number_of_parameters_than_of_prompts(llm, num_params, first):
    results = llm.generate_iter([[1]] * 6, [greedy(2)] * num_params)
    with pytest.raises(ValueError, match=f"sampling_params: {first} ended after {min(num_params, 6)}"):
        list(results)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(([[1]], "greedy"), "sampling_params"), ((7,), "prompts"), (([[1]], None, False, "ignore"), "on_error")],
)
def test_wrong_arguments_at_once(llm, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        llm.generate_iter(*arguments)


def test_one_text_and_nothing_at_all(llm):
    ((index, output),) = llm.generate_iter("the table", greedy(3))
    assert (index, len(output["token_ids"])) == (0, 3)
    assert list(llm.generate_iter([], greedy(3))) == []


@pytest.mark.parametrize("num_read", [0, 1, 5])
@pytest.mark.parametrize("leave", LEAVING)
def test_an_iterator_left_half_way_frees_its_blocks(llm, leave, num_read):
    results = llm.generate_iter(Endless(), greedy(5))
    for _ in range(num_read):
        next(results)
    leave(results)
    del results
    gc.collect()
    assert_idle(llm)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["stream", "generate_iter"])
def test_an_exception_or_ctrl_c_in_a_step(llm, reference, monkeypatch, method, error):
    prompts = reference.draw_prompts((20, 5, 30), 9)
    forward, calls = llm.model_runner.model.forward, []

    def failing(*args):
        calls.append(0)
        if len(calls) == 5:
            raise error
        return forward(*args)

    with monkeypatch.context() as patch:
        patch.setattr(llm.model_runner.model, "forward", failing)
        results = getattr(llm, method)(prompts, [greedy(2), greedy(9), greedy(9)])
        with pytest.raises(error):
            list(results)
    assert_idle(llm)
    assert complete(llm, prompts, greedy(9)) == reference.greedy(prompts, 9)


def test_abort_within_an_iterator(llm):
    reasons = []
    for _, output in llm.generate_iter([[1 + i] for i in range(12)], [greedy(3), *[greedy(50)] * 11]):
        reasons.append(output["finish_reason"])
        if len(reasons) == 1:
            llm.abort_request()
    assert reasons[0] == "length"
    assert 4 <= reasons.count("abort") <= 11
    assert len(reasons) == 12
