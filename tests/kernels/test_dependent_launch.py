"""Launches that begin before the one ahead of them has ended: a layer's attention half, in a graph, against ordinary
launches of the same kernels."""

import pytest
import torch

pytest.importorskip("triton")

from decode_cases import make_plan
from linear_inputs import gemv_linear_add, gemv_norm_linear, same_bits_in_a_graph

from nanovllm.kernels.attention.decode_plan import DecodeConfig, DecodeWorkspace
from nanovllm.kernels.attention.paged_decode import has_tma, paged_decode
from nanovllm.kernels.attention.qk_norm_rope import qk_norm_rope_store
from nanovllm.kernels.dependent_launch import has_pdl
from nanovllm.kernels.matmul.gemv import GemvConfig
from nanovllm.layers.rope_parameters import RopeParameters
from nanovllm.layers.rotary_embedding import RotaryEmbedding

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, EPS = 512, 8, 4, 64, 64, 1e-6
NUM_LAYERS = 8
GEMV = GemvConfig(4, 512, 2)


def random(*shape, device, scale=1.0):
    return (scale * torch.randn(*shape, device=device)).bfloat16()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [DecodeConfig(32, 2, 4), DecodeConfig(32, 2, 4, prefetch=True), DecodeConfig(32, 1, 4, tma=True)]
)
@pytest.mark.parametrize("batch", [1, 3, 4])
def test_a_chain_in_a_graph(batch, config, device):
    """Each launch needs the last one's result, each token attends to the key that the launch before has stored, and
    the residual is overwritten every time."""
    if not has_pdl(torch.device(device)):
        pytest.skip("no programmatic dependent launch here")
    if config.tma and not has_tma(HEAD_DIM, BLOCK_SIZE, 2, torch.device(device)):
        pytest.skip("no kernel for the tensor memory accelerator here")
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv_weights = [random(width, HIDDEN, device=device, scale=HIDDEN**-0.5) for _ in range(NUM_LAYERS)]
    out_weights = [random(HIDDEN, HEADS * HEAD_DIM, device=device, scale=HIDDEN**-0.5) for _ in range(NUM_LAYERS)]
    norms = 1 + random(2, HEAD_DIM, device=device, scale=0.1)
    norm = 1 + random(HIDDEN, device=device, scale=0.1)
    table = RotaryEmbedding.of(RopeParameters(), HEAD_DIM, 1024).to(device).cos_sin_cache
    context_lens = torch.randint(1, 1000, (batch,), dtype=torch.int32, device=device)
    positions = context_lens.long() - 1
    blocks = 1000 // BLOCK_SIZE + 1
    tables = torch.randperm(batch * blocks, dtype=torch.int32, device=device).view(batch, blocks)
    slots = tables[torch.arange(batch, device=device), positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    caches = random(NUM_LAYERS, 2, batch * blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, device=device)
    plan = make_plan(context_lens, KV_HEADS)
    workspace = DecodeWorkspace(batch, HEADS, KV_HEADS, HEAD_DIM, device, len(plan))

    def chain(residual: torch.Tensor, pdl: bool):
        for (keys, values), qkv_weight, out_weight in zip(caches, qkv_weights, out_weights, strict=True):
            qkv = gemv_norm_linear(residual, norm, EPS, qkv_weight, config=GEMV, pdl=pdl)
            args = EPS, table, positions, keys, values, slots, None, HEADS, KV_HEADS
            qk_norm_rope_store.kernel(qkv, *norms, *args, pdl=pdl)
            q = qkv.view(batch, -1, HEAD_DIM)[:, :HEADS]
            scale = HEAD_DIM**-0.5
            o = paged_decode(q, keys, values, tables, scale, plan, workspace, config, pdl=pdl)
            gemv_linear_add(o.flatten(1), out_weight, residual, config=GEMV, pdl=pdl)

    same_bits_in_a_graph(chain, random(batch, HIDDEN, device=device))
