"""Pretending to have another GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanovllm.kernels.gpu import GpuFacts

CPU = GpuFacts.of(torch.device("cpu"))
HOPPER = GpuFacts("NVIDIA H100", (9, 0), 227 * 1024, 132, 80 * 2**30)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, facts: GpuFacts = HOPPER, **changes: Any) -> None:
    """Have every GPU, or with a CPU's facts the CPU, be this one. changes: fields of GpuFacts."""
    pretended, known = replace(facts, **changes), GpuFacts.of

    def facts_of(device: torch.device) -> GpuFacts:
        return pretended if pretended.is_gpu == (device.type == "cuda") else known(device)

    monkeypatch.setattr(GpuFacts, "of", facts_of)
