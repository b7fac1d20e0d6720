"""ImageRules: which images are read, and from where."""

import os
from dataclasses import dataclass
from typing import Any

from nanovllm.utils.rules import FLAG, Rule, check_rules, integer, number, option

ANYWHERE = "/"  # an image_root: every path, and relative ones as the process has them
MAX_MEGAPIXELS = 89.0  # Above 89.4 Pillow warns of a decompression bomb, and from twice that on it refuses.
OPTIONS = ("image_root", "allow_remote", "max_image_mib", "max_image_megapixels", "max_images")  # that a command has
_LEAST = 2**-10

_FOLDER = Rule(
    lambda root: isinstance(root, str) and os.path.isdir(root),
    "a folder",
    convert=lambda root: os.path.expanduser(root) if isinstance(root, str | os.PathLike) else root,
)


def _option(default: Any, help: str, *rules: Rule) -> Any:
    return option(default, *rules, help=help)


@dataclass(frozen=True, kw_only=True)
class ImageRules:
    """Which images `read_image` reads. Raises ValueError for a wrong option."""

    image_root: str | None = _option(
        None, "the folder below which images are read, and where relative paths begin", _FOLDER
    )
    allow_remote: bool = _option(False, "fetch images by http and https, from public addresses alone", FLAG)
    max_image_mib: float = _option(
        50.0, "MiB of an image's file, at most", number(_LEAST, 1024, f"a number in {_LEAST}..1024")
    )
    max_image_megapixels: float = _option(
        50.0,
        "millions of an image's pixels, at most",
        number(_LEAST, MAX_MEGAPIXELS, f"a number in {_LEAST}..{MAX_MEGAPIXELS:g}"),
    )
    max_images: int = _option(1000, "images of a prompt, at most", integer(1, 2**20))
    # Of one image that is fetched, with its redirects, from the first question to its last byte.
    remote_seconds: float = option(20.0, number(_LEAST, 3600, f"a number in {_LEAST}..3600"))
    max_redirects: int = option(3, integer(0, 20))

    def __post_init__(self) -> None:
        check_rules(self)

    @property
    def max_bytes(self) -> int:
        return int(self.max_image_mib * 2**20)

    @property
    def max_url_bytes(self) -> int:
        """Of an image as a data: URL, in base64."""
        return -(-self.max_bytes // 3) * 4

    @property
    def max_pixels(self) -> int:
        return int(self.max_image_megapixels * 1e6)

    def remedy(self, option: str, value: str = "...") -> str:
        """How one sets an option, in a message: a caller's own images (image_root is ANYWHERE) are read without
        commands and their options."""
        if self.image_root == ANYWHERE:
            return f"read_image(..., rules=ImageRules({option}={value}))"
        return f"--{option.replace('_', '-')}"

    def check_bytes(self, num_bytes: float) -> None:
        """Raises ValueError if a file of this size is too large."""
        if num_bytes > self.max_bytes:
            raise ValueError(
                f"its file has {num_bytes / 2**20:.1f} MiB; max_image_mib "
                f"({self.remedy('max_image_mib')}) allows {self.max_image_mib:g}"
            )

    def check_size(self, width: int, height: int) -> None:
        """Raises ValueError if an image of this size is too large."""
        if width * height > self.max_pixels:
            raise ValueError(
                f"it has {width} x {height} pixels, {width * height / 1e6:.1f} million; max_image_megapixels "
                f"({self.remedy('max_image_megapixels')}) allows {self.max_image_megapixels:g}"
            )
