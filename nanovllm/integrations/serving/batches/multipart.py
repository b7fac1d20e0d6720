"""multipart/form-data as it comes, so that a file goes to the disk and is never whole in memory.

The form is RFC 7578's, the lines between its parts are RFC 2046's.
"""

import re
from collections.abc import Callable, Iterator

_MAX_HEADERS = 16 << 10  # bytes of the headers of a part
_MAX_PADDING = 256  # spaces after a line between parts
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*([a-z]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)


class Part:
    """The beginning of a part.

    Attributes:
        name: of the form's field.
        filename: None if the field is no file.
    """

    def __init__(self, name: str, filename: str | None):
        self.name, self.filename = name, filename


class FormReader:
    """Takes a body in pieces of any size, and says what is in it: a Part, then its content in pieces, then the next."""

    def __init__(self, content_type: str):
        """content_type: the header's value. Raises ValueError if it is no form's, or has no boundary."""
        kind = content_type.partition(";")[0].strip().lower()
        found = _BOUNDARY.search(content_type)
        if kind != "multipart/form-data" or found is None:
            raise ValueError("the body must be a form: send 'Content-Type: multipart/form-data' with a boundary")
        self._delimiter = b"\r\n--" + (found[1] or found[2]).encode("latin-1", "replace")
        # The first line between parts may be the first of the body. What is before it is of no part.
        self._buffer = bytearray(b"\r\n")
        self._is_in_part = False  # False: before the first part
        self._state: Callable[[], tuple[Part | bytes | None, bool]] = self._content
        self.has_ended = False

    def feed(self, piece: bytes) -> Iterator[Part | bytes]:
        """What is in the body up to this piece. Raises ValueError for what is no form."""
        self._buffer += piece
        while True:
            found, has_more = self._state()
            if found is not None:
                yield found
            if not has_more:
                return

    def _content(self) -> tuple[bytes | None, bool]:
        place = self._buffer.find(self._delimiter)
        # The end of the buffer may be the beginning of a delimiter.
        size = place if place >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
        content = bytes(self._buffer[:size]) if self._is_in_part and size else None
        del self._buffer[:size]
        if place < 0:
            return content, False
        del self._buffer[: len(self._delimiter)]
        self._state = self._between
        return content, True

    def _between(self) -> tuple[None, bool]:
        """After a delimiter: `--` at the end of the form, else the end of a line."""
        if self._buffer.startswith(b"--"):
            self.has_ended = True
            self._state = self._after
            return None, True
        line, end, _ = self._buffer.partition(b"\r\n")
        if line.strip(b" \t\r-") or len(line) > _MAX_PADDING or (end and b"-" in line):
            raise ValueError("the form is damaged: a line between two parts does not end")
        if not end:
            return None, False
        del self._buffer[: len(line)]  # Its end stays: there may be no header after it.
        self._state = self._headers
        return None, True

    def _headers(self) -> tuple[Part | None, bool]:
        headers, end, _ = self._buffer.partition(b"\r\n\r\n")
        if len(headers) > _MAX_HEADERS:
            raise ValueError(f"the form is damaged: a part has more than {_MAX_HEADERS} bytes of headers")
        if not end:
            return None, False
        del self._buffer[: len(headers) + 4]
        self._is_in_part = True
        self._state = self._content
        return _read_headers(headers.decode("utf-8", "replace")), True

    def _after(self) -> tuple[None, bool]:
        self._buffer.clear()
        return None, False


def _read_headers(text: str) -> Part:
    for line in text.split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            parameters = {key.lower(): plain or _unescape(quoted) for key, quoted, plain in _PARAMETER.findall(value)}
            if "name" in parameters:
                return Part(parameters["name"], parameters.get("filename"))
    raise ValueError("the form is damaged: a part has no name")


def _unescape(text: str) -> str:
    """Browsers and httpx write a quote as %22, others as a backslash and a quote."""
    return re.sub(r"\\(.)", r"\1", text).replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")
