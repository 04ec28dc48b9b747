"""What those that read JAX's programs equation by equation all need to know about them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

BY_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
}
"""Elementwise operations, and the NumPy functions that evaluate them."""


def type_of(variable: Any) -> Any:
    """Return the shape and dtype of a variable, which JAX's type annotations do not declare."""
    return variable.aval


def scan_counts(parameters: Mapping[str, Any]) -> tuple[int, int] | None:
    """The number of constants and of carried values among the inputs of a scan; `None` if it is of an unknown kind."""
    if "num_carry" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    if "ft_in" in parameters:  # since JAX 0.11
        consts, carries = map(len, parameters["ft_in"].unpack()[:2])
        return consts, carries
    return None
