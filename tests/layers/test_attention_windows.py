"""Windows and sinks in the back ends that a GPU has: what they ask of the flash-attn packages, and compute."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from backends import decode_context, prepare
from gpu_engines import HAS_FLASH_ATTN, flash_attn_has

from nanovllm.layers.attention import Attention
from nanovllm.layers.backends.backend import AttentionBackend, AttentionShape
from nanovllm.layers.backends.flash_attn4 import FlashAttn4
from nanovllm.layers.backends.flash_attn_backend import FlashAttnBackend
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.backends.triton_backend import TritonBackend
from nanovllm.utils.context import Context

HEADS, KV_HEADS, BLOCK_SIZE = 4, 2, 256


class Layers:
    """One attention layer for each back end and window, over one cache."""

    def __init__(self, lens: list[tuple[int, int]], head_dim: int, dtype: torch.dtype, device: str):
        """lens: (cached, new) tokens of each sequence."""
        torch.manual_seed(0)
        self.lens, self.head_dim, self.device = lens, head_dim, device
        num_new, num_keys = [new for _, new in lens], [cached + new for cached, new in lens]
        shape = {"dtype": dtype, "device": device}
        self.q = torch.randn(sum(num_new), HEADS, head_dim, **shape)
        self.k, self.v = torch.randn(2, sum(num_new), KV_HEADS, head_dim, **shape)
        num_blocks = -(-max(num_keys) // BLOCK_SIZE)
        self.caches = torch.randn(2, len(lens) * num_blocks, BLOCK_SIZE, KV_HEADS, head_dim, **shape)
        self.tables = torch.randperm(len(lens) * num_blocks, device=device).int().view(len(lens), num_blocks)
        self.cu_q, self.cu_k = (torch.tensor(np.cumsum([0, *n]), device=device).int() for n in (num_new, num_keys))
        self.sizes = max(num_new), max(num_keys)

    def attend(
        self, backend: AttentionBackend, window: int | None, is_prefill: bool, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A prefill, or a decode step of each sequence's last token."""
        layer = Attention(HEADS, self.head_dim, self.head_dim**-0.5, KV_HEADS, backend, window, sinks)
        layer.k_cache, layer.v_cache = self.caches
        if is_prefill:
            tables = self.tables if any(cached for cached, _ in self.lens) else None
            context = Context(True, self.cu_q, self.cu_k, *self.sizes, block_tables=tables)
            return layer.attend(self.q, self.k, self.v, context)
        context_lens = self.cu_k.diff()
        shape = AttentionShape(HEADS, KV_HEADS, self.head_dim, BLOCK_SIZE, self.q.dtype, self.q.device)
        prepare(backend, shape, list({None, window}), len(self.lens))
        context = decode_context(backend, context_lens, self.tables)
        return layer.attend(self.q[: len(self.lens)], self.k, self.v, context)


@pytest.mark.parametrize("lens", [[(0, 400), (0, 3)], [(300, 20), (0, 7)]])
def test_layers_with_a_window_or_sinks_are_not_flash_attn_4s(lens, device):
    def package(q, k, v, **options):
        return torch.full_like(q, 7.0), None

    backend = TritonBackend()
    backend.flash_attn4 = FlashAttn4(package)
    layers = Layers(lens, 16, torch.float32, device)
    assert (layers.attend(backend, None, True) == 7.0).all()
    expected = layers.attend(TorchBackend(), 30, True)
    torch.testing.assert_close(layers.attend(backend, 30, True), expected, atol=1e-5, rtol=1e-5)
    sinks = torch.randn(HEADS, device=device)
    expected = layers.attend(TorchBackend(), None, True, sinks)
    torch.testing.assert_close(layers.attend(backend, None, True, sinks), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("window", "window_size"), [(None, (-1, -1)), (1, (0, 0)), (512, (511, 0))])
def test_what_flash_attn_2_is_asked_for(monkeypatch, window, window_size):
    calls = []

    def play(q, k, v, **options):
        calls.append(options)
        return torch.zeros_like(q)

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = package.flash_attn_with_kvcache = play
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    layers = Layers([(0, 4), (0, 2)], 16, torch.float32, "cpu")
    for is_prefill in (True, False):
        layers.attend(FlashAttnBackend(), window, is_prefill)
    assert [(call["window_size"], call["causal"]) for call in calls] == [(window_size, True)] * 2


@pytest.mark.parametrize("is_prefill", [True, False])
def test_flash_attn_2_without_sinks_becomes_attention_with_them(monkeypatch, is_prefill):
    """By the sums that the package returns: here those of one key each."""

    def prefill(q, k, v, return_attn_probs, **options):
        assert return_attn_probs
        scores = (q * k.repeat_interleave(2, dim=1)).sum(-1) * options["softmax_scale"]
        return v.repeat_interleave(2, dim=1), scores.t(), None

    def decode(q, k_cache, v_cache, return_softmax_lse, block_table, **options):
        assert return_softmax_lse
        k, v = (cache[block_table[:, 0].long(), 0].repeat_interleave(2, dim=1) for cache in (k_cache, v_cache))
        return v.unsqueeze(1), (q.squeeze(1) * k).sum(-1, keepdim=True) * options["softmax_scale"]

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func, package.flash_attn_with_kvcache = prefill, decode
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    layers, sinks = Layers([(0, 1), (0, 1)], 16, torch.float32, "cpu"), torch.randn(HEADS)
    expected = layers.attend(TorchBackend(), None, is_prefill, sinks)
    torch.testing.assert_close(layers.attend(FlashAttnBackend(), None, is_prefill, sinks), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("lens", [[(0, 1500), (0, 3)], [(2000, 20), (600, 700), (0, 7), (0, 1)]])
@pytest.mark.parametrize("window", [1, 128, 512, 700, 4096])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_all_back_ends_agree(head_dim, window, lens, is_prefill, has_sinks):
    layers = Layers(lens, head_dim, torch.bfloat16, "cuda")
    sinks = torch.randn(HEADS, dtype=torch.bfloat16, device="cuda") if has_sinks else None
    expected = layers.attend(TorchBackend(), window, is_prefill, sinks)
    backends: list = [TritonBackend()]
    if HAS_FLASH_ATTN and flash_attn_has(torch.bfloat16, head_dim):
        backends.append(FlashAttnBackend())
    for backend in backends:
        found = layers.attend(backend, window, is_prefill, sinks)
        torch.testing.assert_close(found, expected, atol=3e-2, rtol=3e-2)
