"""Layers driven by hand over several ranks."""

import pytest
import torch
import torch.nn.functional as F
from rank_threads import on_ranks

from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.matmul.matmul import Matmul


@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_columns_then_rows_are_the_whole(bias, has_table):
    torch.manual_seed(0)
    up, down, x = torch.randn(12, 8), torch.randn(6, 12), torch.randn(5, 8)
    biases = torch.randn(12), torch.randn(6)

    def work(tp):
        options = {"tp": tp, "matmul": Matmul() if has_table else None}
        first, second = ColumnParallelLinear(8, 12, bias, **options), RowParallelLinear(12, 6, bias, **options)
        for layer, weight, of_layer in ((first, up, biases[0]), (second, down, biases[1])):
            layer.weight.weight_loader(layer.weight, weight)
            if bias:
                layer.bias.weight_loader(layer.bias, of_layer)
        assert first.weight.shape == (6, 8)
        assert second.weight.shape == (6, 6)
        return second(first(x))

    expected = F.linear(F.linear(x, up, biases[0] if bias else None), down, biases[1] if bias else None)
    for y in on_ranks(2, work):
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
