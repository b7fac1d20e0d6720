"""Hybrids with linear attention on a GPU: states in cells, snapshots, mixed steps, CUDA graphs."""

import pytest
from checkpoints import Reference, assert_idle, complete, greedy, make_checkpoint, needs_family, random_prompt
from gpu_engines import gpu_llm
from replay import Replay

from nanovllm.engine.features.speculation import speculative_scheduler

pytestmark = [pytest.mark.gpu, needs_family("qwen3_5_text")]

FIELDS = {"head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_hidden_layers": 4}
OPTIONS = {"attention_backend": "triton", "dtype": "float32", "kvcache_block_size": 256, "max_model_len": 1024}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """(checkpoint, Reference, prompts of which three share a beginning, their completions)"""
    path = make_checkpoint(tmp_path_factory.mktemp("hybrid"), family="qwen3_5_text", **FIELDS)
    reference = Reference(path)
    prompts = reference.draw_prompts((1, 70, 255, 300), 10)
    prompts += reference.draw_prompts((600, 520, 530), 10, prefix=random_prompt(515, seed=1))
    return path, reference, prompts, reference.greedy(prompts, 10)


@pytest.mark.parametrize("eager", [False, True])
def test_snapshots_and_chunks(hybrid, eager):
    path, _, prompts, expected = hybrid
    options = OPTIONS | {"num_kvcache_blocks": 24, "max_num_batched_tokens": 700, "enforce_eager": eager}
    with gpu_llm(path, **options) as llm:
        for num_hits in (2 * 512, 2 * 512 + 256 + 3 * 512):
            assert complete(llm, prompts, greedy(10)) == expected
            assert llm.scheduler.num_prefix_hits == num_hits
        for num_seqs in (3, 1):
            assert complete(llm, prompts[:num_seqs], greedy(10)) == expected[:num_seqs]
        assert_idle(llm)


def test_preemption(hybrid):
    path, reference, prompts, _ = hybrid
    prompts = reference.draw_prompts((250, 251, 252, 253), 20)
    with gpu_llm(path, **OPTIONS | {"num_kvcache_blocks": 6, "max_num_batched_tokens": 700}) as llm:
        assert complete(llm, prompts, greedy(20)) == reference.greedy(prompts, 20)
        assert llm.scheduler.num_preemptions > 0


@pytest.mark.parametrize("eager", [False, True])
def test_prompts_beside_decode_steps(hybrid, eager):
    """From the first token on, and from a snapshot."""
    path, reference, _, _ = hybrid
    prompts = reference.draw_prompts((300, 290, 280, 20), 40)
    prompts += reference.draw_prompts((300, 310), 40, prefix=random_prompt(260, seed=3))
    limits = (40, 4, 5, 6, 4, 4)
    expected = [found[:limit] for found, limit in zip(reference.greedy(prompts, 40), limits, strict=True)]
    options = OPTIONS | {"num_kvcache_blocks": 24, "mixed_step_rows": 96, "max_num_batched_tokens": 700}
    with gpu_llm(path, **options, enforce_eager=eager) as llm:
        complete(llm, prompts[-1:], greedy(1))
        runner, mixed, copies = llm.model_runner, [], []
        prepare = runner.prepare

        def prepare_and_record(step):
            prepare(step)
            mixed.append(not step.is_prefill and step.num_prefilled > 0)
            copies.extend(step.extras.get("state copies", ()))

        runner.prepare = prepare_and_record
        ids, done = [llm.add_request(prompts[0], greedy(limits[0]))], {}
        while not llm.is_finished():
            done |= dict(llm.step()[0])
            if len(ids) == 1:
                more = zip(prompts[1:], limits[1:], strict=True)
                ids += [llm.add_request(prompt, greedy(limit)) for prompt, limit in more]
        assert [done[i] for i in ids] == expected
        assert sum(mixed) > 3
        assert copies


@pytest.mark.parametrize("eager", [False, True])
def test_proposed_tokens(hybrid, eager, monkeypatch):
    """Some are wrong, so states are taken back."""
    path, _, prompts, expected = hybrid
    choose = lambda chances, num_seqs, pace: [len(each) for each in chances]  # noqa: E731
    monkeypatch.setattr(speculative_scheduler, "choose_counts", choose)
    options = OPTIONS | {"num_kvcache_blocks": 24, "max_num_batched_tokens": 700, "max_num_seqs": 8}
    with gpu_llm(path, **options, speculation="suffix", max_speculative_tokens=5, enforce_eager=eager) as llm:
        for wrong in (0.0, 0.3):
            assert isinstance(llm.scheduler, speculative_scheduler.SpeculativeScheduler)
            replay = Replay({(i, 0): tokens for i, tokens in enumerate(expected)}, wrong, 256)
            llm.scheduler.proposer = replay  # type: ignore[assignment]
            assert complete(llm, prompts, greedy(10)) == expected
            assert complete(llm, prompts[:1], greedy(10)) == expected[:1]
        assert_idle(llm)
        stats = llm.stats()
        assert 0 < stats["accepted_tokens"] < stats["proposed_tokens"]
