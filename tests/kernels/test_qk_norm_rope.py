"""The fused q/k norm, rotation and cache write: kernel against twin, twin against transformers' modules."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import DTYPES, rounding
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from nanovllm.kernels.attention import qk_norm_rope as kernel
from nanovllm.kernels.attention.qk_norm_rope import qk_norm_rope_store
from nanovllm.layers.rope_parameters import RopeParameters
from nanovllm.layers.rotary_embedding import RotaryEmbedding

EPS = 1e-6
MAX_POSITION = 512
NUM_BLOCKS, BLOCK_SIZE = 5, 8


def random_case(num_tokens, num_heads, num_kv_heads, head_dim, dtype, device, index_dtype=torch.int64):
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=device).to(dtype) * 3
    q_weight, k_weight = (1 + 0.5 * torch.randn(2, head_dim, device=device)).to(dtype)
    table = RotaryEmbedding.of(RopeParameters(), head_dim, MAX_POSITION).to(device).cos_sin_cache
    positions = torch.randint(MAX_POSITION, (num_tokens,), device=device).to(index_dtype)
    caches = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim, device=device).to(dtype)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, device=device)[:num_tokens].to(index_dtype)
    slots[::3] = -1
    return qkv, q_weight, k_weight, EPS, table, positions, *caches, slots, None, num_heads, num_kv_heads


def with_rotary_dim(case, rotary_dim):
    """The case with a table for this many of a head's dimensions; None for no table."""
    table = None if rotary_dim is None else torch.randn(MAX_POSITION, 1, rotary_dim, device=case[0].device)
    return *case[:4], table, *case[5:]


def run(function, case):
    """The tensors that a call on copies of the case's tensors leaves behind: qkv, k_cache, v_cache."""
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in case]
    assert function(*copies) is None
    return copies[0], copies[6], copies[7]


def assert_close(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        if other is not None:
            # Rounded once; a rotated value near zero is a difference of numbers of about 4, in float32.
            close = rounding(other.dtype, terms=0) | {"atol": rounding(torch.float32, terms=4)["atol"]}
            torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [(7, 16, 8, 128), (5, 3, 1, 100), (4, 12, 2, 64), (3, 9, 9, 2), (1, 2, 1, 80), (0, 4, 2, 16)],
)
def test_kernel_equals_twin(num_tokens, num_heads, num_kv_heads, head_dim, dtype, device):
    case = random_case(num_tokens, num_heads, num_kv_heads, head_dim, dtype, device)
    expected = run(qk_norm_rope_store.twin, case)
    assert_close(run(qk_norm_rope_store.kernel, case), expected)
    assert_close(run(kernel.qk_norm_rope_store, case), expected)


def test_rows_may_be_a_part_of_longer_ones(device):
    case = random_case(6, 4, 2, 32, torch.float32, device)
    rows = torch.randn(6, 500, device=device)
    part = rows[:, 3 : 3 + case[0].shape[1]]
    part.copy_(case[0])
    before = rows.clone()
    expected, *caches = run(qk_norm_rope_store.twin, case)
    others = [value.clone() if isinstance(value, torch.Tensor) else value for value in case[1:]]
    qk_norm_rope_store.kernel(part, *others)
    assert_close([part, *others[5:7]], [expected, *caches])
    part.copy_(case[0])
    assert torch.equal(rows, before), "it wrote beside its part"


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("cache", [True, False])
def test_norm_and_cache_are_optional(norm, cache, device):
    case = list(random_case(6, 4, 2, 32, torch.bfloat16, device, index_dtype=torch.int32))
    if not norm:
        case[1:3] = None, None
    if not cache:
        case[6:9] = None, None, None
    assert_close(run(qk_norm_rope_store.kernel, case), run(qk_norm_rope_store.twin, case))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(128, 96), (128, 32), (64, 16), (80, 20), (24, 6), (100, 98), (128, None), (80, None)]
)
def test_heads_that_are_rotated_in_part_or_not_at_all(head_dim, rotary_dim, norm, device):
    case = list(with_rotary_dim(random_case(5, 3, 2, head_dim, torch.bfloat16, device), rotary_dim))
    if not norm:
        case[1:3] = None, None
    expected = run(qk_norm_rope_store.twin, case)
    assert_close(run(qk_norm_rope_store.kernel, case), expected)
    q, before = (x[0].view(5, 7, head_dim)[:, :3] for x in (expected, case))
    if not norm:
        assert torch.equal(q[..., rotary_dim or 0 :], before[..., rotary_dim or 0 :])
        assert (rotary_dim is None) == torch.equal(q, before)


@pytest.mark.parametrize("rotary_dim", [32, None])
def test_queries_that_grow_with_their_position(rotary_dim, device):
    case = with_rotary_dim(random_case(5, 3, 2, 32, torch.float32, device), rotary_dim)
    scales = 1 + torch.rand(MAX_POSITION, device=device)
    expected, *caches = run(qk_norm_rope_store.twin, case)
    expected.view(5, 7, 32)[:, :3] *= scales[case[5], None, None]
    for function in (qk_norm_rope_store.twin, qk_norm_rope_store.kernel, kernel.qk_norm_rope_store):
        assert_close(run(partial(function, query_scales=scales), case), (expected, *caches))


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (80, 16), (512, 512)])
def test_values_that_are_normalized(head_dim, rotary_dim, cache, device):
    case = list(with_rotary_dim(random_case(5, 3, 2, head_dim, torch.bfloat16, device), rotary_dim))
    if not cache:
        case[6:9] = None, None, None
    values = case[0].view(5, 7, head_dim)[:, 5:].float()
    normed = values / (values.square().mean(-1, keepdim=True) + EPS).sqrt()
    plain, *_ = run(qk_norm_rope_store.twin, case)
    for function in (qk_norm_rope_store.twin, qk_norm_rope_store.kernel):
        qkv, _, v_cache = run(partial(function, has_value_norm=True), case)
        assert_close((qkv[:, : 5 * head_dim],), (plain[:, : 5 * head_dim],))
        found = qkv.view(5, 7, head_dim)[:, 5:]
        assert_close((found,), (normed.bfloat16(),))
        if cache:
            slots = case[8]
            assert torch.equal(v_cache.view(-1, 2, head_dim)[slots[slots >= 0]], found[slots >= 0])


def test_what_it_must_not_touch(device):
    case = random_case(6, 4, 2, 32, torch.float32, device)
    qkv, k_cache, v_cache = run(qk_norm_rope_store.kernel, case)
    values = case[0][:, -2 * 32 :]
    assert torch.equal(qkv[:, -2 * 32 :], values)
    slots = case[8]
    written = slots[slots >= 0]
    for cache, before, stored in ((k_cache, case[6], qkv[:, 4 * 32 : 6 * 32]), (v_cache, case[7], values)):
        flat, flat_before = cache.view(-1, 64), before.view(-1, 64)
        assert torch.equal(flat[written], stored[slots >= 0])
        others = torch.ones(len(flat), dtype=torch.bool, device=device)
        others[written] = False
        assert torch.equal(flat[others], flat_before[others])


def test_twin_equals_transformers():
    num_heads, num_kv_heads, head_dim, num_tokens = 4, 2, 16, 9
    config = Qwen3Config(num_attention_heads=num_heads, head_dim=head_dim, max_position_embeddings=MAX_POSITION)
    case = random_case(num_tokens, num_heads, num_kv_heads, head_dim, torch.float32, "cpu")
    qkv, q_weight, k_weight, _, _, positions = case[:6]
    q, k, _ = qkv.view(num_tokens, -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    normed = []
    for part, weight in ((q, q_weight), (k, k_weight)):
        norm = Qwen3RMSNorm(head_dim, EPS)
        norm.weight.data = weight
        normed.append(norm(part).transpose(0, 1)[None])
    cos, sin = Qwen3RotaryEmbedding(config)(qkv, positions[None])
    expected = [part[0].transpose(0, 1).flatten(1) for part in apply_rotary_pos_emb(*normed, cos, sin)]
    actual, _, _ = run(qk_norm_rope_store.twin, case)
    size = num_heads * head_dim
    assert_close((actual[:, :size], actual[:, size : size + num_kv_heads * head_dim]), expected)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(6, 200), "qkv must be"),
        (4, torch.zeros(MAX_POSITION, 1, 34), "cos_sin_cache must have an even number of columns up to 32, not 34"),
        (4, torch.zeros(MAX_POSITION, 1, 15), "not 15"),
        (6, torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 16), "caches must be"),
        (7, torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 32, dtype=torch.float16), "caches must be"),
    ],
)
def test_wrong_arguments_are_refused(index, value, message, device):
    case = list(random_case(6, 4, 2, 32, torch.float32, device))
    case[index] = value
    with pytest.raises(ValueError, match=message):
        qk_norm_rope_store.kernel(*case)


@pytest.mark.gpu
def test_slots_beyond_two_billion_elements():
    num_blocks, block_size, num_heads, num_kv_heads, head_dim = 8200, 256, 2, 8, 128
    assert num_blocks * block_size * num_kv_heads * head_dim > 2**31
    qkv, q_weight, k_weight, eps, table, positions, *_ = random_case(
        2, num_heads, num_kv_heads, head_dim, torch.bfloat16, "cuda"
    )
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    slots = torch.tensor([num_blocks * block_size - 1, 3], dtype=torch.int32, device="cuda")
    norms = q_weight, k_weight, eps
    qk_norm_rope_store.kernel(qkv, *norms, table, positions, k_cache, v_cache, slots, None, num_heads, num_kv_heads)
    _, k, v = qkv.view(2, -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[-1, -1], rows[0])
        assert torch.equal(cache[0, 3], rows[1])
        assert cache[-1, -2].isnan().all()
