"""Python's garbage collector, which visits every object that there is, again and again, while many are made."""

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused(stays: bool = False) -> Iterator[None]:
    """Collect no garbage in this scope, in which many objects are made that stay: modules, or a traced program.

    The collector runs after every so many new objects, and here it finds nothing to free.

    Args:
        stays: whether the collector never looks at what there is at the end of the scope; for processes of our own.

    >>> with paused():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if stays:
            gc.freeze()
        if was_enabled:
            gc.enable()


def stays_at_exit() -> None:
    """Look for no garbage while the process ends: the system takes its memory back anyway.

    Python would visit all objects several times, which takes half a second after a training, and more after a sweep.
    """
    atexit.register(gc.freeze)
