"""Rewards, flags and integers as an environment returned them: checked, never converted to another value.

NumPy would make a reward of 5 from "5", `True` from the flag "no", and -1294967296 of 3000000000 in 32 bits.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

_KINDS = {"reward": "fiub", "terminated": "b", "truncated": "b"}
"""The kinds of dtype that a field may have: numbers, or bools."""


class WrongAnswer(TypeError):
    """An environment returned a value of the wrong type: the field, what was given, and what is wanted."""

    def __init__(self, field: str, given: str, wanted: str) -> None:
        super().__init__(field, given, wanted)  # all of it, so that it can be pickled
        self.field, self.given, self.wanted = field, given, wanted

    def __str__(self) -> str:
        return f"{self.field} is {self.given}, but must be {self.wanted}"


def fits(field: str, array: Any, size: int) -> bool:
    """Whether an array holds `size` rewards, or `size` flags."""
    return isinstance(array, np.ndarray) and array.shape == (size,) and array.dtype.kind in _KINDS[field]


def wanted(field: str, size: int) -> str:
    """What a field must hold, for messages."""
    return f"{size} {'numbers' if field == 'reward' else 'bools'}"


def stacked(field: str, values: Sequence[Any]) -> np.ndarray:
    """Stack the values that single environments returned; raise `WrongAnswer` for the first of another type.

    >>> stacked("terminated", [True, np.bool_(False)]).tolist()
    [True, False]
    >>> stacked("terminated", [False, "no"])
    Traceback (most recent call last):
        ...
    lehr.envs.host.answers.WrongAnswer: terminated is 'no' (str), but must be a bool
    """
    try:
        array = np.array(values)
    except ValueError:  # their shapes differ
        array = np.empty(0, object)
    if array.ndim == 1 and array.dtype.kind in _KINDS[field]:
        return array
    for value in values:
        checked(field, value)
    return array  # every value is of an allowed type, but not all together


def checked(field: str, value: Any) -> Any:
    """Return one reward or flag; raise `WrongAnswer` if it is of another type."""
    if isinstance(value, bool | np.bool_) or (field == "reward" and isinstance(value, float | int | np.number)):
        if not isinstance(value, np.complexfloating):
            return value
    elif getattr(value, "shape", None) == () and np.asarray(value).dtype.kind in _KINDS[field]:
        return np.asarray(value)[()]
    wanted_type = "a number" if field == "reward" else "a bool"
    raise WrongAnswer(field, f"{_shown(value)} ({type(value).__name__})", wanted_type)


def over(terminated: Any, truncated: Any, size: int) -> np.ndarray:
    """Where an episode ended, from the flags of a batch of `size`; raise `WrongAnswer` unless both are bools."""
    for field, array in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(array, np.ndarray) or array.dtype.kind != "b":
            raise WrongAnswer(field, described(array), wanted(field, size))
    return terminated | truncated


def beyond(array: np.ndarray, dtype: Any) -> int | None:
    """Return an integer of the array that a dtype of integers cannot hold; `None` if it holds all.

    Only an array whose dtype has more of them is looked at: a cast to int32 would wrap 64-bit ones around.

    >>> beyond(np.array([3_000_000_000, -5]), np.int32), beyond(np.array([3, -5]), np.int32)
    (3000000000, None)
    """
    wanted = np.dtype(dtype)
    if array.dtype.kind not in "iu" or wanted.kind not in "iu" or np.can_cast(array.dtype, wanted) or not array.size:
        return None
    limits, least, most = np.iinfo(wanted), int(array.min()), int(array.max())
    return least if least < limits.min else most if most > limits.max else None


def described(array: Any) -> str:
    """The dtype and the shape of an array, or the type of anything else."""
    if not isinstance(array, np.ndarray):
        return f"a {type(array).__name__}"
    return f"{array.dtype}{list(array.shape)}"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        return "a value"
    return text if len(text) <= 60 else f"{text[:59]}…"
