"""The optional packages of kernels: they may fail, and they keep compiled kernels on the disk."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar, TypeVar

import torch

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class OptionalPackage:
    """A package that is used until it fails for the first time."""

    name: ClassVar[str]  # pip's
    works = True

    def attempt(self, run: Callable[[], Result]) -> Result | None:
        """The result of `run`, or None if the caller must do without the package. The first error is logged, and only
        torch.OutOfMemoryError is raised."""
        if not self.works:
            return None
        try:
            return run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            logger.warning("%s failed and is not used any more: %s: %s", self.name, type(error).__name__, error)
            self.works = False
            return None


def installed_versions(*names: str) -> dict[str, str]:
    """Name -> version of those packages that are installed."""
    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def keep_kernels() -> None:
    """Have both packages keep compiled kernels in this library's cache. By default quack-kernels uses temporary files,
    and flash-attn-4 keeps nothing. They read these variables when they are imported; child processes inherit them."""
    os.environ.setdefault("QUACK_CACHE_DIR", kernel_cache("quack"))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", kernel_cache("flash-attn-4"))


def kernel_cache(name: str) -> str:
    """The directory for a package's compiled kernels: `name` in this library's part of `XDG_CACHE_HOME` or ~/.cache."""
    return str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "nanovllm" / name)
