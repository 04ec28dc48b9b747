"""A replay on the device: a ring of entries for each environment, from which sequences are drawn.

A *stream* is what one environment went through. Each step adds an entry: the observation, the action that was taken
there, and the reward that was received on arriving. The end of an episode adds one more, with its final observation: an
environment resets within the step, so the observation is in no other entry, and without it a model would never see how
episodes end. The next entry is the first of a new episode.

The data is one value, `Replay`, and the counters are another, `Cursor`, so that data of an update that was rejected can
be left behind: it lies ahead of the cursor, where nothing is drawn from, and the next entries overwrite it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lehr.types import Key, PyTree, Rollout, check_fits


class Entries(NamedTuple):
    """Entries of streams, leaves `[..., *shape]`."""

    obs: PyTree
    action: PyTree
    """Taken after the observation; zeros in the last entry of an episode."""
    reward: jax.Array
    """float32 `[...]`: received on arriving at the observation; 0 in the first entry of an episode."""
    first: jax.Array
    """bool `[...]`: the observation is the first of an episode."""
    last: jax.Array
    """bool `[...]`: the observation is the final one of an episode, terminal or truncated."""
    terminal: jax.Array
    """bool `[...]`: the observation is a terminal state, whose value is 0."""
    extras: PyTree
    """What `act` stored of the step; zeros in the last entry of an episode."""


class Replay(NamedTuple):
    """The data."""

    entries: Entries
    """Leaves `[N, C, ...]`: `C` entries of each of `N` streams."""
    attempts: jax.Array
    """uint32 `[]`: rollouts written so far and not rejected, plus one if the last was rejected."""


class Cursor(NamedTuple):
    """The place of the next entry in each stream, and what the next rollout needs to know of the last one."""

    head: jax.Array
    """int32 `[N]`: index of the next entry."""
    size: jax.Array
    """int32 `[N]`: number of entries before it that can be drawn."""
    reward: jax.Array
    """float32 `[N]`: the last reward, which belongs to the next entry."""
    fresh: jax.Array
    """bool `[N]`: the next entry is the first of an episode."""
    rollouts: jax.Array
    """uint32 `[]`: rollouts written so far and not rejected."""


class Drawn(NamedTuple):
    """Sequences, and where they came from."""

    entries: Entries
    """Leaves `[L, B, ...]`."""
    stream: jax.Array
    """int32 `[L, B]`."""
    place: jax.Array
    """int32 `[L, B]`: index in the stream."""


def margin(horizon: int) -> int:
    """Entries of a stream ahead of the cursor that are never drawn: as many as one rollout may write."""
    return 2 * horizon


def empty(example: Rollout, capacity: int) -> tuple[Replay, Cursor]:
    """Return an empty replay with at most `capacity` entries in each stream.

    Args:
        example: shapes and dtypes of a rollout.
        capacity: C, entries of each stream.
    """
    streams = example.reward.shape[1]
    one = jax.eval_shape(_entries, example, *_before(streams))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((streams, capacity, *x.shape[2:]), x.dtype), one)
    check_fits("The replay", "lower replay_size", entries=shapes)
    entries = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return Replay(entries, jnp.uint32(0)), first_cursor(streams)


def first_cursor(streams: int) -> Cursor:
    """Return the cursor of an empty replay."""
    nothing = jnp.zeros(streams, jnp.int32)
    reward, fresh = _before(streams)
    return Cursor(nothing, nothing, reward, fresh, jnp.uint32(0))


def append(replay: Replay, cursor: Cursor, rollout: Rollout) -> tuple[Replay, Cursor]:
    """Write a rollout behind the cursor, with the final observations of its episodes; invalid steps are left out."""
    horizon, streams = rollout.reward.shape
    capacity = jax.tree.leaves(replay.entries)[0].shape[1]
    # If the last rollout was rejected, its steps are missing before these, so these begin a sequence of their own.
    fresh = cursor.fresh | (replay.attempts != cursor.rollouts)
    entries = _entries(rollout, cursor.reward, fresh)
    valid = _valid(rollout)
    ends = valid & rollout.done
    added = valid.astype(jnp.int32) + ends.astype(jnp.int32)
    total = jnp.cumsum(added, axis=0)
    place = cursor.head[None] + total - added
    places = jnp.concatenate([place, place + 1]) % capacity
    places = jnp.where(jnp.concatenate([valid, ends]), places, capacity)  # out of bounds, where writes are dropped
    stream = jnp.broadcast_to(jnp.arange(streams), places.shape)

    def write(room: jax.Array, given: jax.Array) -> jax.Array:
        return room.at[stream, places].set(given, mode="drop")

    return Replay(jax.tree.map(write, replay.entries, entries), cursor.rollouts + 1), Cursor(
        head=(cursor.head + total[-1]) % capacity,
        size=jnp.minimum(cursor.size + total[-1], capacity - margin(horizon)),
        reward=rollout.reward[-1],
        fresh=rollout.done[-1] | ~valid[-1],
        rollouts=cursor.rollouts + 1,
    )


def number_of_sequences(cursor: Cursor, length: int) -> jax.Array:
    """Return how many sequences of so many entries each stream holds, int32 `[N]`."""
    return jnp.maximum(cursor.size - length + 1, 0)


def draw(replay: Replay, cursor: Cursor, key: Key, batch: int, length: int) -> Drawn:
    """Draw sequences uniformly, with replacement; there must be one at least.

    Args:
        replay: the data.
        cursor: what of it is valid.
        key: random key.
        batch: B, the number of sequences.
        length: L, the entries of each.
    """
    sums = jnp.cumsum(number_of_sequences(cursor, length))
    number = (jax.random.bits(key, (batch,)) % jnp.maximum(sums[-1], 1).astype(jnp.uint32)).astype(jnp.int32)
    stream = jnp.minimum(jnp.searchsorted(sums, number, side="right", method="compare_all"), len(sums) - 1)
    start = number - jnp.where(stream > 0, sums[stream - 1], 0)
    capacity = jax.tree.leaves(replay.entries)[0].shape[1]
    oldest = cursor.head[stream] - cursor.size[stream] + start
    place = (oldest[None] + jnp.arange(length)[:, None]) % capacity
    stream = jnp.broadcast_to(stream, place.shape)
    return Drawn(jax.tree.map(lambda room: room[stream, place], replay.entries), stream, place)


def _before(streams: int) -> tuple[jax.Array, jax.Array]:
    """Return the last reward, and whether the next entry is the first of an episode, before the first rollout."""
    return jnp.zeros(streams), jnp.ones(streams, bool)


def _valid(rollout: Rollout) -> jax.Array:
    return jnp.ones_like(rollout.done) if isinstance(rollout.valid, tuple) else rollout.valid


def _entries(rollout: Rollout, reward: jax.Array, fresh: jax.Array) -> Entries:
    """Return an entry for each step, then one for the end of each step, leaves `[2T, N, ...]`; not all are valid."""
    valid, nothing = _valid(rollout), jnp.zeros_like(rollout.done)
    first = rollout.reset | jnp.concatenate([fresh[None], ~valid[:-1]])
    arrived = jnp.where(first, 0.0, jnp.concatenate([reward[None], rollout.reward[:-1]]))

    def then_zeros(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x)]), tree)

    def both(steps: PyTree, ends: PyTree) -> Any:
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), steps, ends)

    return Entries(
        obs=both(rollout.obs, rollout.final_obs),
        action=then_zeros(rollout.action),
        reward=both(arrived, rollout.reward),
        first=then_zeros(first),
        last=both(nothing, ~nothing),
        terminal=both(nothing, rollout.terminated),
        extras=then_zeros(rollout.extras),
    )
