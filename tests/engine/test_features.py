"""A feature that no file of the package knows: one class, handed to the engine, in every kind of step."""

import pickle
from dataclasses import replace

import pytest
from added_number import AddedNumber
from checkpoints import Reference, assert_idle, greedy, make_checkpoint, make_llm
from test_graph_steps import use_graphs

from nanovllm import SamplingParams
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step, StepKind

VOCAB_SIZE, NUMBER = 64, 0.5


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("features"), vocab_size=VOCAB_SIZE)
    return path, Reference(path)


def requests(reference) -> tuple[list, list[SamplingParams], list[SamplingParams]]:
    """Prompts, what half of them ask of the feature, and the same as logit_bias, which the engine has itself."""
    prompts = reference.draw_prompts((3, 20, 5, 9, 33, 7), 16)
    bias = dict.fromkeys(range(0, VOCAB_SIZE, 2), NUMBER)
    plain = [greedy(16) if i % 2 else greedy(12) for i in range(len(prompts))]
    sampled = {"temperature": 0.8, "seed": 5, "ignore_eos": True}
    asking, biased = (
        [
            each if i % 2 else SamplingParams(max_tokens=each.max_tokens, **sampled, **more)
            for i, each in enumerate(plain)
        ]
        for more in ({"extra_args": {"added": NUMBER}}, {"logit_bias": bias})
    )
    return prompts, asking, biased


def tokens_of(llm, prompts, params) -> list[list[int]]:
    found = [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
    assert_idle(llm)
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"mixed_step_rows": 17, "max_num_batched_tokens": 17}, id="mixed"),
        pytest.param({"speculation": "suffix"}, id="speculative"),
        pytest.param({"overlap_steps": False}, id="one step after the other"),
        pytest.param({"tensor_parallel_size": 2}, id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_each_request_gets_what_it_asks_for(base, options, monkeypatch):
    path, reference = base
    prompts, asking, biased = requests(reference)
    with make_llm(path) as llm:
        expected = tokens_of(llm, prompts, biased)
        assert expected != tokens_of(llm, prompts, [greedy(params.max_tokens) for params in biased])
    if "speculation" in options:  # Every step tries all that is proposed.
        from nanovllm.engine.features.speculation import speculative_scheduler

        monkeypatch.setattr(
            speculative_scheduler, "choose_counts", lambda chances, num_seqs, pace: [len(each) for each in chances]
        )
    with make_llm(path, features=[AddedNumber()], **options) as llm:
        (feature,) = llm.config.features
        assert tokens_of(llm, prompts, [greedy(5)] * len(prompts)) == reference.greedy(prompts, 5)
        assert feature.num_steps == 0, "nobody asked for it"
        assert tokens_of(llm, prompts, asking) == expected
        assert feature.num_steps > 0
        if "speculation" in options:
            assert llm.stats()["accepted_tokens"] > 0
        if "mixed_step_rows" in options:
            added = [llm.add_request(prompt, params) for prompt, params in zip(prompts[:1], asking[:1], strict=True)]
            done, is_mixed = {}, []
            while not llm.is_finished():
                done |= dict(llm.step()[0])
                is_mixed.append(llm._in_flight is not None and llm._in_flight.num_prefilled > 0)
                if len(added) == 1:
                    short = [replace(params, max_tokens=3) for params in asking[1:]]
                    added += [llm.add_request(*each) for each in zip(prompts[1:], short, strict=True)]
            assert any(is_mixed)
            assert [done[i] for i in added] == [expected[0], *(tokens[:3] for tokens in expected[1:])]


def test_graphs_that_give_logits_run_only_where_a_request_asks(base):
    path, reference = base
    prompts, asking, biased = requests(reference)
    with make_llm(path) as llm:
        expected = tokens_of(llm, prompts, biased)
    with make_llm(path, features=[AddedNumber()], mixed_step_rows=17, max_num_batched_tokens=17) as llm:
        replayed: list = []
        for is_mixed in (False, True):
            for gives_logits in (False, True):
                use_graphs(llm.model_runner, StepKind(is_mixed, False, gives_logits), replayed)
        tokens_of(llm, prompts, [greedy(5)] * len(prompts))
        assert not any(kind.gives_logits for _, kind in replayed)
        replayed.clear()
        assert tokens_of(llm, prompts, asking) == expected
        assert StepKind(gives_logits=True) in {kind for _, kind in replayed}


def test_what_no_feature_has_is_refused(base):
    with make_llm(base[0], features=[AddedNumber()]) as llm:
        with pytest.raises(ValueError, match="extra_args: 'added_number' is no feature of this engine; it has: added"):
            llm.generate([[1, 2]], SamplingParams(extra_args={"added_number": 1.0}))
        with pytest.raises(ValueError, match="added='much': must be a float"):
            llm.generate([[1, 2]], SamplingParams(extra_args={"added": "much"}))


def test_two_features_of_one_name_are_refused(base):
    with pytest.raises(ValueError, match=r"features=.*must be a list of engine\.features\.feature\.Feature objects"):
        make_llm(base[0], features=[AddedNumber(), AddedNumber()])


def test_a_worker_that_is_given_a_step_by_hand_knows_no_requests():
    """Rank 0 alone edits logits."""
    seq = Sequence([1, 2], SamplingParams(extra_args={"added": NUMBER}))
    feature, steps = AddedNumber(), [Step([each], True, 1) for each in (seq, pickle.loads(pickle.dumps(seq)))]
    for step in steps:
        step.needs_logits = True
    assert [feature.is_used(step) for step in steps] == [True, False]
