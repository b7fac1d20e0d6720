"""Weights packed for a CPU: the same products as with plain weights, and the same bits in any batch."""

import pytest
import torch
import torch.nn.functional as F
from checkpoints import complete, greedy, make_checkpoint, make_llm, random_prompt
from kernel_harness import rounding
from products import run
from torch import nn

from nanovllm.layers.formats.packed import Packed, can_pack
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.matmul.matmul import Matmul

pytestmark = pytest.mark.skipif(not can_pack(torch.ones(1, 1)), reason="this torch has no oneDNN")

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(torch.ones(1, 1, dtype=dtype))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "N", "K"), [(1, 6, 5), (3, 34, 70), (0, 8, 16), (65, 96, 64)])
def test_products_are_those_of_plain_weights(dtype, num_tokens, N, K):
    x = torch.randn(num_tokens, 2 * K).to(dtype)[:, :K]  # Rows need not be adjacent.
    weight, bias, residual = (torch.randn(*shape).to(dtype) for shape in ((N, K), (N,), (num_tokens, N)))
    matmul, packed_weight = Matmul(), Packed().quantize(weight, dtype)
    assert packed_weight.values.is_mkldnn
    wanted = F.linear(x.float(), weight.float())
    gate, up = wanted.chunk(2, dim=1)

    def check(found, expected, terms=K**0.5):
        """terms: products of standard normal numbers; gate and up are as large, and then multiplied."""
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, **rounding(dtype, 3, K, terms))

    check(run(matmul, "linear", x, packed_weight), wanted)
    check(run(matmul, "linear", x, packed_weight, bias), wanted + bias.float())
    out = torch.empty_like(residual)
    assert run(matmul, "linear", x, packed_weight, bias, out) is out
    check(out, wanted + bias.float())
    check(run(matmul, "linear_silu", x, packed_weight), F.silu(gate) * up, K)
    for each in (None, bias):
        total = residual.clone()
        assert run(matmul, "linear_add", x, packed_weight, each, total) is total
        check(total, residual.float() + wanted + (0 if each is None else each.float()))


def test_a_row_has_the_same_bits_in_any_batch():
    x, weight = torch.randn(40, 96), Packed().quantize(torch.randn(50, 96), torch.float32)
    together = run(Matmul(), "linear", x, weight)
    for start, end in ((0, 1), (39, 40), (3, 5), (1, 4), (8, 40)):
        assert torch.equal(run(Matmul(), "linear", x[start:end].clone(), weight), together[start:end])


def test_a_packed_parameter_keeps_its_attributes():
    parameter = nn.Parameter(torch.randn(4, 4), requires_grad=False)
    parameter.shards = {None: (4, 4)}
    format, found = Unquantized().packed(parameter)
    assert format == Packed()
    assert isinstance(found, nn.Parameter)
    assert (found.shards, found.shape, found.numel()) == ({None: (4, 4)}, (4, 4), 16)


@pytest.mark.parametrize("weight", [torch.ones(2, 3, 4), torch.ones(0, 4), torch.ones(2, 4, dtype=torch.float64)])
def test_what_cannot_be_packed_stays_as_it_is(weight):
    format, found = Unquantized().packed(weight)
    assert format == Unquantized()
    assert found is weight


@pytest.mark.parametrize("tied", [True, False])
def test_an_engine_packs_its_weights_and_gives_a_request_the_same_tokens_in_any_batch(tmp_path, tied):
    path = make_checkpoint(tmp_path, tie_word_embeddings=tied)
    prompts = [random_prompt(length, seed=length) for length in (3, 40, 17, 90)]
    with make_llm(path) as llm:
        model = llm.model_runner.model
        assert all(layer.mlp.down_proj.weight.is_mkldnn for layer in model.model.layers)
        assert model.lm_head.weight.is_mkldnn
        assert not model.model.embed_tokens.weight.is_mkldnn
        together = complete(llm, prompts, greedy(8))
        assert together == [complete(llm, [prompt], greedy(8))[0] for prompt in prompts]
