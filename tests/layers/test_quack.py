"""Which products go to quack-kernels, and what becomes of those that it cannot compute. The package is played by a
function; its own results are a GPU's to test (tests/test_gpu_quack.py)."""

import builtins
import logging
import os
from contextlib import contextmanager
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from checkpoints import Reference, assert_idle, complete, greedy, make_checkpoint, make_llm

from nanovllm.engine import model_runner
from nanovllm.layers import decode_linear, quack_tiles
from nanovllm.layers import quack as quack_module
from nanovllm.layers.product import add_product, batch_with_padding, product, product_silu
from nanovllm.layers.quack import Quack, Tile, load_quack
from nanovllm.layers.quack_tiles import PREFILL_TILE
from nanovllm.utils.context import Context, step_context

H200 = 132
CUDA = torch.device("cuda", 0)


class Package:
    """Stands for quack.gemm_interface.gemm_act, in plain torch."""

    def __init__(self, error: Exception | None = None):
        self.calls, self.error = [], error

    def __call__(self, x, weight, *, postact_out, C=None, activation=None, concat_layout=None, config, **options):
        assert options == {"store_preact": False, "tuned": False}
        self.calls.append(config)
        if self.error is not None:
            raise self.error
        y = (x.float() @ weight.float()) + (0 if C is None else C.float())
        if activation is not None:
            assert (activation, concat_layout) == ("swiglu", ("B",))
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        postact_out.copy_(y)


def make_config(**options) -> SimpleNamespace:
    return SimpleNamespace(**options)


class CpuQuack(Quack):
    """Takes what a test has: float32, on a CPU, of any shape."""

    def takes_weight(self, weight):
        return True

    def takes(self, x, weight):
        return self.works


@pytest.fixture
def package() -> Package:
    return Package()


@pytest.fixture
def quack(package, monkeypatch) -> Quack:
    monkeypatch.setattr(quack_tiles, "_MIN_PREFILL_WORK", 1 << 20)
    return CpuQuack(package, make_config, H200)


def tensors(num_tokens: int, N: int, K: int):
    torch.manual_seed(num_tokens)
    return torch.randn(num_tokens, K), torch.randn(N, K) * K**-0.5, torch.randn(num_tokens, N)


PREFILL, DECODE = Context(is_prefill=True), Context()


@pytest.mark.parametrize(
    ("context", "num_tokens", "called"),
    [(PREFILL, 2047, []), (PREFILL, 2048, [PREFILL_TILE]), (DECODE, 16, []), (DECODE, 128, [Tile(128, 32)])],
)
def test_products(quack, package, context, num_tokens, called):
    x, weight, _ = tensors(num_tokens, 96, 32)
    with step_context(context):
        for _ in range(2):
            y = product(x, weight, quack=quack)
        torch.testing.assert_close(y, F.linear(x, weight), rtol=1e-4, atol=1e-4)
    tiles = [Tile(c.tile_m, c.tile_n, (c.cluster_m, c.cluster_n), c.pingpong) for c in package.calls]
    assert tiles == called * 2
    # The package knows a config that it has seen by its identity.
    assert len(set(map(id, package.calls))) <= 1


def test_a_bias_and_a_place_for_the_result_are_cublas_business(quack, package):
    x, weight, residual = tensors(2048, 96, 32)
    bias, out = torch.randn(96), torch.empty(2048, 96)
    with step_context(PREFILL):
        torch.testing.assert_close(product(x, weight, bias, quack=quack), F.linear(x, weight, bias))
        assert product(x, weight, out=out, quack=quack) is out
        torch.testing.assert_close(out, F.linear(x, weight))
        expected = residual + F.linear(x, weight, bias)
        assert add_product(residual, x, weight, bias, quack=quack) is residual
    torch.testing.assert_close(residual, expected)
    assert not package.calls


def test_steps_without_graphs_prefill_alone(quack, package):
    """Launches cost the host more than small products last."""
    quack.decodes = False
    x, weight, residual = tensors(128, 128, 32)
    with step_context(DECODE):
        product(x, weight, quack=quack)
        assert product_silu(x, weight, quack=quack) is None
        add_product(residual, x, weight, quack=quack)
    assert not package.calls
    assert batch_with_padding(100, torch.zeros(6144, 1024, device="meta"), quack) == 100
    with step_context(PREFILL):
        product(*tensors(2048, 128, 32)[:2], quack=quack)
    assert len(package.calls) == 1


@pytest.mark.parametrize(("context", "num_tokens"), [(PREFILL, 2048), (DECODE, 128), (DECODE, 3)])
def test_swiglu(quack, package, context, num_tokens):
    x, weight, _ = tensors(num_tokens, 128, 32)
    with step_context(context):
        y = product_silu(x, weight, quack=quack)
    if num_tokens == 3:
        assert y is None
        return
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    torch.testing.assert_close(y, F.silu(gate) * up, rtol=1e-4, atol=1e-4)
    assert len(package.calls) == 1


@pytest.mark.parametrize(("context", "num_tokens", "count"), [(PREFILL, 2048, 0), (DECODE, 128, 1), (DECODE, 384, 0)])
def test_sums(quack, package, context, num_tokens, count):
    x, weight, residual = tensors(num_tokens, 96, 32)
    expected = residual + F.linear(x, weight)
    with step_context(context):
        assert add_product(residual, x, weight, quack=quack) is residual
    torch.testing.assert_close(residual, expected, rtol=1e-4, atol=1e-4)
    assert len(package.calls) == count


def test_a_failure_is_logged_once_and_costs_no_result(quack, package, caplog):
    package.error = TypeError("no such layout")
    x, weight, residual = tensors(128, 128, 32)
    expected = residual + F.linear(x, weight)
    with step_context(DECODE), caplog.at_level(logging.WARNING):
        torch.testing.assert_close(product(x, weight, quack=quack), F.linear(x, weight))
        assert product_silu(x, weight, quack=quack) is None
        add_product(residual, x, weight, quack=quack)
    torch.testing.assert_close(residual, expected)
    assert len(package.calls) == 1
    (record,) = caplog.records
    assert record.getMessage() == "quack-kernels failed and is not used any more: TypeError: no such layout"


def test_a_tile_that_the_package_does_not_know_costs_no_result(package, caplog):
    def make_config(**options):
        raise TypeError("GemmConfig() got an unexpected keyword argument 'tile_m'")

    quack = CpuQuack(package, make_config, H200)
    x, weight, _ = tensors(128, 128, 32)
    with step_context(DECODE), caplog.at_level(logging.WARNING):
        torch.testing.assert_close(product(x, weight, quack=quack), F.linear(x, weight))
    assert not quack.works
    assert "unexpected keyword" in caplog.text


def test_exhausted_memory_is_not_the_packages_failure(quack, package):
    package.error = torch.OutOfMemoryError("full")
    x, weight, _ = tensors(128, 128, 32)
    with step_context(DECODE):
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="full"):
                product(x, weight, quack=quack)
    assert len(package.calls) == 2


def test_tensors_that_it_does_not_take():
    quack = Quack(Package(), make_config, H200)
    assert not quack.takes_weight(torch.zeros(64, 64).half()), "not on a GPU"


@pytest.fixture
def hopper(monkeypatch, tmp_path) -> SimpleNamespace:
    """The properties of a GPU on a machine that has the package, as far as can be seen without importing it."""
    properties = SimpleNamespace(major=9, multi_processor_count=H200)
    monkeypatch.setattr(quack_module, "version", {"quack-kernels": "0.6.5"}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("QUACK_CACHE_DIR", "")  # so that it is put back
    monkeypatch.delenv("QUACK_CACHE_DIR")
    return properties


def import_instead(monkeypatch, modules: dict) -> None:
    """Have `from name import ...` look into these; one that is an exception is raised."""
    import_module = builtins.__import__

    def find(name, *args, **kwargs):
        module = modules.get(name)
        if isinstance(module, Exception):
            raise module
        return import_module(name, *args, **kwargs) if module is None else module

    monkeypatch.setattr(builtins, "__import__", find)


def test_loading(hopper, monkeypatch, tmp_path):
    modules = {"quack.gemm_config": SimpleNamespace(GemmConfig=make_config)}
    modules["quack.gemm_interface"] = SimpleNamespace(gemm_act=Package())
    import_instead(monkeypatch, modules)
    quack = load_quack(torch.bfloat16, CUDA, decodes=False)
    assert (quack.num_multiprocessors, quack.decodes) == (H200, False)
    assert os.environ["QUACK_CACHE_DIR"] == str(tmp_path / "nanovllm" / "quack")
    assert load_quack(torch.float32, CUDA, decodes=True) is None
    assert load_quack(torch.bfloat16, torch.device("cpu"), decodes=True) is None
    hopper.major = 10
    assert load_quack(torch.bfloat16, CUDA, decodes=True) is None
    hopper.major = 9
    monkeypatch.setattr(quack_module, "version", version)  # where it is not installed
    assert load_quack(torch.bfloat16, CUDA, decodes=True) is None


@pytest.mark.parametrize("can_be_extended", [True, False])
def test_products_that_let_the_next_kernel_in_early_are_preferred(hopper, monkeypatch, caplog, can_be_extended):
    own, early = Package(), Package()
    modules = {"quack.gemm_config": SimpleNamespace(GemmConfig=make_config)}
    modules["quack.gemm_interface"] = SimpleNamespace(gemm_act=own)
    extension = SimpleNamespace(gemm_act=early) if can_be_extended else ImportError("cannot import name 'TileStore'")
    modules["nanovllm.layers.quack_early"] = extension
    import_instead(monkeypatch, modules)
    with caplog.at_level(logging.WARNING):
        quack = load_quack(torch.bfloat16, CUDA, decodes=True)
    x, weight, residual = tensors(128, 96, 32)
    quack.linear(x, weight, Tile(128, 32))
    quack.linear_add(x, weight, residual, Tile(64, 32))
    assert (len(own.calls), len(early.calls)) == ((0, 2) if can_be_extended else (2, 0))
    assert not caplog.records


def test_an_old_package_is_not_used(hopper, monkeypatch, caplog):
    modules = {"quack.gemm_config": SimpleNamespace(GemmConfig=make_config)}
    modules["quack.gemm_interface"] = SimpleNamespace(gemm_act=lambda A, B, tuned=True: None)
    import_instead(monkeypatch, modules)
    monkeypatch.setattr(quack_module, "version", lambda name: "0.5.3")
    with caplog.at_level(logging.WARNING):
        assert load_quack(torch.float16, CUDA, decodes=True) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("quack-kernels 0.5.3 is too old")


def test_a_package_that_cannot_be_imported_is_named(hopper, monkeypatch, caplog):
    import_instead(monkeypatch, {"quack.gemm_config": ImportError("libcute.so: no such file")})
    with caplog.at_level(logging.WARNING):
        assert load_quack(torch.float16, CUDA, decodes=True) is None
    (record,) = caplog.records
    assert record.getMessage() == "quack-kernels cannot be imported: ImportError: libcute.so: no such file"


def test_an_engine_by_the_package(tmp_path, monkeypatch, quack, package):
    """Long prefills, and decode steps whose batches are padded, while the package works and when it stops to."""
    path = make_checkpoint(tmp_path)
    reference = Reference(path)
    prompts = reference.draw_prompts([50] * 42, 6)
    expected = reference.greedy(prompts, 6)
    monkeypatch.setattr(model_runner, "load_quack", lambda dtype, device, decodes: quack)
    monkeypatch.setattr(decode_linear, "MAX_WEIGHTS", 1)  # a weight this small has no other kernel on a GPU
    with make_llm(path, num_kvcache_blocks=300, max_num_seqs=50, max_num_batched_tokens=4096) as llm:
        assert llm.model_runner.decode_inputs.padded[40:] == [64] * 11
        for num_seqs in (42, 17, 3):
            assert complete(llm, prompts[:num_seqs], greedy(6)) == expected[:num_seqs]
        rows = {c.tile_m for c in package.calls}
        assert rows == {64, 128}, "decode and prefill tiles"
        package.calls.clear()
        package.error = RuntimeError("launch failed")
        assert complete(llm, prompts, greedy(6)) == expected
        assert len(package.calls) == 1
        assert_idle(llm)


def test_an_engine_whose_package_fails_at_the_start_pads_nothing(tmp_path, monkeypatch, quack, package):
    @contextmanager
    def compiling_kernels(runner):
        assert runner.decode_inputs.padded[40] == 64
        package.error = RuntimeError("no compiler")
        assert quack.linear(*tensors(128, 96, 32)[:2], Tile(128, 32)) is None
        yield

    monkeypatch.setattr(model_runner, "load_quack", lambda dtype, device, decodes: quack)
    monkeypatch.setattr(model_runner, "compiling_kernels", compiling_kernels)
    monkeypatch.setattr(decode_linear, "MAX_WEIGHTS", 1)
    path = make_checkpoint(tmp_path)
    reference = Reference(path)
    prompts = reference.draw_prompts([5] * 40, 4)
    with make_llm(path, num_kvcache_blocks=100, max_num_seqs=50) as llm:
        assert llm.model_runner.decode_inputs.padded == list(range(51))
        assert complete(llm, prompts, greedy(4)) == reference.greedy(prompts, 4)
        assert_idle(llm)


def test_no_padding_without_the_package(quack):
    gate_up = torch.zeros(6144, 1024, device="meta")
    assert batch_with_padding(100, gate_up, None) == 100
    assert batch_with_padding(100, gate_up, quack) == 128
