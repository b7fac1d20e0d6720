"""Rules of options: what a field of a dataclass accepts, declared with the field, and one check of all of them."""

from collections.abc import Callable
from dataclasses import field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from nanovllm.utils.checks import half_pair, is_int, is_number, quoted, require

Given = TypeVar("Given")
Kept = TypeVar("Kept")


class Converted(Generic[Given, Kept]):
    """The type of a field that callers give as one type, and that the checks turn into another. Type checkers read the
    two methods; at run time the field is a plain attribute."""

    if TYPE_CHECKING:

        def __get__(self, options: object, owner: type) -> Kept: ...

        def __set__(self, options: object, value: Given) -> None: ...


class Rule(NamedTuple):
    """What one option accepts. Its default is right, whatever its rules say.

    Attributes:
        is_right: whether a value is accepted.
        allowed: what is accepted, in words that follow "must be"; or a function that says it of what `is_right` gets.
        convert: to the one spelling that is kept. A value of a wrong kind stays as it is, for the message.
        is_right_entry: of a collection: whether one of its entries is accepted.
        is_of_all: `is_right` gets the whole object, after all other rules.
        choices: the values, if there are few.
    """

    is_right: Callable[[Any], bool]
    allowed: str | Callable[[Any], str]
    convert: Callable[[Any], Any] | None = None
    is_right_entry: Callable[[Any], bool] | None = None
    is_of_all: bool = False
    choices: tuple[str, ...] = ()

    def explain(self, given: Any) -> str:
        """What is allowed, and the first wrong entry of a collection, which may be too long to be shown."""
        allowed = self.allowed if isinstance(self.allowed, str) else self.allowed(given)
        if self.is_right_entry is None or not isinstance(given, tuple) or len(given) < 2:
            return allowed
        wrong = next((entry for entry in enumerate(given) if not self.is_right_entry(entry[1])), None)
        return allowed if wrong is None else f"{allowed}; entry {wrong[0]} is {quoted(wrong[1])}"


FLAG = Rule(lambda value: isinstance(value, bool), "True or False")


def integer(low: int, high: int, allowed: str = "", none: bool = False) -> Rule:
    """none: None is accepted too."""
    allowed = allowed or f"an integer in {low}..{high}"
    return Rule(lambda value: is_int(value, low, high) or (none and value is None), allowed)


def number(low: float, high: float, allowed: str, none: bool = False) -> Rule:
    return Rule(lambda value: (is_number(value) and low <= value <= high) or (none and value is None), allowed)


def one_of(*choices: str) -> Rule:
    allowed = f"one of {', '.join(choices)}"
    return Rule(lambda value: isinstance(value, str) and value in choices, allowed, choices=choices)


def together(is_right: Callable[[Any], bool], allowed: str | Callable[[Any], str]) -> Rule:
    """A rule of several options. Both functions get the whole object."""
    return Rule(is_right, allowed, is_of_all=True)


def option(default: Any, *rules: Rule, **metadata: Any) -> Any:
    """A field with these rules."""
    return field(default=default, metadata={"rules": rules, **metadata})


@cache
def rules_of(declared: type) -> list[tuple[str, Any, Rule]]:
    """Names and defaults of a dataclass's fields with their rules, in the order in which they are checked."""
    found = [(each.name, each.default, rule) for each in fields(declared) for rule in each.metadata.get("rules", ())]
    return sorted(found, key=lambda each: each[2].is_of_all)


def check_rules(options: Any) -> None:
    """Convert and check all options of an object of a dataclass. Raises ValueError with the name and value of the first
    wrong one, and what is allowed."""
    for name, default, rule in rules_of(options.__class__):
        value = getattr(options, name)
        if value is default or (type(value) is type(default) and value == default):
            continue
        try:
            if rule.convert is not None:
                value = rule.convert(value)
                object.__setattr__(options, name, value)
            checked = options if rule.is_of_all else value
            if value is not default and not rule.is_right(checked):
                require(name, value, False, rule.explain(checked))
        except UnicodeEncodeError as error:  # of a rule that encodes texts: half of a surrogate pair is none
            raise ValueError(f"{name}={quoted(error.object)}: {half_pair(error)}") from None
