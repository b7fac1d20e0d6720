"""Shared fixtures. Without a GPU, Triton's interpreter runs the kernels, so it is chosen before Triton loads."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from checkpoints import Reference, assert_idle, make_checkpoint, make_llm


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


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A checkpoint with a tokenizer, which no test may change; a file may have a `path` of its own instead."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), tokenizer=True)


@pytest.fixture(scope="module")
def reference(path):
    return Reference(path)


@pytest.fixture(scope="module")
def shared_llm(path):
    """One engine with a tokenizer for all tests of a file, unless the file has a `shared_llm` of its own."""
    with make_llm(path, skip_tokenizer_init=False, max_model_len=200) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm):
    """The file's engine, which the test must leave idle."""
    yield shared_llm
    assert_idle(shared_llm)
