"""The kernel of paged_decode that reads by the tensor memory accelerator: where it is taken, and what it computes."""

import pytest
import torch

pytest.importorskip("triton")

from backends import decode_context, prepare
from decode_cases import H200, check, make_case, make_plan, needs_tma, paged_decode
from kernel_harness import nightly

import nanovllm.kernels.attention.paged_decode as paged_decode_module
from nanovllm.kernels.attention.decode_plan import DecodeConfig, DecodeWorkspace
from nanovllm.layers.attention import Attention
from nanovllm.layers.backends import triton_backend
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.backends.torch_backend import decode_attention_torch
from nanovllm.layers.backends.triton_backend import TritonBackend

pytestmark = needs_tma


OTHER_DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32


CASES = [
    (4, 2, 128, 256, torch.float16, DecodeConfig(32, 1, 3, tma=True), 1),
    (4, 2, 128, 256, OTHER_DTYPE, DecodeConfig(64, 2, 3, tma=True), 1),
    (8, 2, 64, 64, torch.float16, DecodeConfig(64, 2, 3, tma=True), 30),
    (5, 1, 64, 32, OTHER_DTYPE, DecodeConfig(32, 1, 4, tma=True), 30),
    (16, 1, 128, 64, torch.float16, DecodeConfig(32, 1, 4, tma=True), 1),
]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "config", "spare"),
    [*CASES, *nightly(*((*case[:-1], 31 - case[-1]) for case in CASES))],
)
def test_whole_tiles_by_the_memory_accelerator(
    num_heads, num_kv_heads, head_dim, block_size, dtype, config, spare, device
):
    lens = [0, 1, 31, 32, 33, 63, 64, 65, 0, 130, 320, 351]
    case = make_case(lens, num_heads, num_kv_heads, head_dim, block_size, dtype, device, seed=head_dim + spare)
    plan = make_plan(case["context_lens"], num_kv_heads, len(lens) + spare)
    workspace = DecodeWorkspace(len(lens), num_heads, num_kv_heads, head_dim, device, len(plan))
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    first = check(case, plan=plan, workspace=workspace, config=config)
    assert (workspace.arrivals == 0).all()
    assert torch.equal(first, paged_decode(**case, plan=plan, workspace=workspace, config=config))


def test_the_memory_accelerators_kernel_is_taken_where_it_can_be(monkeypatch, device):
    asked, launched = [], []
    monkeypatch.setattr(triton_backend, "has_tma", lambda *case: asked.append(case) or True)
    describe = paged_decode_module.descriptors_of
    monkeypatch.setattr(paged_decode_module, "descriptors_of", lambda *args: launched.append(args) or describe(*args))
    shape = AttentionShape(16, 8, 64, 64, torch.float16, torch.device(device))
    backend = prepare(TritonBackend(), shape, [None], max_rows=3)
    backend.constants = H200  # which take the accelerator from 3 rows of 8 KV heads on
    for batch, is_taken in ((2, False), (3, True)):
        case = make_case([33 + i for i in range(batch)], 16, 8, 64, 64, torch.float16, device, seed=batch)
        context = decode_context(backend, case["context_lens"], case["block_tables"])
        layer = Attention(16, 64, case["scale"], 8, backend)
        layer.k_cache, layer.v_cache = case["k_cache"], case["v_cache"]
        out = layer.attend(case["q"], case["q"], case["q"], context)
        torch.testing.assert_close(out, decode_attention_torch(**case), atol=4e-3, rtol=4e-3)
        assert bool(launched) == is_taken
    assert set(asked) == {(64, 64, 2, case["q"].device)}


@pytest.mark.parametrize(
    ("head_dim", "block_size", "message"), [(48, 64, "head_dim 48"), (64, 16, "no less than a tile of 32 keys")]
)
def test_what_has_no_whole_tiles_is_refused(head_dim, block_size, message):
    case = make_case([3], 2, 1, head_dim, block_size, torch.float32, "cpu", seed=0)
    with pytest.raises(ValueError, match=message):
        paged_decode(**case, config=DecodeConfig(32, 1, 3, tma=True))
