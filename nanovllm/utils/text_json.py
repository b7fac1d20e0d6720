"""JSON of one line: read, with what others write, and written so that every reader splits lines alike."""

import base64
import json
import math
from typing import Any

from nanovllm.utils.checks import quoted

# A line is pickled, copied and written by functions that call themselves for each level, and Python has an end to that.
MAX_DEPTH = 100
_TOO_DEEP = f"is nested more than {MAX_DEPTH} deep"
_ESCAPES = {chr(code): f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}  # line ends to some readers, not to JSON


def parse_json(text: str) -> Any:
    """A value, in which NaN and Infinity are numbers. Raises ValueError."""
    value = decode_json(text)
    if text.count("[") + text.count("{") > MAX_DEPTH:
        check_depth(value)
    return value


def decode_json(text: str) -> Any:
    """The same of any depth that Python can read."""
    try:
        return _decoder.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None


def check_depth(value: Any) -> None:
    """Raises ValueError for lists and objects that are nested too deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [each for item in level if isinstance(item, dict | list) for each in _items(item)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{quoted(twice)} is there twice")
    return value


_decoder = json.JSONDecoder(object_pairs_hook=_object)


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def to_json(value: Any) -> str:
    """JSON of one line, without characters at which a reader may end a line. NaN and infinity become null, and what
    JSON lacks becomes text."""
    text = as_json(value)
    if not text.isascii():
        for character, escape in _ESCAPES.items():
            text = text.replace(character, escape)
    return text


def as_json(value: Any) -> str:
    """The same with all characters as they are, for a prompt."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_as_text, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, default=_as_text)
    try:
        text.encode()
        return text
    except UnicodeEncodeError:  # Half of a surrogate pair can only be escaped.
        return json.dumps(_finite(value), default=_as_text)


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
