"""The whole engine on a CUDA device, held to transformers in float32 on the CPU."""

from functools import cache

import pytest
import torch
from checkpoints import (
    VOCAB_SIZE,
    Reference,
    assert_idle,
    complete,
    greedy,
    make_checkpoint,
    make_llm,
    needs_family,
    random_prompt,
    record_logits,
)
from gpu_engines import DEMO_MODEL, DEMO_PROMPTS, REGRET, SHAPES, cases, gpu_llm, needs_demo_model

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu

# |logits - reference| / |reference|. On a CPU, plain torch in these dtypes is off by up to 2e-6, 2e-2 and 2e-3.
LOGITS_ERROR = {"float32": 2e-5, "bfloat16": 3.5e-2, "float16": 5e-3}


@pytest.fixture(scope="module")
def make_shaped(tmp_path_factory):
    """From a head_dim to (checkpoint, Reference). Stored in bfloat16, so that every dtype runs the same weights."""

    @cache
    def make(head_dim):
        sizes = {"head_dim": head_dim, "hidden_size": 128, "intermediate_size": 192, **SHAPES[head_dim]}
        path = make_checkpoint(tmp_path_factory.mktemp("gpu"), dtype=torch.bfloat16, **sizes)
        return path, Reference(path)

    return make


@pytest.fixture
def shaped(request, make_shaped):
    return make_shaped(request.param)


# -- numbers -----------------------------------------------------------------------------------------------------


def assert_logits_close(path, reference, backend, dtype):
    """Prefill of all lengths, whole and in chunks, fresh and after a cached prefix, and decode steps after it."""
    head = random_prompt(512, seed=0)
    prompts = [random_prompt(length, seed=length) for length in (1, 17, 255, 256, 257, 700)]
    prompts += [head, head + random_prompt(1, seed=1), head + random_prompt(300, seed=2), head[:300]]
    rows, cached = [], 0
    for chunk in (2048, 200):
        options = {"attention_backend": backend, "dtype": dtype, "max_num_batched_tokens": chunk}
        with gpu_llm(path, enforce_eager=True, **options) as llm:
            record_logits(llm, rows)
            for prompt in prompts:
                rows.clear()
                (output,) = llm.generate([prompt], greedy(5), use_tqdm=False)
                tokens = output["token_ids"]
                cached += output["num_cached_tokens"]
                expected = reference.logits(prompt, tokens)
                # The last five: a chunk that is not the prompt's last has logits too, which mean nothing.
                found = torch.cat(rows)[-5:]
                error = ((found - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
                assert error < LOGITS_ERROR[dtype], f"{len(prompt)} tokens, {output['num_cached_tokens']} cached"
    assert cached >= 2 * (512 + 512 + 256)


@cases(
    "shaped backend dtype",
    (64, "triton", "bfloat16"),
    (64, "flash_attn", "float16"),
    (64, "torch", "float32"),
    (128, "triton", "float16"),
    (128, "triton", "float32"),
    (128, "flash_attn", "bfloat16"),
    (128, "torch", "bfloat16"),
)
def test_logits_are_close_to_those_of_a_cpu(shaped, backend, dtype):
    assert_logits_close(*shaped, backend=backend, dtype=dtype)


LENGTHS = (3, 40, 256, 1, 300, 17, 255, 8, 64, 257, 5, 100, 33, 12, 2, 150, 511)


@cases(
    "shaped backend eager",
    (64, "triton", True),
    (64, "torch", True),
    (128, "triton", False),
)
def test_tokens_in_float32(shaped, backend, eager):
    path, reference = shaped
    prompts = reference.draw_prompts(LENGTHS, 10)
    expected = reference.greedy(prompts, 10)
    options = {"attention_backend": backend, "dtype": "float32", "enforce_eager": eager, "num_kvcache_blocks": 64}
    with gpu_llm(path, **options) as llm:
        # Batch sizes between the captured ones, larger before smaller: their padding rows hold stale sequences.
        for num_seqs in (17, 3, 5, 9, 1):
            assert complete(llm, prompts[:num_seqs], greedy(10)) == expected[:num_seqs]
        outputs = llm.generate(prompts[::-1], greedy(10), use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == expected[::-1]
        assert [output["num_cached_tokens"] for output in outputs] == [(n - 1) // 256 * 256 for n in LENGTHS[::-1]]
        assert_idle(llm)


@cases(
    "shaped backend dtype eager",
    (64, "triton", "float16", False),
    (64, "flash_attn", "bfloat16", False),
    (64, "torch", "float16", True),
    (128, "triton", "bfloat16", False),
    (128, "triton", "bfloat16", True),
    (128, "flash_attn", "float16", False),
    (128, "flash_attn", "bfloat16", True),
)
def test_tokens_in_half_precision(shaped, backend, dtype, eager):
    path, reference = shaped
    head = random_prompt(256, seed=9)
    prompts = [random_prompt(length, seed=length) for length in LENGTHS[:9]]
    prompts += [head + random_prompt(length, seed=length) for length in (1, 2, 50)]
    options = {"attention_backend": backend, "dtype": dtype, "enforce_eager": eager, "num_kvcache_blocks": 64}
    with gpu_llm(path, **options) as llm:
        for batch in (prompts, prompts[:3], prompts[-1:], prompts[::-1]):
            outputs = complete(llm, batch, greedy(10))
            assert max(map(reference.regret, batch, outputs)) < REGRET[dtype]
        assert_idle(llm)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """(checkpoint, Reference) whose down projection is long enough to be split, on one GPU and on two."""
    sizes = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 2176, "attention_bias": True}
    path = make_checkpoint(tmp_path_factory.mktemp("wide"), dtype=torch.bfloat16, **sizes)
    return path, Reference(path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decode_steps_of_forty(wide, dtype):
    """And of ten, seventeen and thirty-three: where the split-K kernel takes over, and more."""
    path, reference = wide
    prompts = [random_prompt(5 + i, seed=i) for i in range(40)]
    options = {"attention_backend": "triton", "dtype": dtype, "num_kvcache_blocks": 64, "max_num_seqs": 48}
    with gpu_llm(path, enforce_eager=True, **options) as llm:
        rows = []
        record_logits(llm, rows)
        outputs = complete(llm, prompts, greedy(5))
    assert [len(logits) for logits in rows[:5]] == [40] * 5
    for prompt, tokens, found in zip(prompts, outputs, torch.stack(rows[:5], dim=1), strict=True):
        expected = reference.logits(prompt, tokens)
        assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).max() < LOGITS_ERROR[dtype]
    with gpu_llm(path, enforce_eager=False, **options) as llm:
        for batch in (prompts, prompts[:10], prompts[:17], prompts[:33]):
            outputs = complete(llm, batch, greedy(8))
            assert max(map(reference.regret, batch, outputs)) < REGRET[dtype]
            assert complete(llm, batch, greedy(8)) == outputs, "equal batches gave other tokens"
        assert_idle(llm)


def test_torch_backend_goes_without_graphs(base):
    path, reference = base
    prompts = reference.draw_prompts((20, 3, 17), 8)
    with gpu_llm(path, attention_backend="torch", dtype="float32", enforce_eager=False) as llm:
        assert not llm.model_runner.graph_bs
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)


@cases(
    "backend eager caching",
    ("triton", True, True),
    ("triton", False, True),
    ("triton", False, False),
    ("torch", True, False),
)
def test_chunks_and_preemption(base, backend, eager, caching):
    path, reference = base
    prompts = reference.draw_prompts((20, 45, 16, 31, 64, 7, 48), 40)
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 9, "max_num_batched_tokens": 24, "max_num_seqs": 5}
    options |= {"attention_backend": backend, "enforce_eager": eager, "enable_prefix_caching": caching}
    with gpu_llm(path, dtype="float32", **options) as llm:
        assert complete(llm, prompts, greedy(40)) == reference.greedy(prompts, 40)
        assert llm.scheduler.num_preemptions > 2
        assert_idle(llm)


@cases("eager overlap", (True, True), (False, True), (False, False))
def test_blocks_of_ended_sequences_are_reused_at_once(base, eager, overlap):
    # An end of sequence comes to light while the step after it runs; its blocks have waiting takers.
    path, reference = base
    eos = set(range(0, VOCAB_SIZE, 10))
    prompts = reference.draw_prompts((20, 45, 16, 31, 64, 7, 48, 15, 33, 5, 28, 90), 40)
    expected = []
    for tokens in reference.greedy(prompts, 40):
        end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens) - 1)
        expected.append(tokens[: end + 1])
    assert len({len(tokens) for tokens in expected}) > 3
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 14, "max_num_seqs": 5, "enforce_eager": eager}
    options |= {"attention_backend": "triton", "dtype": "float32", "overlap_steps": overlap, "eos": eos}
    with gpu_llm(path, **options) as llm:
        for _ in range(2):
            assert complete(llm, prompts, SamplingParams(temperature=0, max_tokens=40)) == expected
            assert_idle(llm)


@pytest.mark.parametrize("block_size", [16, 64, 1024])
def test_triton_takes_other_block_sizes(base, block_size):
    path, reference = base
    prompts = reference.draw_prompts((200, 63, 64, 65, 15, 16, 17), 12)
    options = {"attention_backend": "triton", "dtype": "float32", "max_num_seqs": 8}
    with gpu_llm(path, kvcache_block_size=block_size, **options) as llm:
        for _ in range(2):
            assert complete(llm, prompts, greedy(12)) == reference.greedy(prompts, 12)


@pytest.mark.parametrize(
    "config",
    [
        {"family": "qwen2", "hidden_size": 256},
        {"head_dim": 80, "num_attention_heads": 3, "num_key_value_heads": 1},
        {"attention_bias": True, "tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 1},
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            "max_position_embeddings": 128,
        },
        pytest.param(
            {"family": "gemma4_text", "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}
            | {"moe_intermediate_size": 32},
            marks=needs_family("gemma4_text"),
        ),
    ],
    ids=["qwen2", "head-dim-80", "bias-tied-mqa", "yarn", "experts-beside-an-mlp"],
)
def test_other_models(tmp_path, config):
    path = make_checkpoint(tmp_path, **config)
    reference = Reference(path)
    prompts = reference.draw_prompts((1, 17, 90), 16)
    options = {"attention_backend": "triton", "dtype": "float32", "max_num_seqs": 4}
    with gpu_llm(path, kvcache_block_size=16, **options) as llm:
        assert complete(llm, prompts, greedy(16)) == reference.greedy(prompts, 16)


def test_seeded_requests_draw_what_they_draw_on_a_cpu(base):
    path, _ = base
    prompts = [random_prompt(length, seed=length) for length in (5, 33, 16)]
    params = [SamplingParams(0.6 + 0.2 * i, 20, ignore_eos=True, seed=2**40 + i) for i in range(3)]
    with make_llm(path, device="cpu") as llm:
        expected = complete(llm, prompts, params)
    for eager in (True, False):
        options = {"attention_backend": "triton", "dtype": "float32", "enforce_eager": eager, "max_num_seqs": 4}
        with gpu_llm(path, **options) as llm:
            assert complete(llm, prompts, params) == expected
            assert complete(llm, prompts[::-1], params[::-1]) == expected[::-1]


# -- the demo model ----------------------------------------------------------------------------------------------


@needs_demo_model
def test_demo_model_in_bfloat16_agrees_with_float32():
    assert len(set(DEMO_PROMPTS)) == 20
    with LLM(str(DEMO_MODEL), kvcache_gib=1.0) as llm:
        assert llm.config.device == "cuda"
        assert llm.config.dtype == torch.bfloat16
        found = complete(llm, DEMO_PROMPTS, greedy(32))
    with LLM(str(DEMO_MODEL), device="cpu", dtype="float32") as llm:
        expected = complete(llm, DEMO_PROMPTS, greedy(32))
    assert {len(tokens) for tokens in expected} == {32}
    agreeing = sum(a == b for a, b in zip(found, expected, strict=True))
    assert agreeing >= 11, f"{agreeing} of 20 prompts agree for 32 tokens"
