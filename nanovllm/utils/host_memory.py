"""How much memory this process may use on its machine: the machine's, a container's, and the shell's limit."""

import os
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")
# The files of a control group: its limit, what it uses, and the key in memory.stat of what the kernel would give back.
_V2 = "memory.max", "memory.current", "inactive_file"
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


class HostMemory(NamedTuple):
    """Bytes.

    Attributes:
        total: what this process could have if no other used any.
        available: what it can have now.
        limit: what sets the smaller of the limits, in words.
    """

    total: int
    available: int
    limit: str


def host_memory(root: Path = _ROOT) -> HostMemory:
    """root: where /proc and /sys are, for tests."""
    limits = [_machine(root), *_control_groups(root)]
    limits += [_address_space(root)] if root == _ROOT else []
    known = [limit for limit in limits if limit is not None]
    smallest = min(known, key=lambda memory: memory.available)
    return smallest._replace(total=min(memory.total for memory in known))


def _machine(root: Path) -> HostMemory:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        total, available = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    except (OSError, KeyError, ValueError, IndexError):  # macOS has no such file.
        available = total
    return HostMemory(total, available, "this machine")


def _control_groups(root: Path) -> list[HostMemory | None]:
    """The limits of this process's control group and of all around it, of either version."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        folder = Path(path.strip("/"))
        # In a container the path may be that of the host, and its own group is the mount itself.
        found += [_control_group(mount / part, _V1 if controllers else _V2) for part in (folder, *folder.parents)]
    return found


def _control_group(folder: Path, names: tuple[str, str, str]) -> HostMemory | None:
    limit, used, reclaimable = names
    try:
        total, in_use = int((folder / limit).read_text()), int((folder / used).read_text())  # "max" is no number.
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    available = max(0, total - in_use + int(stat.get(reclaimable, 0)))
    return HostMemory(total, available, "this process's control group (a container's limit)")


def _address_space(root: Path) -> HostMemory | None:
    """What `ulimit -v` sets."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        used = int((root / "proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (ImportError, OSError, ValueError):
        return None
    return HostMemory(limit, max(0, limit - used), "the address space of this process (ulimit -v)")
