"""Checks of values that users give: one message for all of them."""

import math
from typing import Any, NoReturn


def require(name: str, value: object, ok: bool, allowed: str) -> None:
    """Raises ValueError, with the name, the value and what is allowed, unless ok."""
    if not ok:
        raise ValueError(f"{name}={value!r}: must be {allowed}")


def refuse_constant(name: str) -> NoReturn:
    """For the argument parse_constant of json: NaN and Infinity."""
    raise ValueError(f"{name} is no number of JSON")


def is_int(value: Any, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
