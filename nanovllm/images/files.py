"""Images on the disk: only below a folder, after all links have been followed."""

import os
import stat
from urllib.parse import urlsplit
from urllib.request import url2pathname

from nanovllm.images.rules import ANYWHERE, ImageRules


def read_file(path: str, rules: ImageRules) -> bytes:
    """The bytes of a file, or of a file:// URL. Raises ValueError if it lies elsewhere, is too large or unreadable.

    What is outside image_root is refused before it is looked at, so that nobody learns what is there.
    """
    if rules.image_root is None:
        raise ValueError("files are not read here: no image_root (--image-root) says from which folder")
    if path[:5].lower() == "file:":
        path = _path_of_url(path)
    try:
        real = _real_path(path, rules.image_root)
        # Not blocking: to open a pipe would wait for who writes to it.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        with os.fdopen(os.open(real, flags), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ValueError("it is no file")
            rules.check_bytes(facts.st_size)
            data = file.read(rules.max_bytes + 1)
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or error}") from error
    rules.check_bytes(len(data))
    return data


def _path_of_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ValueError("a file:// URL has three slashes: file:///folder/page.png")
    return url2pathname(parts.path)


def _real_path(path: str, root: str) -> str:
    """Raises ValueError unless it lies below the root when all links have been followed."""
    if "\0" in path:
        raise ValueError("it is no path: it has a zero byte")
    if root == ANYWHERE:
        return os.path.realpath(os.path.expanduser(path))
    root = os.path.realpath(root)
    real = os.path.realpath(os.path.join(root, path))
    if os.path.commonpath([root, real]) != root:
        raise ValueError("it lies outside the folder from which images are read, image_root (--image-root)")
    return real
