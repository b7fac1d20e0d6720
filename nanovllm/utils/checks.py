"""Checks of values that users give: one message for all of them."""

import math
import reprlib
from typing import Any, NoReturn

_MAX_TEXT = 100  # characters of a text that a message quotes
_MAX_QUOTED = 400  # of any value
_MAX_BITS = 1200  # of an integer: 362 digits
_MAX_MESSAGE = 1000  # of another library's message
_LARGEST_FLOAT = 2**53  # Above it floats are not exact.


class _Quoter(reprlib.Repr):
    """Python's repr of a short value, and the beginning of a long or deep one, without looking at all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxtuple = self.maxlist = self.maxarray = self.maxdict = self.maxset = self.maxfrozenset = 10
        self.maxother = _MAX_QUOTED

    def repr_str(self, text: str, level: int) -> str:
        return repr(text) if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]!r}... ({len(text)} characters)"

    def repr_bytes(self, data: bytes, level: int) -> str:
        return repr(data) if len(data) <= _MAX_TEXT else f"{data[:_MAX_TEXT]!r}... ({len(data)} bytes)"

    def repr_int(self, number: int, level: int) -> str:
        # Python refuses to write more than 4,300 digits.
        return repr(number) if number.bit_length() <= _MAX_BITS else f"an integer of {number.bit_length()} bits"


_quoter = _Quoter()


def quoted(value: object) -> str:
    """A value as an error message shows it: its repr, or the beginning of that if it is long. A collection may have any
    size and depth."""
    text = " ".join(map(str.strip, _quoter.repr(value).splitlines()))  # Arrays have several.
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."


def shortened(message: object) -> str:
    """Another library's message for one of ours. Such messages may quote all of their input."""
    text = str(message)
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}... ({len(text)} characters)"


def one_line(error: BaseException) -> str:
    """Another library's error, for a message of ours."""
    return f"{type(error).__name__}: {shortened(' '.join(str(error).split()))}"


def require(name: str, value: object, ok: bool, allowed: str) -> None:
    """Raises ValueError, with the name, the value and what is allowed, unless ok."""
    if not ok:
        raise ValueError(f"{name}={quoted(value)}: must be {allowed}")


def half_pair(error: UnicodeEncodeError) -> str:
    """What is wrong with a text that cannot be encoded, in words that follow the text's name."""
    return (
        f"holds half of a surrogate pair, {error.object[error.start]!r} at index {error.start}, which is no character: "
        "often an emoji that was cut in two; remove it, or give both halves"
    )


def refuse_constant(name: str) -> NoReturn:
    """Refuses NaN and Infinity, as the argument parse_constant of json."""
    raise ValueError(f"{name} is no number of JSON")


def is_int(value: Any, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether this is a float without a fraction, and so small that it is exact."""
    return isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST_FLOAT
