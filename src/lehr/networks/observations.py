"""The part of an observation that a network sees: selected keys of a `Dict`, as one vector and at most one image."""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp

from lehr.errors import InputError, closest
from lehr.networks.torsos import to_float
from lehr.spaces import Box, Dict, Discrete, MultiDiscrete, Space, flatten_space
from lehr.types import PyTree

ROWS_AT_ONCE = 131_072
"""Maximum number of observations evaluated at once: their activations, 64 wide, still fit into a large GPU's cache."""

Leaf: TypeAlias = tuple[tuple[str, ...], Box | Discrete | MultiDiscrete]
"""A path into nested dicts, and the space at that path."""


@dataclass(frozen=True)
class View:
    """The leaves of an observation that one network sees: a static value, without arrays."""

    flat: tuple[Leaf, ...]
    """Flattened and concatenated into one vector; integers become one-hot."""
    image: Leaf | None
    """Kept in its shape, for convolutions."""

    @property
    def vector_size(self) -> int:
        """Length of the vector; 0 without one."""
        return sum(flatten_space(space).shape[0] for _, space in self.flat)

    def inputs(self, obs: PyTree) -> tuple[jax.Array, ...]:
        """Return the image `[..., height, width, channels]`, if any, then the vector `[..., vector_size]`, if any."""
        image = [] if self.image is None else [_at(obs, self.image[0])]
        parts = [_flatten(space, _at(obs, path)) for path, space in self.flat]
        vector = [jnp.concatenate(parts, -1)] if len(parts) > 1 else parts
        return (*image, *vector)


def make_view(space: Space, keys: tuple[str, ...] | None, torso: str) -> View:
    """Select `keys` of an observation space (`None`: all), and separate the image from the rest if the torso uses one.

    The torso "cnn" needs exactly one image, a `Box` with three axes; "mlp" flattens every image; any other torso uses
    the image if there is exactly one.
    """
    leaves = _leaves(select(space, keys))
    images = [leaf for leaf in leaves if isinstance(leaf[1], Box) and len(leaf[1].shape) == 3]
    if torso == "cnn" and len(images) != 1:
        raise InputError(
            f"The torso 'cnn' needs exactly one image (a Box with three axes), but there are {len(images)} in {space}: "
            "use the torso 'mlp', or select one image with actor_obs and critic_obs."
        )
    image = images[0] if len(images) == 1 and torso != "mlp" else None
    return View(tuple(leaf for leaf in leaves if leaf is not image), image)


def batch_shape(space: Space, obs: PyTree) -> tuple[int, ...]:
    """Return the leading axes of a batch of observations from this space.

    >>> batch_shape(Box(-1, 1, (4,)), jnp.ones((7, 3, 4)))
    (7, 3)
    """
    path, first = _leaves(space)[0]
    shape = _at(obs, path).shape
    return shape[: len(shape) - len(first.shape)]


def some_at_a_time(function: Callable[[PyTree], jax.Array], space: Space, obs: PyTree) -> jax.Array:
    """Apply a function to observations `[T, N, ...]`, in groups of steps with at most `ROWS_AT_ONCE` observations.

    If all fit, or if there is only one leading axis, call it once.

    Args:
        function: maps observations `[t, N, ...]` to an array `[t, N, ...]`, for any `t`.
        space: space of one observation.
        obs: leaves `[T, N, ...]`, with any number of leading axes.

    >>> some_at_a_time(jnp.square, Box(-1, 1, ()), jnp.arange(6.0).reshape(3, 2)).tolist()
    [[0.0, 1.0], [4.0, 9.0], [16.0, 25.0]]
    """
    shape = batch_shape(space, obs)
    if len(shape) < 2 or math.prod(shape) <= ROWS_AT_ONCE:
        return function(obs)
    steps, size = shape[0], math.prod(shape[1:])
    together = max(d for d in range(1, steps + 1) if steps % d == 0 and (d == 1 or d * size <= ROWS_AT_ONCE))
    if together == steps:
        return function(obs)
    pieces = jax.tree.map(lambda x: x.reshape(steps // together, together, *x.shape[1:]), obs)
    results = jax.lax.map(function, pieces)
    return results.reshape(steps, *results.shape[2:])


def select(space: Space, keys: tuple[str, ...] | None) -> Space:
    """Return the part of a `Dict` with these keys; with `None`, the whole space."""
    if keys is None:
        return space
    if not isinstance(space, Dict):
        raise InputError(
            f"actor_obs and critic_obs select keys of a Dict observation, but the space is {space}: remove them."
        )
    for key in keys:
        if key not in space.spaces:
            raise InputError(
                f"The observation has no key {key!r}, which actor_obs or critic_obs names; {closest(key, space.spaces)}"
            )
    if not keys:
        raise InputError(
            "actor_obs or critic_obs is empty, but a network needs at least one key: name a key, or drop the option."
        )
    return Dict({key: space.spaces[key] for key in keys})


def _leaves(space: Space, path: tuple[str, ...] = ()) -> list[Leaf]:
    if isinstance(space, Dict):
        return [leaf for key, inner in space.spaces.items() for leaf in _leaves(inner, (*path, key))]
    return [(path, space)]


def _at(obs: PyTree, path: tuple[str, ...]) -> jax.Array:
    return functools.reduce(operator.getitem, path, obs)


def _flatten(space: Box | Discrete | MultiDiscrete, x: jax.Array) -> jax.Array:
    """Flatten a batch `[..., *space.shape]` to float32 vectors `[..., size]`; bytes are scaled to [0, 1]."""
    match space:
        case Box():
            return to_float(x).reshape(*x.shape[: x.ndim - len(space.shape)], flatten_space(space).shape[0])
        case Discrete():
            return jax.nn.one_hot(x - space.start if space.start else x, space.n)
        case MultiDiscrete():
            return jnp.concatenate([jax.nn.one_hot(x[..., i], n) for i, n in enumerate(space.nvec)], -1)
