"""Which products go to quack-kernels, and what becomes of those that it cannot compute. The package is played by a
function; its own results are a GPU's to test (tests/test_gpu_quack.py)."""

import logging

import pytest
import torch
import torch.nn.functional as F
from checkpoints import Reference, assert_idle, complete, greedy, make_checkpoint, make_llm
from fake_quack import H200, Package, make_config, tensors

from nanovllm.engine import model_runner
from nanovllm.layers import decode_linear, quack_tiles
from nanovllm.layers.product import add_product, batch_with_padding, product, product_silu
from nanovllm.layers.quack import Product, Quack, Tile
from nanovllm.layers.quack_tiles import PREFILL_TILE
from nanovllm.utils.context import Context, step_context


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


@pytest.mark.parametrize(("context", "num_tokens", "count"), [(PREFILL, 2048, 0), (DECODE, 128, 1), (DECODE, 512, 0)])
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
    tile = Tile(128, 32)
    quack.wanted["linear", tile] = Product("linear", tile, 128, 96, 32, torch.float32)
    package.error = RuntimeError("no compiler")
    monkeypatch.setattr(model_runner, "load_quack", lambda dtype, device, decodes: quack)
    monkeypatch.setattr(decode_linear, "MAX_WEIGHTS", 1)
    path = make_checkpoint(tmp_path)
    reference = Reference(path)
    prompts = reference.draw_prompts([5] * 40, 4)
    with make_llm(path, num_kvcache_blocks=100, max_num_seqs=50) as llm:
        assert llm.model_runner.decode_inputs.padded == list(range(51))
        assert complete(llm, prompts, greedy(4)) == reference.greedy(prompts, 4)
        assert_idle(llm)
    assert len(package.calls) == 1


def test_what_is_traced_is_loaded_later_a_launch_a_kernel(quack, package):
    pytest.importorskip("triton")
    from nanovllm.kernels.launch import compile_ahead

    x, weight, residual = tensors(128, 96, 32)
    with compile_ahead():
        for _ in range(2):
            assert quack.linear(x, weight, Tile(128, 32)).shape == (128, 96)
        assert quack.linear_silu(x, weight, Tile(128, 64)).shape == (128, 48)
        assert quack.linear_add(x, weight, residual, Tile(64, 32)) is residual
    assert package.calls == []
    for wanted in quack.wanted.values():
        quack.load(wanted, torch.device("cpu"))
    assert [(config.tile_m, config.tile_n) for config in package.calls] == [(128, 32), (128, 64), (64, 32)]


def test_no_padding_without_the_package(quack):
    gate_up = torch.zeros(6144, 1024, device="meta")
    assert batch_with_padding(100, gate_up, None) == 100
    assert batch_with_padding(100, gate_up, quack) == 128
