"""LLM.generate_iter: results as they finish, of iterables without end, with faults, and left half-way."""

import itertools

import pytest
from checkpoints import assert_idle, both_ways, greedy, random_prompt
from leaving import LEAVING

from nanovllm.engine.text.streaming import NO_PROMPT

shared_llm = both_ways(max_num_seqs=4)


@pytest.mark.parametrize("ordered", [False, True])
def test_the_results_of_generate_whatever_the_iterable(llm, ordered):
    num = 24  # several times what a step computes
    prompts = [random_prompt(3 + i % 11, seed=i) for i in range(num)]
    params = [greedy(1 + (7 * i) % 13, n=1 + i % 2) for i in range(num)]
    expected = llm.generate(prompts, params, use_tqdm=False)
    results = list(llm.generate_iter((p for p in prompts), (p for p in params), ordered=ordered))
    assert sorted(index for index, _ in results) == list(range(num))
    if ordered:
        assert [index for index, _ in results] == list(range(num))
    for index, output in results:
        for name in ("text", "token_ids", "finish_reason", "num_prompt_tokens"):
            assert output[name] == expected[index][name]
        assert [s["token_ids"] for s in output.get("samples", [])] == [
            s["token_ids"] for s in expected[index].get("samples", [])
        ]


def test_results_come_as_they_finish(llm):
    results = llm.generate_iter([[1]] * 4, [greedy(30), greedy(2), greedy(9), greedy(2)])
    assert [index for index, _ in results] == [1, 3, 2, 0]


def test_while_there_is_no_prompt_the_others_go_on(llm):
    given = []

    def prompts():
        yield from ([1, 2], NO_PROMPT, [3], NO_PROMPT)
        while len(given) < 1:
            yield NO_PROMPT
        yield from ([4], NO_PROMPT, [5])
        while True:
            yield NO_PROMPT

    for index, output in llm.generate_iter(prompts(), greedy(3)):
        given.append(index)
        assert len(output["token_ids"]) == 3
    assert given == [0, 1, 2, 3]


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
    run = llm.model_runner.prepare

    def spy(step):
        if not step.is_prefill:
            batch_sizes.append(len(step.seqs))
        run(step)

    llm.model_runner.prepare = spy
    try:
        list(llm.generate_iter(([1 + i] for i in range(60)), (greedy(2 + i % 5) for i in range(60))))
    finally:
        del llm.model_runner.prepare
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


@pytest.mark.parametrize("leave", LEAVING)
def test_an_iterator_left_half_way_frees_its_blocks(llm, leave):
    for num_read in (0, 1, 5):
        results = llm.generate_iter(Endless(), greedy(5))
        for _ in range(num_read):
            next(results)
        leave(results)
        del results
        assert_idle(llm)


def test_abort_within_an_iterator(llm):
    reasons = []
    for _, output in llm.generate_iter([[1 + i] for i in range(12)], [greedy(3), *[greedy(50)] * 11]):
        reasons.append(output["finish_reason"])
        if len(reasons) == 1:
            llm.abort_request()
    assert reasons[0] == "length"
    assert 4 <= reasons.count("abort") <= 11
    assert len(reasons) == 12
