"""Steps that run by CUDA graphs, on a CPU: in place of a graph runs what it would have been captured from."""

import pytest
from checkpoints import Reference, assert_idle, complete, greedy, make_checkpoint, make_llm

from nanovllm.engine.step import StepKind

SIZES = [1, 2, 4, 8]


class Graph:
    """Of one batch size of a kind of step."""

    def __init__(self, runner, batch_size: int, kind: StepKind, replayed: list):
        self._runner, self._args, self._replayed = runner, (batch_size, kind), replayed

    def replay(self) -> None:
        self._runner._decode(*self._args)
        self._replayed.append(self._args)


def use_graphs(runner, kind: StepKind, replayed: list) -> None:
    graphs = runner.step_graphs[kind]
    graphs.use_sizes(SIZES, pool=None)
    graphs.graphs = {size: Graph(runner, size, kind, replayed) for size in SIZES}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("graphs"))


@pytest.mark.parametrize("overlap", [True, False])
def test_batches_between_the_sizes_of_graphs(path, overlap):
    """Padding rows, larger batches before smaller ones, and one that is too large for any graph."""
    reference = Reference(path)
    prompts = reference.draw_prompts((3, 20, 5, 9, 33, 7, 2, 11, 6), 12)
    params = [greedy(4 + i) for i in range(8)] + [greedy(2)]
    expected = [tokens[: each.max_tokens] for tokens, each in zip(reference.greedy(prompts, 12), params, strict=True)]
    with make_llm(path, overlap_steps=overlap) as llm:
        replayed: list = []
        use_graphs(llm.model_runner, StepKind(), replayed)
        assert complete(llm, prompts, params) == expected
        assert {size for size, _ in replayed} == set(SIZES)
        assert_idle(llm)


def test_mixed_steps(path):
    """Prompts are computed in rows behind those of decoding sequences, padded to one number of rows."""
    reference = Reference(path)
    prompts = reference.draw_prompts((3, 20, 5, 9), 20)
    with make_llm(path, mixed_step_rows=16) as llm:
        replayed: list = []
        for kind in (StepKind(), StepKind(is_mixed=True)):
            use_graphs(llm.model_runner, kind, replayed)
        ids, done = [llm.add_request(prompts[0], greedy(20))], {}
        while not llm.is_finished():
            done |= dict(llm.step()[0])
            if len(ids) == 1:
                ids += [llm.add_request(prompt, greedy(4)) for prompt in prompts[1:]]
        expected = reference.greedy(prompts, 20)
        assert [done[i] for i in ids] == [expected[0], *(tokens[:4] for tokens in expected[1:])]
        assert {kind for _, kind in replayed} == {StepKind(), StepKind(is_mixed=True)}


def test_sleep_lets_go_of_the_graphs(path):
    """Wherever they are known."""
    with make_llm(path) as llm:
        runner = llm.model_runner
        use_graphs(runner, StepKind(), [])
        runner.graphs = runner.step_graphs[StepKind()].graphs
        llm.sleep()
        assert not runner.graphs
        assert not runner.step_graphs
