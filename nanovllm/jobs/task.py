"""Task: what a job does with its lines. The seam at which a task is a file: its lines, its call, its rows.

The tasks are in `jobs/tasks`. They are pickled, and the reading process imports them without torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nanovllm.jobs.columns import Columns
from nanovllm.jobs.lines import LineId, Row
from nanovllm.jobs.prepared import Prepared, Preparer
from nanovllm.openai_format.openai_batch import Responder

if TYPE_CHECKING:  # The reading process has no torch.
    from nanovllm import LLM, ImageReader, RequestChecker

Output = Mapping[str, Any]  # of a line: what the task's `answer` makes of results; or an "error" that it failed with


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """What a job does with its lines.

    Attributes:
        name: that `--task` takes.
        line_format: the task's options, and how lines are read by them.
        counter: the one of `LLM.stats` that says how far an engine is, in tokens.
        packs_vectors: whether rows are for parts that will be Parquet: JSON holds the bytes of their vectors then.
    """

    name: ClassVar[str]
    line_format: Columns
    counter: ClassVar[str]
    packs_vectors: bool = False

    def engine_options(self) -> Row:
        """Options of LLM, that the task needs."""
        return {"task": self.name}

    def describe(self) -> Row:
        """All that answers depend on, as the manifest keeps it."""
        return {"task": self.name} | self.line_format.given()

    def of_model(self, checker: "RequestChecker") -> "Task":
        """The same task, with what it needs to know of the model. Raises ValueError for an option that the model does
        not have."""
        return self

    # -- before an engine works ----------------------------------------------------------------------------------------

    @abstractmethod
    def preparer(
        self, tokenizer: Any, max_len: int | None, chat_format: str | None, images: "ImageReader | str"
    ) -> Preparer:
        """What reads lines. Arguments as in ReadPlan. images: reads those of lines; or why none are read."""

    @abstractmethod
    def check(self, checker: "RequestChecker", lines: Sequence[Any]) -> list[int | Exception]:
        """The prompt tokens of each line, or what is wrong with it, as an engine sees it."""

    @abstractmethod
    def check_options(self, checker: "RequestChecker", lines: Sequence[Any]) -> None:
        """Raises ValueError for an option of the job that no line could have, or ImportError for a missing package.
        lines: the first ones."""

    # -- with an engine ------------------------------------------------------------------------------------------------

    @abstractmethod
    def answer(self, llm: "LLM", lines: Iterator[Prepared | None]) -> Iterator[tuple[Prepared, Output]]:
        """Give an engine all lines, which have no error, and yield their outputs as they finish, each with the object
        that was taken, or with one without its images. lines: taken as the engine needs them; after a None the next one
        is taken when a step has been computed."""

    @abstractmethod
    def num_tokens(self, output: Output) -> int:
        """By which an output has moved the `counter`."""

    # -- rows ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def row(self, line_id: LineId, line: Any, output: Output, responder: Responder) -> Row:
        """A row of the answers; arrays of one dimension among its values become lists of numbers. Raises ValueError if
        there can be none. output: one without an error."""

    @abstractmethod
    def columns(self) -> Row:
        """The types of a row's own columns in Parquet, in order: pyarrow's, or numpy's of an array's numbers."""

    def last_columns(self) -> Row:
        """Those that come after the columns of the input."""
        return {}
