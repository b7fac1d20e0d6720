"""The cores beside a GPU: those of its NUMA node."""

import os
from pathlib import Path
from typing import Any

import torch

_DEVICES = Path("/sys/bus/pci/devices")


def use_cores_of_gpu(index: int) -> None:
    """Let this process, and what it starts, run on the cores beside a GPU alone. Does nothing where they are unknown,
    or are not this process's."""
    found: object = torch.cuda.get_device_properties(index)
    parts: list[Any] = [getattr(found, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if None in parts or not hasattr(os, "sched_setaffinity"):
        return
    cores = cores_beside("{:04x}:{:02x}:{:02x}.0".format(*parts)) & os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)


def cores_beside(address: str, devices: Path = _DEVICES) -> set[int]:
    """Cores near the device with this PCI address, as the kernel says it ("0-15,32-47"); none if it does not."""
    try:
        text = (devices / address / "local_cpulist").read_text().strip()
        ends = [part.split("-") for part in text.split(",") if part]
        return {core for first, *last in ends for core in range(int(first), int((last or [first])[0]) + 1)}
    except (OSError, ValueError):
        return set()
