"""What becomes of a batch in which prompts are faulty, requests are aborted, or a callback fails."""

import pytest
from checkpoints import assert_idle, both_ways, complete, generate, greedy, make_llm, random_prompt

shared_llm = both_ways()


# -- faults ------------------------------------------------------------------------------------------------------

FAULTY = [
    ("", "is empty"),
    ([1, 10**6], "outside the vocabulary"),
    (None, "integer token ids"),
    ([1] * 200, "200 tokens"),
    ("a lone surrogate: \ud800", "prompts"),
]


@pytest.mark.parametrize(("prompt", "message"), FAULTY, ids=lambda value: repr(value)[:12])
def test_a_faulty_prompt_among_others(llm, reference, prompt, message):
    good = reference.draw_prompts((10, 6), 4)
    batch = [good[0], prompt, good[1], "some text"]
    with pytest.raises((ValueError, TypeError), match=r"prompts\[1\]") as raised:
        generate(llm, batch, greedy(4))
    assert_idle(llm)
    outputs = llm.generate(batch, greedy(4), use_tqdm=False, on_error="return")
    assert [outputs[0]["token_ids"], outputs[2]["token_ids"]] == reference.greedy(good, 4)
    assert len(outputs[3]["token_ids"]) == 4
    fault = outputs[1]
    assert (fault["finish_reason"], fault["text"], fault["token_ids"]) == ("error", None, [])
    assert fault["error"] == str(raised.value)
    assert message in fault["error"]
    assert all(output.keys() - fault.keys() == set() for output in outputs)
    assert not any("error" in output for output in (outputs[0], outputs[2], outputs[3]))


def test_faulty_parameters_among_others(llm):
    outputs = llm.generate([[1], [2]], [greedy(2), "greedy"], use_tqdm=False, on_error="return")
    assert [output["finish_reason"] for output in outputs] == ["length", "error"]
    assert "sampling_params[1]" in outputs[1]["error"]
    # A list of another length is no fault of one prompt.
    with pytest.raises(ValueError, match=r"sampling_params: 1 .*2 prompts"):
        llm.generate([[1], [2]], [greedy(2)], use_tqdm=False, on_error="return")


def test_all_are_faulty(llm):
    outputs = llm.generate(["", []], greedy(2), use_tqdm=False, on_error="return")
    assert [output["finish_reason"] for output in outputs] == ["error", "error"]


def test_on_error_takes_one_of_two(llm):
    with pytest.raises(ValueError, match=r"on_error='ignore'.*raise, return"):
        llm.generate([[1]], greedy(2), on_error="ignore")


def test_a_wrong_prompt_leaves_the_prefix_cache_alone(llm):
    prompt = random_prompt(100, seed=9)
    complete(llm, [prompt], greedy(2))
    with pytest.raises(ValueError, match="empty"):
        generate(llm, [""], greedy(2))
    assert generate(llm, [prompt], greedy(2))[0]["num_cached_tokens"] == 96


# -- abort -------------------------------------------------------------------------------------------------------


def test_abort_from_a_callback_gives_what_there_is(llm, reference):
    prompts = reference.draw_prompts((10, 30, 20), 20)
    expected = reference.greedy(prompts, 20)
    steps = []

    def on_step(stats):
        steps.append(stats)
        if len(steps) == 5:
            llm.abort_request()

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


def test_abort_of_a_request_drops_all_its_samples(llm):
    request = llm.add_request([1, 2, 3], greedy(9, n=3))
    other = llm.add_request([4, 5], greedy(3, n=2))
    llm.step()
    llm.abort_request(request)
    finished = []
    while not llm.is_finished():
        finished += llm.step()[0]
    assert [request_id for request_id, _ in finished] == [other, other]


def test_an_exception_in_the_callback_ends_the_batch(llm, reference):
    def on_step(stats):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate([[1, 2]], greedy(5), use_tqdm=False, on_step=on_step)
    assert_idle(llm)
    assert complete(llm, [[5, 6, 7]], greedy(4)) == reference.greedy([[5, 6, 7]], 4)


def test_a_callback_cannot_start_another_batch(llm):
    with pytest.raises(RuntimeError, match=r"generate\(\) while other requests are unfinished"):
        llm.generate([[1, 2]], greedy(5), use_tqdm=False, on_step=lambda stats: complete(llm, [[1]], greedy(1)))
