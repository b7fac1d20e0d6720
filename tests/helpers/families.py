"""The families of models, a row each: a small checkpoint, and what its configuration may also say.

`tests/models/test_families.py` runs every row on every kind of engine. A new family is a row of FAMILIES.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from checkpoints import Reference, edit_tensors, has_transformers, make_checkpoint, random_prompt

from nanovllm import RequestOutput

NUM_TOKENS = 12  # of each completion
BEGINNING = 70  # tokens that two of the prompts share: four blocks, and one chunk of linear attention
CHUNK = 64  # of linear attention: tokens between the states that can be kept


class pick(NamedTuple):
    """A value of a row that is drawn. The checkpoint that all engines run has the first one."""

    values: tuple[Any, ...]


def choose(*values: Any) -> pick:
    return pick(values)


class Family(NamedTuple):
    """A row.

    Attributes:
        architecture: the name in config.json.
        parts: fields of the configuration, one after the other; each part, or a field of it, may be a choice.
        larger: (architecture, model_type) of checkpoints of which this is the text part.
        prefixes: what names of such a checkpoint begin with in the place of "model.", and of "lm_head." if that is
            inside too.
        is_hybrid: whether layers have linear attention.
        has_plain_twin: whether `plain=True` runs it.
    """

    architecture: str
    parts: Sequence[Any]
    larger: tuple[str, str] | None = None
    prefixes: tuple[tuple[str, str], ...] = (("model.language_model.", "lm_head."),)
    is_hybrid: bool = False
    has_plain_twin: bool = False


def shape(num_kv_heads: int, ratio: int, head_dim: int, hidden_size: int | None = None) -> dict:
    """Of attention. Without a hidden size, head_dim is no field, and follows from it."""
    num_heads = num_kv_heads * ratio
    fields = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    if hidden_size is None:
        return fields | {"hidden_size": num_heads * head_dim}
    return fields | {"head_dim": head_dim, "hidden_size": hidden_size}


# With original contexts that are shorter than the prompts.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ODD_YARN = YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.8}
LINEAR = {"rope_type": "linear", "factor": 3.5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
QUERIES = YARN | {"llama_4_scaling_beta": 0.3}

# Two ranks may divide the sizes of each first choice in groups of 32.
COMMON = {
    "vocab_size": choose(320, 307),
    "intermediate_size": choose(128, 109, 160),
    "num_hidden_layers": choose(2, 1, 3),
    "tie_word_embeddings": choose(False, True),
    "rms_norm_eps": choose(1e-6, 1e-5, 0.1),
    "max_position_embeddings": 128,
    "rope_theta": choose(500.0, 1e4, 5e5),
    "rope_scaling": choose(None, LINEAR, YARN, ODD_YARN, LLAMA3, LLAMA3 | {"factor": 32.0}),
}
HEADS = choose(shape(2, 2, 16), shape(1, 4, 32), shape(1, 7, 48), shape(4, 1, 80), shape(2, 3, 96), shape(1, 1, 128))
# transformers 5 requires that the heads divide the hidden size of a Llama, though they do not use it.
FREE_HEADS = choose(
    *(shape(2, 2, 32, 64), shape(1, 4, 64, 96), shape(1, 7, 48, 56), shape(4, 1, 80, 64), shape(2, 3, 96, 48)),
    *(shape(1, 4, 128, 64), shape(1, 1, 256, 64)),
)
# Of which two ranks have a copy of the one head of keys.
ONE_KV_HEAD, ONE_FREE_KV_HEAD = choose(shape(1, 4, 16), *HEADS.values), choose(shape(1, 4, 32, 64), *FREE_HEADS.values)
BIAS = {"attention_bias": choose(True, False)}
# Shorter than most prompts, a number of blocks, or longer than all. (With a window of 1, transformers keeps all keys.)
WINDOW = choose(13, 2, 7, 32, 45, 127)
# Of Qwen and SmolLM3. Without flash-attn, transformers gives all layers the window before 4.53.
SOME_WINDOWS = choose(
    {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": int(has_transformers("4.53"))},
    {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0},
    {},
)
KINDS = ("sliding_attention", "full_attention")
SHARED_EXPERT = {
    "num_experts": choose(4, 5, 16),
    "num_experts_per_tok": choose(2, 1, 4),
    "moe_intermediate_size": choose(64, 36),
    "shared_expert_intermediate_size": choose(64, 40),
}
HYBRID = (
    *(COMMON, FREE_HEADS, BIAS, {"rope_scaling": choose(None, YARN)}),
    choose(
        {"num_hidden_layers": 3, "full_attention_interval": 2},
        {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]},
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]},
    ),
    choose(
        {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        {"linear_num_key_heads": 1, "linear_num_value_heads": 4},
        {"linear_num_key_heads": 3, "linear_num_value_heads": 9},
    ),
    {"linear_key_head_dim": choose(16, 8, 24), "linear_value_head_dim": choose(32, 8, 24)},
)
FACTORS = {
    "embedding_multiplier": choose(6.0, 1.0, 12),
    "attention_multiplier": choose(0.2, 0.015625, 1.0),
    "residual_multiplier": choose(0.22, 1.0, 1.5),
    "logits_scaling": choose(3.0, 1.0, 8),
}
LONGROPE = {"type": "longrope", "short_factor": [1.0 + i for i in range(4)], "long_factor": [7.0, 2.0, 5.0, 1.0]}
PARTIAL = {"partial_rotary_factor": 0.5, "rope_scaling": LONGROPE, **shape(2, 2, 16)}
PHI_ROPES = choose(
    {"partial_rotary_factor": 0.75, "rope_scaling": None},
    # All sequences are longer than the original context, or none is.
    PARTIAL | {"original_max_position_embeddings": 8},
    PARTIAL | {"original_max_position_embeddings": 112},
    {"partial_rotary_factor": 0.25, "rope_scaling": None},
)
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 4.0}
GEMMA4 = (
    *(COMMON, FREE_HEADS, BIAS),
    {
        "layer_types": choose(["sliding_attention", "full_attention"], ["full_attention"] * 2),
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
        "num_attention_heads": 4,
        "num_key_value_heads": choose(2, 1, 4),
        "head_dim": choose(16, 48, 80),
        "global_head_dim": choose(32, 96, 512),
        "attention_k_eq_v": choose(True, False),
        "num_global_key_value_heads": choose(1, 2, None),
        "final_logit_softcapping": choose(2.0, None),
        "rope_theta": choose(30.0, 1e4),
        "rope_scaling": choose(None, PROPORTIONAL, PROPORTIONAL | {"partial_rotary_factor": 1.0}),
    },
)
GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": choose(4, 5, 16),
    "top_k_experts": choose(2, 1, 4),
    "moe_intermediate_size": choose(64, 36),
}
QWEN3_MOE = {
    "num_experts": choose(4, 5, 128),
    "num_experts_per_tok": choose(2, 1, 4),
    "moe_intermediate_size": choose(64, 36),
    "norm_topk_prob": choose(True, False),
    "max_window_layers": 0,  # transformers 5 gives all layers of this family the window.
}
SOME_EXPERTS = choose(  # Layers without experts, in two ways.
    {"mlp_only_layers": [0]}, {}, {"num_hidden_layers": 3, "mlp_only_layers": [2], "decoder_sparse_step": 2}
)
GPT_OSS = {
    "sliding_window": WINDOW,
    "num_local_experts": choose(4, 5, 16),
    "num_experts_per_tok": choose(2, 1, 4),
    "intermediate_size": choose(64, 36),
    "swiglu_limit": choose(0.5 if has_transformers("5.20") else 7.0, 7.0),  # Earlier releases have 7 in the code.
    "rope_scaling": choose(YARN | {"truncate": False}, YARN | {"factor": 32.0, "truncate": False}, None),
}
GEMMA3 = {
    "sliding_window": WINDOW,
    "sliding_window_pattern": choose(2, 3),
    "num_hidden_layers": choose(3, 4),
    "rope_theta": choose(700.0, 1e4),
    "rope_local_base_freq": choose(30.0, 1e4),
    "query_pre_attn_scalar": choose(50, 168),
    "rope_scaling": choose({"rope_type": "linear", "factor": 8.0}, None, YARN),
}
OLMO3 = {
    "sliding_window": WINDOW,
    "layer_types": choose([*KINDS], [*KINDS[::-1]]),
    "num_hidden_layers": 2,
    # transformers 5 gives this base to layers with a window, whatever the configuration says.
    "rope_theta": 5e5,
    "rope_scaling": choose(YARN, None),
}
# Only a model with windows has layers without RoPE.
EXAONE4 = choose(
    {"layer_types": [*KINDS], "sliding_window": 13, "sliding_window_pattern": "LG"},
    {"layer_types": [*KINDS[::-1]], "sliding_window": 32, "sliding_window_pattern": 2},
    {"sliding_window": 7, "sliding_window_pattern": 2},
    {"layer_types": [KINDS[1]] * 2, "sliding_window": None},
)
NO_ROPE = {"num_hidden_layers": choose(2, 3), "no_rope_layers": choose([1, 0, 1], [0, 1, 1])}
# In transformers 5, and in 4.
PREFIXES = ("model.language_model.", "lm_head."), ("language_model.model.", "language_model.lm_head.")

FAMILIES = {
    "llama": Family("LlamaForCausalLM", (COMMON, FREE_HEADS, BIAS, {"rope_scaling": choose(LLAMA3, LINEAR, None)})),
    "qwen2": Family("Qwen2ForCausalLM", (COMMON, HEADS, SOME_WINDOWS, {"rope_scaling": choose(ODD_YARN, YARN, None)})),
    "qwen3": Family("Qwen3ForCausalLM", (COMMON, FREE_HEADS, BIAS, SOME_WINDOWS), has_plain_twin=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", (COMMON, FREE_HEADS, BIAS, SOME_WINDOWS, QWEN3_MOE, SOME_EXPERTS)),
    "mistral": Family(
        "MistralForCausalLM",
        (COMMON, FREE_HEADS, {"sliding_window": choose(13, None, 32), "rope_scaling": choose(LINEAR, None, YARN)}),
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        (COMMON, FREE_HEADS, {"rope_scaling": choose(QUERIES, QUERIES | {"mscale": 1.0, "mscale_all_dim": 1.0})}),
        ("Mistral3ForConditionalGeneration", "mistral3"),
        PREFIXES,
    ),
    "smollm3": Family("SmolLM3ForCausalLM", (COMMON, HEADS, BIAS, SOME_WINDOWS, NO_ROPE)),
    "phi3": Family("Phi3ForCausalLM", (COMMON, HEADS, {"sliding_window": choose(13, None, 128)}, PHI_ROPES)),
    "olmo2": Family("Olmo2ForCausalLM", (COMMON, ONE_KV_HEAD, BIAS, {"rope_scaling": None})),
    "olmo3": Family("Olmo3ForCausalLM", (COMMON, HEADS, BIAS, OLMO3)),
    "exaone4": Family("Exaone4ForCausalLM", (COMMON, FREE_HEADS, {"num_hidden_layers": 2}, EXAONE4)),
    "seed_oss": Family("SeedOssForCausalLM", (COMMON, FREE_HEADS, BIAS, {"attention_out_bias": choose(False, True)})),
    "granite": Family("GraniteForCausalLM", (COMMON, HEADS, BIAS, FACTORS)),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        (COMMON, FREE_HEADS, BIAS, GEMMA3),
        ("Gemma3ForConditionalGeneration", "gemma3"),
        PREFIXES,
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        (*GEMMA4, choose(GEMMA4_EXPERTS, {})),
        ("Gemma4ForConditionalGeneration", "gemma4"),
    ),
    "gemma4_unified_text": Family(
        "Gemma4UnifiedForCausalLM", GEMMA4, ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified")
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM", HYBRID, ("Qwen3_5ForConditionalGeneration", "qwen3_5"), is_hybrid=True
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        (*HYBRID, SHARED_EXPERT),
        ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
        is_hybrid=True,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        (
            *HYBRID,
            ONE_FREE_KV_HEAD,
            SHARED_EXPERT,
            choose({"mlp_only_layers": [0]}, {}),
            {"norm_topk_prob": choose(True, False)},
        ),
        is_hybrid=True,
    ),
    "gpt_oss": Family("GptOssForCausalLM", (COMMON, FREE_HEADS, BIAS, GPT_OSS)),
}


def fields_of(family: str, seed: int | None = None) -> dict[str, Any]:
    """A configuration of the row: of all choices the first, or drawn ones."""
    draw = random.Random(f"{family} {seed}")

    def value(chosen):
        if isinstance(chosen, pick):
            return chosen.values[0] if seed is None else draw.choice(chosen.values)
        return chosen

    fields: dict[str, Any] = {}
    for part in FAMILIES[family].parts:
        fields |= {name: value(chosen) for name, chosen in value(part).items()}
    return fields


def hold_in_int4(tensors: dict[str, torch.Tensor], is_gpt_oss: bool) -> None:
    """Make every matrix one that int4 holds exactly, in groups of 32 columns or of more.

    The numbers of a row are -8..7 times one scale, and each group has a -8. So an engine that rounds to int4 computes
    what transformers does. None is a 3 or a 6: these lie between two numbers of fp8, where the last bit of a scale
    would decide.
    """
    for name, tensor in tensors.items():
        # gpt-oss has the columns of its experts in the second dimension.
        is_turned = is_gpt_oss and name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        matrix = tensor.transpose(1, 2) if is_turned else tensor
        if matrix.dim() < 2 or matrix.shape[-1] % 32 or name.startswith(("model.embed", "lm_head")):
            continue
        scale = torch.linspace(0.04, 0.06, matrix.shape[-2]).unsqueeze(1)
        scale[::2] *= -1
        groups = (matrix / scale).round().clamp(-8, 7).unflatten(-1, (-1, 32))
        groups += (groups.abs() == 3) | (groups.abs() == 6)
        groups.scatter_(-1, groups.abs().argmax(-1, keepdim=True), -8.0)
        matrix.copy_(groups.flatten(-2) * scale)


class Case:
    """A checkpoint of a family, transformers' model of it, and prompts, of which the last two begin alike."""

    def __init__(self, family: str, directory: Path, seed: int | None = None, **changes: Any):
        self.name, self.row = family, FAMILIES[family]
        self.fields = fields_of(family, seed) | changes
        self.path = make_checkpoint(directory, family=family, seed=seed or 0, **self.fields)
        edit_tensors(self.path, lambda tensors: hold_in_int4(tensors, family == "gpt_oss"))
        self.reference = Reference(self.path)
        trained = self.fields.get("original_max_position_embeddings", 0)
        self.max_model_len = trained if trained > 100 else 128  # One set of LongRoPE's factors holds.
        vocab_size = self.fields["vocab_size"]
        beginning = random_prompt(BEGINNING, 0, vocab_size)
        self.prompts = [random_prompt(length, length, vocab_size) for length in (1, 26)]
        self.prompts += [beginning + random_prompt(length, length, vocab_size) for length in (5, 20)]

    def num_cached(self, prompt: list[int]) -> int:
        """How many tokens of a prompt come from the cache when it comes again."""
        size = CHUNK if self.row.is_hybrid else 16
        return (len(prompt) - 1) // size * size

    def assert_greedy(self, completions: list[list[int]], limits: Sequence[int] = (NUM_TOKENS,) * 4) -> None:
        """Every token is transformers' after those before it: none has a better logit, beyond rounding."""
        assert [len(tokens) for tokens in completions] == list(limits)
        for prompt, tokens in zip(self.prompts, completions, strict=True):
            assert self.reference.regret(prompt, tokens) <= self.reference.rounding(prompt, tokens)

    def assert_like_transformers(self, outputs: list[RequestOutput]) -> None:
        """`assert_greedy`, and the log-probabilities of the outputs that have some."""
        self.assert_greedy([output["token_ids"] for output in outputs])
        for prompt, output in zip(self.prompts, outputs, strict=True):
            if tokens := output["logprobs"] and output["token_ids"]:
                found = [of_step[token] for token, of_step in zip(tokens, output["logprobs"], strict=True)]
                difference = torch.tensor(found) - self.reference.logprobs(prompt, tokens)
                assert difference.abs().max() <= 2 * self.reference.rounding(prompt, tokens)
