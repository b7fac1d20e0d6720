"""Products of fp8 weights on a GPU against their plain-torch twins, and engines that use them."""

from itertools import product

import pytest
import torch
from checkpoints import complete, greedy, make_checkpoint, random_prompt
from fp8_checkpoints import make_fp8_checkpoint
from gpu_engines import assert_replays_repeat, gpu_llm

pytest.importorskip("triton")

from products import FP8, dequantized, experts_sum, problem, quantized

from nanovllm import LLM
from nanovllm.kernels.experts.experts import route_torch
from nanovllm.kernels.matmul import fp8 as fp8_kernels
from nanovllm.kernels.matmul import split_k as split_k_kernels
from nanovllm.kernels.matmul.fp8 import dequantize_torch
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.candidates import make_candidates
from nanovllm.layers.matmul.candidates.quack import load_quack
from nanovllm.layers.matmul.candidates.scaled_mm import scaled_mm
from nanovllm.layers.matmul.candidates.split_k import SplitK
from nanovllm.layers.matmul.problem import ExpertsProblem
from nanovllm.layers.matmul.table import Key, package_table

pytestmark = pytest.mark.gpu
in_blocks = pytest.mark.parametrize("in_blocks", [False, True], ids=["channels", "blocks"])
# Of the result's norm: bfloat16, and what tensor cores drop of fp8 sums.
MAX_DISTANCE = 0.01
BFLOAT16 = torch.bfloat16


def make_weight(N, K, in_blocks, num_experts=None) -> Weight:
    if in_blocks and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    lead = () if num_experts is None else (num_experts,)
    return FP8[in_blocks].quantize(torch.randn(*lead, N, K, device="cuda") / K**0.5, BFLOAT16)


def distance(found, expected) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


@in_blocks
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 300, 2049])
@pytest.mark.parametrize(("N", "K"), [(6144, 4096), (4096, 12288), (5120, 25600), (256, 384), (384, 128)])
def test_products_with_quantized_inputs(N, K, num_tokens, in_blocks):
    weight, x = make_weight(N, K, in_blocks), torch.randn(num_tokens, K, device="cuda", dtype=BFLOAT16)
    norm = RMSNorm(K).to(device="cuda", dtype=BFLOAT16)
    gate_up = torch.cat([x, x.flip(1)], dim=1)
    inputs = [
        (x, x),
        (Normed(x, norm), rms_norm.twin(x, norm.weight, norm.eps)),
        (Gated(gate_up), silu_and_mul.twin(gate_up)),
    ]
    for given, value in inputs:
        assert distance(scaled_mm(given, weight), product_of("scaled-mm", value, weight)) < MAX_DISTANCE


def table_cases():
    """(operation, candidate, constants, tokens, N, K) of every choice for fp8 weights."""
    for key, row in package_table("NVIDIA H200").rows.items():
        if key.format.startswith("float8") and key.operation.startswith("linear"):
            for bound, choices in zip(row.bounds, row.choices, strict=True):
                for name, constants in choices:
                    if name != "quack-kernels":  # tests/gpu/test_gpu_quack.py
                        yield key.operation, name, constants, bound, key.N, key.K


def tuner_cases():
    """(operation, candidate, constants, tokens, N, K) of some split-k constants that the tuner tries for Qwen3-8B."""
    shapes = ("linear", 6144, 4096), ("linear_add", 4096, 12288), ("linear_silu", 24576, 4096)
    for (operation, N, K), num_tokens in product(shapes, (8, 48, 128, 300)):
        key = Key(operation, "decode", N, K, FP8[True].name)  # Channels may have more columns in a step.
        choices = list(SplitK.challengers(key, num_tokens, 1, 132))
        for constants in (choices[0], choices[-1]):
            yield operation, "split-k", constants, num_tokens, N, K
    yield "linear", "split-k", (64, 256, 2, 6, 0, 16, 4), 9, 4096, 25600
    yield "linear_add", "split-k", (128, 128, 1, 6, 1024, 128, 8), 300, 5120, 25600


def product_of(name, x, weight):
    """float32, with the candidate's rounding: the GEMV kernel reads x as it is."""
    if name == "gemv":
        return x.float() @ dequantized(weight).t()
    return dequantize_torch(*quantized(x, weight)) @ dequantized(weight).t()


@in_blocks
@pytest.mark.parametrize(("operation", "name", "constants", "num_tokens", "N", "K"), [*table_cases(), *tuner_cases()])
def test_what_the_table_names(operation, name, constants, num_tokens, N, K, in_blocks):
    """And what the tuner tries."""
    if in_blocks and name == "split-k":
        tile_rows, tile_k, *others = constants
        constants = (tile_rows, min(tile_k, 128), *others)  # A step has no more columns than a block.
    weight, x = make_weight(N, K, in_blocks), torch.randn(num_tokens, K, device="cuda", dtype=BFLOAT16)
    norm = RMSNorm(K).to(device="cuda", dtype=BFLOAT16)
    out = torch.randn(num_tokens, N, device="cuda", dtype=BFLOAT16) if operation == "linear_add" else None
    value = x if operation == "linear_add" else rms_norm.twin(x, norm.weight, norm.eps)
    expected = product_of(name, value, weight)
    if operation == "linear_silu":
        expected = silu_and_mul.twin(expected.to(BFLOAT16))
    elif operation == "linear_add":
        expected += out.float()
    asked = problem(operation, x if operation == "linear_add" else Normed(x, norm), weight, out=out)
    candidate = {each.name: each for each in make_candidates(torch.device("cuda", 0))}[name]
    assert candidate.supports(asked.key, weight)
    assert distance(candidate.launch(asked, constants), expected) < MAX_DISTANCE


@in_blocks
@pytest.mark.parametrize("num_tokens", [9, 64, 200])
def test_dependent_launches_in_a_graph(num_tokens, in_blocks, monkeypatch):
    """A chain of layers, each of which needs the last one's result and overwrites the residual twice: with and without
    dependent launches, the same bits."""
    hidden, intermediate, num_layers = 1024, 3072, 8
    shapes = (intermediate, hidden), (hidden, intermediate), (2 * intermediate, hidden), (hidden, intermediate)
    layers = [[make_weight(*shape, in_blocks) for shape in shapes] for _ in range(num_layers)]
    norm = RMSNorm(hidden).to(device="cuda", dtype=BFLOAT16)
    start = torch.randn(num_tokens, hidden, device="cuda", dtype=BFLOAT16)
    residual, split = start.clone(), SplitK(start.device)
    constants = (64, 128, 4, 4, 1024, 64, 4)

    def run(operation, x, weight):
        out = residual if operation == "linear_add" else None
        return split.launch(problem(operation, x, weight, out=out), constants)

    def chain():
        for first, second, gate_up, down in layers:
            run("linear_add", run("linear", Normed(residual, norm), first), second)
            run("linear_add", run("linear_silu", Normed(residual, norm), gate_up), down)

    with monkeypatch.context() as patch:
        for module in (fp8_kernels, split_k_kernels):
            patch.setattr(module, "has_pdl", lambda device: False)
        chain()
    expected = residual.clone()
    residual.copy_(start)
    chain()
    assert torch.equal(residual, expected)
    assert_replays_repeat(chain, residual, start, 50)
    assert not split.arrivals.any()


def expert_cases():
    """(candidate, constants, tokens) of every choice for experts with fp8 weights, and what no row names."""
    yield "expert-tiles", (), 5
    yield "expert-tiles", (), 700
    for key, row in package_table("NVIDIA H200").rows.items():
        if key.format.startswith("float8") and key.operation == "experts":
            for bound, choices in zip(row.bounds, row.choices, strict=True):
                for name, constants in choices:
                    yield name, constants, min(bound, 1000)


@in_blocks
@pytest.mark.parametrize(("name", "constants", "num_tokens"), [*expert_cases()])
def test_every_candidate_for_experts_in_fp8_equals_the_twin(name, constants, num_tokens, in_blocks):
    """Of fewer experts than a model has, in the sizes of Qwen3-30B-A3B. Candidates that read inputs as they are differ
    by the rounding of these, which is 3 % of each product. The others differ where the tensor cores' sums, which may be
    0.1 % off, are rounded the other way. If such a number is the largest of its row, it moves the row's scale and so
    every number of the row: a token may differ by 3 %, and of eight tokens two or three do so at times."""
    num_experts, hidden_size, intermediate, top_k = 16, 2048, 768, 4
    make_weight(128, 128, in_blocks)  # skips on other GPUs
    gate_up, down = (
        make_weight(*shape, in_blocks, num_experts)
        for shape in ((2 * intermediate, hidden_size), (hidden_size, intermediate))
    )
    x, out = (torch.randn(num_tokens, hidden_size, device="cuda", dtype=BFLOAT16) for _ in range(2))
    out *= 0.1  # or the sum with it would be rounded more than the result
    norm = RMSNorm(hidden_size).to(device="cuda", dtype=BFLOAT16)
    logits = torch.randn(num_tokens, num_experts, device="cuda", dtype=BFLOAT16)
    lens = (torch.arange(1, num_tokens + 1, device="cuda") % 9).int()  # with rows of padding
    routed = route_torch(logits, top_k, True, lens)
    total = experts_sum(rms_norm.twin(x, norm.weight, norm.eps), routed, gate_up, down)
    key = Key.of("experts", False, gate_up)
    asked = ExpertsProblem(key, Normed(x, norm), logits, gate_up, down, top_k, True, out.clone(), True, lens)
    device = torch.device("cuda", 0)
    quack = load_quack(BFLOAT16, device, decodes=True)
    candidates = {each.name: each for each in make_candidates(device, quack)}
    if name == "quack-experts" and (quack is None or in_blocks):
        pytest.skip("quack-kernels is not installed, or multiplies no blocks")
    candidate = candidates[name]
    assert candidate.supports(key, gate_up)
    found = candidate.launch(asked, constants)
    assert torch.equal(found[lens == 0], out[lens == 0])
    max_distance = 0.08 if name == "experts-gemv" else 0.04 if num_tokens <= 8 else 0.02
    assert distance((found - out)[lens > 0], total[lens > 0]) < max_distance


def logprobs(llm: LLM, prompts, outputs) -> torch.Tensor:
    return torch.tensor([each["logprobs"] for each in llm.score(prompts, outputs, use_tqdm=False)])


def on_cpu(path, dtype, options, prompts, outputs) -> torch.Tensor:
    with gpu_llm(path, dtype=dtype, device="cpu", attention_backend="torch", **options) as llm:
        return logprobs(llm, prompts, outputs)


@pytest.mark.parametrize("source", ["while loading", "channels", "blocks"])
@pytest.mark.parametrize("eager", [False, True])
def test_an_engine_in_fp8_gives_the_tokens_of_a_cpu(tmp_path, source, eager):
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
        found = logprobs(llm, prompts, outputs)
    exact, rounded = (on_cpu(path, dtype, options, prompts, outputs) for dtype in ("float32", "bfloat16"))
    # What bfloat16 changes before a rounding to e4m3 decides how many numbers are rounded to a neighbour.
    assert (found - exact).abs().mean() < 2 * (rounded - exact).abs().mean()
