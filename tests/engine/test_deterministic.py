"""deterministic=True: a request's tokens and log-probabilities have the same bits in any company."""

import re
from typing import Any

import pytest
import torch
from checkpoints import complete, generate, make_checkpoint, make_llm, skip_unless_known
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from same_bits import answers, answers_alone, bits, make_requests
from thread_ranks import make_llm_of_ranks
from thread_replicas import ThreadReplicas

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.engine.deterministic import check_deterministic
from nanovllm.engine.features.feature import Feature
from nanovllm.engine.replicas import replicated_engine
from nanovllm.engine.start.build import choose_mixed_step_rows
from nanovllm.layers.backends.choice import DETERMINISTIC_BACKENDS
from nanovllm.layers.formats.fixed_order import (
    DequantizedProducts,
    FixedOrder,
    FixedOrderReady,
    RowCounts,
    find_row_counts,
    trial_weight,
)
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks
from nanovllm.layers.formats.int4 import Int4
from nanovllm.layers.formats.mxfp4 import Mxfp4
from nanovllm.layers.formats.packed import Packed
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.matmul.candidates import make_candidates
from nanovllm.layers.matmul.candidates.fixed_order import make_fixed_order_candidates
from nanovllm.layers.matmul.candidates.fixed_order_gpu import make_fixed_order_candidates_of_gpu
from nanovllm.layers.matmul.table import package_table

KINDS = ["sliding_attention", "full_attention"]
MOE = {"num_experts": 4, "num_experts_per_tok": 2}
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 13, "layer_types": KINDS, "head_dim": 32}
FAMILIES: dict[str, dict] = {
    "qwen3": {},
    "gemma3": {"family": "gemma3_text", "sliding_window": 40, "layer_types": KINDS, "head_dim": 32},
    "olmo3 with one KV head": {"family": "olmo3", "num_key_value_heads": 1, "sliding_window": 13, "layer_types": KINDS},
    "qwen3_moe": {"family": "qwen3_moe", "moe_intermediate_size": 36, **MOE},
    "qwen3_moe in mxfp4": {"family": "qwen3_moe", "moe_intermediate_size": 64, **MOE},
    "gpt_oss": {"family": "gpt_oss", "intermediate_size": 36, **GPT_OSS},
    "qwen3_next": {"family": "qwen3_next", "moe_intermediate_size": 36, "shared_expert_intermediate_size": 20, **MOE},
    "qwen3_5": {"family": "qwen3_5_text", "linear_value_head_dim": 24},
}
# Dtypes, and options of engines.
CASES: dict[tuple[str, str], dict] = {
    **{(name, "float32"): {} for name in ("qwen3", "gemma3", "olmo3 with one KV head", "qwen3_moe", "gpt_oss")},
    ("qwen3", "bfloat16"): {},
    ("qwen3 in fp8", "bfloat16"): {"quantization": "fp8"},
    ("qwen3_moe in mxfp4", "bfloat16"): {"quantization": "mxfp4"},
    ("qwen3_next", "float32"): {},
    ("qwen3_5", "bfloat16"): {"state_dtype": "float16"},
}
# What an engine may do with a request, beside computing it whole and alone.
ENGINES: dict[str, dict] = {
    "chunks": {"max_num_batched_tokens": 70},
    "mixed": {"mixed_step_rows": 12, "max_num_seqs": 5},
    "speculation": {"speculation": "suffix", "enable_prefix_caching": False},
    "preempted": {"num_kvcache_blocks": 20},
}
REQUESTS = make_requests(14, lengths=(1, 5, 33, 64, 90, 131, 200), head=70, max_tokens=12)


def answers_of(llm, numbers):
    return answers(llm, [REQUESTS[i] for i in numbers])


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def case(request, tmp_path_factory):
    """(engines by name, the bits of each request alone)."""
    name, dtype = request.param
    fields = FAMILIES.get(name, {})
    skip_unless_known(fields.get("family", "qwen3"))
    path = make_checkpoint(tmp_path_factory.mktemp("model"), **fields)
    options = {"dtype": dtype, "deterministic": True, **CASES[request.param]}
    engines = {name: make_llm(path, **options, **ENGINES[name]) for name in ENGINES}
    with make_llm(path, enable_prefix_caching=False, **options) as llm:
        alone = answers_alone(llm, REQUESTS)
    yield engines, alone
    for each in engines.values():
        each.exit()


@settings(max_examples=5)
@given(name=st.sampled_from(list(ENGINES)), numbers=st.lists(st.integers(0, 13), min_size=2, max_size=12, unique=True))
def test_a_requests_bits_do_not_depend_on_its_company(case, name, numbers):
    engines, alone = case
    assert answers_of(engines[name], numbers) == [alone[i] for i in numbers]


def test_engines_did_what_they_are_named_after(case):
    engines, alone = case
    assert all(answers(llm, REQUESTS) == alone for llm in engines.values())
    assert engines["preempted"].scheduler.num_preemptions > 0
    # The second time, all beginnings are cached.
    outputs = generate(engines["chunks"], *(list(each) for each in zip(*REQUESTS, strict=True)))
    assert bits(outputs) == alone
    assert sum(output["num_cached_tokens"] for output in outputs) > 200


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(path):
    with make_llm(path, deterministic=True) as llm:
        yield llm


def test_tokens_are_those_of_other_engines(path, llm):
    """A fixed order of sums is no other model: in float32 the tokens are those without it."""
    requests = [(prompt, SamplingParams(0, 12, ignore_eos=True)) for prompt, _ in REQUESTS]
    with make_llm(path) as other:
        assert complete(llm, *map(list, zip(*requests, strict=True))) == complete(
            other, *map(list, zip(*requests, strict=True))
        )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_a_score_has_the_bits_of_the_sampling_also_after_an_update(family, tmp_path):
    skip_unless_known(family)
    path, other = (make_checkpoint(tmp_path / str(seed), seed=seed, **FAMILIES[family]) for seed in (0, 3))
    numbers = 0, 6, 8
    with make_llm(path, deterministic=True) as llm:
        expected = answers_of(llm, numbers)
    with make_llm(other, deterministic=True) as updated:
        updated.update_weights(load_file(path / "model.safetensors").items())
        for number, sampled_before in zip(numbers, expected, strict=True):
            prompt, params = REQUESTS[number]
            [output] = generate(updated, [prompt], params)
            assert bits([output]) == [sampled_before]
            beside = [each for each, _ in REQUESTS[:5]]
            scores = updated.score([prompt, *beside], [output["token_ids"], *beside], use_tqdm=False)
            sampled: Any = [next(iter(each.values())) for each in output["logprobs"] or ()]
            assert scores[0]["logprobs"] == sampled


def test_replicas_and_one_engine_give_the_same_bits(path, llm, monkeypatch):
    monkeypatch.setattr(replicated_engine, "Replicas", ThreadReplicas)
    with make_llm(path, data_parallel_size=2, deterministic=True) as several:
        assert answers(several, REQUESTS) == answers(llm, REQUESTS)


def test_four_ranks_keep_the_bits_of_four_ranks(tmp_path):
    """gloo adds numbers at one place of a tensor in another order than those at another place."""
    path = make_checkpoint(tmp_path, **FAMILIES["qwen3_moe"])
    with make_llm_of_ranks(path, num_ranks=4, deterministic=True, max_num_batched_tokens=40) as ranks:
        assert answers_alone(ranks, REQUESTS[:3]) == answers(ranks, REQUESTS[:3])


# -- who keeps the promise ---------------------------------------------------------------------------------------------


def test_products_of_any_number_of_rows_have_the_same_bits():
    """A weight of this shape has other bits for one row: oneDNN divides its sums there."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(256, 4096, generator=generator), torch.randn(150, 4096, generator=generator)
    format, values = FixedOrder().packed(weight)
    ready = Weight(format, values)
    whole = format.linear(x, ready)
    torch.testing.assert_close(whole, x @ weight.T, atol=1e-3, rtol=1e-4)
    for size in (1, 2, 3, 7, 16, 21, 100, 149):
        assert torch.equal(torch.cat([format.linear(part, ready) for part in x.split(size)]), whole), size


@pytest.mark.parametrize("format", [Fp8(), Fp8Blocks(), Int4(), Mxfp4()], ids=lambda each: each.name)
def test_so_have_those_of_weights_that_become_plain_ones(format):
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(256, 1024, generator=generator), torch.randn(50, 1024, generator=generator).bfloat16()
    ready, products = format.quantize(weight, torch.bfloat16), DequantizedProducts(1)
    whole = products.linear(x, ready)
    torch.testing.assert_close(whole, format.linear(x, ready), atol=0.1, rtol=2**-7)
    for size in (1, 2, 3, 17):
        assert torch.equal(torch.cat([products.linear(part, ready) for part in x.split(size)]), whole), size


@pytest.mark.parametrize("counts", [(16,), (2, 4, 8, 16), (1, 16, 64)])
def test_parts_make_up_all_rows(counts):
    for num_rows in range(1, 200):
        parts = list(RowCounts(counts, 1).parts(num_rows))
        assert sum(part for part, _ in parts) == num_rows
        assert all(part <= count and count in counts for part, count in parts)


def test_a_split_by_the_number_of_rows_is_left_out():
    weight = torch.randn(40, 512, generator=torch.Generator().manual_seed(0))

    def linear(x):
        if len(x) in (1, 4):  # in two halves
            return x[:, :256] @ weight[:, :256].T + x[:, 256:] @ weight[:, 256:].T
        return torch.stack([(row.double() @ weight.T.double()).float() for row in x])

    assert find_row_counts(linear, 40, 512, torch.float32, 1).counts == (2, 8, 16, 32, 64)


def test_a_split_shows_in_16_bits_too():
    """Rounded to bfloat16, nearly all results of two orders are alike. Those of the trial's numbers are not."""
    weight = trial_weight(8, 512, torch.bfloat16).float()

    def linear(x):
        size = 256 if len(x) == 4 else 512
        sums = torch.zeros(512 // size, len(x), 8)
        for k in range(512):
            sums[k // size] += x[:, k, None].float() * weight[None, :, k]
        return sums.sum(0).bfloat16()

    assert find_row_counts(linear, 8, 512, torch.bfloat16, 1).counts == (1, 2, 8, 16, 32, 64)


def test_a_processor_without_any_order_is_refused():
    def linear(x):
        return x * torch.arange(len(x))[:, None]

    with pytest.raises(ValueError, match=r"deterministic=True.*a weight \[4, 4\] in float32"):
        find_row_counts(linear, 4, 4, torch.float32, 1)


def test_only_what_says_so_is_chosen():
    chosen = make_fixed_order_candidates(1) + make_fixed_order_candidates_of_gpu(torch.device("cpu"))
    chosen += [each for each in make_candidates() if {FixedOrder.name, FixedOrderReady.name} & {*each.formats}]
    assert all(each.is_batch_invariant for each in chosen)
    assert all(each.is_batch_invariant for each in DETERMINISTIC_BACKENDS)


# -- what is refused ---------------------------------------------------------------------------------------------------


class Warmer(Feature):
    option = "warmer"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"plain": True}, "plain=True: must be False with deterministic=True"),
        ({"attention_backend": "torch"}, "attention_backend='torch': must be 'auto'"),
        ({"features": [Warmer()]}, "features='Warmer': must be of features with is_batch_invariant=True"),
    ],
)
def test_what_cannot_be_promised_is_refused_by_name(path, options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        Config(str(path), device="cpu", skip_tokenizer_init=True, deterministic=True, **options)


def test_a_format_without_an_order_is_refused(path, monkeypatch):
    config = Config(str(path), device="cpu")
    monkeypatch.setattr(config, "weight_format", Packed())
    with pytest.raises(ValueError, match="quantization: products of weights in packed"):
        check_deterministic(config)


def test_it_has_the_mixed_steps_that_the_model_has_without_it(path):
    config, table = Config(str(path), device="cpu"), package_table("NVIDIA H200")
    values = torch.empty(24576, 4096, dtype=torch.bfloat16, device="meta")  # Qwen3-8B's gate and up
    plain, fixed = (
        choose_mixed_step_rows(config, True, False, Weight(format, values), table)
        for format in (Unquantized(), FixedOrder())
    )
    assert fixed == plain > 0


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3.5-0.8B"])
def test_a_gpu_takes_every_format_ranks_and_linear_attention(model, monkeypatch):
    config = Config(model, device="cpu", load_format="dummy", skip_tokenizer_init=True)
    monkeypatch.setattr(config, "device", "cuda")
    monkeypatch.setattr(config, "tensor_parallel_size", 2)
    for format in (Fp8(), Fp8Blocks(), Int4(), Mxfp4(), None):
        monkeypatch.setattr(config, "weight_format", format)
        check_deterministic(config)
