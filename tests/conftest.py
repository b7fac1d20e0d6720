"""Shared fixtures. Without a GPU, Triton's interpreter runs the kernels, so it is chosen before Triton loads."""

import json
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

# Of the processes that tests start as well: threads of several processes that wait busily keep each other from working.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import huggingface_hub
import hypothesis
import pytest
import real_model
from checkpoints import Reference, assert_idle, make_checkpoint, make_llm
from configs import NEW_STYLE

from nanovllm.layers.matmul.table import package_table
from nanovllm.utils.threads import available_cores

pytest_plugins = ["lone_gpu", "quick_interpreter", "quick_ranks", "ray_cluster"]

# By default an example of more than 200 ms is a failure, on whatever machine and beside whatever else it runs.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
# For scripts/planted_faults.py, which asks whether a test fails, always with the same examples. To look for the
# smallest one would take most of the time.
_PHASES = hypothesis.Phase.explicit, hypothesis.Phase.generate
hypothesis.settings.register_profile("planted_faults", deadline=None, derandomize=True, phases=_PHASES)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """A process a core; on a GPU this one alone, for tests of its memory would see each other's."""
    return 0 if torch.cuda.is_available() else min(available_cores(), 8)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    """Tests marked `nightly` run if -m names the mark, or the command names the very case."""
    if "nightly" not in config.option.markexpr:
        named = {arg.partition("::")[2] for arg in config.args}
        left_out = [x for x in items if x.get_closest_marker("nightly") and x.nodeid.partition("::")[2] not in named]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    missing = {
        "gpu": None if torch.cuda.is_available() else "needs a CUDA device",
        "two_gpus": None if torch.cuda.device_count() > 1 else "needs two CUDA devices",
        "real": None if real_model.is_complete(real_model.default_folder()) else f"needs {real_model.COMMAND}",
    }
    for item in items:
        for mark, reason in missing.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
        if "device" in item.fixturenames and not item.get_closest_marker("gpu"):
            item.add_marker("kernel")


@pytest.fixture(scope="session", autouse=True)
def flash_attn4_takes_small_models():
    """Where it is installed it would be given no prefill of models as small as the tests'. (The processes of further
    ranks keep to the rule.)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(package_table("NVIDIA H200").settings["flash_attn4"], "min_layer_work", 0)
        yield


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_interrupts():
    """A runner in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
def base(tmp_path_factory):
    """(checkpoint, Reference) for tests on a GPU of what does not depend on the shape: stored in float32, heads of 64.
    A file may have a `base` of its own."""
    path = make_checkpoint(tmp_path_factory.mktemp("base"), head_dim=64)
    return path, Reference(path)


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


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """{name: directory} of checkpoints to load; tests that change one take a copy."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "plain": make_checkpoint(root / "plain"),
        "tied": make_checkpoint(root / "tied", tie_word_embeddings=True),
        "bias": make_checkpoint(root / "bias", attention_bias=True),
        "qwen2": make_checkpoint(root / "qwen2", family="qwen2"),
        "sharded": make_checkpoint(root / "sharded", max_shard_size="60KB"),
    }


@pytest.fixture
def copy(checkpoints, tmp_path):
    """copy(name) -> a directory that the test may damage."""
    return lambda name="plain": Path(shutil.copytree(checkpoints[name], tmp_path / name))


@pytest.fixture
def four_threads():
    """Loading by four threads, of which none may be left, nor any trace of how many they were."""
    before, running = torch.get_num_threads(), set(threading.enumerate())
    torch.set_num_threads(4)
    yield
    assert torch.get_num_threads() == 4
    torch.set_num_threads(before)
    # One that has done its work may take a moment to end.
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) != running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) == running


@pytest.fixture
def no_network(monkeypatch):
    """Whatever reaches for the hub fails at once instead of after its retries."""

    def refuse(*args, **kwargs):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


@pytest.fixture
def model_dir(tmp_path):
    """A function that writes a model directory and returns its path."""

    def write(config=NEW_STYLE, generation_config=None, name="model", **changes) -> str:
        directory = tmp_path / name
        directory.mkdir()
        config = {key: value for key, value in (config | changes).items() if value is not ...}
        (directory / "config.json").write_text(json.dumps(config))
        if generation_config is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation_config))
        return str(directory)

    return write
