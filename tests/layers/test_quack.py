"""Which products go to quack-kernels, and what becomes of those that it cannot compute. The package is played by a
function; its own results are a GPU's to test (tests/gpu/test_gpu_quack.py)."""

import logging

import pytest
import torch
import torch.nn.functional as F
from checkpoints import Reference, assert_idle, complete, greedy, make_checkpoint, make_llm
from fake_quack import CpuQuack, Package, make_config, tensors
from products import FP8, default_result, matmul_with, problem, run

from nanovllm.engine.start import build
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.candidates.quack import Quack, Tile, Wanted
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.matmul.row import Row
from nanovllm.layers.matmul.table import Choice, Key, Table, load_table
from nanovllm.models.layer_facts import layer_products
from nanovllm.utils.context import Context, step_context

PREFILL_TILE = Tile(128, 128, (1, 2), pingpong=True)


def make_table(*shapes: tuple[int, int]) -> Table:
    """For these weights: the package in decode steps of 33 to 64 and of 128 tokens, and in prefills of 2048 and more,
    except for sums."""

    def choices(tile: Tile) -> list[Choice]:
        return [Choice("quack-kernels", tuple(tile))]

    rows = {}
    for N, K in shapes:
        for operation in ("linear", "linear_silu", "linear_add"):
            decode = {32: [], 64: choices(Tile(64, 32)), 127: [], 128: choices(Tile(128, 32)), 129: []}
            rows[Key(operation, "decode", N, K, "float32")] = Row(decode)
            prefill = {2047: [], 2048: choices(PREFILL_TILE)}
            rows[Key(operation, "prefill", N, K, "float32")] = Row({1: []} if operation == "linear_add" else prefill)
    return Table(rows)


@pytest.fixture
def package() -> Package:
    return Package()


@pytest.fixture
def quack(package) -> Quack:
    return CpuQuack(package, make_config)


@pytest.fixture
def matmul(quack) -> Matmul:
    return matmul_with(make_table((96, 32), (128, 32)), [quack])


PREFILL, DECODE = Context(is_prefill=True), Context()


DECODE_TILE = Tile(128, 32)


@pytest.mark.parametrize(
    ("operation", "context", "num_tokens", "tile"),
    [
        ("linear", PREFILL, 2047, None),
        ("linear", PREFILL, 2048, PREFILL_TILE),
        ("linear", DECODE, 16, None),
        ("linear", DECODE, 128, DECODE_TILE),
        ("linear_silu", PREFILL, 2048, PREFILL_TILE),
        ("linear_silu", DECODE, 128, DECODE_TILE),
        ("linear_silu", DECODE, 3, None),
        ("linear_add", PREFILL, 2048, None),
        ("linear_add", DECODE, 128, DECODE_TILE),
        ("linear_add", DECODE, 512, None),
    ],
)
def test_products(matmul, package, operation, context, num_tokens, tile):
    x, weight, residual = tensors(num_tokens, 96, 32)
    product = F.linear(x, weight)
    gate, up = product.chunk(2, dim=-1)
    expected = {"linear": product, "linear_silu": F.silu(gate) * up, "linear_add": residual + product}[operation]
    with step_context(context):
        for _ in range(2):
            out = residual.clone() if operation == "linear_add" else None
            y = run(matmul, operation, x, weight, out=out)
            assert out is None or y is out
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    tiles = [Tile(c.tile_m, c.tile_n, (c.cluster_m, c.cluster_n), c.pingpong) for c in package.calls]
    assert tiles == ([] if tile is None else [tile] * 2)
    # The package knows a config that it has seen by its identity.
    assert len(set(map(id, package.calls))) <= 1


def test_a_bias_and_a_place_for_the_result_are_cublas_business(matmul, package):
    x, weight, residual = tensors(2048, 96, 32)
    bias, out = torch.randn(96), torch.empty(2048, 96)
    with step_context(PREFILL):
        torch.testing.assert_close(run(matmul, "linear", x, weight, bias), F.linear(x, weight, bias))
        assert run(matmul, "linear", x, weight, out=out) is out
        torch.testing.assert_close(out, F.linear(x, weight))
    x, residual = x[:128], residual[:128]
    with step_context(DECODE):
        expected = residual + F.linear(x, weight, bias)
        assert run(matmul, "linear_add", x, weight, bias, residual) is residual
    torch.testing.assert_close(residual, expected)
    assert not package.calls


def test_steps_without_graphs_prefill_alone(quack, matmul, package):
    """Launches cost the host more than small products last."""
    quack.decodes = False
    x, weight, residual = tensors(128, 128, 32)
    with step_context(DECODE):
        run(matmul, "linear", x, weight)
        run(matmul, "linear_silu", x, weight)
        run(matmul, "linear_add", x, weight, out=residual)
    assert not package.calls
    with step_context(PREFILL):
        run(matmul, "linear", *tensors(2048, 128, 32)[:2])
    assert len(package.calls) == 1


@pytest.fixture
def fp8_weight() -> Weight:
    _, weight, _ = tensors(1, 128, 32)
    return FP8[False].quantize(weight * torch.linspace(0.5, 2, 128).unsqueeze(1), torch.float32)


@pytest.mark.parametrize("operation", ["linear", "linear_silu", "linear_add"])
def test_weights_in_fp8(quack, package, fp8_weight, operation):
    """x is quantized with what stands before it, and the result is not, so the next product quantizes that."""
    x, _, residual = tensors(128, 128, 32)
    gate_up, norm = torch.cat([x, x.flip(1)], dim=1), RMSNorm(32)
    inputs = [
        (x, x),
        (Normed(x, norm), rms_norm.twin(x, norm.weight, norm.eps)),
        (Gated(gate_up), silu_and_mul.twin(gate_up)),
    ]
    for given, value in inputs:
        expected = fp8_weight.format.linear(value, fp8_weight)
        if operation == "linear_silu":
            expected = silu_and_mul.twin(expected)
        out = residual.clone() if operation == "linear_add" else None
        asked = problem(operation, given, fp8_weight, out=out)
        assert quack.supports(asked.key, asked.weight)
        y = quack.launch(asked, Tile(128, 32))
        if operation == "linear_add":
            assert y is out
            expected = expected + residual
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert len(package.calls) == 3


def test_weights_in_fp8_without_the_package(quack, package, fp8_weight, caplog):
    """After its first error they are multiplied as if it was not installed."""
    package.error = TypeError("no such layout")
    x, _, residual = tensors(128, 128, 32)
    key = Key("linear_add", "decode", 128, 32, fp8_weight.table_name)
    asked = problem("linear_add", x, fp8_weight, out=residual)
    expected = default_result(asked._replace(out=residual.clone()))
    matmul = matmul_with(Table({key: Row({128: [Choice("quack-kernels", tuple(Tile(128, 32)))]})}), [quack])
    with step_context(DECODE), caplog.at_level(logging.WARNING):
        assert matmul.run(asked) is residual
    assert torch.equal(residual, expected)
    assert (len(package.calls), quack.works, len(caplog.records)) == (1, False, 1)


def test_a_failure_is_logged_once_and_costs_no_result(matmul, package, caplog):
    package.error = TypeError("no such layout")
    x, weight, residual = tensors(128, 128, 32)
    expected = residual + F.linear(x, weight)
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    with step_context(DECODE), caplog.at_level(logging.WARNING):
        torch.testing.assert_close(run(matmul, "linear", x, weight), F.linear(x, weight))
        torch.testing.assert_close(run(matmul, "linear_silu", x, weight), F.silu(gate) * up)
        run(matmul, "linear_add", x, weight, out=residual)
    torch.testing.assert_close(residual, expected)
    assert len(package.calls) == 1
    (record,) = caplog.records
    assert record.getMessage() == "quack-kernels failed and is not used any more: TypeError: no such layout"


def test_a_tile_that_the_package_does_not_know_costs_no_result(package, caplog):
    def make_config(**options):
        raise TypeError("GemmConfig() got an unexpected keyword argument 'tile_m'")

    quack = CpuQuack(package, make_config)
    x, weight, _ = tensors(128, 128, 32)
    with step_context(DECODE), caplog.at_level(logging.WARNING):
        y = run(matmul_with(make_table((128, 32)), [quack]), "linear", x, weight)
    torch.testing.assert_close(y, F.linear(x, weight))
    assert not quack.works
    assert "unexpected keyword" in caplog.text


def test_exhausted_memory_is_not_the_packages_failure(matmul, package):
    package.error = torch.OutOfMemoryError("full")
    x, weight, _ = tensors(128, 128, 32)
    with step_context(DECODE):
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="full"):
                run(matmul, "linear", x, weight)
    assert len(package.calls) == 2


def test_tensors_that_it_does_not_take():
    quack = Quack(Package(), make_config)
    asked = problem("linear", torch.zeros(64, 64).half(), torch.zeros(64, 64).half())
    assert not quack.supports(asked.key, asked.weight), "not on a GPU"


@pytest.fixture
def engine_options(monkeypatch, tmp_path, quack) -> dict:
    """Of an engine on a CPU that has the package, and a table for its model."""
    path = make_checkpoint(tmp_path)
    with make_llm(path) as llm:
        shapes = {tuple(make(1).weight.shape) for make in layer_products(llm.model_runner.model.model.layers[0])}
    monkeypatch.setattr(build, "load_quack", lambda dtype, device, decodes: quack)
    monkeypatch.setattr(build, "load_table", lambda device: load_table(device).updated(make_table(*shapes)))
    return {"path": path, "num_kvcache_blocks": 300, "max_num_seqs": 50, "max_num_batched_tokens": 4096}


def test_an_engine_by_the_package(engine_options, package):
    """Long prefills and decode steps, while the package works and when it stops to."""
    reference = Reference(engine_options["path"])
    prompts = reference.draw_prompts([50] * 42, 6)
    expected = reference.greedy(prompts, 6)
    with make_llm(**engine_options) as llm:
        for num_seqs in (42, 17, 3):
            assert complete(llm, prompts[:num_seqs], greedy(6)) == expected[:num_seqs]
        rows = {c.tile_m for c in package.calls}
        assert rows == {64, 128}, "decode and prefill tiles"
        package.calls.clear()
        package.error = RuntimeError("launch failed")
        assert complete(llm, prompts, greedy(6)) == expected
        assert len(package.calls) == 1
        assert_idle(llm)


def test_an_engine_whose_package_fails_at_the_start(engine_options, quack, package):
    tile = Tile(128, 32)
    quack.wanted["linear", tile] = Wanted(Key("linear", "decode", 96, 32, "float32"), tile, 128, torch.float32)
    package.error = RuntimeError("no compiler")
    reference = Reference(engine_options["path"])
    prompts = reference.draw_prompts([5] * 40, 4)
    with make_llm(**engine_options) as llm:
        assert complete(llm, prompts, greedy(4)) == reference.greedy(prompts, 4)
        assert_idle(llm)
    assert len(package.calls) == 1


def test_what_is_traced_is_loaded_later_a_launch_a_kernel(quack, package, fp8_weight):
    pytest.importorskip("triton")
    from nanovllm.kernels.launch import compile_ahead

    x, weight, residual = tensors(128, 96, 32)
    with compile_ahead():
        for _ in range(2):
            assert quack.launch(problem("linear", x, weight), Tile(128, 32)).shape == (128, 96)
        assert quack.launch(problem("linear_silu", x, weight), Tile(128, 64)).shape == (128, 48)
        assert quack.launch(problem("linear_add", x, weight, out=residual), Tile(64, 32)) is residual
        assert quack.launch(problem("linear", x, fp8_weight), Tile(128, 32)).shape == (128, 128)
    assert package.calls == []
    for wanted in quack.wanted.values():
        quack.load(wanted, torch.device("cpu"))
    assert [(config.tile_m, config.tile_n) for config in package.calls] == [(128, 32), (128, 64), (64, 32), (128, 32)]


def test_its_decode_tiles_are_for_their_own_shape(matmul, package, caplog):
    """Those of long prefills are for all. What is not measured is logged once."""
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            for context, num_tokens in ((DECODE, 128), (PREFILL, 2048)):
                x, weight, _ = tensors(num_tokens, 112, 32)
                with step_context(context):
                    torch.testing.assert_close(
                        run(matmul, "linear", x, weight), F.linear(x, weight), rtol=1e-4, atol=1e-4
                    )
    assert {config.tile_m for config in package.calls} == {PREFILL_TILE.tokens}
    (record,) = caplog.records
    assert record.getMessage() == (
        "linear with a weight [112, 32] was not measured on this GPU; to measure it: nanovllm tune MODEL"
    )


def test_a_sum_over_ranks_needs_no_rows_for_one_gpu(quack, caplog):
    """Rank 0 adds its part by linear_add, which the tuner does not measure for several GPUs."""
    row = Row({1: [Choice("cublas")]})
    matmul = matmul_with(Table({Key("linear_sum", "decode", 96, 32, "float32"): row}), [quack])
    x, weight, residual = tensors(8, 96, 32)
    with step_context(DECODE), caplog.at_level(logging.INFO):
        run(matmul, "linear_add", x, weight, out=residual)
        assert not caplog.records
        run(matmul, "linear", x, weight)
    assert len(caplog.records) == 1
