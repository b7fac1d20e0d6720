"""read_image: an image in any form that a caller may have it in, to its pixels."""

import base64
import binascii
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from nanovllm.images.decode import decode, from_pillow
from nanovllm.images.files import read_file
from nanovllm.images.pixels import ImagePixels
from nanovllm.images.remote import fetch
from nanovllm.images.rules import ANYWHERE, ImageRules
from nanovllm.utils.checks import quoted

FORMS = "a path, a data: URL, an http(s) URL, the bytes of a file, or Pillow's image"
_SPACE = re.compile(r"\s+")


def read_image(source: Any, *, rules: ImageRules | None = None) -> ImagePixels:
    """The pixels of an image: upright by its EXIF data, in RGB, over white where it is transparent.

    Args:
        source: a path, a file://, data:, http:// or https:// URL; the bytes of a file; Pillow's image; an ImagePixels,
            which is returned; or {"bytes": ..., "path": ...}, as tables of the package datasets have it.
        rules: None reads any path, and nothing from the network.

    Raises:
        ValueError: no JPEG, PNG, WebP or GIF, or one that is broken, too large or not allowed. The message begins with
            what the source is.
        TypeError: the source has another type.
        ImportError: Pillow is missing.
    """
    rules = ImageRules(image_root=ANYWHERE) if rules is None else rules
    if isinstance(source, ImagePixels):
        return source
    try:
        if isinstance(source, Mapping) and source.get("bytes") is not None:
            source = source["bytes"]
        elif isinstance(source, Mapping):
            source = source.get("path")
        if isinstance(source, bytes | bytearray | memoryview):
            return decode(bytes(source), rules)
        if isinstance(source, str | os.PathLike):
            return decode(_read_text(os.fspath(source), rules), rules)
        if hasattr(source, "getexif") and hasattr(source, "convert"):
            return from_pillow(source, rules)
    except ValueError as error:
        raise ValueError(f"image {name_of(source)}: {error}") from error
    raise TypeError(f"image {name_of(source)}: must be {FORMS}, not {type(source).__name__}")


def name_of(source: Any) -> str:
    """A source in a message."""
    if isinstance(source, bytes | bytearray | memoryview):
        return f"of {len(source)} bytes"
    if isinstance(source, str) and source[:5].lower() == "data:":
        return f"{source[:30]!r}... ({len(source)} characters)"
    return quoted(os.fspath(source) if isinstance(source, os.PathLike) else source)


def _read_text(source: Any, rules: ImageRules) -> bytes:
    if not isinstance(source, str):
        raise ValueError("must be a text, not a path of bytes")
    scheme = source.split(":", 1)[0].lower() if ":" in source[:12] else ""
    if scheme == "data":
        return _of_data_url(source, rules)
    if scheme in ("http", "https"):
        return fetch(source, rules)
    if scheme != "file" and "://" in source[:24]:
        raise ValueError(f"URLs of {scheme or 'this kind'} are not read; file, data, http and https are")
    if not source:
        raise ValueError("is empty")
    return read_file(source, rules)


def _of_data_url(url: str, rules: ImageRules) -> bytes:
    head, comma, text = url[5:].partition(",")
    if not comma:
        raise ValueError("is no data: URL, which is data:image/png;base64,...")
    if not head.lower().endswith(";base64"):
        rules.check_bytes(len(text) / 3)
        return unquote_to_bytes(text)
    rules.check_bytes(len(text) * 3 / 4 - 2)
    if "%" in text:
        text = unquote(text)
    text = _SPACE.sub("", text).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"is not base64: {error}") from error
