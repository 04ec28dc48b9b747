"""Minibatches of segments: drawn with Brax's keys and in its order, gathered by the core's functions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lehr.compat.brax.loss import Transitions
from lehr.compat.brax.pixels import shifted
from lehr.compat.brax.random_keys import split_chain
from lehr.errors import InputError
from lehr.maths.minibatches import pack, take
from lehr.types import Key, PyTree


class TrainingSizes(NamedTuple):
    """The sizes of one training step."""

    num_envs: int
    """N."""
    unroll_length: int
    """T, the steps of a segment."""
    unrolls: int
    """U: a rollout has `U · T` steps of each environment, hence `U · N` segments."""
    num_minibatches: int
    num_updates_per_batch: int
    """Passes over a rollout."""
    action_repeat: int

    @classmethod
    def of(
        cls,
        num_envs: int,
        unroll_length: int,
        batch_size: int,
        num_minibatches: int,
        num_updates_per_batch: int,
        action_repeat: int,
    ) -> "TrainingSizes":
        """The sizes for Brax's arguments of the same names."""
        segments = batch_size * num_minibatches
        if segments % num_envs:
            raise InputError(
                f"batch_size · num_minibatches is {segments}, but must be a multiple of num_envs, which is {num_envs}."
            )
        return cls(num_envs, unroll_length, segments // num_envs, num_minibatches, num_updates_per_batch, action_repeat)

    @property
    def segments(self) -> int:
        """Segments in a rollout."""
        return self.unrolls * self.num_envs

    @property
    def steps_per_update(self) -> int:
        """Env steps of one training step, action repeats included."""
        return self.segments * self.unroll_length * self.action_repeat

    @property
    def gradient_steps(self) -> int:
        """Gradient steps in one training step."""
        return self.num_updates_per_batch * self.num_minibatches


class MinibatchDraw(NamedTuple):
    """Which segments a minibatch consists of, and its keys."""

    segments: jax.Array
    """int32 `[B]`."""
    key: Key
    """For the loss."""
    shift_keys: Any
    """Keys `[B]` of the image augmentation; `()` without it."""


def draw_minibatches(key: Key, sizes: TrainingSizes, augment_pixels: bool) -> MinibatchDraw:
    """The minibatches of all gradient steps on a rollout, leaves `[gradient_steps, ...]`."""

    def one_pass(key: Key, _: None) -> tuple[Key, tuple[Key, Key, Key]]:
        key, order, loss = jax.random.split(key, 3)
        key, shift = jax.random.split(key) if augment_pixels else (key, key)
        return key, (order, loss, shift)

    _, (orders, losses, shifts) = jax.lax.scan(one_pass, key, length=sizes.num_updates_per_batch)
    segments = jax.vmap(lambda key: jax.random.permutation(key, sizes.segments))(orders)
    keys = jax.vmap(lambda key: split_chain(key, sizes.num_minibatches, used=1))(losses)
    shift_keys: Any = ()
    if augment_pixels:
        by_segment = jax.vmap(lambda key: jax.random.split(key, sizes.segments))(shifts)
        shift_keys = jax.vmap(lambda keys, chosen: keys[chosen])(by_segment, segments)
    count, size = sizes.gradient_steps, sizes.segments // sizes.num_minibatches
    return MinibatchDraw(
        segments.reshape(count, size),
        keys.reshape(count, *keys.shape[2:]),
        jax.tree.map(lambda x: x.reshape(count, size, *x.shape[2:]), shift_keys),
    )


def gatherer(
    obs: PyTree, steps: Transitions, sizes: TrainingSizes, augment_pixels: bool
) -> Callable[[MinibatchDraw], Transitions]:
    """A function that gathers minibatches directly from a rollout, with time as the first axis.

    Args:
        obs: leaves `[U · T + 1, N, ...]`.
        steps: leaves `[U · T, N, ...]`, without observations.
        sizes: of the rollout.
        augment_pixels: whether images are shifted.
    """
    obs_rows, unpack_obs = _rows(obs)
    step_rows, unpack_steps = _rows(steps)
    length, size = sizes.unroll_length, sizes.num_envs

    def gather(draw: MinibatchDraw) -> Transitions:
        first = draw.segments // size * (length * size) + draw.segments % size
        rows = first[None, :] + jnp.arange(length + 1, dtype=first.dtype)[:, None] * size
        found = unpack_obs(take(obs_rows, rows, axis=0))
        if augment_pixels:
            found = shifted(found, draw.shift_keys)
        return unpack_steps(take(step_rows, rows[:-1], axis=0))._replace(obs=found)

    return gather


def _rows(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Leaves `[L, N, ...]` as rows `[L · N, ...]`, small ones packed into one array; and the function that unpacks."""
    leaves = jax.tree.leaves(tree)
    packed, unpack = tree, lambda taken: taken
    if all(leaf.ndim <= 3 for leaf in leaves) and any(leaf.dtype == jnp.float32 for leaf in leaves):
        packed, unpack = pack(tree)  # images are not packed: it would only copy them
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), packed), unpack


def by_segment(x: jax.Array, sizes: TrainingSizes) -> jax.Array:
    """Reshape `[U · T, N, ...]` to `[U · N, T, ...]`."""
    x = x.reshape(sizes.unrolls, sizes.unroll_length, *x.shape[1:]).swapaxes(1, 2)
    return x.reshape(sizes.segments, sizes.unroll_length, *x.shape[3:])
