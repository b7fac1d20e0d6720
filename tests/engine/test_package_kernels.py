"""Kernels of the optional packages are compiled in processes, and loaded once each. A list stands for the processes,
and functions for the packages."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from configs import dummy
from fake_quack import Package, make_config, tensors

pytest.importorskip("triton")

from gpus import pretend_gpu
from products import problem

from nanovllm.engine.start import package_kernels
from nanovllm.engine.start.package_kernels import PackageKernels
from nanovllm.kernels.launch import compile_ahead
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.backends.flash_attn4 import FlashAttn4, load_kernel
from nanovllm.layers.matmul.candidates.quack import Quack, Tile, load_product
from nanovllm.layers.matmul.table import Table, user_path, write_table
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.utils import optional_packages

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, 16, torch.float32, CPU)


class Processes(list):
    """Stands for CompileProcesses."""

    def __init__(self, modules):
        self.has_waited = False

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def submit(self, tasks):
        self.extend(tasks)

    def wait(self, tell):
        self.has_waited = True


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A machine with both packages, as far as the start of the processes asks."""
    monkeypatch.setattr(package_kernels, "CompileProcesses", Processes)
    monkeypatch.setattr(optional_packages, "version", lambda name: "1.0")
    monkeypatch.setattr(package_kernels, "keep_kernels", lambda: None)
    pretend_gpu(monkeypatch, name="a GPU")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def start(quack=None, flash_attn4=None, rank=0, **options) -> Processes | None:
    """The processes of an engine's start that asks for a product twice and for another one; None without any."""
    config = dummy(**{"device": "cpu", "dtype": "bfloat16"} | options)
    with PackageKernels(config, rank, torch.device("cuda", 0)) as packages:
        processes = packages._processes
        x, weight, _ = tensors(128, 96, 64)
        with compile_ahead():
            for tile in (Tile(128, 32), Tile(128, 32), Tile(64, 32)):
                if quack is not None:
                    quack.launch(problem("linear", x, weight), tile)
        packages.compile(quack, flash_attn4, SHAPE)
        packages.load(TensorParallel(), lambda done, total: None)
    return processes


def test_what_is_asked_for_is_compiled_in_processes_and_loaded(hopper):
    package, attention = Package(), []
    quack = Quack(package, make_config)
    flash_attn4 = FlashAttn4(None)
    flash_attn4.load = lambda shape, kernel: attention.append((shape, kernel))
    processes = start(quack, flash_attn4)
    assert processes.has_waited
    assert processes[:2] == [(load_kernel, SHAPE, kernel) for kernel in range(2)]
    assert [(function, product.tile) for function, product, _ in processes[2:]] == [
        (load_product, Tile(128, 32)),
        (load_product, Tile(64, 32)),
    ]
    assert attention == [(SHAPE, kernel) for kernel in range(2)]
    assert [(config.tile_m, config.tile_n) for config in package.calls] == [(128, 32), (64, 32)]


def test_a_second_engine_of_this_shape_needs_no_processes(hopper):
    assert start(Quack(Package(), make_config)) is not None
    quack = Quack(package := Package(), make_config)
    assert start(quack) is None
    assert len(package.calls) == 2, "loaded all the same"
    assert start(max_num_seqs=7) is not None, "other options, other kernels"
    assert start(rank=1, max_num_seqs=8) is None, "rank 0's compile for all"
    write_table(user_path("a GPU"), "a GPU", Table())
    assert start() is not None, "another table, other kernels"


def test_a_start_that_fails_is_made_once_more(hopper):
    def fail():
        with PackageKernels(dummy(device="cpu", dtype="bfloat16"), 0, torch.device("cuda", 0)):
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert start() is not None


def test_none_where_the_packages_are_not_used(hopper, monkeypatch):
    def missing(name):
        raise PackageNotFoundError

    assert PackageKernels(dummy(device="cpu", dtype="bfloat16"), 0, CPU).__enter__()._processes is None
    assert start(dtype="float32") is None
    pretend_gpu(monkeypatch, capability=(8, 0))
    assert start() is None
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(optional_packages, "version", missing)
    assert start() is None


def test_a_cache_that_cannot_be_written_costs_a_later_start_alone(hopper, monkeypatch, tmp_path):
    Path(tmp_path, "nanovllm").write_text("a file where the folder would be")
    assert start() is not None
    assert start() is not None
