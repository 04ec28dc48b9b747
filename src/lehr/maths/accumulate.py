"""Gradient accumulation: compute the gradients of a minibatch in parts, to save memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lehr.errors import InputError
from lehr.types import PyTree


def in_parts(tree: PyTree, parts: int, axis: int) -> PyTree:
    """Split leaves into equal parts along an axis: `[..., n, ...]` to `[parts, ..., n / parts, ...]`.

    >>> in_parts(jnp.arange(4), 2, axis=0).tolist()
    [[0, 1], [2, 3]]
    """

    def cut(x: jax.Array) -> jax.Array:
        if x.shape[axis] % parts:
            raise InputError(f"A minibatch of {x.shape[axis]} cannot be split into accumulate={parts} equal parts.")
        shape = (*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    return jax.tree.map(cut, tree)


def joined(x: jax.Array, axis: int) -> jax.Array:
    """Undo `in_parts`."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def mean_over_parts(differentiate: Callable[..., Any], parts: PyTree) -> tuple[Any, Any]:
    """Return the mean loss, metrics and gradients over parts, and the other outputs of each part, stacked.

    Args:
        differentiate: maps a part to `((loss, (metrics, rest)), gradients)`.
        parts: leaves `[parts, ...]`.
    """
    count = jax.tree.leaves(parts)[0].shape[0]

    def add(sums: Any, part: Any) -> tuple[Any, Any]:
        (loss, (metrics, rest)), gradients = differentiate(part)
        return jax.tree.map(jnp.add, sums, (loss, metrics, gradients)), rest

    first = jax.tree.map(lambda x: x[0], parts)
    (loss, (metrics, _)), gradients = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(differentiate, first)
    )
    sums, rest = jax.lax.scan(add, (loss, metrics, gradients), parts)
    return jax.tree.map(lambda x: x / count, sums), rest
