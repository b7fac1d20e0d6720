"""Python's garbage collector beside an engine at work."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def old_objects_set_aside() -> Iterator[None]:
    """A block in which automatic collections look only at what has been made since it began.

    Torch, transformers and compilers leave a million objects, and looking at all of them takes a third of a second, in
    which the GPU runs out of work: once every few thousand requests, as often as a quarter has been added. They are
    counted by reference as ever; a cycle among them that is dropped meanwhile goes after the block. Blocks may nest or
    overlap, then the first that ends ends it for all; so it does for what the caller may have frozen.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
