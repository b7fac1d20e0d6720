"""Columns: the arrays that one part of the engine has of a step's rows."""

from typing import Any

import numpy as np
from torch import Tensor

from nanovllm.engine.step import Rows, Step, StepKind
from nanovllm.layers.backends.backend import AttentionBackend, Layout

ContextFields = dict[str, Any]  # some of a `Context`


class Columns:
    """Arrays that go to the device with a step's tokens, in the same copy. A feature declares them here, so the core
    need not know it.

    Those of decode, mixed and speculative steps have a fixed place on the device, where CUDA graphs read them: `layout`
    declares it, `write` fills it on the host. A prefill has arrays of its own size, from `prefill`. Either way
    `context` hands the device's tensors to whoever reads them.
    """

    def layout(self, max_rows: int) -> Layout:
        """{name: (shape, numpy dtype)} of the largest step but a prefill. Names are unique in an engine."""
        return {}

    def is_used(self, step: Step) -> bool:
        """Whether anybody in the step asks for it. If nobody does, it costs the step nothing."""
        return True

    def write(self, step: Step, rows: Rows, host: dict[str, np.ndarray], num_rows: int) -> dict[str, np.ndarray]:
        """Fill its arrays for a step that is no prefill.

        Args:
            host: all arrays of the layouts. Those of `DecodeInputs` are filled.
            num_rows: rows of the step, padding included.

        Returns:
            The part of each array that the device reads: its beginning, in every dimension.
        """
        return {}

    def prefill(self, step: Step, rows: Rows) -> dict[str, np.ndarray]:
        """Its arrays of a prefill, each of any shape."""
        return {}

    def pretend(self, step: Step) -> None:
        """Give the sequences of a step of the start, whose results mean nothing, what the others write of them."""
        return None

    def context(self, arrays: dict[str, Tensor], num_rows: int, kind: StepKind) -> ContextFields:
        """Fields of the `Context` of a step that is no prefill. Where it runs for a CUDA graph, later steps replace the
        content.

        arrays: all arrays of the layouts, whole, on the device.
        """
        return {}

    def prefill_context(self, arrays: dict[str, Tensor], step: Step) -> ContextFields:
        """Fields of the `Context` of a prefill. arrays: those of all columns. step: a worker's has no sequences."""
        return {}

    def largest_prefill(self, num_tokens: int) -> ContextFields:
        """Fields of the `Context` of the largest prefill, by which an engine's start measures how much memory steps
        need; what is computed for them counts too."""
        return {}


class AttentionColumns(Columns):
    """What an attention back end declares: plans of how the step's keys are cut into pieces of work."""

    def __init__(self, backend: AttentionBackend):
        """backend: prepared for as many rows as there can be."""
        self._backend = backend
        self._has_arrays = bool(backend.layout())

    def layout(self, max_rows):
        return self._backend.layout()

    def is_used(self, step):
        return self._has_arrays

    def write(self, step, rows, host, num_rows):
        if step.kind.shares_reads:
            of_groups = np.zeros(num_rows, np.int32)
            of_groups[rows.heads] = np.bincount(rows.owners[: rows.num_sampled])
            host = host | {"group_rows": of_groups}
        return self._backend.host_arrays(host, num_rows)

    def context(self, arrays, num_rows, kind):
        return {"attention": self._backend.arguments(arrays, num_rows, kind.shares_reads)}
