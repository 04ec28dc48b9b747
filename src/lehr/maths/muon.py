"""Muon (Jordan et al., 2024) as in optax, with all matrices orthogonalised together.

Newton-Schulz iterations on the matrices of a small network are tens of products that each take less time than their
launch on a GPU. Rows and columns of zeros stay zero, so all matrices can be padded to one size and iterated as one
batch.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from lehr.types import PyTree

MOST_ENTRIES = 2**19
"""Matrices that take more entries when padded are orthogonalised by optax, one after another."""

UNUSUAL = ("adaptive", "consistent_rms", "mu_dtype", "preconditioning", "weight_decay", "weight_decay_mask")
"""Options with which optax computes the whole update."""


@functools.wraps(optax.contrib.muon)
def muon(learning_rate: Any, ns_steps: int = 5, **options: Any) -> optax.GradientTransformation:
    """Return optax's muon, with the same state; on an accelerator, few small matrices are orthogonalised together."""
    whole = optax.contrib.muon(learning_rate, ns_steps=ns_steps, **options)
    axes: Any = options.get("muon_weight_dimension_numbers")
    coefficients = options.get("ns_coeffs", (3.4445, -4.7750, 2.0315))
    is_usual = callable(axes) and isinstance(ns_steps, int) and not any(name in options for name in UNUSUAL)
    if not is_usual or learning_rate != 1.0 or len(coefficients) != 3 or any(map(jnp.ndim, coefficients)):
        return whole
    # Without iterations, optax returns the normalised momentum times the scale of each matrix.
    momentum = optax.contrib.muon(learning_rate, ns_steps=0, **options)

    def update(updates: PyTree, state: Any, params: PyTree = None, **others: Any) -> tuple[PyTree, Any]:
        chosen = axes(updates)
        structure: Any
        leaves, structure = jax.tree.flatten(updates)
        wanted = structure.flatten_up_to(chosen)
        if not launches_are_slow() or not _fit(leaves, wanted):
            return whole.update(updates, state, params, **others)
        found, state = momentum.update(updates, state, params, **others)
        found = _orthogonalised(structure.flatten_up_to(found), wanted, coefficients, ns_steps)
        return structure.unflatten(found), state

    return optax.GradientTransformationExtraArgs(whole.init, update)


def launches_are_slow() -> bool:
    """Whether few large products are faster than many small ones."""
    return jax.default_backend() != "cpu"


def _matrices(leaf: Any, axes: MuonDimensionNumbers) -> tuple[int, int, int]:
    """Return how many matrices a leaf holds, and their size."""
    outputs = leaf.shape[-1]
    inputs = math.prod(leaf.shape[axis] for axis in axes.reduction_axis)
    return math.prod(leaf.shape) // (inputs * outputs), inputs, outputs


def _fit(leaves: list[Any], axes: list[MuonDimensionNumbers | None]) -> bool:
    """Whether there are several matrices, and not many entries when all are padded to one size."""
    sizes = [_matrices(leaf, one) for leaf, one in zip(leaves, axes, strict=True) if one is not None]
    if len(sizes) < 2:
        return False
    small, large = max(min(size[1:]) for size in sizes), max(max(size[1:]) for size in sizes)
    return sum(size[0] for size in sizes) * small * large <= MOST_ENTRIES


def _orthogonalised(
    leaves: list[Any], axes: list[MuonDimensionNumbers | None], coefficients: Any, steps: int
) -> list[Any]:
    """Replace each matrix −s x, with s its scale and |x| = 1, by −s times the orthogonalised x."""
    sizes = [_matrices(leaf, one) for leaf, one in zip(leaves, axes, strict=True) if one is not None]
    small, large = max(min(size[1:]) for size in sizes), max(max(size[1:]) for size in sizes)
    padded = []
    for leaf, one in zip(leaves, axes, strict=True):
        if one is not None:
            count, inputs, outputs = _matrices(leaf, one)
            x = leaf.reshape(count, inputs, outputs) / -_scale(inputs, outputs)
            x = x.mT if inputs > outputs else x
            padded.append(jnp.pad(x, ((0, 0), (0, small - x.shape[1]), (0, large - x.shape[2]))))
    every = _newton_schulz(jnp.concatenate(padded), coefficients, steps)
    found, begin = [], 0
    for leaf, one in zip(leaves, axes, strict=True):
        if one is not None:
            count, inputs, outputs = _matrices(leaf, one)
            x = every[begin : begin + count, : min(inputs, outputs), : max(inputs, outputs)]
            begin += count
            leaf = ((x.mT if inputs > outputs else x) * -_scale(inputs, outputs)).reshape(leaf.shape)
        found.append(leaf)
    return found


def _scale(inputs: int, outputs: int) -> float:
    """The factor with which optax makes steps of matrices of different shapes alike."""
    return math.sqrt(max(1.0, outputs / inputs))


def _newton_schulz(x: jax.Array, coefficients: tuple[float, float, float], steps: int) -> jax.Array:
    """Iterate x ← a x + (b A + c A²) x, with A = x xᵀ, on matrices `[M, m, n]`; it moves their singular values to 1."""
    a, b, c = coefficients
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x
