"""deterministic=True: a prompt with images has the same bits in any company, in chunks, cached and preempted."""

import math
from functools import partial

import pytest
from checkpoints import VOCAB_SIZE, make_llm, needs_family, needs_transformers
from replay import Replay
from same_bits import answers, answers_alone
from vision_checkpoints import VISION_FAMILIES, image_requests, make_vision_checkpoint

from nanovllm.engine.features.speculation import speculative_scheduler
from nanovllm.utils.threads import torch_threads

pytest.importorskip("PIL", reason="needs Pillow")
pytestmark = needs_transformers("5")

ENGINES: dict[str, dict] = {
    "chunks": {"max_num_batched_tokens": 75, "mixed_step_rows": 4},
    "preempted, speculation": {
        **{"num_kvcache_blocks": 12, "enable_prefix_caching": False},
        **{"speculation": "suffix", "max_speculative_tokens": 3},
    },
}


def each_case():
    cases = [(family, "float32") for family in VISION_FAMILIES] + [("gemma3", "bfloat16"), ("qwen3_vl", "bfloat16")]
    for family, dtype in cases:
        nightly = [pytest.mark.nightly] if family.endswith("moe") else []
        yield pytest.param(family, dtype, id=f"{family} {dtype}", marks=[needs_family(family), *nightly])


@pytest.mark.parametrize(("family", "dtype"), list(each_case()))
def test_a_prompt_with_images_has_the_same_bits_in_any_company(family, dtype, tmp_path, monkeypatch):
    choose = lambda chances, num_seqs, pace: [len(each) for each in chances]  # noqa: E731
    monkeypatch.setattr(speculative_scheduler, "choose_counts", choose)
    monkeypatch.setattr(speculative_scheduler, "_MAX_LOOKING_SHARE", math.inf)  # on a busy machine too
    path, requests = make_vision_checkpoint(tmp_path, family), image_requests()
    make = partial(make_llm, path, dtype=dtype, deterministic=True)
    with make(enable_prefix_caching=False) as llm:
        alone = answers_alone(llm, requests)
        assert answers(llm, requests[::-1]) == alone[::-1]
    for name, options in ENGINES.items():
        if "num_kvcache_blocks" in options and family.startswith("gemma4"):  # whose prompts are longer
            options = options | {"num_kvcache_blocks": 15}
        with torch_threads(2), make(**options) as llm:
            if options.get("speculation"):
                known = {(i, 0): token_ids for i, (token_ids, _) in enumerate(alone)}
                llm.scheduler.proposer = Replay(known, 0.2, VOCAB_SIZE)
            assert answers(llm, requests) == alone, name
            if name == "chunks":
                cached = llm.scheduler.num_prefix_hits
                assert answers(llm, requests[::-1]) == alone[::-1]  # The beginnings are in the cache.
                assert llm.scheduler.num_prefix_hits > cached
            else:
                assert llm.scheduler.num_preemptions > 0
                stats = llm.stats()
                assert 0 < stats["accepted_tokens"] < stats["proposed_tokens"]
