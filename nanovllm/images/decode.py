"""From an image's file to its pixels. What a file is, is decided by its content; its size is checked before anything
is decoded."""

import io
import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.images.pixels import ImagePixels
from nanovllm.images.rules import ImageRules
from nanovllm.utils.checks import one_line

if TYPE_CHECKING:
    from PIL import Image

KINDS = "JPEG, PNG, WebP or GIF"
_OTHERS = {  # what people have instead, by how it begins
    b"%PDF": "a PDF: pdftoppm -png FILE.pdf page makes an image of each page",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"BM": "BMP",
    b"<svg": "SVG",
    b"<?xml": "XML",
    b"<!DOCTYPE": "a web page",
    b"<html": "a web page",
}
# Progressive files of cameras and tools have about ten. Each one costs a look at all pixels, and takes few bytes.
_MAX_SCANS = 100
_FRAMES_OF_JPEG = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_BEGINNING_OF_JPEG, _END_OF_JPEG, _SCAN = 0xD8, 0xD9, 0xDA
# Any of these, or of those before a segment of a JPEG file. What follows 0xff in the data of a scan is left out.
_MARKER = re.compile(rb"\xff+[^\x00\x01\xd0-\xd7\xff]", re.DOTALL)
_ORIENTATION = 0x0112  # EXIF's tag
_SIXTEEN_BITS = ("I", "I;16", "I;16B", "I;16L", "I;16N")


class _Meaningless(ValueError):
    """Pixels have no colours."""


def require_pillow() -> Any:
    """PIL.Image. Raises ImportError, saying what to install."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("images need Pillow: pip install 'nanovllm[images]'") from error
    return Image


def decode(data: bytes, rules: ImageRules) -> ImagePixels:
    """The pixels of an image's file; of one with several frames those of the first.

    Raises ValueError for another kind of file, one that is broken or cut off, and one that is too large. Raises
    ImportError without Pillow.
    """
    pillow = require_pillow()
    rules.check_bytes(len(data))
    kind = _kind(data)
    # Before Pillow opens it: of some formats it makes room for all pixels then, and of large images it warns.
    if (size := _SIZES[kind](data)) is not None:
        rules.check_size(*size)
    try:
        image = pillow.open(io.BytesIO(data), formats=[kind])
    except Exception as error:  # Each format raises whatever it likes.
        raise ValueError(f"it is a broken {kind} file: {one_line(error)}") from error
    if not _HAS_END.get(kind, bool)(data):  # The others are broken to Pillow then.
        raise ValueError(f"it is a broken {kind} file: its end is missing")
    with image:
        rules.check_size(*image.size)
        try:
            image.load()
        except Exception as error:
            raise ValueError(f"it is a broken {kind} file: {one_line(error)}") from error
        return from_pillow(image, rules)


def from_pillow(image: "Image.Image", rules: ImageRules) -> ImagePixels:
    """The pixels of Pillow's image. Raises ValueError for one that is too large, broken, or of a mode without a
    meaning."""
    require_pillow()
    rules.check_size(*image.size)
    if not all(image.size):
        raise ValueError(f"it has {image.width} x {image.height} pixels")
    try:
        return ImagePixels(np.array(_turned(_as_rgb(image), _orientation(image)), np.uint8))
    except _Meaningless:
        raise
    except Exception as error:  # Files are read here that a caller has only opened.
        raise ValueError(f"it cannot be decoded: {one_line(error)}") from error


def _kind(data: bytes) -> str:
    """Pillow's name of a format. Raises ValueError unless it is one of ours."""
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if not data:
        raise ValueError("its file is empty")
    if data[4:12] in (b"ftypavif", b"ftypheic", b"ftypmif1", b"ftypheix"):
        raise ValueError(f"it is HEIF or AVIF; {KINDS} is read")
    beginning = data[:64].lstrip(b"\xef\xbb\xbf \r\n\t")
    for start, name in _OTHERS.items():
        if beginning.startswith(start):
            raise ValueError(f"it is {name}; {KINDS} is read")
    raise ValueError(f"it is no image: {KINDS} is read")


def _png_size(data: bytes) -> tuple[int, int]:
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def _gif_size(data: bytes) -> tuple[int, int]:
    return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")


def _webp_size(data: bytes) -> tuple[int, int]:
    """By its first chunk. Raises ValueError if that says nothing."""
    name, chunk = data[12:16], data[20:30]
    if len(chunk) == 10 and name == b"VP8X":
        return 1 + int.from_bytes(chunk[4:7], "little"), 1 + int.from_bytes(chunk[7:10], "little")
    if len(chunk) == 10 and name == b"VP8 ":
        return int.from_bytes(chunk[6:8], "little") & 0x3FFF, int.from_bytes(chunk[8:10], "little") & 0x3FFF
    if len(chunk) >= 5 and name == b"VP8L":
        bits = int.from_bytes(chunk[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    raise ValueError("it is a broken WEBP file: it has no image in its first chunk")


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """None if no segment says it. Raises ValueError for too many scans."""
    place, num_scans, size = 2, 0, None
    while found := _MARKER.search(data, place):
        place, marker = found.end(), data[found.end() - 1]
        if marker == _END_OF_JPEG:
            break
        if marker in _FRAMES_OF_JPEG and size is None:
            size = (
                int.from_bytes(data[place + 5 : place + 7], "big"),
                int.from_bytes(data[place + 3 : place + 5], "big"),
            )
        num_scans += marker == _SCAN
        if num_scans > _MAX_SCANS:
            raise ValueError(f"it is a JPEG of more than {_MAX_SCANS} scans, which would take hours")
        if marker != _BEGINNING_OF_JPEG:
            place += max(2, int.from_bytes(data[place : place + 2], "big"))
    return size


# Width and height of an image, as its file says; None if it does not.
_SIZES: dict[str, Callable[[bytes], tuple[int, int] | None]] = {
    "JPEG": _jpeg_size,
    "PNG": _png_size,
    "GIF": _gif_size,
    "WEBP": _webp_size,
}


def _png_has_end(data: bytes) -> bool:
    place = 8
    while place + 12 <= len(data):
        length, name = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8]
        place += 12 + length
        if name == b"IEND":
            return place <= len(data)
    return False


def _gif_has_end(data: bytes) -> bool:
    place = 13 + _size_of_colors(data[10:11])
    while (kind := data[place : place + 1]) in (b"!", b","):
        if kind == b"!":  # an extension, and its label
            place += 2
        else:  # a frame, and the size of its codes
            place += 11 + _size_of_colors(data[place + 9 : place + 10])
        while length := int.from_bytes(data[place : place + 1], "big"):
            place += 1 + length
        place += 1
    return kind == b";"


def _size_of_colors(flags: bytes) -> int:
    """Bytes of a GIF's table of colors."""
    return 3 << (flags[0] % 8 + 1) if flags and flags[0] & 0x80 else 0


_HAS_END: dict[str, Callable[[bytes], bool]] = {"PNG": _png_has_end, "GIF": _gif_has_end}


def _as_rgb(image: "Image.Image") -> "Image.Image":
    from PIL import Image

    if image.mode == "F":
        raise _Meaningless("its pixels are floats (mode F), whose range nobody knows; convert it to RGB before")
    transparent = image.info.get("transparency")
    if image.mode in _SIXTEEN_BITS:
        # Pillow's own conversion cuts off what is above 255.
        values = np.clip(np.asarray(image).astype(np.int64), 0, 0xFFFF)
        gray = (values >> 8).astype(np.uint8)
        if isinstance(transparent, int):
            gray[values == transparent] = 0xFF
        return Image.fromarray(gray).convert("RGB")
    if transparent is None and image.mode not in ("RGBA", "LA", "PA", "RGBa", "La"):
        return image.convert("RGB")
    if image.mode in ("RGBa", "La"):
        image = image.convert({"RGBa": "RGBA", "La": "LA"}[image.mode])
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def _orientation(image: "Image.Image") -> int:
    """How its EXIF data says that it is meant, from 1 to 8; 1 is upright."""
    with suppress(Exception):  # What is broken there does not concern the pixels.
        return int(image.getexif().get(_ORIENTATION, 1))
    return 1


def _turned(image: "Image.Image", orientation: int) -> "Image.Image":
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image
