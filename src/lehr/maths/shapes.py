"""Checks of shapes: what must agree is said by name."""

import jax


def check_same_shape(**arrays: jax.Array) -> None:
    """Refuse arrays of different shapes, which would broadcast to a wrong result in silence.

    >>> import jax.numpy as jnp
    >>> check_same_shape(values=jnp.zeros((8, 1)), returns=jnp.zeros(8))
    Traceback (most recent call last):
    ValueError: values (8, 1), returns (8,) must have one shape; reshape or squeeze those that differ.
    """
    if len({array.shape for array in arrays.values()}) > 1:
        given = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"{given} must have one shape; reshape or squeeze those that differ.")
