"""Which of a kernel and its twin a call runs."""

import pkgutil
from importlib import import_module
from inspect import isfunction, signature
from types import SimpleNamespace

import nanovllm.kernels
from nanovllm.kernels import HAS_TRITON, kernel_of, kernel_or_twin

MODULES = [
    import_module(module.name) for module in pkgutil.walk_packages(nanovllm.kernels.__path__, "nanovllm.kernels.")
]
FUNCTIONS = {name: value for module in MODULES for name, value in vars(module).items() if isfunction(value)}
OPERATIONS = {name: function for name, function in FUNCTIONS.items() if hasattr(function, "twin")}


def test_the_first_argument_decides():
    @kernel_or_twin
    def operation(x, y, z=3):
        """What it does."""
        return "twin", y, z

    @kernel_of(operation)
    def launch(x, y, z=3):
        return "kernel", y, z

    on_gpu, on_cpu = (SimpleNamespace(is_cuda=is_cuda) for is_cuda in (True, False))
    assert operation(on_cpu, on_gpu, z=4) == ("twin", on_gpu, 4)
    assert operation(on_gpu, on_cpu) == ("kernel" if HAS_TRITON else "twin", on_cpu, 3)
    assert operation.twin(on_gpu, 1) == ("twin", 1, 3)
    assert operation.kernel is launch
    assert operation.__doc__ == "What it does."


def test_every_operation_has_a_kernel_with_the_arguments_of_its_twin():
    def arguments(function):
        return [(each.name, each.default) for each in signature(function).parameters.values()]

    assert len(OPERATIONS) > 20
    for name, operation in OPERATIONS.items():
        assert arguments(operation.kernel) == arguments(operation.twin), name
