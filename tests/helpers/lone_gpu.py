"""Is this process alone on its GPU? Tests marked `alone`, which measure the memory of a whole device, are skipped if it
is not. A plugin of pytest."""

import os
import subprocess
from collections.abc import Collection, Iterator
from multiprocessing import active_children
from typing import Any, NamedTuple

import pytest
import torch

# Of a process besides torch's tensors: CUDA's context, loaded kernels, libraries. They take 0.5 to 1 GiB on an H100.
_OWN_BESIDES = 2 << 30
_QUERY = ("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if who := _who_disturbs(item):
        pytest.skip(f"needs the GPU alone, and {who} uses it too")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    try:
        return (yield)
    except Exception:
        if who := _who_disturbs(item):  # It may have come while the test ran.
            pytest.skip(f"failed while {who} used the GPU too")
        raise


def _who_disturbs(item: pytest.Item) -> str | None:
    return others_on_gpu() if item.get_closest_marker("alone") and torch.cuda.is_available() else None


class Usage(NamedTuple):
    """What is known of a device."""

    pids: list[int]  # of processes that use it, as far as the driver shows them; perhaps numbers of another namespace
    used: int  # bytes, by anyone
    reserved: int  # bytes, by torch in this process


def others(usage: Usage, own: Collection[int]) -> str | None:
    """Who else uses a device; None if nobody is seen. own: ids of this process and of those that it has started."""
    if any(pid in own for pid in usage.pids):
        strangers = [pid for pid in usage.pids if pid not in own]
        return f"process {', '.join(map(str, strangers))}" if strangers else None
    if len(usage.pids) > len(own):  # A container sees the ids of its host: one of them is this process.
        return f"{len(usage.pids) - len(own)} other processes"
    unexplained = usage.used - usage.reserved - _OWN_BESIDES
    # Where the driver shows no processes at all.
    return f"others, {unexplained / 2**30:.1f} GiB" if not usage.pids and unexplained > 0 else None


def others_on_gpu() -> str | None:
    """Who else uses this process's device."""
    free, total = torch.cuda.mem_get_info()
    usage = Usage(_pids(str(torch.cuda.get_device_properties().uuid)), total - free, torch.cuda.memory_reserved())
    return others(usage, [os.getpid(), *(child.pid for child in active_children())])


def _pids(uuid: str) -> list[int]:
    try:
        found = subprocess.run(["nvidia-smi", *_QUERY], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return read_pids(found, uuid)


def read_pids(found: str, uuid: str) -> list[int]:
    """The processes of a device. found: rows of its id and a process's."""
    rows = (line.split(",") for line in found.splitlines() if uuid in line)
    return [int(pid) for _, pid in rows if pid.strip().isdigit()]
