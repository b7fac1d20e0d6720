"""An engine serves one user at a time: who is refused while a stream or an iterator of results is half read, and while
another thread is inside a call."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpoints import both_ways, complete, greedy

shared_llm = both_ways(max_num_seqs=4)

USES = {
    "generate": lambda llm: llm.generate([[1]], greedy(2)),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "hi"}]),
    "stream": lambda llm: llm.stream([[1]], greedy(2)),
    "generate_iter": lambda llm: llm.generate_iter([[1]], greedy(2)),
    "score": lambda llm: llm.score([[1]], [[2]]),
    "add_request": lambda llm: llm.add_request([1], greedy(2)),
    "step": lambda llm: llm.step(),
}


@pytest.mark.parametrize("method", ["stream", "generate_iter"])
def test_nobody_else_while_a_stream_is_half_read(llm, reference, method):
    prompts = reference.draw_prompts((20, 5), 9)
    not_begun = llm.stream([[2]], greedy(3))
    half_read = getattr(llm, method)(prompts, [greedy(3), greedy(9)])
    next(half_read)
    for use in (*USES.values(), lambda llm: next(not_begun)):
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


def test_nobody_else_while_requests_wait_for_steps(llm):
    request = llm.add_request([1, 2], greedy(3))
    for name in USES.keys() - {"add_request", "step"}:
        with pytest.raises(RuntimeError, match="add_request"):
            USES[name](llm)
    done = {}
    while not llm.is_finished():
        done |= dict(llm.step()[0])
    assert list(done) == [request]


def test_nobody_else_while_the_last_token_is_on_its_way(llm, reference):
    prompts = reference.draw_prompts((6, 7), 3)
    expected = reference.greedy(prompts, 3)
    stream = llm.stream(prompts[:1], greedy(3))
    tokens = next(stream)["token_ids"] + next(stream)["token_ids"]
    for others in (lambda: llm.generate([[2]], greedy(1)), lambda: next(llm.stream([[2]], greedy(1)))):
        with pytest.raises(RuntimeError, match="while other requests"):
            others()
    # When all that it has taken is done, others may have a turn.
    assert tokens + next(stream)["token_ids"] == expected[0]
    assert complete(llm, prompts, greedy(3)) == expected
    assert list(stream) == []


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


# -- threads -----------------------------------------------------------------------------------------------------


@pytest.fixture
def other_thread():
    with ThreadPoolExecutor(1) as pool:
        yield lambda use: pool.submit(use).result(60)


INSIDE = {
    "generate()": lambda llm, prompts: complete(llm, prompts, greedy(9)),
    "stream()": lambda llm, prompts: [delta["token_ids"] for delta in llm.stream(prompts, greedy(9))],
    "generate_iter()": lambda llm, prompts: [out["token_ids"] for _, out in llm.generate_iter(prompts, greedy(9))],
    "score()": lambda llm, prompts: llm.score(prompts, [[1], [2]], use_tqdm=False),
    "add_request() or step()": lambda llm, prompts: (llm.add_request(prompts[0], greedy(1)), llm.step()[0])[1][0][1],
}


@pytest.mark.parametrize("inside", INSIDE)
def test_nobody_else_while_another_thread_is_inside_a_call(llm, reference, monkeypatch, other_thread, inside):
    prompts = reference.draw_prompts((20, 5), 9)
    expected, run, messages = INSIDE[inside](llm, prompts), llm.model_runner.prepare, []
    not_begun = llm.stream([[1]], greedy(2))
    uses = [*USES.values(), lambda llm: next(not_begun), lambda llm: llm.abort_request()]
    uses.append(lambda llm: llm.reset_prefix_cache())

    def try_all():
        for use in uses:
            with pytest.raises(RuntimeError) as error:
                use(llm)
            messages.append(str(error.value))
        assert not llm.is_finished(), "to watch is allowed"
        assert llm.stats()["running"] > 0

    def run_while_others_try(step):
        if not messages:
            other_thread(try_all)
        run(step)

    monkeypatch.setattr(llm.model_runner, "prepare", run_while_others_try)
    assert INSIDE[inside](llm, prompts) == expected
    assert len(messages) == len(uses)
    for message in messages:
        assert f"() is called while another thread is inside {inside}: an LLM serves one thread at a time" in message


def test_of_many_threads_each_is_served_or_refused(llm, reference):
    """Whatever the moment in which they begin: all results are right, and all errors speak of threads."""
    prompts = reference.draw_prompts((20, 5), 9)
    expected = reference.greedy(prompts, 9)
    start = threading.Barrier(4)

    def use(i):
        served, refused = 0, set()
        start.wait(60)
        for _ in range(15):
            try:
                if i % 2:
                    assert complete(llm, prompts, greedy(9)) == expected
                else:
                    outputs = dict(llm.generate_iter(prompts, greedy(9)))
                    assert [outputs[0]["token_ids"], outputs[1]["token_ids"]] == expected
                served += 1
            except RuntimeError as error:
                refused.add(str(error))
        return served, refused

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(use, range(4)))
    assert sum(served for served, _ in outcomes) > 0
    # An iterator between two steps is half read, and no thread is inside it.
    expected_errors = ("is called while another thread is inside", "while other requests are unfinished")
    assert all(any(text in error for text in expected_errors) for _, refused in outcomes for error in refused)


def test_a_stream_may_go_on_in_another_thread(llm, other_thread):
    stream = llm.stream([[1]], greedy(4))
    assert len([next(stream), other_thread(lambda: next(stream)), *stream]) == 4
    stream = llm.stream([[1]], greedy(4))
    next(stream)
    other_thread(stream.close)
    assert llm.is_finished()


def test_a_thread_is_free_again_after_an_error(llm, other_thread):
    for wrong in ({"on_error": "no"}, {"on_step": lambda stats: 1 / 0}):
        with pytest.raises((ValueError, ZeroDivisionError)):
            llm.generate([[1]], greedy(3), use_tqdm=False, **wrong)
        assert other_thread(lambda: len(complete(llm, [[1]], greedy(3))[0])) == 3
