"""The plain Qwen3 in an engine: what `test_families.py` does not ask of it."""

import pytest
import torch
from checkpoints import complete, greedy, make_checkpoint, make_llm, random_prompt

from nanovllm import SamplingParams


def test_log_probabilities_and_scores(path):
    prompts, params = (
        [random_prompt(n, seed=n) for n in (9, 30)],
        greedy(6, logprobs=2, prompt_logprobs=1),
    )
    found = []
    for plain in (True, False):
        with make_llm(path, plain=plain) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            scores = llm.score(prompts, prompts[::-1], use_tqdm=False)
            values = [list(each.values()) for output in outputs for each in output["logprobs"]]
            values += [list(each.values()) for output in outputs for each in output["prompt_logprobs"][1:]]
            found.append((torch.tensor([x for each in values for x in each]), [s["total"] for s in scores]))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-4, rtol=1e-4)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)


def test_in_bfloat16_log_probabilities_differ_by_rounding(path):
    """Each layer rounds its sums to 8 bits in another order. The bound is what that does to these few layers."""
    prompt = random_prompt(60, seed=1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    found = []
    for options in ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "plain": True}):
        with make_llm(path, **options) as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            pairs = zip(prompt[1:], output["prompt_logprobs"][1:], strict=True)
            found.append(torch.tensor([each[token] for token, each in pairs]))
    exact, fast, plain = found
    # Both are as far from float32 as rounding takes them, and neither much farther than the other.
    errors = [(each - exact).square().mean().sqrt() for each in (fast, plain)]
    assert max(errors) < 4 * min(errors) + 2**-8
    assert (fast - plain).square().mean().sqrt() < errors[0] + errors[1] + 2**-8


def test_weights_can_be_updated_and_given_back(path, reference):
    prompts = reference.draw_prompts((20,), 8)
    weights = {name: tensor.clone() for name, tensor in reference.model.state_dict().items()}
    with make_llm(path, plain=True) as llm:
        llm.update_weights((name, torch.zeros_like(tensor)) for name, tensor in weights.items())
        assert complete(llm, prompts, greedy(8)) != reference.greedy(prompts, 8)
        llm.update_weights(weights.items())
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)
        llm.sleep(2)
        llm.wake_up()
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "fp8"}, "quantization='fp8': must be None with plain=True"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': must be 'auto' with plain=True"),
        ({"speculation": "suffix"}, "speculation='suffix': must be None with plain=True"),
        ({"mixed_step_rows": 8}, "mixed_step_rows=8: must be 0 or None with plain=True"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(path, options, message):
    with pytest.raises(ValueError, match=message):
        make_llm(path, plain=True, **options)


def test_other_families_are_refused(tmp_path):
    path = make_checkpoint(tmp_path, family="qwen2")
    with pytest.raises(ValueError, match="plain=True: must be False for Qwen2ForCausalLM: it runs Qwen3ForCausalLM"):
        make_llm(path, plain=True)
