"""A Ray cluster for all tests of a session, since it takes seconds to start. A plugin of pytest."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cluster():
    """Its workers find the package and the tests' modules. It pretends to have two GPUs. Engines that are given one
    find none, and use the CPU."""
    ray = pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
    paths = os.pathsep.join([os.getcwd(), str(Path(__file__).parent)])
    environment = {"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}}
    ray.init("local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()
