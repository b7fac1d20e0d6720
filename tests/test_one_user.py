"""An engine serves one user at a time: who is refused while a stream or an iterator of results is half read."""

import pytest
from checkpoints import both_ways, complete, greedy, make_llm

shared_llm = both_ways(max_num_seqs=4)


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
