"""The timing of each request, and the figures of the engine: they add up, and count what happened."""

import time

import pytest
from checkpoints import complete, generate, greedy, make_llm, random_prompt

from nanovllm import SamplingParams


def test_metrics_add_up(path):
    with make_llm(path, num_kvcache_blocks=4) as llm:
        start = time.perf_counter()
        outputs = generate(llm, [random_prompt(20, seed=i) for i in range(5)], greedy(8))
        seconds = time.perf_counter() - start
    for output in outputs:
        metrics = output["metrics"]
        assert 0 <= metrics["queued"] <= metrics["time_to_first_token"] <= metrics["total"] <= seconds
        expected = len(output["token_ids"]) / (metrics["total"] - metrics["queued"])
        assert metrics["tokens_per_second"] == pytest.approx(expected)
        assert output["num_prompt_tokens"] == 20
        assert (output["logprobs"], output["prompt_logprobs"]) == (None, None)
    # Two have room at once: the others wait until these are done.
    assert outputs[4]["metrics"]["queued"] > outputs[0]["metrics"]["total"] / 2
    assert outputs[4]["metrics"]["total"] > outputs[0]["metrics"]["total"]


def test_stats_count_what_happened(path):
    with make_llm(path, num_kvcache_blocks=40) as llm:
        fresh = llm.stats()
        assert not any(value for name, value in fresh.items() if not name.startswith("kv_blocks"))
        assert (fresh["kv_blocks_total"], fresh["kv_blocks_used"], fresh["kv_blocks_free"]) == (40, 0, 40)
        readings = []
        prompts = [random_prompt(40, seed=0)] * 2 + [random_prompt(33, seed=1)]
        llm.generate(prompts, [greedy(5), greedy(9), greedy(1)], use_tqdm=False, on_step=readings.append)
        stats = llm.stats()
        assert (stats["running"], stats["waiting"], stats["kv_blocks_used"]) == (0, 0, 0)
        assert stats["prompt_tokens"] == stats["prefix_cache_queries"] == 113
        # The second prompt waited for the first one's two full blocks.
        assert stats["prefix_cache_hits"] == 32
        assert stats["prefix_cache_hit_rate"] == 32 / 113
        assert stats["generated_tokens"] == 5 + 9 + 1
        assert stats["tokens_per_second"] == pytest.approx(15 / stats["seconds"])
        assert stats["preemptions"] == 0
        # One reading a step: what was under way, and blocks that are all accounted for.
        assert stats["steps"] == len(readings) == readings[-1]["steps"]
        assert all(r["kv_blocks_used"] + r["kv_blocks_free"] == 40 for r in readings)
        assert max(r["running"] for r in readings) >= 2
        assert max(r["kv_blocks_used"] for r in readings) >= 4
        llm.add_request([1, 2], greedy(4))
        assert llm.stats()["waiting"] == 1
        while not llm.is_finished():
            llm.step()
        assert llm.stats()["generated_tokens"] == 19


def test_stats_count_preemptions_and_surplus_tokens_of_nobody(path, reference):
    prompts = reference.draw_prompts((20, 18, 23), 25)
    with make_llm(path, num_kvcache_blocks=6) as llm:
        complete(llm, prompts, greedy(25))
        stats = llm.stats()
        assert stats["preemptions"] > 0
        assert stats["generated_tokens"] == 75
        assert stats["prompt_tokens"] == 61
    eos = reference.greedy(prompts, 25)[0][5]
    with make_llm(path, eos=eos) as llm:
        outputs = complete(llm, prompts, SamplingParams(temperature=0, max_tokens=25))
        assert len(outputs[0]) <= 6
        assert llm.stats()["generated_tokens"] == sum(map(len, outputs))


def test_what_log_probabilities_of_a_prompt_ask_the_prefix_cache(path):
    """Those of all tokens ask nothing. A score asks for its prompt."""
    prompt = random_prompt(40, seed=0)
    with make_llm(path) as llm:
        complete(llm, [prompt] * 2, greedy(2))
        before = llm.stats()
        complete(llm, [prompt], greedy(1, prompt_logprobs=0))
        after = llm.stats()
        assert after["prompt_tokens"] - before["prompt_tokens"] == 40
        for name in ("prefix_cache_queries", "prefix_cache_hits", "prefix_cache_hit_rate"):
            assert after[name] == before[name]
        llm.score([prompt], [[5]], use_tqdm=False)
        scored = llm.stats()
        assert scored["prefix_cache_queries"] - after["prefix_cache_queries"] == 41
        assert scored["prefix_cache_hits"] - after["prefix_cache_hits"] == 32
