"""The parts of a state that each process of a run on several hosts has: compared, sent, and put together."""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.training.hosts import Hosts
from lehr.training.leaves import is_key
from lehr.types import TrainState


def copies(state: TrainState) -> dict[str, list[str]]:
    """Return a digest of each copy in this process of the arrays that all devices have, by path."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if leaf.is_fully_replicated:
            shards = _plain(leaf).addressable_shards
            found[jax.tree_util.keystr(path)] = [
                hashlib.sha256(np.asarray(x.data).tobytes()).hexdigest() for x in shards
            ]
    return found


def spread_over_hosts(state: TrainState) -> list[str]:
    """Return the paths of the arrays of which this process has only a part."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [jax.tree_util.keystr(path) for path, leaf in leaves if not leaf.is_fully_replicated]


def send_parts(state: TrainState, paths: Sequence[str], hosts: Hosts) -> None:
    """Send this process's parts of some arrays to process 0."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jax.tree_util.keystr(path) in paths:
            parts = _parts(leaf)
            hosts.answer(b"".join(part.tobytes() for _, part in parts), places=[place for place, _ in parts])


def gathered(leaf: jax.Array, answers: Sequence[dict[str, Any]]) -> Any:
    """Return a whole array from this process's parts and from those that others sent."""
    plain = _plain(leaf)
    array = np.empty(plain.shape, plain.dtype)
    for place, part in _parts(leaf):
        array[_slices(place)] = part
    for answer in answers:
        begin = 0
        for place in answer["places"]:
            part = array[_slices(place)]
            content = np.frombuffer(answer["content"], plain.dtype, part.size, begin)
            part[...] = content.reshape(part.shape)
            begin += content.nbytes
    return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf)) if is_key(leaf) else array


def _plain(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _parts(leaf: jax.Array) -> list[tuple[list[list[int]], np.ndarray]]:
    """This process's parts of an array, each with where it begins and ends along every axis."""
    plain, found = _plain(leaf), []
    for shard in plain.addressable_shards:
        if shard.replica_id == 0:
            place = [list(at.indices(size)[:2]) for at, size in zip(shard.index, plain.shape, strict=True)]
            found.append((place, np.asarray(shard.data)))
    return found


def _slices(place: Sequence[Sequence[int]]) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in place)
