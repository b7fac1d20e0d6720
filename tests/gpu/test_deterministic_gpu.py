"""deterministic=True on a GPU: the same bits in any company, of the kernels at real sizes and of whole engines."""

import pytest
import torch
from checkpoints import generate, make_checkpoint, make_llm, random_prompt
from same_bits import answers, answers_alone, make_requests

from nanovllm import SamplingParams
from nanovllm.kernels.attention.fixed_order import FixedOrderWorkspace, fixed_order_decode, fixed_order_prefill
from nanovllm.kernels.matmul.fixed_order import fixed_order_linear

pytestmark = pytest.mark.gpu


LENGTHS = (1, 17, 300, 600, 1100, 90, 513, 512)
ENGINES: dict[str, dict] = {
    "graphs": {},
    "eager": {"enforce_eager": True, "max_num_seqs": 3},
    "chunks": {"max_num_batched_tokens": 200},
    "mixed": {"mixed_step_rows": 40},
    "speculation": {"speculation": "suffix", "enable_prefix_caching": False},
    "preempted": {"num_kvcache_blocks": 90},
}
FAMILIES: dict[str, dict] = {
    "qwen3": {"head_dim": 64},
    "windows": {"family": "gemma3_text", "sliding_window": 100, "head_dim": 64}
    | {"layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("N", "K"), [(4096, 1024), (1024, 3072), (151936, 1024), (1030, 2048)])
def test_a_rows_product_has_the_same_bits_among_any_others(N, K, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(700, K, device="cuda").to(dtype), torch.randn(N, K, device="cuda").to(dtype) / K**0.5
    whole = fixed_order_linear(x, weight)
    torch.testing.assert_close(whole.float(), x.float() @ weight.float().T, rtol=2e-2, atol=2e-2)
    for size in (1, 2, 3, 16, 63, 64, 65, 256):
        for start in (0, 7, 433):
            assert torch.equal(fixed_order_linear(x[start:][:size], weight), whole[start:][:size]), (size, start)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "head_dim"), [((16, 8), 128), ((32, 8), 128), ((8, 1), 64), ((5, 5), 96)])
@pytest.mark.parametrize("window", [None, 700])
def test_a_token_has_the_same_bits_in_prefill_and_decode(heads, head_dim, dtype, window):
    torch.manual_seed(0)
    (num_heads, num_kv_heads), length, block_size = heads, 2100, 256
    num_blocks = -(-length // block_size)
    q = torch.randn(length, num_heads, head_dim, device="cuda").to(dtype)
    cache = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim, device="cuda").to(dtype)
    table = torch.randperm(num_blocks, device="cuda").int()[None]
    k, v = (x[table[0].long()].flatten(0, 1)[:length] for x in cache)

    def prefill(first, paged):
        lens = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (length - first, length)]
        args = *lens, length - first, table if paged else None, head_dim**-0.5, window
        return fixed_order_prefill(q[first:], k, v, cache[0], cache[1], *args)

    whole = prefill(0, False)
    for first in (0, 1, 511, 512, 1300, 2099):
        assert torch.equal(prefill(first, True), whole[first:]), first
    rows = [0, 1, 63, 64, 511, 512, 513, 699, 700, 1023, 1024, 1500, 2047, 2099]
    workspace = FixedOrderWorkspace(len(rows), num_heads, head_dim, 4096, "cuda")

    def decode(rows):
        lens = torch.tensor(rows, dtype=torch.int32, device="cuda") + 1
        tables = table.expand(len(rows), -1).contiguous()
        return fixed_order_decode(q[rows], cache[0], cache[1], lens, tables, head_dim**-0.5, workspace, window)

    assert torch.equal(decode(rows), whole[rows])
    assert all(torch.equal(decode([row]), whole[row : row + 1]) for row in rows)


REQUESTS = make_requests(24, LENGTHS, head=600, max_tokens=40)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_requests_bits_do_not_depend_on_its_company(family, dtype, tmp_path):
    fields = {"max_position_embeddings": 2048} | FAMILIES[family]
    path = make_checkpoint(tmp_path, **fields)
    common: dict = {"device": "cuda", "dtype": dtype, "deterministic": True, "max_model_len": 2048}
    common["num_kvcache_blocks"] = 2000
    with make_llm(path, enable_prefix_caching=False, **common) as llm:
        alone = answers_alone(llm, REQUESTS)
    for name, options in ENGINES.items():
        with make_llm(path, **common | options) as llm:
            for _ in range(2):  # The second time, beginnings are cached.
                found = answers(llm, REQUESTS)
                wrong = [i for i in range(len(REQUESTS)) if found[i] != alone[i]]
                assert not wrong, (name, wrong)


def test_a_score_has_the_bits_of_the_sampling(base):
    path, _ = base
    with make_llm(path, device="cuda", dtype="bfloat16", deterministic=True, max_model_len=1024) as llm:
        prompts, params = [random_prompt(50 + i, i) for i in range(8)], SamplingParams(1.0, 60, seed=1, logprobs=0)
        outputs = generate(llm, prompts, params)
        scores = llm.score(prompts, [output["token_ids"] for output in outputs], use_tqdm=False)
        for output, score in zip(outputs, scores, strict=True):
            assert score["logprobs"] == [next(iter(each.values())) for each in output["logprobs"] or ()]


def test_tokens_are_those_of_transformers_in_float32(base):
    path, reference = base
    prompts = reference.draw_prompts((20, 300, 7), 20)
    with make_llm(path, device="cuda", dtype="float32", deterministic=True) as llm:
        found = generate(llm, prompts, SamplingParams(0, 20, ignore_eos=True))
    assert [output["token_ids"] for output in found] == reference.greedy(prompts, 20)


def test_what_a_gpu_does_not_promise_is_refused(base):
    path, _ = base
    with pytest.raises(ValueError, match="keeps no keys and values in fp8"):
        make_llm(path, device="cuda", deterministic=True, kv_cache_dtype="fp8")
