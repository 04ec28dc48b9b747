"""LaProp and adaptive gradient clipping, the optimiser of Dreamer.

Both work with any algorithm: `optimiser="laprop"` names this one where an optax optimiser's name would stand.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from lehr.types import PyTree

SMALLEST_NORM = 1e-3
"""Norm that adaptive clipping takes for arrays with a smaller one, so that arrays of zeros can move."""

ROW = 1024
"""Numbers that are summed at a time, of one array."""


class LaPropState(NamedTuple):
    """What LaProp remembers."""

    steps: jax.Array
    """int32 `[]`: steps so far."""
    momentum: PyTree
    """Like the parameters: mean of the scaled gradients."""
    square: PyTree
    """Like the parameters: mean of the squared gradients."""


def laprop(
    learning_rate: Any, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-20
) -> optax.GradientTransformationExtraArgs:
    """LaProp (Ziyin et al., 2020): Adam with the momentum taken after the scaling, which is stable for a tiny ε.

        v ← b2 v + (1 − b2) g²,  u = g / (√(v / (1 − b2ᵗ)) + ε)
        m ← b1 m + (1 − b1) u,   θ ← θ − learning_rate · m / (1 − b1ᵗ)

    >>> one = laprop(0.1)
    >>> state = one.init(jnp.zeros(2))
    >>> change, state = one.update(jnp.array([3.0, -1e-9]), state)
    >>> [round(float(x), 4) for x in change]
    [-0.1, 0.1]
    """

    def init(params: PyTree) -> LaPropState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return LaPropState(jnp.int32(0), zeros, zeros)

    def update(gradients: PyTree, state: LaPropState, params: PyTree = None) -> tuple[PyTree, LaPropState]:
        count = optax.safe_increment(state.steps)
        square = optax.tree.update_moment_per_elem_norm(gradients, state.square, b2, 2)
        size = optax.tree.bias_correction(square, b2, count)
        scaled = jax.tree.map(lambda gradient, size: gradient / (jnp.sqrt(size) + eps), gradients, size)
        momentum = optax.tree.update_moment(scaled, state.momentum, b1, 1)
        return optax.tree.bias_correction(momentum, b1, count), LaPropState(count, momentum, square)

    return optax.chain(optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate))


@dataclass(frozen=True)
class Parts:
    """Where each array of a pytree lies in the vector of all of them: a static value.

    The arrays' own sums and products would be kernels of each array, several hundred to compile for a world model.
    Here they are a few on the whole vector.
    """

    sizes: tuple[int, ...]
    """Lengths of the parts, in order."""

    @classmethod
    def of(cls, tree: PyTree) -> "Parts":
        """Return the parts of `ravel_pytree(tree)`; empty arrays have none."""
        return cls(tuple(leaf.size for leaf in jax.tree.leaves(tree) if leaf.size))

    @property
    def ends(self) -> np.ndarray:
        """Where each part ends, int64 `[P]`."""
        return np.cumsum(self.sizes)

    def owners(self) -> jax.Array:
        """Return the index of the part that each number belongs to, int32 `[D]`."""
        inner = jnp.asarray(self.ends[:-1], jnp.int32)
        return jnp.searchsorted(inner, jnp.arange(self.ends[-1], dtype=jnp.int32), side="right")

    def sums(self, x: jax.Array) -> jax.Array:
        """Return the sum of each part of a vector `[D]`, `[P]`: sums of rows, each within one part, then their sums."""
        width = min(ROW, x.size)
        count = [-(-size // width) for size in self.sizes]
        part = np.repeat(np.arange(len(count)), count)
        begin = (self.ends - self.sizes)[part] + width * (np.arange(len(part)) - (np.cumsum(count) - count)[part])
        end = np.minimum(begin + width, self.ends[part])
        first = np.minimum(begin, x.size - width)  # rows at the very end overlap those before them
        shape = len(part), width

        def columns(places: np.ndarray) -> jax.Array:
            return jnp.broadcast_to(jnp.asarray(places, jnp.int32)[:, None], shape)

        place = columns(first) + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        inside = (place >= columns(begin)) & (place < columns(end))
        by_row = jnp.broadcast_to(jnp.sum(jnp.where(inside, x[place], 0.0), -1), (len(count), len(part)))
        return jnp.sum(jnp.where(np.arange(len(count))[:, None] == part, by_row, 0.0), -1)


def clip_adaptively(gradients: PyTree, params: PyTree, limit: Any) -> PyTree:
    """Clip the gradient of each array to a fraction of the array's own norm (Brock et al., 2021).

        g ← g · min(1, limit · max(‖θ‖, 10⁻³) / ‖g‖)

    >>> clip_adaptively({"w": jnp.array([0.0, 5.0])}, {"w": jnp.array([2.0, 0.0])}, 0.5)["w"].tolist()
    [0.0, 1.0]
    """
    flat, unpack = ravel_pytree(gradients)
    return unpack(adaptive_clipping(gradients, flat)(flat, ravel_pytree(params)[0], limit))


def adaptive_clipping(arrays: PyTree, packed: PyTree) -> Callable[[PyTree, PyTree, Any], PyTree]:
    """Return `clip_adaptively` for gradients and parameters in the form in which an optimiser packs these arrays."""
    if not isinstance(packed, jax.Array):
        return clip_adaptively
    parts = Parts.of(arrays)
    owners = parts.owners()

    def clip(gradients: jax.Array, params: jax.Array, limit: Any) -> jax.Array:
        sizes, norms = (jnp.sqrt(parts.sums(jnp.square(x))) for x in (gradients, params))
        factors = 1 / jnp.maximum(1.0, sizes / (limit * jnp.maximum(norms, SMALLEST_NORM)))
        return gradients * factors[owners]

    return clip
