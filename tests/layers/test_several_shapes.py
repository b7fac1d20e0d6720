"""A back end for each shape of layers, as those of a GPU compute them."""

import pytest
import torch

pytest.importorskip("triton")

from backends import decode_context, prepare

from nanovllm.layers.attention import Attention
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.backends.choice import select_backend
from nanovllm.layers.backends.several_shapes import SeveralShapes
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.backends.triton_backend import TritonBackend
from nanovllm.utils.context import Context

BLOCK_SIZE, LENS = 64, (1, 70, 190)


def make_layer(shape, backend, window):
    """A layer over a cache of its own, with random keys and values."""
    layer = Attention(shape.num_heads, shape.head_dim, shape.head_dim**-0.5, shape.num_kv_heads, backend, window)
    caches = torch.randn(2, 9, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, device=shape.device)
    layer.k_cache, layer.v_cache = caches
    return layer


def test_each_layer_is_computed_by_the_back_end_of_its_heads(device):
    local, wide = (
        AttentionShape(4, n, dim, BLOCK_SIZE, torch.float32, torch.device(device)) for n, dim in ((2, 32), (1, 64))
    )
    backend = SeveralShapes({local: TritonBackend(), wide: TritonBackend()})
    context_lens = torch.tensor(LENS, dtype=torch.int32, device=device)
    tables = torch.randperm(9, device=device).int().view(3, 3)
    for shape, windows in ((local, [48]), (wide, [None])):
        prepare(backend, shape, windows, len(LENS))
    context = decode_context(backend, context_lens, tables)
    for shape, window in ((local, 48), (wide, None)):
        layer = make_layer(shape, backend, window)
        q = torch.randn(3, 4, shape.head_dim, device=device)
        k, v = torch.randn(2, 3, shape.num_kv_heads, shape.head_dim, device=device)
        plain = TorchBackend()
        prepare(plain, shape, [window], len(LENS))
        expected = plain.decode(layer, q, decode_context(plain, context_lens, tables))
        torch.testing.assert_close(layer.attend(q, k, v, context), expected, atol=1e-5, rtol=1e-5)
        ends = torch.tensor([0, 2, 3], dtype=torch.int32, device=device)
        prefill = Context(True, ends, ends, 2, 2)
        torch.testing.assert_close(layer.attend(q, k, v, prefill), plain.prefill(layer, q, k, v, prefill))
    assert backend.description == "triton"


def test_a_back_end_that_lacks_one_shape_is_refused():
    shape = AttentionShape(4, 2, 256, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    assert isinstance(select_backend("torch", shape, shape._replace(head_dim=512)), SeveralShapes)
    with pytest.raises(ValueError, match="attention_backend='triton': needs a CUDA device"):
        select_backend("triton", shape, shape._replace(head_dim=512))
