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
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+[=\s]*")
_BEGINNINGS = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR")  # of a JPEG, PNG, GIF and WebP in base64
_SHORTEST = 40  # characters of an image of one pixel, or fewer
_LONGER_THAN_PATHS = 4097


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
        if isinstance(source, Mapping):
            keys = [key for key in ("bytes", "path") if source.get(key) is not None]
            if not keys:
                raise TypeError(f'image {quoted(source)}: must have "bytes" or "path", or be {FORMS}')
            source = source[keys[0]]
        if isinstance(source, bytes | bytearray | memoryview):
            return decode(bytes(source), rules)
        if isinstance(source, str | os.PathLike):
            return decode(_read_text(os.fspath(source), rules), rules)
        if hasattr(source, "ndim") and hasattr(source, "shape"):
            given = f"{type(source).__name__} of shape {tuple(source.shape)}"
            raise TypeError(f"an image must be {FORMS}, not {given}: PIL.Image.fromarray makes one of an array")
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
    if _is_base64(source):
        raise ValueError("is base64, and no path: put data:image/png;base64, in front of it")
    return read_file(source, rules)


def _is_base64(text: str) -> bool:
    """Whether it is an image in base64, or far too long for a path."""
    if not text.startswith(_BEGINNINGS) and len(text) < _LONGER_THAN_PATHS:
        return False
    return len(text) >= _SHORTEST and _BASE64.fullmatch(text) is not None


def _of_data_url(url: str, rules: ImageRules) -> bytes:
    head, comma, text = url[5:].partition(",")
    if not comma:
        raise ValueError("is no data: URL, which is data:image/png;base64,...")
    if not head.lower().endswith(";base64"):
        rules.check_bytes(len(text) / 3)
        if _is_base64(unquote(text)):
            raise ValueError(f"is base64, and does not say so: it must begin with data:{head};base64,")
        return unquote_to_bytes(text)
    rules.check_bytes(len(text) * 3 / 4 - 2)
    if "%" in text:
        text = unquote(text)
    text = _SPACE.sub("", text).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"is not base64: {error}") from error
