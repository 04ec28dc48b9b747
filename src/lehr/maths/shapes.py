"""Shape checks whose errors name the arrays."""

import jax


def check_same_shape(**arrays: jax.Array) -> None:
    """Raise an error for different shapes, which would silently broadcast to a wrong result.

    >>> import jax.numpy as jnp
    >>> check_same_shape(values=jnp.zeros((8, 1)), returns=jnp.zeros(8))
    Traceback (most recent call last):
    ValueError: values (8, 1), returns (8,) must have the same shape; reshape or squeeze those that differ.
    """
    if len({array.shape for array in arrays.values()}) > 1:
        given = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"{given} must have the same shape; reshape or squeeze those that differ.")
