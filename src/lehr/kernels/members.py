"""How many members of a population a program is vmapped over, which a function that is vmapped cannot see."""

import contextlib
import contextvars
from collections.abc import Iterator

_members: contextvars.ContextVar[int] = contextvars.ContextVar("members", default=1)


def members() -> int:
    """The number of members; 1 outside `together`."""
    return _members.get()


@contextlib.contextmanager
def together(count: int) -> Iterator[None]:
    """Say that what is traced in this scope is vmapped over so many members."""
    token = _members.set(count)
    try:
        yield
    finally:
        _members.reset(token)
