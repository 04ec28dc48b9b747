"""Python's garbage collector, which visits every object that there is, again and again, while many are made."""

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Collect no garbage in this scope, in which many objects are made that stay: modules, or a traced program.

    The collector runs after every so many new objects, and here it finds nothing to free.

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
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def importing(for_good: bool = False) -> Iterator[None]:
    """The same for a scope that imports modules: afterwards, only full collections look at what there is, or none.

    Args:
        for_good: whether none does; for processes of our own.
    """
    with paused():
        yield
        if for_good:
            gc.freeze()
        elif not gc.get_freeze_count():  # otherwise, what somebody else has frozen would not stay so
            gc.freeze()
            gc.unfreeze()


def stays_at_exit() -> None:
    """Look for no garbage while the process ends: the system takes its memory back anyway.

    Python would visit all objects several times, which takes half a second after a training, and more after a sweep.
    """
    atexit.register(gc.freeze)
