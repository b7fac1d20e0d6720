"""Is there a mistake that every line would have, or a missing package? Then it is one of the call, and no line's."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from nanovllm import LLM, RequestChecker
from nanovllm.jobs.arguments import Arguments
from nanovllm.jobs.inputs import Inputs
from nanovllm.jobs.prepared import ImagePreparer, Prepared
from nanovllm.jobs.reader import make_preparer
from nanovllm.jobs.task import Task

_AT_ONCE, _IMAGES_AT_ONCE = 64, 4  # lines


def check_first_lines(arguments: Arguments, inputs: Inputs, checker: RequestChecker, all_may_fail: bool) -> None:
    """Look at lines until one can be answered. With the job's own options the first ones are checked too, whatever
    options they have.

    Args:
        all_may_fail: look at the first ones only.

    Raises ValueError for an option of the job that no line could have, or if no line can be answered, and ImportError
    for a package that is missing.
    """
    first: Prepared | None = None
    first_error = ""
    is_checked = False
    for batch in _batches(arguments, inputs):
        lines = [each.line for each in batch if each.line is not None]
        if lines and not is_checked:
            is_checked = True
            try:
                arguments.task.check_options(checker, lines)
            except (ImportError, ValueError, TypeError) as wrong:
                raise error_of_call(wrong) from wrong
        found = iter(arguments.task.check(checker, lines))
        for prepared in batch:
            error = prepared.error if prepared.line is None else next(found)
            if isinstance(error, ImportError):
                raise error_of_call(error)
            if isinstance(error, int):
                return
            if first is None:
                first, first_error = prepared, _without_place(str(error))
        if all_may_fail:
            return
    if first is not None:
        where = f"{first.file}:{first.number}"
        raise ValueError(f"input: no line can be answered; the first one, {where}: {first_error}")


class Packages:
    """Looks for a package that is missing, and that the first lines did not need. It is no mistake of a line's: with it
    the same call goes on."""

    def __init__(self, llm: LLM, task: Task):
        self._llm, self._task = llm, task
        self._checker: RequestChecker | None = None
        self._are_here = False

    def check(self, line: Any) -> None:
        """Raises ImportError if a line needs one."""
        if self._are_here or not line.may_need_packages:
            return
        if self._checker is None:
            self._checker = RequestChecker(self._llm.config, self._llm.scheduler.length_limit.num_blocks)
        (found,) = self._task.check(self._checker, [line])
        if isinstance(found, ImportError):
            raise error_of_call(found)
        self._are_here = isinstance(found, int)


def error_of_call(error: Exception | None) -> Exception:
    """What an error of a line becomes that is none of the line's."""
    kind = ImportError if isinstance(error, ImportError) else ValueError
    return kind(_without_place(str(error)))


def _without_place(text: str) -> str:
    """A message without the index of a request."""
    for name in ("prompts[", "sampling_params["):
        if text.startswith(name):
            return text.partition("]: ")[2]
    return text


def _batches(arguments: Arguments, inputs: Inputs) -> Iterator[list[Prepared]]:
    preparer = make_preparer(arguments.read_plan(inputs))
    read: Any = preparer.read_images if isinstance(preparer, ImagePreparer) else lambda prepared: prepared
    lines = enumerate(line for _, line in inputs.lines())
    while batch := list(islice(lines, _AT_ONCE)):
        # Images are large: a few lines at a time, and none behind the first line that can be answered.
        prepared = preparer.prepare(batch)
        has_images = any(getattr(each.line, "num_images", 0) for each in prepared)
        size = _IMAGES_AT_ONCE if has_images else _AT_ONCE
        for start in range(0, len(prepared), size):
            yield list(map(read, prepared[start : start + size]))
