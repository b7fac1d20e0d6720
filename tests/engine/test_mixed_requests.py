"""Requests that ask for more than a temperature, begun beside decode steps: what they get without mixed steps."""

from collections import Counter

import pytest
from checkpoints import assert_idle, make_llm
from test_speculation import PROMPT, WAYS, params, within_rounding, without_metrics

from nanovllm import LLM

LONGEST = {"max_tokens": 48, "temperature": 0}  # It runs while the others begin.
# A prompt whose own log-probabilities are wanted has a prefill, and so do those behind it.
SPECIAL = [way for way in WAYS if "prompt_logprobs" not in way and way.get("max_tokens", 1) is not None]


def serve(llm: LLM, ways: list[dict], seen: Counter) -> list:
    prepare = llm.model_runner.prepare

    def count(step) -> None:
        prepare(step)
        seen["mixed"] += step.num_prefilled > 0 and not step.is_prefill
        seen["mixed, with logits"] += step.kind.is_mixed and step.needs_logits
        seen["mixed, behind the tokens"] += step.kind.is_mixed and step.waits_for_tokens

    llm.model_runner.prepare = count
    try:
        prompts, all_params = [[*PROMPT, i] for i in range(len(ways))], params(ways)
        results = [result for _, result in llm.generate_iter(prompts, all_params, ordered=True)]
    finally:
        llm.model_runner.prepare = prepare
    assert_idle(llm)
    return without_metrics(results)


@pytest.mark.parametrize("speculation", [None, "suffix"])
def test_answers_are_those_without_mixed_steps(path, speculation):
    ways, seen = [LONGEST, *SPECIAL], Counter()
    options = {"skip_tokenizer_init": False, "max_model_len": 64, "speculation": speculation}
    with make_llm(path, mixed_step_rows=0, **options) as llm:
        expected = serve(llm, ways, Counter())
    # So few tokens a step that the first prompt is prefilled alone.
    with make_llm(path, mixed_step_rows=12, max_num_batched_tokens=12, **options) as llm:
        assert serve(llm, ways, seen) == within_rounding(expected)
    assert seen["mixed, with logits"] > 0
    assert seen["mixed, behind the tokens"] > 0
