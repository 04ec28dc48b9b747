"""Image observations: the entries of a mapping whose names begin with `pixels/`."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from lehr.types import Key, PyTree

PREFIX = "pixels/"
MOST = 4
"""The largest shift of an image by augmentation, in pixels, along either axis."""


def without_pixels(obs: PyTree) -> PyTree:
    """The observations that running statistics are kept of."""
    if not isinstance(obs, Mapping):
        return obs
    return {name: part for name, part in obs.items() if not name.startswith(PREFIX)}


def shifted(obs: Mapping[str, jax.Array], keys: Key) -> dict[str, jax.Array]:
    """Shift the images of each segment by a few pixels, at all of its steps alike (DrQ, Yarats et al., 2021).

    Args:
        obs: leaves `[T, B, ...]`, images `[T, B, H, W, C]`.
        keys: `[B]`.
    """
    moved = dict(obs)
    for name in sorted(obs):
        if name.startswith(PREFIX):
            pairs = jax.vmap(jax.random.split)(keys)
            keys = pairs[:, 0]
            moved[name] = jax.vmap(_shift, in_axes=(1, 0), out_axes=1)(obs[name], pairs[:, 1])
    return moved


def _shift(images: jax.Array, key: Key) -> jax.Array:
    """Shift `[T, H, W, C]` by up to `MOST` pixels; the edge is repeated into the gap."""
    rows, columns = jax.random.randint(key, (2,), 0, 2 * MOST + 1)
    padded = jnp.pad(images, ((0, 0), (MOST, MOST), (MOST, MOST), (0, 0)), mode="edge")
    return jax.lax.dynamic_slice(padded, (0, rows, columns, 0), images.shape)
