"""deterministic=True on a GPU: the same bits in any company, of the kernels at real sizes and of whole engines."""

import pytest
import torch
from checkpoints import generate, make_checkpoint, make_llm, random_prompt, skip_unless_known
from fp8_checkpoints import BLOCK_SIZES, make_fp8_checkpoint
from products import problem
from same_bits import answers, answers_alone, make_requests

from nanovllm import SamplingParams
from nanovllm.kernels.attention.fixed_order import FixedOrderWorkspace, fixed_order_decode, fixed_order_prefill
from nanovllm.kernels.matmul.fixed_order import fixed_order_linear
from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.fixed_order import FixedOrder
from nanovllm.layers.formats.format import WeightFormat
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks
from nanovllm.layers.formats.int4 import Int4
from nanovllm.layers.formats.mxfp4 import Mxfp4
from nanovllm.layers.matmul.candidates.fixed_order_gpu import make_fixed_order_candidates_of_gpu
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.matmul.problem import ExpertsProblem
from nanovllm.layers.matmul.table import Key

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
LINEAR = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
FAMILIES: dict[str, dict] = {
    "qwen3": {"head_dim": 64},
    "windows": {"family": "gemma3_text", "sliding_window": 100, "head_dim": 64}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "hybrid": {"family": "qwen3_5_text", "head_dim": 64, "num_hidden_layers": 4} | LINEAR,
    "hybrid with experts": {"family": "qwen3_next", "head_dim": 64, "num_hidden_layers": 4, "num_experts": 8}
    | {"num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    | LINEAR,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("N", "K"), [(4096, 1024), (1024, 3072), (151936, 1024), (1030, 2048)])
def test_a_rows_product_has_the_same_bits_among_any_others(N, K, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(2100, K, device="cuda").to(dtype), torch.randn(N, K, device="cuda").to(dtype) / K**0.5
    whole = fixed_order_linear(x, weight)
    torch.testing.assert_close(whole.float(), x.float() @ weight.float().T, rtol=2e-2, atol=2e-2)
    # Of each tile size, and of the kernel for rows that begin anywhere.
    elsewhere = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view_as(x).copy_(x)
    for size in (1, 2, 3, 16, 63, 64, 65, 128, 129, 256, 257, 512, 1025):
        for start in (0, 7, 433):
            for rows in (x, elsewhere):
                found = fixed_order_linear(rows[start:][:size], weight)
                assert torch.equal(found, whole[start:][:size]), (size, start, rows is x)


FORMATS: dict[str, tuple[WeightFormat, torch.dtype]] = {
    "plain": (FixedOrder(), torch.bfloat16),
    "plain in float32": (FixedOrder(), torch.float32),
    "fp8": (Fp8(), torch.bfloat16),
    "fp8 in blocks": (Fp8Blocks(), torch.bfloat16),
    "int4": (Int4(), torch.bfloat16),
    "mxfp4": (Mxfp4(), torch.bfloat16),
    "mxfp4 in float32": (Mxfp4(), torch.float32),
}
every_format = pytest.mark.parametrize(("format", "dtype"), FORMATS.values(), ids=FORMATS)


def skip_unless_multiplied(format: WeightFormat) -> None:
    missing = format.check_gpu(torch.cuda.get_device_capability())
    if missing is not None:
        pytest.skip(f"needs compute capability {missing}")


def matmul_of_gpu() -> Matmul:
    return Matmul(candidates=make_fixed_order_candidates_of_gpu(torch.device("cuda")))


@every_format
@pytest.mark.parametrize(("N", "K"), [(6144, 4096), (4096, 12288), (384, 128)])
def test_so_have_products_of_weights_in_every_format(format, dtype, N, K):
    """x and weight have halves that cancel, so that results are the rounding of sums alone, which another order would
    change in nearly every number."""
    skip_unless_multiplied(format)
    torch.manual_seed(0)
    matmul, num_rows = matmul_of_gpu(), 700
    half, of_weight = (torch.randn(n, K // 2, device="cuda") for n in (num_rows, N))
    half, of_weight = (each * torch.randn_like(each).exp() for each in (half, of_weight))
    weight = format.quantize(torch.cat((of_weight, of_weight), dim=1) / K**0.5, dtype)
    for x in (torch.cat((half, -half), dim=1).to(dtype), torch.cat((half, half.flip(0)), dim=1).to(dtype)):
        for operation in ("linear", "linear_silu", "linear_add"):
            residual = torch.randn(num_rows, N, device="cuda").to(dtype) if operation == "linear_add" else None

            def run(start, size, x=x, operation=operation, residual=residual):
                rows = slice(start, start + size)
                out = None if residual is None else residual[rows].clone()
                y = matmul.run(problem(operation, x[rows], weight, None, out))
                return y.gate_up if isinstance(y, Gated) else y

            whole = run(0, num_rows)
            assert whole.isfinite().all()
            for size in (1, 2, 3, 16, 63, 64, 65, 256):
                for start in (0, 7, 433):
                    assert torch.equal(run(start, size), whole[start:][:size]), (operation, size, start)
    plain = format.dequantized(weight) if not isinstance(format, FixedOrder) else weight.values
    found, expected = matmul.run(problem("linear", x, weight)).float(), x.float() @ plain.float().T
    assert (found - expected).norm() <= 0.06 * expected.norm()  # Inputs are rounded to fp8.


@every_format
@pytest.mark.parametrize(
    ("num_experts", "top_k", "hidden_size", "intermediate"), [(128, 8, 2048, 768), (8, 2, 512, 128)]
)
def test_so_have_a_tokens_experts(format, dtype, num_experts, top_k, hidden_size, intermediate):
    skip_unless_multiplied(format)
    torch.manual_seed(0)
    matmul, num_rows = matmul_of_gpu(), 700
    shapes = (2 * intermediate, hidden_size), (hidden_size, intermediate)
    gate_up, down = (
        format.quantize(torch.randn(num_experts, *shape, device="cuda") / shape[1] ** 0.5, dtype) for shape in shapes
    )
    x, residual = (torch.randn(num_rows, hidden_size, device="cuda").to(dtype) for _ in range(2))
    logits, key = torch.randn(num_rows, num_experts, device="cuda").to(dtype), Key.of("experts", False, gate_up)

    def run(rows):
        options = top_k, True, residual[rows].clone(), True
        return matmul.run(ExpertsProblem(key, x[rows], logits[rows], gate_up, down, *options))

    whole = run(slice(num_rows))
    assert whole.isfinite().all()
    for size in (1, 2, 3, 16, 63, 64, 65, 256):
        for start in (0, 7, 433):
            assert torch.equal(run(slice(start, start + size)), whole[start:][:size]), (size, start)
    order = torch.randperm(num_rows, device="cuda")
    assert torch.equal(run(order), whole[order])


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


def assert_same_bits(path, common, engines, passes=1):
    """Of each request alone and among all, in these ENGINES. In a second pass, beginnings are cached."""
    with make_llm(path, enable_prefix_caching=False, **common) as llm:
        alone = answers_alone(llm, REQUESTS)
    for name in engines:
        with make_llm(path, **common | ENGINES[name]) as llm:
            for _ in range(passes):
                found = answers(llm, REQUESTS)
                assert [i for i in range(len(REQUESTS)) if found[i] != alone[i]] == [], name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_requests_bits_do_not_depend_on_its_company(family, dtype, tmp_path):
    fields = {"max_position_embeddings": 2048} | FAMILIES[family]
    skip_unless_known(fields.get("family", "qwen3"))
    path = make_checkpoint(tmp_path, **fields)
    common: dict = {"device": "cuda", "dtype": dtype, "deterministic": True, "max_model_len": 2048}
    if LINEAR.keys() <= fields.keys():
        common["state_dtype"] = dtype
    common["num_kvcache_blocks"] = 2000
    assert_same_bits(path, common, ENGINES, passes=2)


MOE = {"family": "qwen3_moe", "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 3, "max_window_layers": 0}
MOE |= {"moe_intermediate_size": 64}
GPT_OSS = {"family": "gpt_oss", "head_dim": 64, "sliding_window": 70}
GPT_OSS |= {"num_local_experts": 8, "num_experts_per_tok": 3}
WIDE = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
# A checkpoint's fields, its quantization, and a dtype.
PRODUCTS: dict[str, tuple[dict, str | None, str]] = {
    "fp8": ({"head_dim": 64}, "fp8", "bfloat16"),
    "fp8 in blocks": (BLOCK_SIZES, "blocks", "bfloat16"),
    "int4": ({"head_dim": 64}, "int4", "bfloat16"),
    "mxfp4": ({"head_dim": 64}, "mxfp4", "bfloat16"),
    "int4 in float32": ({"head_dim": 64}, "int4", "float32"),
    "fp8, wide": (WIDE | {"intermediate_size": 3072}, "fp8", "bfloat16"),
    "int4, wide": (WIDE | {"intermediate_size": 3072}, "int4", "bfloat16"),
    "experts": (MOE, None, "bfloat16"),
    "experts in float32": (MOE, None, "float32"),
    "experts, wide": (MOE | WIDE | {"moe_intermediate_size": 512}, None, "bfloat16"),
    "experts in fp8": (MOE, "fp8", "bfloat16"),
    "experts in int4": (MOE, "int4", "bfloat16"),
    "experts in mxfp4": (MOE, "mxfp4", "bfloat16"),
    "gpt_oss": (GPT_OSS, None, "bfloat16"),
    "gpt_oss in mxfp4": (GPT_OSS, "mxfp4", "bfloat16"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_so_it_is_with_weights_in_every_format_and_with_experts(name, tmp_path):
    fields, quantization, dtype = PRODUCTS[name]
    skip_unless_known(fields.get("family", "qwen3"))
    fields, common = {"max_position_embeddings": 2048} | fields, {"device": "cuda", "deterministic": True}
    common |= {"dtype": dtype, "max_model_len": 2048, "num_kvcache_blocks": 2000}
    if quantization == "blocks":
        skip_unless_multiplied(Fp8Blocks())
        path = make_fp8_checkpoint(tmp_path, in_blocks=True, **fields)
    else:
        path = make_checkpoint(tmp_path, **fields)
        common |= {"quantization": quantization} if quantization else {}
    if quantization == "fp8":
        skip_unless_multiplied(Fp8())
    assert_same_bits(path, common, ("graphs", "chunks", "mixed"))


@pytest.mark.two_gpus
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("fields", "dtype"), [({"head_dim": 64}, "bfloat16"), ({"head_dim": 64}, "float32"), (MOE, "bfloat16")]
)
def test_so_it_is_over_several_gpus(fields, dtype, num_ranks, tmp_path):
    """Of the same number of ranks."""
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    path = make_checkpoint(tmp_path, max_position_embeddings=2048, **fields)
    common: dict = {"device": "cuda", "dtype": dtype, "deterministic": True, "tensor_parallel_size": num_ranks}
    common |= {"max_model_len": 2048, "num_kvcache_blocks": 2000}
    assert_same_bits(path, common, ("graphs", "chunks", "speculation"))


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
