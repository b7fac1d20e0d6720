"""Caches of float8_e4m3fn: the kernels against their twins, and these against attention in float64."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from decode_cases import (
    HAS_TMA,
    TOLERANCE,
    dense_decode,
    make_group_case,
    make_group_plan,
    make_plan,
    needs_tma,
    paged_decode,
)
from decode_cases import make_case as decode_case
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import nightly
from prefill_cases import make_case as prefill_case

from nanovllm.kernels.attention import paged_decode as kernel
from nanovllm.kernels.attention.decode_plan import DecodeConfig
from nanovllm.kernels.attention.kv_quantization import E4M3_MAX, KV_DTYPE, dequantize_kv, quantize_kv, round_to_cache
from nanovllm.kernels.attention.paged_prefill import paged_prefill
from nanovllm.kernels.attention.qk_norm_rope import qk_norm_rope_store
from nanovllm.layers.backends.torch_backend import decode_attention_torch, prefill_attention_torch
from nanovllm.layers.rope_parameters import RopeParameters
from nanovllm.layers.rotary_embedding import RotaryEmbedding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies bfloat16 as if it were integers.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@triton.jit
def split_pairs_twin(pairs):
    """`_split_pairs` without PTX, which the interpreter does not know."""
    numbers = tl.join(pairs.to(tl.uint8), (pairs >> 8).to(tl.uint8))
    return numbers.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@pytest.fixture(scope="module", autouse=True)
def exact_conversions():
    """Triton's interpreter loses a carry where it rounds to e4m3, and reads NaN as a number: torch converts instead."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    dtypes = {tl.float8e4nv: KV_DTYPE, tl.float16: torch.float16, tl.float32: torch.float32}

    def convert_by_torch(values, source, target, rounding):
        if tl.float8e4nv not in (source, target):
            return convert(values, source, target, rounding)
        converted = torch.from_numpy(values.copy().view(np.uint8)).view(dtypes[source]).to(dtypes[target])
        return converted.view(torch.uint8).numpy().view(f"uint{target.primitive_bitwidth}").reshape(values.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert_by_torch)
        patch.setattr(kernel, "_split_pairs", split_pairs_twin)
        yield


def assert_near(out, expected):
    """Errors are in proportion to the values, which the scales make small or large."""
    tolerance = TOLERANCE[out.dtype]
    atol = tolerance * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=atol)


def random_scales(num_kv_heads, seed):
    exponents = torch.randint(-9, 3, (2, num_kv_heads), generator=torch.Generator().manual_seed(seed))
    return torch.exp2(exponents.float()).to(DEVICE)


def in_fp8(case, seed):
    """(the case with fp8 caches and their scales, the case with caches of the numbers that these hold)."""
    scales = random_scales(case["k_cache"].shape[2], seed)
    caches = {name: quantize_kv(case[name], s) for name, s in zip(("k_cache", "v_cache"), scales, strict=True)}
    held = {
        name: dequantize_kv(cache, s, case["q"].dtype) for (name, cache), s in zip(caches.items(), scales, strict=True)
    }
    return case | caches | {"kv_scales": scales}, case | held


# -- what is stored ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_value_is_stored_within_e4m3s_rounding(dtype):
    """A value is off by a sixteenth of itself at most, or by half of the smallest step."""
    scales = torch.exp2(torch.tensor([-14.0, -6.0, 0.0, 5.0]))
    x = torch.randn(200, 4, 16, dtype=torch.float64) * torch.logspace(-5, 0.8, 200, dtype=torch.float64)[:, None, None]
    x = (x * scales[:, None] * 20).to(dtype)
    rounded = x.clone()
    round_to_cache(rounded, scales)
    in_range = x.double().abs() <= E4M3_MAX * scales[:, None]
    error = (rounded.double() - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() / 16, scales[:, None] * 2.0**-10))[in_range].all()
    assert torch.equal(rounded.double().abs()[~in_range], (E4M3_MAX * scales[:, None]).expand_as(x)[~in_range].double())
    # What is read from the cache is the very same number, in every dtype.
    stored = quantize_kv(x, scales)
    exact = stored.double() * scales[:, None]
    assert torch.equal(rounded.double(), exact)
    again = rounded.clone()
    round_to_cache(again, scales)
    assert torch.equal(again, rounded)


def test_values_past_the_largest_are_clamped_and_nan_stays():
    x = torch.tensor([[[500.0, -1e30, float("inf"), float("nan")]]])
    assert quantize_kv(x, torch.ones(1)).float()[0, 0, :3].tolist() == [448, -448, 448]
    assert quantize_kv(x, torch.ones(1)).float()[0, 0, 3].isnan()


@settings(max_examples=12)
@given(
    num_tokens=st.integers(0, 6),
    num_kv_heads=st.integers(1, 9),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 64, 80, 128, 256]),
    rotary=st.sampled_from([0, 0.5, 1]),
    norm=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_store_kernel_equals_twin(num_tokens, num_kv_heads, group, head_dim, rotary, norm, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    num_heads = num_kv_heads * group
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(DEVICE, dtype) * 3
    weights = (1 + 0.5 * torch.randn(2, head_dim, generator=generator)).to(DEVICE, dtype)
    q_weight, k_weight = weights if norm else (None, None)
    table = RotaryEmbedding.of(RopeParameters(), head_dim, 64).to(DEVICE).cos_sin_cache
    rotary_dim = int(head_dim * rotary) // 2 * 2
    table = table[..., :rotary_dim].contiguous() if rotary_dim else None
    positions = torch.randint(64, (num_tokens,), generator=generator).to(DEVICE)
    slots = torch.randperm(32, generator=generator)[:num_tokens].to(DEVICE)
    slots[::3] = -1
    scales = random_scales(num_kv_heads, seed)
    results = []
    for function in (qk_norm_rope_store.kernel, qk_norm_rope_store.twin):
        own = qkv.clone()
        caches = torch.zeros(2, 4, 8, num_kv_heads, head_dim, device=DEVICE).to(KV_DTYPE)
        function(own, q_weight, k_weight, 1e-6, table, positions, *caches, slots, scales, num_heads, num_kv_heads)
        results.append((own.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim), caches.float()))
    (own, caches), (twins, twin_caches) = results
    v = num_heads + num_kv_heads
    assert torch.equal(own[:, v:], twins[:, v:])
    assert torch.equal(caches[1], twin_caches[1])
    tolerance = {torch.float32: 4e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(own[:, :num_heads], twins[:, :num_heads], rtol=tolerance, atol=4e-6)
    # A key that lies between two numbers of the cache may be rounded to the other one.
    step = torch.maximum(twin_caches[0].abs() / 8, torch.tensor(2.0**-9))
    assert ((caches[0] - twin_caches[0]).abs() <= step).all()
    # The step's own keys and values are those of the cache.
    written = slots >= 0
    for cache, scale, first in ((caches[0], scales[0], num_heads), (caches[1], scales[1], v)):
        held = cache.flatten(0, 1)[slots[written]] * scale[:, None]
        assert torch.equal(own[written, first : first + num_kv_heads].float(), held)
    others = torch.ones(32, dtype=torch.bool)
    others[slots[written].cpu()] = False
    assert (caches.flatten(1, 2)[:, others.to(DEVICE)] == 0).all()


def test_the_store_kernel_clamps_and_keeps_nan(device):
    qkv = torch.tensor([[1.0, 1.0, 1e6, -1e6, float("nan"), -500.0]], device=device)
    caches = torch.zeros(2, 1, 16, 1, 2, device=device).to(KV_DTYPE)
    scales = torch.tensor([[0.5], [1.0]], device=device)
    slots, positions = torch.zeros(2, 1, dtype=torch.int64, device=device)
    qk_norm_rope_store.kernel(qkv, None, None, 1e-6, None, positions, *caches, slots, scales, 1, 1)
    assert qkv[0, :4].tolist() == [1, 1, 224, -224]
    assert qkv[0, 4].isnan()
    assert qkv[0, 5] == -448
    assert caches[0, 0, 0, 0].float().tolist() == [448, -448]


@pytest.mark.parametrize(
    ("cache_dtype", "scales", "message"),
    [
        (KV_DTYPE, None, "caches must be"),
        (torch.float32, torch.ones(2, 2), "caches must be"),
        (KV_DTYPE, torch.ones(2, 3), "kv_scales must be"),
        (KV_DTYPE, torch.ones(2, 2, dtype=torch.float16), "kv_scales must be"),
    ],
)
def test_scales_and_caches_that_do_not_belong_together(cache_dtype, scales, message):
    qkv, slots = torch.zeros(3, 8 * 16), torch.zeros(3, dtype=torch.int64)
    caches = torch.zeros(2, 4, 16, 2, 16).to(cache_dtype)
    with pytest.raises(ValueError, match=message):
        qk_norm_rope_store.kernel(qkv, None, None, 1e-6, None, slots, *caches, slots, scales, 4, 2)
    if message == "kv_scales must be":
        q, tables, lens = torch.zeros(1, 4, 16), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        with pytest.raises(ValueError, match=message):
            paged_decode(q, *caches, lens, tables, 1.0, kv_scales=scales)


# -- what is read ------------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(
    lens=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    tma=st.booleans(),
    group=st.sampled_from([1, 2, 4, 7, 8, 16]),
    num_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([64, 80, 128, 256]),
    block_size=st.sampled_from([16, 32, 64, 256]),
    spare=st.sampled_from([None, 1, 5]),
    tile=st.sampled_from([16, 32, 64]),
    window=st.none() | st.integers(1, 160),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_decode_attends_to_the_numbers_that_the_cache_holds(
    lens, tma, group, num_kv_heads, head_dim, block_size, spare, tile, window, dtype, seed
):
    tma = tma and HAS_TMA
    if tma:
        head_dim, tile = min(head_dim, 128) // 64 * 64, min(tile, block_size)
        dtype = torch.float16 if dtype == torch.float32 else dtype
    num_heads = group * num_kv_heads
    case = decode_case(lens, num_heads, num_kv_heads, head_dim, block_size, dtype, DEVICE, seed, window=window)
    case, held = in_fp8(case, seed)
    plan = make_plan(case["context_lens"], num_kv_heads, spare and len(lens) + spare, window)
    config = DecodeConfig(tile, 1 if tma else 4, 2, tma=tma)
    twin = decode_attention_torch(**case)
    assert torch.equal(twin, decode_attention_torch(**held))
    expected = dense_decode(**held)
    for out in (twin, paged_decode(**case, plan=plan, config=config)):
        assert out.dtype == dtype
        assert_near(out, expected)


BOTH_KERNELS = pytest.mark.parametrize(
    "config", [DecodeConfig(64, 4, 2), pytest.param(DecodeConfig(32, 1, 3, tma=True), marks=needs_tma)]
)


@pytest.mark.parametrize("window", [None, 30])
@BOTH_KERNELS
def test_groups_of_rows_attend_to_the_numbers_that_the_cache_holds(window, config, device):
    groups = [(62, 4), (1, 1), (66, 2)]
    case, group_rows = make_group_case(groups, 1, 3, 1, 64, 64, torch.bfloat16, device, seed=4, window=window)
    case, held = in_fp8(case, 4)
    expected = dense_decode(**held)
    plan = make_group_plan(case["context_lens"], group_rows, 1, 12, window, most_rows=4)
    out = paged_decode(**case, plan=plan, config=config._replace(num_warps=4), group_rows=4)
    assert_near(out, expected)


@pytest.mark.gpu
@needs_tma
@pytest.mark.parametrize(("head_dim", "group"), [(64, 7), (128, 4), (128, 16)])
@pytest.mark.parametrize(
    ("tile", "num_warps", "num_stages"), [(32, 1, 4), (32, 2, 4), (64, 1, 3), (64, 2, 4), (64, 4, 3)]
)
def test_constants_for_large_batches(tile, num_warps, num_stages, head_dim, group):
    lens = [0, 1, 31, 32, 33, 64, 65, 200, 640, 3000]
    case = decode_case(lens, 8 * group, 8, head_dim, 256, torch.bfloat16, DEVICE, seed=tile)
    case, held = in_fp8(case, tile)
    expected = dense_decode(**held)
    out = paged_decode(**case, config=DecodeConfig(tile, num_warps, num_stages, tma=True))
    assert_near(out, expected)


@pytest.mark.parametrize("magnitude", [0.0, 1e-38, 1e-15, 1e30, *nightly(1e-5, 1.0, 1e5)])
@BOTH_KERNELS
def test_queries_of_any_magnitude(magnitude, config, device):
    """They are multiplied in float16, whose range is smaller than bfloat16's. Scores are ordinary here, but for the
    smallest queries: to them all keys weigh alike."""
    case = decode_case([0, 1, 70, 300], 8, 2, 64, 64, torch.bfloat16, device, seed=7)
    case["q"] = (case["q"].double() * magnitude).to(torch.bfloat16)
    case["scale"] /= magnitude if magnitude > 1e-20 else 1.0
    case, held = in_fp8(case, 7)
    out = paged_decode(**case, config=config)
    assert_near(out, dense_decode(**held))
    assert (out[0] == 0).all()


@BOTH_KERNELS
def test_a_large_query_takes_no_precision_from_those_of_other_heads(config, device):
    case = decode_case([300], 4, 1, 64, 64, torch.bfloat16, device, seed=8)
    case, held = in_fp8(case, 8)
    alone = dense_decode(**held)
    case["q"] = case["q"].clone()
    case["q"][:, 0] *= 2.0**20
    out = paged_decode(**case, config=config)
    assert_near(out[:, 1:], alone[:, 1:])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN, in Triton's interpreter
@pytest.mark.parametrize(
    ("config", "spoilt"),
    [
        (DecodeConfig(64, 4, 2), "q"),
        (DecodeConfig(64, 4, 2), "v_cache"),
        pytest.param(DecodeConfig(32, 1, 3, tma=True), "k_cache", marks=needs_tma),
        *nightly((DecodeConfig(64, 4, 2), "k_cache")),
        pytest.param(DecodeConfig(32, 1, 3, tma=True), "q", marks=[pytest.mark.nightly, needs_tma]),
    ],
)
def test_nan_stays_in_its_row(config, spoilt, device):
    lens = [70, 300, 65]
    case, _ = in_fp8(decode_case(lens, 4, 2, 64, 64, torch.bfloat16, device, seed=3), 3)
    expected = paged_decode(**case, config=config)
    if spoilt == "q":
        case["q"][1] = float("nan")
    else:
        case[spoilt][case["block_tables"][1, :5].long()] = torch.tensor(float("nan"), device=device).to(KV_DTYPE)
    out = paged_decode(**case, config=config)
    assert out[1].isnan().all()
    torch.testing.assert_close(out[[0, 2]], expected[[0, 2]], atol=0, rtol=0)


@settings(max_examples=5)
@given(
    lens=st.lists(st.tuples(st.integers(0, 120), st.integers(1, 50)), min_size=1, max_size=2),
    group=st.sampled_from([1, 2, 5, 8]),
    num_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([64, 80, 128, 256]),
    block_size=st.sampled_from([16, 64, 256]),
    window=st.none() | st.integers(1, 160),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
@pytest.mark.slow
def test_prefill_attends_to_the_numbers_that_the_cache_holds(
    lens, group, num_kv_heads, head_dim, block_size, window, dtype, seed
):
    """From the cache, and from the step's own keys and values, which are the same numbers."""
    shapes = group * num_kv_heads, num_kv_heads, head_dim, block_size
    case = prefill_case(lens, *shapes, True, dtype, DEVICE, seed, window)
    _, k, v = (torch.cat(parts) for parts in zip(*case.sequences, strict=True))
    paged = case.arguments | {"kv_scales": random_scales(num_kv_heads, seed)}
    packed = paged | {"k": k, "v": v, "k_cache": None, "v_cache": None, "block_tables": None}
    for name, values, scales in zip(("k_cache", "v_cache"), (k, v), paged["kv_scales"], strict=True):
        paged[name] = quantize_kv(paged[name], scales)
        round_to_cache(values, scales)
    expected = prefill_attention_torch(**packed)
    assert torch.equal(prefill_attention_torch(**paged), expected)
    for arguments in (paged, packed):
        assert_near(paged_prefill(**arguments), expected.double().cpu())


@BOTH_KERNELS
def test_attention_is_as_exact_as_e4m3(config, device):
    """Against float64 over the keys and values before rounding. Keys are off by a 16th at most, so a score is by
    |q| |k| / 16 times the scale, and a weight by the factor exp of twice that at most; values by a 16th more."""
    case = decode_case([1, 70, 300], 8, 2, 64, 64, torch.float16, device, seed=1)
    case["k_cache"].nan_to_num_()
    case["v_cache"].nan_to_num_()
    expected = dense_decode(**case)
    scales = torch.full((2, 2), 2.0**-6, device=device)  # 448 / 64 = 7: nothing is clamped.
    fp8 = case | {name: quantize_kv(case[name], scales[0]) for name in ("k_cache", "v_cache")}
    out = paged_decode(**fp8, config=config, kv_scales=scales)
    largest_score = (case["q"].norm(dim=-1).max() * case["k_cache"].norm(dim=-1).max() * 64**-0.5).item()
    largest_value = case["v_cache"].abs().max().item()
    bound = largest_value * (torch.tensor(2 * largest_score / 16).expm1().item() + 1 / 16)
    error = (out.double().cpu() - expected).abs()
    assert error.max() <= bound
    # The roundings are independent of each other: on average they nearly cancel.
    assert error.mean() <= expected.abs().mean() / 16
