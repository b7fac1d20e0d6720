"""Products of fp8 weights on a GPU against their plain-torch twins, and engines that use them."""

import pytest
import torch
from checkpoints import complete, greedy, make_checkpoint, random_prompt
from fp8_checkpoints import make_fp8_checkpoint
from gpu_engines import gpu_llm

from nanovllm.layers.activation import Gated, silu_and_mul_torch
from nanovllm.layers.fp8_products import fp8_product
from nanovllm.layers.kernel_matmul import our_candidates
from nanovllm.layers.layernorm import Normed, RMSNorm, rms_norm_torch
from nanovllm.layers.matmul import Problem
from nanovllm.layers.quantization import (
    Fp8Format,
    Fp8Weight,
    fp8_product_torch,
    quantize_input_torch,
    weight_only_product_torch,
)
from nanovllm.tuning.table import package_table

pytestmark = pytest.mark.gpu
in_blocks = pytest.mark.parametrize("in_blocks", [False, True], ids=["channels", "blocks"])
# Of the result's norm: bfloat16, and what tensor cores drop of fp8 sums.
MAX_DISTANCE = 0.01
BFLOAT16 = torch.bfloat16


def make_weight(N, K, in_blocks) -> Fp8Weight:
    if in_blocks and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    format = Fp8Format(is_blocked=in_blocks)
    return Fp8Weight(*format.quantize(torch.randn(N, K, device="cuda") / K**0.5), format, BFLOAT16)


def distance(found, expected) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


@in_blocks
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 300, 2049])
@pytest.mark.parametrize(("N", "K"), [(6144, 4096), (256, 384), (384, 128)])
def test_products_with_quantised_inputs(N, K, num_tokens, in_blocks):
    weight, x = make_weight(N, K, in_blocks), torch.randn(num_tokens, K, device="cuda", dtype=BFLOAT16)
    norm = RMSNorm(K).to(device="cuda", dtype=BFLOAT16)
    gate_up = torch.cat([x, x.flip(1)], dim=1)
    inputs = [
        (x, x),
        (Normed(x, norm), rms_norm_torch(x, norm.weight, norm.eps)),
        (Gated(gate_up), silu_and_mul_torch(gate_up)),
    ]
    for given, value in inputs:
        expected = fp8_product_torch(quantize_input_torch(value, weight.format), weight)
        assert distance(fp8_product(given, weight), expected) < MAX_DISTANCE


def table_cases():
    """(operation, candidate, constants, tokens, N, K) of every choice for fp8 weights."""
    for key, row in package_table("NVIDIA H200").rows.items():
        if key.dtype.startswith("float8") and key.operation.startswith("linear"):
            for bound, choices in zip(row.bounds, row.choices, strict=True):
                for name, constants in choices:
                    yield key.operation, name, constants, bound, key.N, key.K


@in_blocks
@pytest.mark.parametrize(("operation", "name", "constants", "num_tokens", "N", "K"), table_cases())
def test_what_the_table_names(operation, name, constants, num_tokens, N, K, in_blocks):
    weight, x = make_weight(N, K, in_blocks), torch.randn(num_tokens, K, device="cuda", dtype=BFLOAT16)
    norm = RMSNorm(K).to(device="cuda", dtype=BFLOAT16)
    out = torch.randn(num_tokens, N, device="cuda", dtype=BFLOAT16) if operation == "linear_add" else None
    value = x if operation == "linear_add" else rms_norm_torch(x, norm.weight, norm.eps)
    expected = weight_only_product_torch(value, weight)
    if operation == "linear_silu":
        expected = silu_and_mul_torch(expected.to(BFLOAT16))
    elif operation == "linear_add":
        expected += out.float()
    problem = Problem(operation, x if operation == "linear_add" else Normed(x, norm), weight, out=out)
    candidate = {each.name: each for each in our_candidates(torch.device("cuda", 0))}[name]
    assert candidate.supports(problem)
    assert distance(candidate.launch(problem, constants), expected) < MAX_DISTANCE


@pytest.mark.parametrize("source", ["while loading", "channels", "blocks"])
@pytest.mark.parametrize("eager", [False, True])
def test_engines(tmp_path, source, eager):
    """Of a CPU with the same weights, whose logits differ by roundings to e4m3."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
    if source == "while loading":
        path, options = make_checkpoint(tmp_path, **sizes), {"quantization": "fp8"}
    else:
        path, options = make_fp8_checkpoint(tmp_path, source == "blocks", **sizes), {}
    if source == "blocks" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    prompts = [random_prompt(length, seed=length) for length in (1, 17, 90, 200)]
    with gpu_llm(path, dtype="bfloat16", enforce_eager=eager, **options) as llm:
        outputs = complete(llm, prompts, greedy(12))
        scores = llm.score(prompts, outputs, use_tqdm=False)
    with gpu_llm(path, dtype="float32", device="cpu", attention_backend="torch", **options) as llm:
        expected = llm.score(prompts, outputs, use_tqdm=False)
    for found, reference in zip(scores, expected, strict=True):
        difference = torch.tensor(found["logprobs"]) - torch.tensor(reference["logprobs"])
        assert difference.abs().mean() < 0.2
