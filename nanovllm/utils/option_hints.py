"""What to write instead of an option that does not exist: the nearest known name, or a hint for users of vLLM."""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Concatenate, TypeVar

from typing_extensions import ParamSpec

from nanovllm.utils.checks import quoted

Function = TypeVar("Function", bound=Callable)
Options = ParamSpec("Options")

# {who has options: {an option that it does not have: what to do instead}}, for users of vLLM and transformers.
HINTS = json.loads(Path(__file__).with_name("option_hints.json").read_text(encoding="utf-8"))


def unknown_option(name: str, known: Iterable[str], hints: Mapping[str, str], otherwise: str = "") -> TypeError:
    """The error for an unknown option. It says what to use instead: the hint, the nearest known name, or `otherwise`
    (by default the known names)."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    nearest = f"did you mean {near[0]!r}?" if near else otherwise or f"known: {', '.join(known)}"
    return TypeError(f"unknown option {quoted(name)}: {hints.get(name, nearest)}")


def explains_unknown_options(
    hints: Mapping[str, str], otherwise: Callable[[str, object], str] = lambda name, value: ""
) -> Callable[[Function], Function]:
    """A decorator: an unknown keyword of the function or class raises `unknown_option`'s TypeError. `otherwise` makes
    that function's argument from the keyword and its value."""

    def decorate(function: Any) -> Any:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function
        kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        known = {name: None for name, p in signature(function).parameters.items() if p.kind in kinds and name != "self"}

        @wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            for name, value in options.items():
                if name not in known:
                    raise unknown_option(name, known, hints, otherwise(name, value))
            return function(*args, **options)

        return checked

    return decorate


def takes_options_of(
    source: Callable[Options, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Options], None]]:
    """A decorator of a method that passes all its arguments on to `source`: type checkers, editors and help() see the
    arguments of `source`, which are declared only there."""

    def decorate(method: Any) -> Any:
        self = Parameter("self", Parameter.POSITIONAL_ONLY)
        own = signature(source)
        method.__signature__ = own.replace(parameters=[self, *own.parameters.values()], return_annotation=None)
        return method

    return decorate
