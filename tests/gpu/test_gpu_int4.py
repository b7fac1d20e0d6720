"""Engines with weights in int4 on a GPU, against the same engine with the same numbers in floats."""

import pytest
import torch
from checkpoints import make_checkpoint, random_prompt
from fp8_checkpoints import scored
from gpu_engines import gpu_llm
from int4_checkpoints import quantize_checkpoint

from nanovllm import SamplingParams

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
PROMPT, COMPLETION = random_prompt(40, 1), random_prompt(60, 2)


@pytest.mark.parametrize(("kind", "group"), [("compressed", 128), ("compressed with zeros", None), ("awq", 32)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_are_those_of_the_dequantized_weights(kind, group, dtype, tmp_path):
    path = make_checkpoint(tmp_path / "model", **SIZES)
    floats = quantize_checkpoint(path, kind, group)
    found = []
    for each in (path, floats):
        with gpu_llm(each, dtype=dtype) as llm:
            found.append(scored(llm, PROMPT, COMPLETION))
    assert (found[0] - found[1]).abs().mean() < 0.05


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_decode_steps_compute_what_prefills_do(family, tmp_path):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    sizes = SIZES | (experts if family == "qwen3_moe" else {})
    path = make_checkpoint(tmp_path, family=family, **sizes)
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 1}
    with gpu_llm(path, quantization="int4") as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(**params), use_tqdm=False)
        tokens = output["token_ids"]
        prefilled = scored(llm, PROMPT, tokens)
    decoded = [logprobs[token] for token, logprobs in zip(tokens, output["logprobs"], strict=True)]
    assert (torch.tensor(decoded) - prefilled).abs().mean() < 0.1
