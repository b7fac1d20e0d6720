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
from torch import nn

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.engine.deterministic import check_deterministic, check_layers
from nanovllm.engine.features.feature import Feature
from nanovllm.engine.replicas import replicated_engine
from nanovllm.layers.backends.choice import DETERMINISTIC_BACKENDS
from nanovllm.layers.experts.experts import MixtureOfExperts
from nanovllm.layers.formats.fixed_order import FixedOrder, FixedOrderReady, RowCounts, find_row_counts, trial_weight
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.matmul.candidates import make_candidates
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel

KINDS = ["sliding_attention", "full_attention"]
GPT_OSS = {"num_experts_per_tok": 3, "sliding_window": 13, "layer_types": KINDS, "head_dim": 32}
FAMILIES: dict[str, dict] = {
    "qwen3": {},
    "windows": {"family": "gemma3_text", "sliding_window": 40, "layer_types": KINDS, "head_dim": 32},
    "full norms, one KV head": {"family": "olmo2", "num_key_value_heads": 1},
    "full norms and windows": {"family": "olmo3", "sliding_window": 13, "layer_types": KINDS},
    "experts": {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36},
    "experts with biases, sinks": {"family": "gpt_oss", "num_local_experts": 5, "intermediate_size": 36, **GPT_OSS},
}
# What an engine may do with a request, beside computing it whole and alone.
ENGINES: dict[str, dict] = {
    "chunks": {"max_num_batched_tokens": 23},
    "mixed": {"mixed_step_rows": 12, "max_num_seqs": 5},
    "speculation": {"speculation": "suffix", "enable_prefix_caching": False},
    "preempted": {"num_kvcache_blocks": 20},
}
REQUESTS = make_requests(14, lengths=(1, 5, 33, 64, 90, 131, 200), head=70, max_tokens=12)


def answers_of(llm, numbers):
    return answers(llm, [REQUESTS[i] for i in numbers])


CASES = [*((name, "float32") for name in FAMILIES), ("qwen3", "bfloat16"), ("experts with biases, sinks", "bfloat16")]


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def case(request, tmp_path_factory):
    """(engines by name, the bits of each request alone)."""
    family, dtype = request.param
    skip_unless_known(FAMILIES[family].get("family", "qwen3"))
    path = make_checkpoint(tmp_path_factory.mktemp("model"), **FAMILIES[family])
    options = {"dtype": dtype, "deterministic": True}
    engines = {name: make_llm(path, **options, **ENGINES[name]) for name in ENGINES}
    with make_llm(path, enable_prefix_caching=False, **options) as llm:
        alone = answers_alone(llm, REQUESTS)
    yield engines, alone
    for each in engines.values():
        each.exit()


@settings(max_examples=8)
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
    assert sum(output["num_cached_tokens"] for output in outputs) > 500


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


def test_a_score_has_the_bits_of_the_sampling_also_after_an_update(path, llm, tmp_path):
    other = make_checkpoint(tmp_path, seed=3)
    with make_llm(other, deterministic=True) as updated:
        updated.update_weights(load_file(path / "model.safetensors").items())
        for number in (0, 6, 8):
            prompt, params = REQUESTS[number]
            [output] = generate(updated, [prompt], params)
            assert bits([output]) == answers_of(llm, [number])
            beside = [each for each, _ in REQUESTS[:5]]
            scores = updated.score([prompt, *beside], [output["token_ids"], *beside], use_tqdm=False)
            sampled: Any = [next(iter(each.values())) for each in output["logprobs"] or ()]
            assert scores[0]["logprobs"] == sampled


def test_replicas_and_one_engine_give_the_same_bits(path, llm, monkeypatch):
    monkeypatch.setattr(replicated_engine, "Replicas", ThreadReplicas)
    with make_llm(path, data_parallel_size=2, deterministic=True) as several:
        assert answers(several, REQUESTS) == answers(llm, REQUESTS)


def test_two_ranks_keep_the_bits_of_two_ranks(path):
    with make_llm_of_ranks(path, num_ranks=2, deterministic=True, max_num_batched_tokens=40) as ranks:
        assert answers_alone(ranks, REQUESTS[:6]) == answers(ranks, REQUESTS[:6])


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
    chosen = [
        each for each in make_candidates() if FixedOrder.name in each.formats or FixedOrderReady.name in each.formats
    ]
    assert chosen
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
        ({"quantization": "int4"}, "quantization: products of weights in int4"),
        ({"quantization": "fp8"}, "quantization: products of weights in fp8"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size=4: must be at most 2 with deterministic=True"),
        ({"features": [Warmer()]}, "features='Warmer': must be of features with is_batch_invariant=True"),
    ],
)
def test_what_cannot_be_promised_is_refused_by_name(path, options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        Config(str(path), device="cpu", skip_tokenizer_init=True, deterministic=True, **options)


def test_linear_attention_is_refused():
    with pytest.raises(ValueError, match="model: linear attention"):
        Config("Qwen3.5-0.8B", device="cpu", load_format="dummy", deterministic=True, skip_tokenizer_init=True)


def test_experts_on_a_gpu_are_refused():
    model = nn.Sequential(MixtureOfExperts(8, 8, 2, 1, True, TensorParallel(), Matmul()))
    check_layers(model, "cpu")
    with pytest.raises(ValueError, match="model: on a GPU the products of experts"):
        check_layers(model, "cuda")


def test_a_gpu_is_refused(path, monkeypatch):
    """Until its kernels have been compared on one."""
    config = Config(str(path), device="cpu")
    monkeypatch.setattr(config, "device", "cuda")
    with pytest.raises(ValueError, match="device='cuda': must be 'cpu' with deterministic=True"):
        check_deterministic(config)
