"""How much memory a process may use: of the machine, and of the control groups that it is in."""

import subprocess
import sys

import pytest

from nanovllm.utils.host_memory import host_memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n"


def write(root, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def group(total, used, reclaimable=0) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {reclaimable}\n"
    return {"memory.max": f"{total}\n", "memory.current": f"{used}\n", "memory.stat": stat}


def test_the_machines(tmp_path):
    write(tmp_path, {"proc/meminfo": MEMINFO})
    assert host_memory(tmp_path) == (1000 * 1024, 600 * 1024, "this machine")


def test_a_machine_without_proc(tmp_path):
    """macOS."""
    memory = host_memory(tmp_path)
    assert memory.total == memory.available > 2**28


@pytest.mark.parametrize("path", ["/", "/outer/inner"], ids=["a container's", "nested"])
def test_a_control_group_and_all_around_it(tmp_path, path):
    write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": f"0::{path}\n"})
    mount = tmp_path / "sys/fs/cgroup"
    write(mount, group(500_000, 400_000, 100_000) if path == "/" else {})
    write(mount / "outer", group(500_000, 400_000, 100_000))
    write(mount / "outer/inner", group("max", 300_000))
    memory = host_memory(tmp_path)
    assert (memory.total, memory.available) == (500_000, 200_000)
    assert "container" in memory.limit


def test_a_control_group_of_the_old_version(tmp_path):
    lines = "11:cpu,cpuacct:/docker/abc\n5:memory:/docker/abc\n1:name=systemd:/docker/abc\n"
    write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": lines})
    files = {"memory.limit_in_bytes": "300000", "memory.usage_in_bytes": "290000"}
    write(tmp_path / "sys/fs/cgroup/memory", files | {"memory.stat": "total_inactive_file 40000\n"})
    assert host_memory(tmp_path)[:2] == (300_000, 50_000)


def test_a_group_with_more_than_the_machine(tmp_path):
    write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"})
    write(tmp_path / "sys/fs/cgroup", group(2**40, 5))
    assert host_memory(tmp_path) == (1000 * 1024, 600 * 1024, "this machine")


def test_the_shells_limit():
    script = (
        "import resource; from nanovllm.utils.host_memory import host_memory; "
        "resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33)); print(*host_memory()[:2])"
    )
    total, available = map(int, subprocess.check_output([sys.executable, "-c", script]).split())
    assert available < total <= 2**33
