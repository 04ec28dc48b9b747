"""Sums, means and maxima over devices, for a program in which each device has its share of the environments.

`lehr.training.sharding` traces such a program with a device axis. What is computed from environments differs between
devices until it is reduced here; what is the same on all devices, such as parameters, stays so only if nothing else
goes into it. Everywhere else there is one device, and every function returns what it is given: the same code trains on
one device, with the same bits.

A mean over all samples is the mean over devices of each device's mean, if they have equally many. Where they have not,
because some steps do not count, `lehr.maths.losses.weighted_mean` divides each device's sum by the mean count, so that
its result is such a part too. So losses and metrics are *parts* until they are averaged here: gradients by the
optimiser, metrics at the end of an update.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from lehr.errors import InputError
from lehr.types import Key, PyTree

AXIS = "devices"
"""The name of the device axis."""


def devices() -> int:
    """The number of devices of the program that is being traced."""
    try:
        return jax.lax.axis_size(AXIS)
    except NameError:
        return 1


def index() -> Any:
    """The number of this device, from 0."""
    return jax.lax.axis_index(AXIS) if devices() > 1 else 0


def sum(tree: PyTree) -> PyTree:
    """The sum of each leaf over all devices, with one collective for all leaves of a type."""
    if devices() == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    found: dict[int, jax.Array] = {}
    for dtype in sorted({leaf.dtype for leaf in leaves}, key=str):
        chosen = [number for number, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = jax.lax.psum(jnp.concatenate([leaves[number].reshape(-1) for number in chosen]), AXIS)
        begin = 0
        for number in chosen:
            end = begin + math.prod(leaves[number].shape)
            found[number] = flat[begin:end].reshape(leaves[number].shape)
            begin = end
    return jax.tree.unflatten(structure, [found[number] for number in range(len(leaves))])


def mean(tree: PyTree) -> PyTree:
    """The mean of each floating-point leaf over all devices, with one collective for all leaves of a type."""
    if devices() == 1:
        return tree
    return jax.tree.map(lambda x: x / devices(), sum(tree))


def mean_count(count: jax.Array) -> jax.Array:
    """The mean over all devices of a sum of weights, which may be integers or bools."""
    return count if devices() == 1 else mean(count.astype(jnp.float32))


def maximum(tree: PyTree) -> PyTree:
    """The maximum of each leaf over all devices."""
    return tree if devices() == 1 else jax.lax.pmax(tree, AXIS)


def minimum(tree: PyTree) -> PyTree:
    """The minimum of each leaf over all devices."""
    return tree if devices() == 1 else jax.lax.pmin(tree, AXIS)


def all(condition: jax.Array) -> jax.Array:
    """Whether a condition, bool `[]`, holds on all devices."""
    return condition if devices() == 1 else jax.lax.pmin(condition.astype(jnp.int32), AXIS) > 0


def any(condition: jax.Array) -> jax.Array:
    """Whether a condition, bool `[]`, holds on some device."""
    return condition if devices() == 1 else jax.lax.pmax(condition.astype(jnp.int32), AXIS) > 0


def moments(mean: PyTree, variance: PyTree, count: Any, total: jax.Array) -> tuple[PyTree, PyTree]:
    """The mean and variance of the `total` samples of all devices, from those of each device's own `count` samples.

    w = count / total,  m = Σ w mean,  v = Σ w (variance + (mean − m)²)
    """
    if devices() == 1:
        return mean, variance
    weight = count / jnp.maximum(total, 1)

    def weighted(x: jax.Array) -> jax.Array:
        return jnp.where(count > 0, weight * x, 0.0)  # the mean of no samples is NaN

    whole = sum(jax.tree.map(weighted, mean))
    spread = jax.tree.map(lambda v, m, w: weighted(v + jnp.square(m - w)), variance, mean, whole)
    return whole, sum(spread)


def own(key: Key) -> Key:
    """A random key of this device's own."""
    return key if devices() == 1 else jax.random.fold_in(key, index())


def share(size: int, name: str) -> int:
    """This device's share of a size that is a setting of the run, `name` for the error message."""
    if size % devices():
        raise InputError(
            f"{name} is {size}, which {devices()} devices cannot share equally; choose a multiple of {devices()}."
        )
    return size // devices()
