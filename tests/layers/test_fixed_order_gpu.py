"""Products of deterministic=True as a GPU computes them, by Triton's interpreter: they are those of the format, and a
row has the same bits in any company."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import launch_everywhere, rounding
from products import default_result, problem

from nanovllm.kernels.matmul.fixed_order import fixed_order_linear
from nanovllm.layers.activation import Gated
from nanovllm.layers.formats import fixed_order
from nanovllm.layers.formats.fixed_order import FixedOrder
from nanovllm.layers.formats.format import WeightFormat
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks
from nanovllm.layers.formats.int4 import Int4
from nanovllm.layers.formats.mxfp4 import Mxfp4
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.candidates import dequantized, expert_tiles
from nanovllm.layers.matmul.candidates.fixed_order import OF_LAYERS
from nanovllm.layers.matmul.candidates.fixed_order_gpu import make_fixed_order_candidates_of_gpu
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.matmul.problem import ExpertsProblem
from nanovllm.layers.matmul.table import Key

HALF, FLOAT = torch.float16, torch.float32  # Triton's interpreter multiplies bfloat16 wrongly.
CASES: dict[str, tuple[WeightFormat, torch.dtype]] = {
    "plain": (FixedOrder(), HALF),
    "plain in float32": (FixedOrder(), FLOAT),
    "fp8": (Fp8(), HALF),
    "fp8 in blocks": (Fp8Blocks(), HALF),
    "int4": (Int4(), HALF),
    "mxfp4": (Mxfp4(), HALF),
    "mxfp4 in float32": (Mxfp4(), FLOAT),
}
every_format = pytest.mark.parametrize(("format", "dtype"), CASES.values(), ids=CASES)


@pytest.fixture
def matmul(monkeypatch) -> Matmul:
    """A GPU's, on a CPU."""
    launch_everywhere(monkeypatch, expert_tiles, dequantized)
    monkeypatch.setattr(fixed_order, "fixed_order_linear", fixed_order_linear.kernel)
    return Matmul(candidates=make_fixed_order_candidates_of_gpu(torch.device("cpu")))


def value(y):
    return y.value() if isinstance(y, Gated) else y


def companies(num_rows: int) -> Iterator[list[int]]:
    """Rows of a batch of num_rows: alone, at other places, and more than a tile holds."""
    yield from ([5], [num_rows - 1, 5, 0], list(reversed(range(num_rows))), [*range(num_rows), *range(num_rows)])


def expected_result(asked):
    """Of the format's plain product; the twin of all candidates."""
    if isinstance(asked.weight.format, FixedOrder):
        fields = {name: getattr(asked, name) for name in ("weight", "down") if hasattr(asked, name)}
        asked = asked._replace(**{name: Unquantized().quantize(x.values, x.dtype) for name, x in fields.items()})
    return value(default_result(asked._replace(key=asked.key._replace(format=asked.weight.table_name))))


def cancelling(num_rows: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weight, `[num_rows, K]`, whose products are the rounding of sums alone. So another order shows in 16 bits
    too. Both halves of a row have the same groups, and so the same scales. Sums of numbers with few bits would be exact
    if they were not of many sizes."""
    x, weight = torch.randn(2, num_rows, K // 2) * torch.randn(2, num_rows, K // 2).exp()
    return 8 * torch.cat((x, -x), dim=1), torch.cat((weight, weight), dim=1)


@every_format
def test_another_order_of_sums_would_show(format, dtype, matmul):
    num_rows, K = 40, 512
    x, weight = cancelling(num_rows, K)
    x, weight = x.to(dtype), format.quantize(weight.repeat(4, 1)[:128], dtype)
    whole = matmul.run(problem("linear", x, weight))
    assert whole.count_nonzero() > whole.numel() / 20
    for rows in companies(num_rows):
        assert torch.equal(matmul.run(problem("linear", x[rows], weight)), whole[rows]), len(rows)


@every_format
def test_a_rows_products_are_the_formats_and_have_the_same_bits_in_any_company(format, dtype, matmul):
    N, K, num_rows = 128, 256, 9
    weight = format.quantize(torch.randn(N, K) / K**0.5, dtype)
    x, bias, residual = (torch.randn(num_rows, n).to(dtype) for n in (K, N, N))
    norm = RMSNorm(K).to(dtype).requires_grad_(False)
    for operation in OF_LAYERS:
        has_out, bias_of = operation in ("linear_add", "linear_sum"), bias[0] if operation == "linear" else None

        def asked(rows, operation=operation, has_out=has_out, bias_of=bias_of):
            given = Normed(x[rows], norm) if operation == "linear_silu" else x[rows]
            return problem(operation, given, weight, bias_of, residual[rows].clone() if has_out else None)

        everything = list(range(num_rows))
        whole = value(matmul.run(asked(everything)))
        torch.testing.assert_close(whole, expected_result(asked(everything)), **rounding(dtype, 4, K))
        for rows in companies(num_rows):
            assert torch.equal(value(matmul.run(asked(rows))), whole[rows]), (operation, len(rows))
        assert len(value(matmul.run(asked([])))) == 0


@every_format
def test_so_have_a_tokens_experts(format, dtype, matmul):
    num_experts, top_k, hidden_size, intermediate, num_rows = 4, 2, 128, 128, 9
    gate_up, down = (
        format.quantize(torch.randn(num_experts, *shape) / 8, dtype)
        for shape in ((2 * intermediate, hidden_size), (hidden_size, intermediate))
    )
    x, residual = (torch.randn(num_rows, hidden_size).to(dtype) for _ in range(2))
    logits, key = torch.randn(num_rows, num_experts).to(dtype), Key.of("experts", False, gate_up)

    def asked(rows):
        lens = torch.ones(len(rows), dtype=torch.int32)
        options = top_k, True, residual[rows].clone(), True, lens
        return ExpertsProblem(key, x[rows], logits[rows], gate_up, down, *options)

    everything = list(range(num_rows))
    whole, expected = matmul.run(asked(everything)), expected_result(asked(everything))
    # Gate and up, hidden numbers and results are rounded.
    assert (whole.float() - expected.float()).norm() <= 4 * torch.finfo(dtype).eps * expected.float().norm()
    for rows in companies(num_rows):
        assert torch.equal(matmul.run(asked(rows)), whole[rows]), len(rows)
