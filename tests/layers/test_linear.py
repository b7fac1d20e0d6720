"""Linear layers driven by hand: one rank by default, no table, and what each rank loads."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.layers.formats.all_formats import weight_format
from nanovllm.layers.formats.fp8 import Fp8
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    divide,
)
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel


def load(layer: LinearBase, tensors: dict) -> None:
    """tensors: {(kind of parameter, shard id): tensor}, as a loader of nano-vLLM hands them over."""
    for (kind, shard_id), tensor in tensors.items():
        param = getattr(layer, kind)
        args = (tensor,) if shard_id is None else (tensor, shard_id)
        param.weight_loader(param, *args)


@pytest.mark.parametrize("kind", [LinearBase, ReplicatedLinear, ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("matmul", [None, Matmul()])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_by_hand_is_torchs(kind, matmul, bias):
    layer = kind(12, 7, bias, matmul=matmul)
    weight, of_bias, x = torch.randn(7, 12), torch.randn(7), torch.randn(5, 12)
    load(layer, {("weight", None): weight} | ({("bias", None): of_bias} if bias else {}))
    expected = F.linear(x, weight, of_bias if bias else None)
    torch.testing.assert_close(layer(x), expected)
    assert layer.is_plain == (matmul is None)
    assert (layer.tp_rank, layer.tp_size) == (0, 1)
    assert layer.tp_dim == {ColumnParallelLinear: 0, RowParallelLinear: 1}.get(kind)
    assert (layer.bias is not None) == bias
    assert not layer.weight.requires_grad


def test_defaults():
    assert RowParallelLinear(8, 4).weight.shape == (4, 8)
    assert ColumnParallelLinear(8, 4)(torch.ones(2, 8)).shape == (2, 4)
    sizes = [6, 4]
    merged = MergedColumnParallelLinear(8, sizes)
    assert merged.output_sizes is sizes
    assert merged.weight.shape == (10, 8)
    qkv = QKVParallelLinear(8, 2, 4)
    assert (qkv.head_size, qkv.num_heads, qkv.num_kv_heads) == (2, 4, 4)
    assert qkv.weight.shape == (24, 8)
    assert QKVParallelLinear(8, 2, 4, 2, True).bias.shape == (16,)
    assert divide(12, 4) == 3
    with pytest.raises(ValueError, match="13 is not a multiple of 4"):
        divide(13, 4)
    with pytest.raises(ValueError, match="7 is not a multiple of 2"):
        RowParallelLinear(7, 4, tp=TensorParallel(0, 2))


@pytest.mark.parametrize("bias", [False, True])
def test_stacked_matrices_are_divided_one_by_one(bias):
    kinds = ["weight", "bias"] if bias else ["weight"]
    whole = {
        (kind, i): torch.randn(n, 8)[:, : 8 if kind == "weight" else 1].squeeze(1)
        for kind in kinds
        for i, n in enumerate((6, 4))
    }
    for rank in range(2):
        layer = MergedColumnParallelLinear(8, [6, 4], bias, tp=TensorParallel(rank, 2))
        load(layer, whole)
        for kind in kinds:
            parts = [whole[kind, i].chunk(2)[rank] for i in range(2)]
            assert torch.equal(getattr(layer, kind), torch.cat(parts))


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_heads_are_divided(num_kv_heads):
    """With fewer KV heads than ranks, each rank has a copy of the one that its queries read."""
    sizes = {"q": 4, "k": num_kv_heads, "v": num_kv_heads}
    whole = {("weight", key): torch.randn(n * 3, 8) for key, n in sizes.items()}
    for rank in range(2):
        layer = QKVParallelLinear(8, 3, 4, num_kv_heads, tp=TensorParallel(rank, 2))
        load(layer, whole)
        kv = max(1, num_kv_heads // 2)
        assert (layer.num_heads, layer.num_kv_heads) == (2, kv)
        q, k, v = layer.weight.split([6, 3 * kv, 3 * kv])
        assert torch.equal(q, whole["weight", "q"].chunk(2)[rank])
        for key, part in (("k", k), ("v", v)):
            of_ranks = whole["weight", key].chunk(2) if num_kv_heads > 1 else [whole["weight", key]] * 2
            assert torch.equal(part, of_ranks[rank])


def test_a_format_and_the_fast_decoders_products_need_no_table():
    x, weight = torch.randn(3, 32), torch.randn(8, 32)
    with weight_format(Fp8()):
        layer = RowParallelLinear(32, 8)
    assert layer.format == RowParallelLinear(32, 8, format=Fp8()).format == Fp8()
    load(layer, {("weight", None): weight})
    assert not layer.is_plain
    torch.testing.assert_close(layer(x), layer.format.linear(x, layer.matrix))
    plain, norm = RowParallelLinear(32, 8), RMSNorm(8)
    load(plain, {("weight", None): weight})
    residual = torch.randn(3, 8)
    total = residual + F.linear(x, weight)
    torch.testing.assert_close(plain.add(residual, x, norm).value(), norm(total))
    torch.testing.assert_close(residual, total)
    gate_up = MergedColumnParallelLinear(32, [4, 4])
    load(gate_up, {("weight", 0): weight[:4], ("weight", 1): weight[4:]})
    gate, up = F.linear(x, weight).chunk(2, dim=1)
    gated = gate_up.silu(x)
    torch.testing.assert_close(gated if isinstance(gated, torch.Tensor) else gated.value(), F.silu(gate) * up)


def test_a_packed_weight_is_still_multiplied():
    layer, x = ReplicatedLinear(64, 64), torch.randn(3, 64)
    layer.weight.normal_()
    before = layer(x)
    layer.pack_weight()
    torch.testing.assert_close(layer(x), before)
    layer.unpack_weight()
    assert torch.equal(layer(x), before)
