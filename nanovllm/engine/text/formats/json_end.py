"""Where a JSON object ends that comes in pieces, and the call that it is."""

import json
import re
from collections.abc import Mapping
from typing import Any

# What may follow outside of texts. Anything else is no JSON.
_OUTSIDE = re.compile(r"[\s,:+\-.0-9A-Za-z]*")
_INSIDE = re.compile(r'[^"\\]*')
_OPENINGS, _CLOSINGS = "{[", "}]"
INCOMPLETE, WRONG = -1, -2
MAY_END_JSON = frozenset(_CLOSINGS)


class JsonEnd:
    """Finds the end of an object or array that begins at a place of a text which grows. A tag in a text of the JSON
    ends nothing. Each character is looked at once."""

    def __init__(self, start: int):
        self._at, self._depth, self._is_inside = start, 0, False
        self._end = INCOMPLETE

    def find(self, text: str) -> int:
        """Where it ends; INCOMPLETE, or WRONG if this becomes no JSON whatever follows."""
        if self._end != INCOMPLETE:
            return self._end
        at = self._at
        while True:
            if self._is_inside:
                at = _INSIDE.match(text, at).end()  # type: ignore[union-attr]
                if at >= len(text) or (text[at] == "\\" and at + 1 == len(text)):
                    break
                self._is_inside = text[at] == "\\"
                at += 1 + self._is_inside
                continue
            at = _OUTSIDE.match(text, at).end()  # type: ignore[union-attr]
            if at >= len(text):
                break
            character = text[at]
            at += 1
            if character == '"':
                self._is_inside = True
            elif character in _OPENINGS:
                self._depth += 1
            elif character in _CLOSINGS:
                self._depth -= 1
                if self._depth == 0:
                    self._end = at
                    break
            else:
                self._end = WRONG
                break
        self._at = at
        return self._end


def parse(text: str) -> Any:
    """The JSON of a text, in which line feeds within texts are allowed, as models write them. None if it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def read_call(found: Any) -> tuple[str, dict[str, Any]] | None:
    """The name and the arguments of a call as an object of JSON has them; None if it is no call."""
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):  # as OpenAI's API writes them
        arguments = parse(arguments or "{}")
        if arguments is None:
            return None
    arguments = {} if arguments is None else arguments
    return (found["name"], dict(arguments)) if isinstance(arguments, Mapping) else None
