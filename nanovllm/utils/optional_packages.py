"""What the optional packages of kernels have in common: they may fail, and they keep what they compile on the disk."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class OptionalPackage:
    """A package that is used until it fails, and that others stand in for.

    Attributes:
        name: of the package, as pip knows it.
        works: whether it has not failed yet.
    """

    name: str
    works = True

    def attempt(self, run: Callable[[], Result]) -> Result | None:
        """What `run` returns; None where the caller has to do without, from its first error on, which is logged. Raises
        torch.OutOfMemoryError alone."""
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


def keep_kernels() -> None:
    """Have both packages keep what they compile in this library's cache. Their own defaults are temporary files, and
    for flash-attn-4 nothing. They read these variables when they are imported, and processes inherit them."""
    os.environ.setdefault("QUACK_CACHE_DIR", kernel_cache("quack"))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", kernel_cache("flash-attn-4"))


def kernel_cache(name: str) -> str:
    """The directory in which a package keeps what it compiles: `name` in this library's cache, `XDG_CACHE_HOME` or
    ~/.cache."""
    return str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "nanovllm" / name)
