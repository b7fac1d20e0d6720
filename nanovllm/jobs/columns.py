"""Which columns of a line are its prompt, and which ones are data that its answer repeats."""

import math
from collections.abc import Container
from dataclasses import dataclass, fields
from functools import cached_property
from string import Formatter
from typing import Any, ClassVar

from nanovllm.openai_format.request_names import Row
from nanovllm.utils.rules import Rule, check_rules, option
from nanovllm.utils.text_json import as_json


@dataclass(frozen=True, kw_only=True)
class Columns:
    """How the columns of a job's lines are read, whatever the job does with them. Raises ValueError for a wrong option.

    Attributes:
        PROMPTS: the names that a prompt's column may have, unless prompt_column or template says otherwise.
    """

    prompt_column: str | None = None  # None: one of PROMPTS
    id_column: str = option("id", Rule(lambda name: isinstance(name, str) and name != "", "a column's name"))
    template: str | None = None  # makes the prompt of columns: "Summarise: {text}"
    keeps_receipts: bool = False  # whether rows have receipts: an engine's option decides it

    PROMPTS: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        if self.template is not None and self.prompt_column is not None:
            raise ValueError("template: makes the prompt, so that prompt_column cannot be given as well")
        check_rules(self)
        _ = self._template_parts

    def given(self) -> Row:
        """Those of the options, apart from `sampling` and the engine's, that are not as by default."""
        names = [option.name for option in fields(self) if option.name not in ("sampling", "keeps_receipts")]
        defaults = type(self)()
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(defaults, name)}

    @cached_property
    def added_keys(self) -> tuple[str, ...]:
        """Those that an answer may have, beside the columns that it repeats."""
        raise NotImplementedError

    @cached_property
    def prompt_names(self) -> tuple[str, ...]:
        """The columns of which a prompt is made."""
        if self.template is not None:
            return tuple(name for _, name in self._template_parts if name is not None)
        return self.PROMPTS if self.prompt_column is None else (self.prompt_column,)

    @cached_property
    def _template_parts(self) -> list[tuple[str, str | None]]:
        """Pairs of a text and the column that follows it."""
        if self.template is None:
            return []
        try:
            parsed = list(Formatter().parse(self.template))
        except ValueError as error:
            raise ValueError(f"template={self.template!r}: {error}; a brace of the text is written twice") from None
        if not any(name for _, name, _, _ in parsed) or any(name == "" or spec or end for _, name, spec, end in parsed):
            raise ValueError(f"template={self.template!r}: must name columns in braces, as in 'Summarise: {{text}}'")
        return [(text, name) for text, name, _, _ in parsed]

    def check_columns(self, columns: list[str], has_requests: bool = False) -> None:
        """Raises ValueError if no line has a prompt, because no line has its column. columns: of all lines.
        has_requests: whether some are requests of OpenAI's, whose prompts are in their bodies."""
        if has_requests:
            return
        names = names_of(columns)
        if self.template is None and not set(self.prompt_names) & set(columns):
            if self.prompt_column is not None:
                raise ValueError(f"prompt_column={self.prompt_column!r}: no line has this column; there are: {names}")
            raise ValueError(
                f"input: no line has a prompt: {' or '.join(map(repr, self.PROMPTS))}; name its column by "
                f"prompt_column (--prompt-column), or make it of columns by template (--template); there are: {names}"
            )
        for name in self.prompt_names if self.template is not None else ():
            if name not in columns:
                raise ValueError(f"template={self.template!r}: no line has the column {name!r}; there are: {names}")

    def parameter_columns(self, columns: list[str]) -> list[str]:
        """Those of the input's columns that are parameters of their lines."""
        return []

    def copies(self, name: str) -> bool:
        """Whether answers repeat this column of the input, as `column_name`."""
        return name != self.id_column and name not in self.prompt_names

    def data(self, row: Row) -> Row:
        """What the answer to a line repeats of it."""
        return {column_name(name, row, self.added_keys): value for name, value in row.items() if self.copies(name)}

    def _prompt(self, row: Row) -> tuple[str, Any]:
        """The name and the value of a line's prompt. The name is "" where a template makes it. Raises ValueError."""
        if self.template is not None:
            return "", "".join(text if name is None else text + _text(row, name) for text, name in self._template_parts)
        given = [name for name in self.prompt_names if not is_missing(row.get(name))]
        if len(given) == 1:
            return given[0], row[given[0]]
        columns = ", ".join(map(repr, list(row)[:10])) or "none"
        if given:
            raise ValueError(f"has {' and '.join(map(repr, given))}: a line has one prompt")
        missing = " or ".join(map(repr, self.prompt_names))
        raise ValueError(f"has no prompt: {missing} is missing; its columns: {columns}")


def names_of(columns: list[str]) -> str:
    """The first ones, for a message."""
    return ", ".join(map(repr, columns[:20]))


def is_missing(value: Any) -> bool:
    """Whether a cell has no value: tables write null or NaN."""
    return value is None or (isinstance(value, float) and value != value)


def column_name(name: str, columns: Container[str], added: Container[str]) -> str:
    """What one of the columns of the input is called in the output, where the names of `added` are taken."""
    if name not in added:
        return name
    name = f"input_{name}"
    while name in columns:
        name = f"input_{name}"
    return name


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"has no {name!r}, which the template needs; its columns: {', '.join(map(repr, row))}")
    return value if isinstance(value, str) else as_json(value)
