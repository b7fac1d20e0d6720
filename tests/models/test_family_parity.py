"""Greedy output of every family against transformers: float32 on the CPU, token for token.

Each case is a small random checkpoint whose switches are drawn. NANOVLLM_PARITY_CASES sets how many a family has.
"""

import json
import os
import random

import pytest
from checkpoints import Reference, assert_idle, complete, greedy, make_checkpoint, make_llm, needs_family

from nanovllm.layers.matmul.table import Key
from nanovllm.models.layer_facts import one_of_each_kind
from nanovllm.tuning.tune_model import layer_problems, with_new_products

NUM_CASES = int(os.environ.get("NANOVLLM_PARITY_CASES", 2))
HEAD_DIMS = (32, 48, 64, 80, 96, 128, 256)
BLOCK_SIZE = 16
# With original contexts that are shorter than the prompts.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

ENGINES = {
    "roomy": {},
    # Prompts in chunks, and sequences that are preempted.
    "cramped": {"num_kvcache_blocks": 8, "max_num_batched_tokens": 20},
    "one by one, no cache": {"overlap_steps": False, "enable_prefix_caching": False, "num_kvcache_blocks": 8},
}


def heads(draw: random.Random, head_dim_is_free: bool) -> dict:
    """Attention's shape. Where head_dim is no field of the configuration, the hidden size follows from it."""
    num_kv_heads, ratio = draw.choice([(1, 1), (1, 4), (2, 1), (2, 2), (2, 3), (4, 1), (1, 7)])
    head_dim = draw.choice(HEAD_DIMS)
    shape = {"num_attention_heads": num_kv_heads * ratio, "num_key_value_heads": num_kv_heads}
    if not head_dim_is_free:
        return shape | {"hidden_size": num_kv_heads * ratio * head_dim}
    # transformers 5 requires that the heads divide the hidden size of a Llama, though they do not use it.
    return shape | {"head_dim": head_dim, "hidden_size": num_kv_heads * ratio * draw.choice((8, 16, 24))}


def rope(draw: random.Random) -> dict:
    linear = {"rope_type": "linear", "factor": draw.choice((2.0, 3.5))}
    scaling = draw.choice([None, linear, YARN, LLAMA3, LLAMA3 | {"factor": 32.0}])
    return {"rope_theta": draw.choice((500.0, 1e4, 5e5)), "rope_scaling": scaling, "max_position_embeddings": 128}


def common(draw: random.Random, head_dim_is_free: bool = False) -> dict:
    return {
        "vocab_size": draw.choice((307, 320)),
        "intermediate_size": draw.choice((96, 109, 160)),
        "num_hidden_layers": draw.choice((1, 2, 3)),
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice((1e-6, 1e-5, 0.1)),
        **heads(draw, head_dim_is_free),
        **rope(draw),
    }


def llama(draw):
    return common(draw, head_dim_is_free=True) | {"attention_bias": draw.random() < 0.5}


def window(draw: random.Random) -> int:
    """Shorter than most prompts, a number of blocks, or longer than all. (With a window of 1, the cache of transformers
    keeps all keys.)"""
    return draw.choice((2, 7, 13, 32, 45, 127))


def layers_with_a_window(draw: random.Random) -> dict:
    """Of Qwen and SmolLM3."""
    if draw.random() < 0.5:
        return {}
    return {"use_sliding_window": True, "sliding_window": window(draw), "max_window_layers": draw.choice((0, 1))}


def qwen2(draw):
    return common(draw) | layers_with_a_window(draw)


def qwen3(draw):
    switches = {"attention_bias": draw.random() < 0.5, **layers_with_a_window(draw)}
    return common(draw, head_dim_is_free=True) | switches


def qwen3_moe(draw):
    num_experts = draw.choice((4, 5, 16, 128))
    fields = qwen3(draw) | {"num_experts": num_experts, "num_experts_per_tok": draw.randint(1, min(8, num_experts))}
    # transformers 5 gives all layers of this family the window.
    fields |= {"max_window_layers": 0, "moe_intermediate_size": draw.choice((24, 36))}
    fields["norm_topk_prob"] = draw.random() < 0.5
    if draw.random() < 0.5:  # Layers without experts, in two ways.
        fields |= {"num_hidden_layers": 3, "mlp_only_layers": draw.choice(([], [0], [2])), "decoder_sparse_step": 2}
    return fields


def mistral(draw):
    return common(draw, head_dim_is_free=True) | {"sliding_window": draw.choice((None, window(draw)))}


def ministral3(draw):
    beta = draw.choice((0.1, 0.7))
    scaling = draw.choice((YARN, YARN | {"mscale": 1.0, "mscale_all_dim": 1.0})) | {"llama_4_scaling_beta": beta}
    return mistral(draw) | {"rope_scaling": scaling}


def smollm3(draw):
    switches = {"attention_bias": draw.random() < 0.5, **layers_with_a_window(draw)}
    fields = common(draw) | switches | {"num_hidden_layers": 4}
    if draw.random() < 0.5:
        fields["no_rope_layers"] = [draw.randint(0, 1) for _ in range(4)]
    return fields


def phi3(draw):
    fields = common(draw)
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    share = draw.choice((1.0, 0.75, 0.5, 0.25))
    fields |= {
        "partial_rotary_factor": share,
        "rope_scaling": None,
        "sliding_window": draw.choice((None, 128, window(draw))),
    }
    kind = draw.choice(("default", "short", "long"))
    if kind != "default":
        factors = [[draw.uniform(1, 8) for _ in range(int(head_dim * share) // 2)] for _ in range(2)]
        scaling = {"type": "longrope", "short_factor": factors[0], "long_factor": factors[1]}
        # All prompts are longer than the original context, or none is.
        trained = 112 if kind == "short" else 16
        fields |= {"rope_scaling": scaling, "original_max_position_embeddings": trained}
    return fields


def granite(draw):
    factors = {
        "embedding_multiplier": draw.choice((1.0, 6.0, 12)),
        "attention_multiplier": draw.choice((0.015625, 0.1, 1.0)),
        "residual_multiplier": draw.choice((1.0, 0.22, 1.5)),
        "logits_scaling": draw.choice((1.0, 3.0, 8)),
    }
    return common(draw) | factors | {"attention_bias": draw.random() < 0.5}


def olmo2(draw):
    return common(draw) | {"attention_bias": draw.random() < 0.5, "rope_scaling": None}


def olmo3(draw):
    num_layers = draw.choice((2, 3, 4))
    fields = {"num_hidden_layers": num_layers, "sliding_window": window(draw)}
    if draw.random() < 0.5:
        kinds = ("sliding_attention", "full_attention")
        fields["layer_types"] = [draw.choice(kinds) for _ in range(num_layers)]
    # transformers 5 gives this base to layers with a window, whatever the configuration says.
    rope = {"rope_theta": 5e5, "rope_scaling": draw.choice((None, YARN))}
    return common(draw) | fields | rope | {"attention_bias": draw.random() < 0.5}


def gemma3_text(draw):
    switches = {
        "attention_bias": draw.random() < 0.5,
        "sliding_window": window(draw),
        "sliding_window_pattern": draw.choice((2, 3)),
        "rope_local_base_freq": draw.choice((30.0, 1e4)),
        "query_pre_attn_scalar": draw.choice((20, 168, 256)),
        "num_hidden_layers": draw.choice((3, 4)),
    }
    return common(draw, head_dim_is_free=True) | switches


def gemma4_text(draw):
    num_layers, num_kv_heads = draw.choice((2, 3, 4)), draw.choice((1, 2, 4))
    kinds = [draw.choice(("sliding_attention", "full_attention")) for _ in range(num_layers - 1)]
    fields = common(draw, head_dim_is_free=True) | {
        "num_hidden_layers": num_layers,
        "layer_types": [*kinds, "full_attention"],  # transformers lets the last layer see all.
        "sliding_window": window(draw),
        "num_attention_heads": 4,
        "num_key_value_heads": num_kv_heads,
        "global_head_dim": draw.choice((64, 96, 512)),
        "attention_k_eq_v": draw.random() < 0.5,
        "num_global_key_value_heads": draw.choice((None, 1, 2)),
        "final_logit_softcapping": draw.choice((None, 3.0)),
        "attention_bias": draw.random() < 0.5,
        "rope_theta": draw.choice((30.0, 1e4)),
    }
    share = draw.choice((0.25, 0.5, 1.0))
    scaling = {"rope_type": "proportional", "partial_rotary_factor": share, "factor": draw.choice((1.0, 4.0))}
    fields |= {"rope_scaling": draw.choice((None, scaling))}
    experts = {"enable_moe_block": True, "num_experts": draw.choice((4, 5, 16)), "top_k_experts": draw.randint(1, 4)}
    return fields | (experts | {"moe_intermediate_size": draw.choice((24, 36))} if draw.random() < 0.5 else {})


def gemma4_unified_text(draw):
    fields = gemma4_text(draw)
    return fields | {"enable_moe_block": False, "num_experts": None}


def qwen3_5_text(draw):
    num_layers = draw.choice((2, 3, 4))
    if draw.random() < 0.5:
        kinds = {"full_attention_interval": 2}
    else:  # The last layer may have linear attention.
        full = draw.randrange(num_layers)
        kinds = {
            "layer_types": ["full_attention" if i == full else "linear_attention" for i in range(num_layers)],
        }
    num_key_heads = draw.choice((1, 2, 3))
    heads = {
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_key_heads * draw.choice((1, 2, 3, 4)),
        "linear_key_head_dim": draw.choice((8, 16, 24)),
        "linear_value_head_dim": draw.choice((8, 16, 24)),
    }
    switches = {"attention_bias": draw.random() < 0.5, "num_hidden_layers": num_layers, **kinds, **heads}
    scaling = draw.choice((None, YARN))
    return common(draw, head_dim_is_free=True) | switches | {"rope_scaling": scaling}


def with_shared_expert(draw: random.Random) -> dict:
    num_experts = draw.choice((4, 5, 16))
    return qwen3_5_text(draw) | {
        "num_experts": num_experts,
        "num_experts_per_tok": draw.randint(1, 4),
        "moe_intermediate_size": draw.choice((24, 36)),
        "shared_expert_intermediate_size": draw.choice((20, 40)),
    }


def qwen3_5_moe_text(draw):
    return with_shared_expert(draw)


def qwen3_next(draw):
    fields = with_shared_expert(draw) | {"norm_topk_prob": draw.random() < 0.5}
    if draw.random() < 0.5:
        fields |= {"mlp_only_layers": [0]}
    return fields


def gpt_oss(draw):
    num_experts = draw.choice((4, 5, 16))
    scaling = draw.choice((YARN | {"truncate": False}, YARN | {"factor": 32.0, "truncate": False}, None))
    return common(draw, head_dim_is_free=True) | {
        "attention_bias": draw.random() < 0.7,
        "sliding_window": window(draw),
        "num_hidden_layers": draw.choice((2, 3)),
        "num_local_experts": num_experts,
        "num_experts_per_tok": draw.randint(1, 4),
        "intermediate_size": draw.choice((24, 36)),
        "swiglu_limit": draw.choice((0.5, 7.0)),
        "rope_scaling": scaling,
    }


FAMILIES = (llama, qwen2, qwen3, qwen3_moe, mistral, ministral3, smollm3, phi3, olmo2, olmo3, granite, gemma3_text)
FAMILIES += (gemma4_text, gemma4_unified_text, qwen3_5_text, qwen3_5_moe_text, qwen3_next, gpt_oss)
CASES = [
    pytest.param(family, seed, id=f"{family.__name__}-{seed}", marks=needs_family(family.__name__))
    for family in FAMILIES
    for seed in range(NUM_CASES)
]


def make_case(family, seed: int, directory, **changes):
    """A checkpoint, its reference, and the longest sequence for which one set of RoPE's factors holds."""
    fields = family(random.Random(f"{family.__name__} {seed}")) | changes
    path = make_checkpoint(directory, family=family.__name__, seed=seed, **fields)
    return path, Reference(path), min(fields.get("original_max_position_embeddings", 0), 128) or 128


def record_mixed_steps(llm) -> list[bool]:
    """Whether each decode step from now on is a mixed one."""
    runner, is_mixed = llm.model_runner, []
    prepare = runner.prepare

    def prepare_and_record(step):
        prepare(step)
        if not step.is_prefill:
            is_mixed.append(step.kind.is_mixed)

    runner.prepare = prepare_and_record
    return is_mixed


@pytest.mark.slow
@pytest.mark.parametrize(("family", "seed"), CASES)
def test_output_is_that_of_transformers(family, seed, tmp_path):
    path, reference, longest = make_case(family, seed, tmp_path)
    max_model_len = longest if longest > 100 else 128
    head = reference.draw_prompts((2 * BLOCK_SIZE,), 1, seed)[0]
    prompts = reference.draw_prompts((17, 26, 90, 28), 14, seed)
    prompts += reference.draw_prompts((2 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE), 14, seed, prefix=head)
    expected = reference.greedy(prompts, 14)
    for name, options in ENGINES.items():
        with make_llm(path, max_model_len=max_model_len, **options) as llm:
            assert complete(llm, prompts, greedy(14)) == expected, name
            if name == "roomy":  # and from the cache
                assert complete(llm, prompts[::-1], greedy(14)) == expected[::-1]
                assert asked_products(llm) == tuned_products(llm)
            assert (llm.scheduler.num_preemptions > 0) == (name != "roomy")
            assert_idle(llm)
    # The first prompt alone is prefilled. The others enter beside its decode steps, since they end before it.
    limits = (14, 6, 2, 4, 3, 3)
    with make_llm(path, max_model_len=max_model_len, mixed_step_rows=17, max_num_batched_tokens=17) as llm:
        is_mixed = record_mixed_steps(llm)
        tokens = complete(llm, prompts, [greedy(limit) for limit in limits])
        assert tokens == [found[:limit] for found, limit in zip(expected, limits, strict=True)]
        assert sum(is_mixed) > 2
        assert_idle(llm)


def asked_products(llm) -> set[Key]:
    """Those that the engine has looked up in the table."""
    return {key._replace(phase="") for key in llm.model_runner.model.matmul._rows}


def tuned_products(llm) -> set[Key]:
    """Those that `nanovllm tune` would measure, of the same layers."""
    layers = llm.model_runner.model.model.layers
    measured = with_new_products(layers[i] for i in one_of_each_kind(layers))
    return {problem.key._replace(phase="") for layer, _ in measured for problem in layer_problems(layer)}


TWO_RANKS = {
    # A layer with experts and one without, whose sums go the same ways.
    "qwen3_moe": (
        qwen3_moe,
        {"num_experts": 16, "num_experts_per_tok": 3, "mlp_only_layers": [0], "decoder_sparse_step": 1}
        | {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 64},
    ),
    # Both ranks have a copy of the KV head, whose norm is over the heads of all ranks.
    "olmo2": (olmo2, {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 128, "attention_bias": True}),
    # Only one rank adds the bias of the attention's output, which has a factor too.
    "granite": (
        granite,
        {"attention_bias": True, "residual_multiplier": 0.22, "logits_scaling": 3.0, "embedding_multiplier": 6.0}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128},
    ),
    # Parts of the fused tensors.
    "phi3": (phi3, {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 192, "rope_scaling": None}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), TWO_RANKS.values(), ids=TWO_RANKS)
def test_two_ranks_give_the_same_tokens(family, changes, tmp_path):
    path, reference, _ = make_case(family, 0, tmp_path, intermediate_size=98, num_hidden_layers=2, **changes)
    prompts = reference.draw_prompts((17, 26, 90, 28), 14)
    with make_llm(path, max_model_len=128, tensor_parallel_size=2, **ENGINES["cramped"]) as llm:
        assert complete(llm, prompts, greedy(14)) == reference.greedy(prompts, 14)


def respell(file) -> None:
    """Write a config.json with the names of the other transformers, 4 or 5."""
    config = json.loads(file.read_text())
    if "rope_parameters" in config:
        rope = config.pop("rope_parameters")
        names = ("rope_theta", "partial_rotary_factor")
        config |= {name: rope.pop(name) for name in names if name in rope}
        config |= {"rope_scaling": rope if rope.get("rope_type") != "default" else None}
        config["torch_dtype"] = config.pop("dtype")
    else:
        rope = config.pop("rope_scaling", None) or {"rope_type": "default"}
        rope.setdefault("rope_type", rope.get("type"))
        names = ("rope_theta", "partial_rotary_factor")
        config["rope_parameters"] = rope | {name: config.pop(name) for name in names if name in config}
        config["dtype"] = config.pop("torch_dtype")
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (llama, {"rope_scaling": LLAMA3}),
        (qwen3, {"rope_scaling": YARN}),
        (phi3, {"partial_rotary_factor": 0.5, "rope_scaling": None}),
    ],
    ids=["llama3", "yarn", "partial"],
)
def test_both_spellings_of_the_configuration(family, changes, tmp_path):
    path, reference, _ = make_case(family, 0, tmp_path, rope_theta=500.0, **changes)
    prompts = reference.draw_prompts((17, 90), 8)
    before = set(json.loads((path / "config.json").read_text()))
    respell(path / "config.json")
    assert len(before ^ set(json.loads((path / "config.json").read_text()))) >= 4
    with make_llm(path, max_model_len=128) as llm:
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)
