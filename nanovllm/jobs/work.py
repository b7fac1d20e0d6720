"""What a call has to do: the lines that are not done, read by one process or by several."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from nanovllm.jobs.arguments import Arguments
from nanovllm.jobs.inputs import Inputs
from nanovllm.jobs.prepared import Prepared
from nanovllm.jobs.reader import ReadAhead, ReadPlan
from nanovllm.jobs.writer import Finished

_WINDOW = 4096  # Lines that one reading process takes before the next one; they are grouped by their beginnings.


@dataclass
class Work:
    """The lines of a job without an answer."""

    arguments: Arguments
    inputs: Inputs
    corrections: Inputs  # lines that are read instead of some of the input's
    corrected: np.ndarray  # int64: places of these in the input
    is_done: np.ndarray  # bool [num_lines]: lines that have a row in the folder
    early: list[Finished]  # finished, and waiting for lines before them
    is_early: np.ndarray  # bool [num_lines]

    @property
    def num_lines(self) -> int:
        """Lines of the whole job."""
        return len(self.is_done)

    @property
    def num_left(self) -> int:
        """Lines to answer."""
        return self.num_lines - int((self.is_done | self.is_early).sum())

    @contextmanager
    def read(self, num_processes: int) -> Iterator[list[Iterable[Prepared]]]:
        """A block with an iterator of lines for each process that reads. With one, lines have their positions among all
        that are not done."""
        with ExitStack() as stack:
            readers = [stack.enter_context(ReadAhead(plan)) for plan in self._plans(num_processes)]
            yield [self._place(reader) for reader in readers] if len(readers) == 1 else list(readers)

    def _plans(self, num_processes: int) -> list[ReadPlan]:
        is_elsewhere = self.is_done | self.is_early
        is_elsewhere[self.corrected] = True
        windows = np.arange(self.num_lines) // _WINDOW
        masks = [is_elsewhere | (windows % num_processes != i) for i in range(num_processes)]
        plans = [self.arguments.read_plan(self.inputs, mask) for mask in masks if not mask.all()]
        if not self.is_done[self.corrected].all():
            plans.append(self.arguments.read_plan(self.corrections, self.is_done[self.corrected]))
        return plans

    def _place(self, lines: Iterable[Prepared]) -> Iterator[Prepared]:
        if not self.early:
            yield from lines
            return
        positions = (np.cumsum(~self.is_done) - 1)[~(self.is_done | self.is_early)]
        for prepared in lines:
            yield prepared._replace(position=int(positions[prepared.position]))
