"""How many members of a population a program is vmapped over, which a function that is vmapped cannot see."""

import contextvars
from contextlib import AbstractContextManager

from lehr.types import in_scope

_members: contextvars.ContextVar[int] = contextvars.ContextVar("members", default=1)


def members() -> int:
    """The number of members; 1 outside `together`."""
    return _members.get()


def together(count: int) -> AbstractContextManager[None]:
    """Say that what is traced in this scope is vmapped over so many members."""
    return in_scope(_members, count)
