"""Shared fixtures. Without a GPU, Triton's interpreter runs the kernels, so it is chosen before Triton loads."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernel tests put their tensors: the GPU, or the CPU under Triton's interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"
