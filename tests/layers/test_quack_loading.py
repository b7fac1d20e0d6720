"""Loading quack-kernels: where it is used, by which of its functions, and what is said where it cannot be."""

import builtins
import logging
import os
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from fake_quack import Package, make_config, tensors
from gpus import pretend_gpu
from products import problem

from nanovllm.layers.matmul.candidates import quack as quack_module
from nanovllm.layers.matmul.candidates.quack import Tile, load_quack

CUDA = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch, tmp_path) -> None:
    """A Hopper GPU on a machine that has the package, as far as can be seen without importing it."""
    monkeypatch.setattr(quack_module, "version", {"quack-kernels": "0.6.5"}.__getitem__)
    pretend_gpu(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("QUACK_CACHE_DIR", "")  # so that it is put back
    monkeypatch.delenv("QUACK_CACHE_DIR")


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
    own = Package()
    modules = {"quack.gemm_config": SimpleNamespace(GemmConfig=make_config)}
    modules["nanovllm.layers.matmul.candidates.quack_products"] = SimpleNamespace(gemm_act=own)
    import_instead(monkeypatch, modules)
    quack = load_quack(torch.bfloat16, CUDA, decodes=False)
    assert not quack.decodes
    assert os.environ["QUACK_CACHE_DIR"] == str(tmp_path / "nanovllm" / "quack")
    x, weight, residual = tensors(128, 96, 64)
    quack.launch(problem("linear", x, weight), Tile(128, 32))
    quack.launch(problem("linear_add", x, weight, out=residual), Tile(64, 32))
    assert len(own.calls) == 2
    assert load_quack(torch.float32, CUDA, decodes=True) is None
    assert load_quack(torch.bfloat16, torch.device("cpu"), decodes=True) is None
    pretend_gpu(monkeypatch, capability=(10, 0))
    assert load_quack(torch.bfloat16, CUDA, decodes=True) is None
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(quack_module, "version", version)  # where it is not installed
    assert load_quack(torch.bfloat16, CUDA, decodes=True) is None


@pytest.mark.parametrize("missing", ["quack.gemm_config", "nanovllm.layers.matmul.candidates.quack_products"])
def test_a_package_that_cannot_be_imported_is_named(hopper, monkeypatch, caplog, missing):
    """An older one, or one of which a library is missing."""
    modules = {"quack.gemm_config": SimpleNamespace(GemmConfig=make_config)}
    import_instead(monkeypatch, modules | {missing: ImportError("cannot import name 'TileStore'")})
    monkeypatch.setattr(quack_module, "version", lambda name: "0.5.3")
    with caplog.at_level(logging.WARNING):
        assert load_quack(torch.float16, CUDA, decodes=True) is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "quack-kernels 0.5.3 is not used (0.6.5 would be): it cannot be imported: ImportError: "
        "cannot import name 'TileStore'"
    )
