"""LLM.stream: its deltas, read to the end, left half-way or aborted."""

import pytest
from checkpoints import assert_idle, both_ways, generate, greedy, random_prompt
from leaving import LEAVING, leave_unread

from nanovllm import SamplingParams

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


def test_requests_by_hand_have_deltas_too(llm):
    """As a server needs them: requests come and go between two steps."""
    prompts = ["the table names a block", [5, 6], random_prompt(30, seed=1), "a row"]
    params = [
        greedy(12),
        SamplingParams(max_tokens=9, seed=1, ignore_eos=True, n=2, logprobs=1),
        greedy(15),
        SamplingParams(max_tokens=30, seed=4, stop=["e", "a"]),
    ]
    expected = llm.generate(prompts, params, use_tqdm=False)
    found = {}
    waiting = list(zip(prompts, params, strict=True))
    gone = llm.add_request("a row of slots", greedy(50), streams=True)
    ids = []
    for step in range(1000):
        if waiting:
            ids.append(llm.add_request(*waiting.pop(0), streams=True))
        if step == 2:
            llm.abort_request(gone)
        for delta in llm.step_deltas():
            assert step < 2 or delta["request_id"] != gone
            found.setdefault((delta["request_id"], delta["sample"]), []).append(delta)
        if not waiting and llm.is_finished():
            break
    for request_id, output in zip(ids, expected, strict=True):
        for sample, whole in enumerate(output.get("samples", [output])):
            deltas = found[request_id, sample]
            assert "".join(delta["text"] for delta in deltas) == whole["text"]
            assert [token for delta in deltas for token in delta["token_ids"]] == whole["token_ids"]
            assert [delta["finish_reason"] for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert deltas[-1]["finish_reason"] == whole["finish_reason"]
            assert deltas[-1]["stop_reason"] == whole["stop_reason"]
    with pytest.raises(RuntimeError, match="no request queued"):
        llm.step_deltas()


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


@pytest.mark.parametrize("leave", LEAVING)
def test_a_stream_left_half_way_frees_its_blocks_and_leaves_its_beginning_in_the_cache(llm, reference, leave):
    prompts = reference.draw_prompts((40, 9, 20), 12)
    for num_read in (0, 1, 5):
        llm.reset_prefix_cache()
        stream = llm.stream(prompts, greedy(12))
        for _ in range(num_read):
            next(stream)
        leave(stream)
        del stream
        assert_idle(llm)
        outputs = generate(llm, prompts, greedy(12))
        assert [output["token_ids"] for output in outputs] == reference.greedy(prompts, 12)
        was_computed = num_read > 0 or leave is not leave_unread
        assert outputs[0]["num_cached_tokens"] == (32 if was_computed else 0)


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
