"""Python's garbage collector beside an engine at work."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def old_objects_set_aside() -> Iterator[None]:
    """A block in which automatic collections look only at objects made since it began.

    A full collection, of all objects of torch, transformers and compilers, lets the GPU run out of work. Blocks may
    nest or overlap: the first one that ends, ends it for all, also for objects that the caller has frozen.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
