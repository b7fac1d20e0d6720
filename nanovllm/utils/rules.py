"""Rules of options: what a field of a dataclass accepts, declared with the field, and one check of all of them."""

from collections.abc import Callable
from dataclasses import field, fields
from functools import cache
from typing import Any, NamedTuple

from nanovllm.utils.checks import is_int, quoted, require


class Rule(NamedTuple):
    """What one option accepts.

    Attributes:
        is_right: whether a value is accepted.
        allowed: what is accepted, in words that follow "must be"; or a function that says it of what `is_right` gets.
        convert: to the one spelling that is kept. A value of a wrong kind stays as it is, for the message.
        is_right_entry: of a collection: whether one of its entries is accepted.
        is_of_all: `is_right` gets the whole object. Its other rules hold then.
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


def integer(low: int, high: int, allowed: str = "", optional: bool = False) -> Rule:
    allowed = allowed or f"an integer in {low}..{high}"
    return Rule(lambda value: is_int(value, low, high) or (optional and value is None), allowed)


def one_of(*choices: str, optional: bool = False) -> Rule:
    allowed = f"{'None or ' if optional else ''}one of {', '.join(choices)}"
    is_right = lambda value: (isinstance(value, str) and value in choices) or (optional and value is None)  # noqa: E731
    return Rule(is_right, allowed, choices=choices)


def together(is_right: Callable[[Any], bool], allowed: str | Callable[[Any], str]) -> Rule:
    """A rule of several options. Both functions get the whole object."""
    return Rule(is_right, allowed, is_of_all=True)


def option(default: Any, *rules: Rule, **metadata: Any) -> Any:
    """A field with these rules. Its default is right, whatever they say."""
    return field(default=default, metadata={"rules": rules, **metadata})


@cache
def rules_of(declared: type) -> dict[str, tuple[Rule, ...]]:
    """The rules of each field of a dataclass that has some."""
    return {each.name: each.metadata["rules"] for each in fields(declared) if "rules" in each.metadata}


@cache
def _in_order(declared: type) -> tuple[list[tuple[str, Any, Rule]], list[tuple[str, Any, Rule]]]:
    """Names, defaults and rules: those of single values, and those of whole objects."""
    found = [(each.name, each.default, rule) for each in fields(declared) for rule in each.metadata.get("rules", ())]
    return [each for each in found if not each[2].is_of_all], [each for each in found if each[2].is_of_all]


def check_rules(options: Any) -> None:
    """Convert and check every option of an object of a dataclass. Raises ValueError for the first wrong one, with its
    name, the value and what is allowed."""
    of_one, of_all = _in_order(options.__class__)
    for name, default, rule in of_one:
        value = getattr(options, name)
        if value is default:  # as most are: a request is made in a few microseconds
            continue
        try:
            if rule.convert is not None:
                value = rule.convert(value)
                object.__setattr__(options, name, value)
            if value is not default and not rule.is_right(value):
                require(name, value, False, rule.explain(value))
        except UnicodeEncodeError as error:  # of a rule that encodes texts: half of a surrogate pair is none
            raise ValueError(f"{name}={quoted(error.object)}: cannot be encoded: {error}") from None
    for name, default, rule in of_all:
        value = getattr(options, name)
        is_default = type(value) is type(default) and value == default
        if not is_default and not rule.is_right(options):
            require(name, value, False, rule.explain(options))
