"""LaProp and adaptive gradient clipping, the optimiser of Dreamer.

Both work with any algorithm: `optimiser="laprop"` names this one where an optax optimiser's name would stand.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lehr.types import PyTree

SMALLEST_NORM = 1e-3
"""Norm that adaptive clipping takes for arrays with a smaller one, so that arrays of zeros can move."""


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


def clip_adaptively(gradients: PyTree, params: PyTree, limit: Any) -> PyTree:
    """Clip the gradient of each array to a fraction of the array's own norm (Brock et al., 2021).

        g ← g · min(1, limit · max(‖θ‖, 10⁻³) / ‖g‖)

    >>> clip_adaptively({"w": jnp.array([0.0, 5.0])}, {"w": jnp.array([2.0, 0.0])}, 0.5)["w"].tolist()
    [0.0, 1.0]
    """

    leaves, structure = jax.tree.flatten(gradients)
    sizes, norms = (
        jnp.sqrt(jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)]))
        for tree in (gradients, params)
    )
    factors = 1 / jnp.maximum(1.0, sizes / (limit * jnp.maximum(norms, SMALLEST_NORM)))
    return jax.tree.unflatten(structure, [leaf * factor for leaf, factor in zip(leaves, factors, strict=True)])
