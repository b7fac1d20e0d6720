"""Every family layer by layer: bfloat16 on a GPU against the same model in float32 on the CPU.

Where the bound comes from:

- bfloat16's significand has 8 bits. Rounding changes a number by 2^-8 of it at most; by 2^-8 / sqrt(3), the root of the
  mean square, if all errors up to that are equally likely.
- A layer rounds up to twelve times, one result after the other: norm, q/k/v, RoPE, probabilities, attention, o, sum;
  norm, gate and up, their product, down, sum. Independent errors add up as squares: to sqrt(12 n) of one in n layers.
- Random matrices do not change the relative error of a vector. Neither does a softmax of scores of about N(0, 1).
- The worst of 300 rows may have four times as much as the mean.

On a CPU the worst row has 2.5 times as much. A window with one key too many makes 1.4 to 34 times the bound.

With weights and KV cache in fp8, twelve results of a layer are rounded to e4m3 besides: weights and inputs of q/k/v, o,
gate, up and down; keys and values. The gate's count twice, because SiLU is steeper than a line through 0. e4m3's
significand has 4 bits, so rounding changes a number by 2^-4 of it at most. The mean of all rows is held to that,
without the factor of four.

Linear attention normalizes the output of each head, however small it is: of a token whose query and keys are nearly
orthogonal, rounding may change the sign. So hybrids are held to twice these numbers, in the mean of all rows.
"""

from functools import cache
from types import SimpleNamespace

import families
import pytest
import torch
from checkpoints import (
    Reference,
    complete,
    edit_tensors,
    greedy,
    make_checkpoint,
    make_llm,
    needs_family,
    random_prompt,
)
from gpu_engines import gpu_llm
from gpus import pretend_gpu

from nanovllm import LLM
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.utils.context import get_context

NUM_LAYERS = 4
SHAPE = {"hidden_size": 128, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
HYBRID = {"head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
SHARED_EXPERT = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
SHARED_EXPERT |= {"shared_expert_intermediate_size": 64}
GEMMA4 = {
    "hidden_size": 64,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "sliding_window": 70,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 30.0,
}
FAMILIES = {
    "llama": {"head_dim": 64, "rope_scaling": LLAMA3},
    "mistral": {"head_dim": 64, "sliding_window": 8},
    "ministral3": {"head_dim": 64, "rope_scaling": YARN | {"llama_4_scaling_beta": 0.3}},
    "phi3": {"partial_rotary_factor": 0.75},
    "smollm3": {},
    "gpt_oss": {"head_dim": 64, "sliding_window": 70, "num_local_experts": 8, "num_experts_per_tok": 3},
    "olmo2": {},
    "olmo3": {"sliding_window": 70},
    "exaone4": {
        "sliding_window": 70,
        "sliding_window_pattern": "LG",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "seed_oss": {"head_dim": 64, "attention_out_bias": True},
    "granite": {
        "embedding_multiplier": 8.0,
        "attention_multiplier": 0.15,
        "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
    },
    "gemma3_text": {
        "hidden_size": 64,  # The embeddings' scale is 8, in both dtypes.
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 70,
        "sliding_window_pattern": 2,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID | SHARED_EXPERT,
    "qwen3_next": HYBRID | SHARED_EXPERT,
    "qwen3_moe": {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
}
# Its sizes, except for the number of layers and the vocabulary.
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": NUM_LAYERS, "head_dim": 128}
QWEN3_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_shard_size": "9GB"}
# The last prompt comes in two chunks, of which the second reads the cache.
CHUNK = 179  # It has 64 tokens of the last prompt, and a hybrid's chunks are multiples of 64.
OPTIONS = {
    "kvcache_block_size": 256,
    "num_kvcache_blocks": 24,
    "max_num_batched_tokens": CHUNK,
    "mixed_step_rows": 0,
    "enable_prefix_caching": False,
    "max_model_len": 512,
}
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
PROMPTS = [random_prompt(length, seed=length) for length in (1, 7, 8, 9, 90, 150)]
DECODE_STEPS = 4


every_family = pytest.mark.parametrize("family", [pytest.param(name, marks=needs_family(name)) for name in FAMILIES])


def bound(num_layers: int) -> float:
    """The largest relative error after this many layers."""
    return 4 * 2**-8 / 3**0.5 * (12 * num_layers) ** 0.5


def fp8_bound(num_layers: int) -> float:
    """The mean relative error with weights and KV cache in fp8; bfloat16's is small beside it."""
    return 2**-4 / 3**0.5 * (14 * num_layers) ** 0.5


def make_family(directory, family, **changes):
    """A checkpoint in bfloat16, so that both dtypes have the same weights. Changes of settings leave these alone."""
    fields = QWEN3_8B if family == "Qwen3-8B" else SHAPE | FAMILIES[family]
    family = "qwen3" if family == "Qwen3-8B" else family
    path = make_checkpoint(directory, family=family, dtype=torch.bfloat16, **fields | changes)
    edit_tensors(path, lambda tensors: soften_attention(tensors, family))
    if "num_experts" in fields or "num_local_experts" in fields:
        edit_tensors(path, lambda tensors: choose_experts_by_token(tensors, float(not is_hybrid(family))))
    return path


def soften_attention(tensors, family) -> None:
    """Bring the scores to about N(0, 1)."""
    for name, tensor in tensors.items():
        has_offset = family == "gemma3_text" or (is_hybrid(family) and "linear_attn" not in name)
        if name.endswith("norm.weight") and has_offset:
            tensor -= 1
        elif name.endswith("q_norm.weight") and family.startswith("gemma4"):  # It has no factor of scores.
            tensor *= len(tensor) ** -0.5
        elif name.endswith("q_proj.weight"):
            tensor *= 0.35
        elif name.endswith("qkv_proj.weight"):
            tensor[: SHAPE["hidden_size"]] *= 0.35


def choose_experts_by_token(tensors, one: float) -> None:
    """Let a token's id choose its experts, by wide margins. Where two experts are nearly equal, rounding would choose
    another one, and change the token's whole state. one: a norm's weight that changes nothing."""
    routers = ("mlp.gate.weight", "mlp.router.weight")
    num_experts = next(len(tensor) for name, tensor in tensors.items() if name.endswith(routers))
    embedding = tensors["model.embed_tokens.weight"]
    order = torch.arange(len(embedding)).unsqueeze(1) + torch.arange(num_experts)
    embedding[:, :num_experts] = order % num_experts / 8
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor[:num_experts] = 0  # This part of the residual stream stays as it is.
        elif name.endswith(("o_proj.bias", "experts.down_proj", "experts.down_proj_bias")):  # of gpt-oss
            tensor[..., :num_experts] = 0
        elif name.endswith("post_attention_layernorm.weight"):
            tensor[:num_experts] = one
        elif name.endswith(routers):
            tensor.zero_().fill_diagonal_(1)
        elif name.endswith("router.bias"):
            tensor.zero_()


def next_token(position):
    """The completions' token after a position. It does not depend on the logits, so every run has the same input."""
    return position * 7 % 320


@torch.inference_mode()
def layer_outputs(llm: LLM) -> list[torch.Tensor]:
    """The residual stream after each layer, then the log-probabilities: float32 [num_rows, ...], of the rows of all
    steps in order. The last layer has no rows but those that get a token."""
    runner = llm.model_runner
    outputs = [[] for _ in range(NUM_LAYERS + 1)]

    def record_layer(i, residual):
        context = get_context()
        rows = residual if context.is_prefill else residual[context.context_lens > 0]  # without padding
        outputs[i].append(rows.float().cpu().clone())

    def sampler(logits, temperatures, seeds, positions, out):
        outputs[-1].append(logits.float().log_softmax(-1).cpu())
        out.copy_(next_token(positions))

    for i, layer in enumerate(runner.model.model.layers):
        layer.register_forward_hook(lambda module, args, hidden, i=i: record_layer(i, hidden.residual))
    vars(runner)["sampler"] = sampler
    complete(llm, PROMPTS, greedy(DECODE_STEPS + 1))
    return [torch.cat(rows) for rows in outputs]


def errors_of_rows(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[torch.Tensor]:
    """The relative error of each row, for each layer and for the log-probabilities."""
    result = []
    for a, b in zip(found, expected, strict=True):
        spread = b - b.mean(1, keepdim=True)  # The mean of log-probabilities says nothing of them.
        result.append((a - b).norm(dim=1) / spread.norm(dim=1))
    return result


def errors(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    """The largest of a row."""
    return [of_rows.max().item() for of_rows in errors_of_rows(found, expected)]


def assert_rounded_to_fp8(found: list[torch.Tensor], expected: list[torch.Tensor], family: str) -> None:
    most = 2 if is_hybrid(family) else 1
    for i, of_rows in enumerate(errors_of_rows(found, expected)):
        assert fp8_bound(i + 1) / 8 < of_rows.mean() < most * fp8_bound(i + 1), f"after layer {i} of {NUM_LAYERS}"


def assert_within_rounding(found: list[torch.Tensor], expected: list[torch.Tensor], family: str) -> None:
    for i, of_rows in enumerate(errors_of_rows(found, expected)):
        if is_hybrid(family):
            assert of_rows.mean() < 2 * bound(i + 1) / 4, f"after layer {i} of {NUM_LAYERS}"
        else:
            assert of_rows.max() < bound(i + 1), f"after layer {i} of {NUM_LAYERS}"


def is_hybrid(family: str) -> bool:
    """False also of a published shape, such as Qwen3-8B, which is no family's row."""
    return family in families.FAMILIES and families.FAMILIES[family].is_hybrid


@pytest.fixture(scope="module")
def make_case(tmp_path_factory):
    """From a family to its checkpoint as `path`, and its float32 `outputs`."""

    @cache
    def make(family):
        path = make_family(tmp_path_factory.mktemp(family), family)
        with make_llm(path, dtype="float32", **OPTIONS) as llm:
            return SimpleNamespace(path=path, outputs=layer_outputs(llm))

    return make


@torch.inference_mode()
def outputs_of_transformers(path) -> list[torch.Tensor]:
    """The same of transformers, except for the last layer, which it does not show."""
    model, hidden, log_probs = Reference(path).model, [], []
    for prompt in PROMPTS:
        last = len(prompt) - 1
        tokens = prompt + [next_token(last + i) for i in range(DECODE_STEPS)]
        result = model(torch.tensor([tokens]), output_hidden_states=True)
        hidden.append(torch.cat(result.hidden_states[1:NUM_LAYERS]))
        log_probs.append(result.logits[0].log_softmax(-1))
    lens = [len(prompt) for prompt in PROMPTS]
    chunk_end = CHUNK - sum(lens[:-1]) - 1
    steps = range(DECODE_STEPS)
    decoded = [torch.stack([x[..., n + i, :] for x, n in zip(hidden, lens, strict=True)], 1) for i in steps]
    layers = torch.cat([x[:, :n] for x, n in zip(hidden, lens, strict=True)] + decoded, 1)
    rows = [x[n - 1] for x, n in zip(log_probs, lens, strict=True)]
    rows.insert(-1, log_probs[-1][chunk_end])
    rows += [x[n + i] for i in steps for x, n in zip(log_probs, lens, strict=True)]
    return [*layers, torch.stack(rows)]


def test_every_family_has_a_row():
    """docs/adding-a-model.md says how to write one."""
    assert FAMILIES.keys() == families.FAMILIES.keys()


@every_family
def test_float32_on_a_cpu_is_transformers_layer_by_layer(make_case, family):
    case = make_case(family)
    outputs = [*case.outputs[: NUM_LAYERS - 1], case.outputs[-1]]
    found = errors_of_rows(outputs, outputs_of_transformers(case.path))
    assert max((of_rows.mean() if is_hybrid(family) else of_rows.max()).item() for of_rows in found) < 1e-5


@every_family
def test_bfloat16_on_a_cpu_is_within_rounding(make_case, family):
    case = make_case(family)
    with make_llm(case.path, dtype="bfloat16", **OPTIONS) as llm:
        assert_within_rounding(layer_outputs(llm), case.outputs, family)


# test_families.py has the others.
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe", "qwen3_5_text"])
def test_fp8_on_a_cpu_is_within_rounding(make_case, family):
    case = make_case(family)
    with make_llm(case.path, dtype="bfloat16", **OPTIONS | FP8) as llm:
        assert_rounded_to_fp8(layer_outputs(llm), case.outputs, family)


# The settings, and the first layer that they change.
WRONG = [
    ("llama", {"rope_theta": 9000.0}, 0),
    ("mistral", {"sliding_window": 9}, 0),
    ("phi3", {"rope_theta": 9000.0}, 0),
    pytest.param("smollm3", {"no_rope_layers": [1, 1, 0, 0]}, 2, marks=needs_family("smollm3")),
    ("gemma3_text", {"rope_local_base_freq": 1e6}, 0),
    ("gemma3_text", {"sliding_window": 71}, 0),
    pytest.param("gpt_oss", {"num_experts_per_tok": 2}, 0, marks=needs_family("gpt_oss")),
    ("qwen3_moe", {"num_experts_per_tok": 2}, 0),
]


@pytest.mark.parametrize(("family", "changes", "first"), WRONG, ids=str)
def test_a_wrong_setting_is_not_within_rounding(make_case, family, changes, first, tmp_path):
    with make_llm(make_family(tmp_path, family, **changes), dtype="float32", **OPTIONS) as llm:
        found = errors(layer_outputs(llm), make_case(family).outputs)
    assert found[:first] == [0] * first
    assert all(error > bound(i + 1) for i, error in enumerate(found) if i >= first)


@pytest.mark.gpu
@every_family
def test_bfloat16_on_a_gpu_is_within_rounding(make_case, family):
    case = make_case(family)
    options = {"attention_backend": "triton", "dtype": "bfloat16", "enforce_eager": True}
    with gpu_llm(case.path, **OPTIONS | options) as llm:
        assert_within_rounding(layer_outputs(llm), case.outputs, family)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe"])
def test_a_gpu_with_little_shared_memory(make_case, monkeypatch, family):
    """99 KiB, as GeForce cards have: heads of 256 and experts need smaller tiles there. With CUDA graphs, so that the
    start goes through all launches."""
    from nanovllm.kernels.attention import paged_prefill

    tiles, choose_tiles = set(), paged_prefill.choose_tiles

    def choose(*args):
        tiles.add(choose_tiles(*args))
        return choose_tiles(*args)

    monkeypatch.setattr(paged_prefill, "choose_tiles", choose)
    pretend_gpu(monkeypatch, GpuFacts.of(torch.device("cuda", torch.cuda.current_device())), shared_bytes=99 * 1024)
    case = make_case(family)
    options = {"attention_backend": "triton", "dtype": "bfloat16"}
    with gpu_llm(case.path, **OPTIONS | options) as llm:
        tokens = complete(llm, PROMPTS, greedy(DECODE_STEPS))
        assert all(len(completion) == DECODE_STEPS for completion in tokens)
    with gpu_llm(case.path, **OPTIONS | options, enforce_eager=True) as llm:
        assert_within_rounding(layer_outputs(llm), case.outputs, family)
    if family == "gemma3_text":
        assert {(each.rows, each.keys) for each in tiles} == {(64, 32)}


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*FAMILIES, "Qwen3-8B"])
def test_fp8_on_a_gpu_is_within_rounding(make_case, family):
    case = make_case(family)
    options = {"attention_backend": "triton", "dtype": "bfloat16", "enforce_eager": True}
    with gpu_llm(case.path, **OPTIONS | FP8 | options) as llm:
        assert_rounded_to_fp8(layer_outputs(llm), case.outputs, family)


@pytest.mark.gpu
@every_family
def test_float32_with_cuda_graphs_has_the_tokens_of_the_cpu(make_case, family):
    path = make_case(family).path
    reference = Reference(path)
    prompts = reference.draw_prompts((1, 8, 9, 71, 150), 8)
    with gpu_llm(path, attention_backend="triton", dtype="float32", **OPTIONS) as llm:
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)
