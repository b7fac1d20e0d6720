"""Which prefills go to flash-attn-4, and what becomes of those that it cannot compute. The package is played by a
function; its own results are a GPU's to test."""

import logging
import sys
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from gpus import pretend_gpu

from nanovllm.layers.attention import Attention
from nanovllm.layers.backends import flash_attn4, gpu_backend
from nanovllm.layers.backends.backend import AttentionShape, StepSizes
from nanovllm.layers.backends.flash_attn4 import FlashAttn4, load_flash_attn4
from nanovllm.layers.backends.torch_backend import prefill_attention_torch
from nanovllm.layers.backends.triton_backend import TritonBackend
from nanovllm.layers.matmul.table import Table
from nanovllm.utils.context import Context

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 1, 16, 16
SCALE = HEAD_DIM**-0.5
MAX_SHORT = 256
SHAPE = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.float32, torch.device("cpu"))
# From 300 tokens on, for layers of one parameter.
SETTINGS = {"min_layer_work": 300, "max_short_prompt": {"triton": MAX_SHORT}, "max_few_keys": 4096}
TABLE = Table(settings={"flash_attn4": SETTINGS})


class Package:
    """Stands for flash_attn.cute.flash_attn_varlen_func: its results are all sevens."""

    def __init__(self, error: Exception | None = None):
        self.calls, self.error = [], error

    def __call__(self, q, k, v, **options):
        self.calls.append(options | {"shape": tuple(q.shape)})
        if self.error is not None:
            raise self.error
        return torch.full_like(q, 7.0), None


def make_backend(package: Package) -> TritonBackend:
    backend = TritonBackend()
    backend.max_short_prompt = MAX_SHORT
    backend.flash_attn4 = FlashAttn4(package)
    return backend


def prefill(backend: TritonBackend, lens: list[tuple[int, int]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the back end makes of sequences of (cached, new) tokens, and what attention is."""
    torch.manual_seed(len(lens))
    new, keys = [n for _, n in lens], [cached + n for cached, n in lens]
    q, k, v = (torch.randn(sum(new), heads, HEAD_DIM, device=device) for heads in (HEADS, KV_HEADS, KV_HEADS))
    cu_q, cu_k = (torch.tensor([0, *n], device=device).cumsum(0).int() for n in (new, keys))
    tables, caches = None, (None, None)
    if new != keys:
        blocks = -(-max(keys) // BLOCK_SIZE)
        tables = torch.arange(len(lens) * blocks, dtype=torch.int32, device=device).view(len(lens), blocks)
        caches = torch.randn(2, len(lens) * blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, device=device)
    context = Context(True, cu_q, cu_k, max(new), max(keys), block_tables=tables)
    expected = prefill_attention_torch(q, k, v, *caches, cu_q, cu_k, max(new), tables, SCALE)
    return make_layer(backend, *caches).attend(q, k, v, context), expected


def make_layer(backend: TritonBackend, k_cache=None, v_cache=None, kv_scales=None) -> Attention:
    layer = Attention(HEADS, HEAD_DIM, SCALE, KV_HEADS, backend)
    if k_cache is not None:
        layer.k_cache, layer.v_cache, layer.kv_scales = k_cache, v_cache, kv_scales
    return layer


def is_the_packages(out: torch.Tensor) -> bool:
    return bool((out == 7.0).all())


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_package_that_cannot_be_imported_is_named(is_installed, monkeypatch, caplog):
    """flash-attn 2 in another folder hides it: its module is missing, though pip has it."""
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    monkeypatch.setattr(flash_attn4, "keep_kernels", lambda: None)
    pretend_gpu(monkeypatch)
    found = {"flash-attn-4": "4.0.0"} if is_installed else {}
    monkeypatch.setattr(flash_attn4, "installed_versions", lambda *names: found)
    with caplog.at_level("WARNING"):
        assert load_flash_attn4(torch.bfloat16, 128, torch.device("cuda")) is None
    assert ("flash-attn-4 cannot be imported" in caplog.text) == is_installed


@pytest.mark.parametrize(
    ("lens", "is_paged"),
    [([(0, 3), (0, MAX_SHORT + 1)], False), ([(BLOCK_SIZE, 5), (0, 2)], True), ([(BLOCK_SIZE, MAX_SHORT)] * 2, True)],
)
def test_long_prompts_and_cached_beginnings_go_there(lens, is_paged, device):
    """Beginnings as pages, also where all lengths are equal."""
    package, keys = Package(), [cached + new for cached, new in lens]
    out, _ = prefill(make_backend(package), lens, device)
    assert is_the_packages(out)
    (options,) = package.calls
    assert options["causal"]
    assert options["softmax_scale"] == SCALE
    if is_paged:
        assert options["seqused_k"].tolist() == keys
        assert options["page_table"].shape == (2, -(-max(keys) // BLOCK_SIZE))
        assert "cu_seqlens_k" not in options
    else:
        assert options["cu_seqlens_q"].tolist() == options["cu_seqlens_k"].tolist() == [0, keys[0], sum(keys)]
        assert "page_table" not in options


@pytest.mark.parametrize("lens", [[(0, 1)], [(0, 40), (0, 7)], [(0, MAX_SHORT)]])
def test_short_prompts_are_our_kernels(lens, device):
    package = Package()
    out, expected = prefill(make_backend(package), lens, device)
    assert package.calls == []
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_what_is_short_is_a_setting(device):
    for longest, num_calls in ((5, 0), (6, 1)):
        package = Package()
        backend = make_backend(package)
        backend.max_short_prompt = 5
        prefill(backend, [(0, 2), (0, longest)], device)
        assert len(package.calls) == num_calls


def test_an_fp8_cache_is_our_kernels(device):
    """The package reads none. Without a cached beginning it reads the step's own keys and values."""
    package = Package()
    backend = make_backend(package)
    q = torch.randn(MAX_SHORT + 1, HEADS, HEAD_DIM, device=device)
    kv = torch.randn(MAX_SHORT + 1, KV_HEADS, HEAD_DIM, device=device)
    scales = torch.ones(2, KV_HEADS, device=device)
    blocks = -(-len(q) // BLOCK_SIZE)
    caches = torch.zeros(2, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, device=device).to(torch.float8_e4m3fn)
    ends = torch.tensor([0, len(q)], dtype=torch.int32, device=device)
    tables = torch.arange(blocks, dtype=torch.int32, device=device).unsqueeze(0)
    layer = make_layer(backend, *caches, scales)
    for block_tables, is_theirs in ((None, True), (tables, False)):
        context = Context(True, ends, ends, len(q), len(q), block_tables=block_tables)
        out = layer.attend(q, kv, kv, context)
        assert is_the_packages(out) == is_theirs
    assert (out == 0).all()


def test_few_tokens_are_our_kernels(monkeypatch, device):
    """Of all new tokens of the step, also where only the last ones are asked for."""
    package = Package()
    monkeypatch.setattr(gpu_backend, "load_flash_attn4", lambda dtype, head_dim, device: FlashAttn4(package))
    backend = TritonBackend()
    backend.use_flash_attn4(SHAPE, StepSizes(300, 300, 1, num_layer_params=1), TABLE)
    out, expected = prefill(backend, [(0, 299)], device)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert package.calls == []
    out, _ = prefill(backend, [(0, 290), (0, 10)], device)
    assert is_the_packages(out)
    q, kv = torch.zeros(2, HEADS, HEAD_DIM, device=device), torch.zeros(300, KV_HEADS, HEAD_DIM, device=device)
    ends = torch.tensor([0, 290, 300], dtype=torch.int32, device=device)
    context = Context(True, ends, ends, 290, 290).of_last_tokens()
    assert is_the_packages(make_layer(backend).attend(q, kv, kv, context))
    backend.max_few_keys = 5 * BLOCK_SIZE
    for num_cached, who in ((4 * BLOCK_SIZE, 0), (5 * BLOCK_SIZE, 1)):
        package.calls.clear()
        prefill(backend, [(num_cached, 2)], device)
        assert len(package.calls) == who, "few tokens over many keys"


@pytest.mark.parametrize(
    ("max_num_tokens", "max_model_len", "is_loaded"), [(299, 4096, False), (300, 64, True), (299, 4097, True)]
)
def test_where_no_step_is_large_enough_it_is_not_loaded(max_num_tokens, max_model_len, is_loaded, monkeypatch):
    package = Package()
    monkeypatch.setattr(gpu_backend, "load_flash_attn4", lambda dtype, head_dim, device: FlashAttn4(package))
    backend = TritonBackend()
    backend.use_flash_attn4(SHAPE, StepSizes(max_num_tokens, max_model_len, 1, num_layer_params=1), TABLE)
    assert (backend.flash_attn4 is not None) == is_loaded


def test_more_sequences_than_it_has_a_kernel_for_are_our_kernels(monkeypatch, device):
    monkeypatch.setattr(flash_attn4, "MAX_SEQS", 5)
    package = Package()
    assert is_the_packages(prefill(make_backend(package), [(BLOCK_SIZE, 1)] * 5, device)[0])
    package.calls.clear()
    out, expected = prefill(make_backend(package), [(BLOCK_SIZE, 1)] * 6, device)
    assert package.calls == []
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_what_fails_is_logged_once_and_not_used_again(caplog, device):
    package = Package(RuntimeError("no such kernel"))
    backend = make_backend(package)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            out, expected = prefill(backend, [(BLOCK_SIZE, 4)], device)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert len(package.calls) == 1
    (record,) = caplog.records
    assert "flash-attn-4" in record.message
    assert "no such kernel" in record.message


def test_a_full_gpu_is_the_callers_to_hear_of(device):
    with pytest.raises(torch.OutOfMemoryError):
        prefill(make_backend(Package(torch.OutOfMemoryError("full"))), [(0, MAX_SHORT + 1), (0, 1)], device)


def test_all_kernels_are_loaded_whatever_is_short():
    package = Package()
    flash_attn4 = FlashAttn4(package)
    for kernel in range(flash_attn4.NUM_KERNELS):
        flash_attn4.load(SHAPE, kernel)
    assert ["page_table" in options for options in package.calls] == [False, True]


def test_pages_have_a_function_of_their_own(device):
    package, paged = Package(), Package()
    backend = TritonBackend()
    backend.flash_attn4 = FlashAttn4(package, paged)
    prefill(backend, [(BLOCK_SIZE, 5), (0, 2)], device)
    assert [len(each.calls) for each in (package, paged)] == [0, 1]
    prefill(backend, [(0, 3), (0, MAX_SHORT + 1)], device)
    assert [len(each.calls) for each in (package, paged)] == [1, 1]


def _forward_of_4_0_0b36(q, k, v, tile_mn=None, mma_pv_is_rs=None, **options):
    assert (tile_mn, mma_pv_is_rs) == ((192, 96), False)
    return torch.full_like(q, 7.0), None


@pytest.mark.parametrize(
    ("forward", "capability", "head_dim", "in_tiles"),
    [
        (_forward_of_4_0_0b36, 9, 128, True),
        (_forward_of_4_0_0b36, 10, 128, False),
        (_forward_of_4_0_0b36, 9, 64, False),
        (lambda q, k, v, tile: None, 9, 128, False),
        (None, 9, 128, False),
        ("no module", 9, 128, False),
    ],
)
def test_tiles_are_asked_for_where_the_package_takes_them(forward, capability, head_dim, in_tiles, monkeypatch):
    public = Package()
    cute, interface = ModuleType("flash_attn.cute"), ModuleType("flash_attn.cute.interface")
    cute.flash_attn_varlen_func = public
    if forward is not None:
        interface._flash_attn_fwd = forward
    for module in (ModuleType("flash_attn"), cute, interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    if forward == "no module":
        monkeypatch.setitem(sys.modules, interface.__name__, None)
    pretend_gpu(monkeypatch, capability=(capability, 0))
    backend = TritonBackend()
    backend.flash_attn4 = load_flash_attn4(torch.bfloat16, head_dim, torch.device("cuda"))
    for lens in ([(0, MAX_SHORT + 4)] * 2, [(0, 3), (0, MAX_SHORT + 1)], [(BLOCK_SIZE, 5), (0, 2)]):
        assert is_the_packages(prefill(backend, lens, "cpu")[0])
    assert len(public.calls) == (1 if in_tiles else 3)
