"""A line on its way from the reading process to the engine."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from nanovllm.jobs.inputs import RawLine
from nanovllm.jobs.lines import LineId

NO_IMAGES = "this model reads no images"


class Prepared(NamedTuple):
    """A line on its way. Exactly one of line and error is given."""

    position: int  # of those that this process reads, from 0, in the order of the input
    id: LineId
    file: str
    number: int
    line: Any  # of its task: a Line, whose prompt is token ids, or a PooledLine
    error: str | None


class Preparer(Protocol):
    """Turns lines into requests, many at a time."""

    def prepare(self, raw_lines: Iterable[tuple[int, RawLine]]) -> list[Prepared]:
        """raw_lines: with their positions. Raises nothing: what is wrong with a line is its error."""


@runtime_checkable
class ImagePreparer(Preparer, Protocol):
    """One whose lines may have images. These are large, and so they are read a few lines at a time, when these are
    about to go to the engine."""

    def read_images(self, prepared: Prepared) -> Prepared:
        """The line with its images, and a prompt that has their tokens. Several threads call it. Raises ImportError
        for a package that is missing."""
