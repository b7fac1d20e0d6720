"""Python's garbage collector beside an engine at work."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def old_objects_set_aside() -> Iterator[None]:
    """A block in which automatic collections look only at objects made since it began.

    A full collection looks at all objects of torch, transformers and compilers. That takes a third of a second, in
    which the GPU runs out of work. In the block, cycles among old objects are not collected.
    Blocks may nest or overlap: the first one that ends, ends it for all, also for objects that the caller has frozen.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
