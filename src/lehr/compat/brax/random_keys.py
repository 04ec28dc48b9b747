"""Brax's random keys, split in its order, so that the same seed gives the same episodes and minibatches."""

from typing import NamedTuple

import jax

from lehr.types import Key

HostKeys = dict[str, Key]
"""The keys kept between epochs: `host`, which each epoch splits, and `environments` `[N]`, which each reset splits."""


class SeedKeys(NamedTuple):
    """The keys that a training starts with."""

    host: Key
    environments: Key
    evaluation: Key
    policy: Key
    """For the initial parameters of the policy."""
    value: Key
    """For those of the critic."""


def seed_keys(seed: int) -> SeedKeys:
    """Derive the keys of a training from its seed."""
    shared, host = jax.random.split(jax.random.PRNGKey(seed))
    policy, value = jax.random.split(shared)
    host, environments, evaluation = jax.random.split(jax.random.fold_in(host, 0), 3)  # 0: the only process
    return SeedKeys(host, environments, evaluation, policy, value)


def split_chain(key: Key, length: int, used: int) -> Key:
    """Keys `[length]` from repeated splits in two: the half `used`, 0 or 1, is a result, the other is split again."""

    def link(key: Key, _: None) -> tuple[Key, Key]:
        pair = jax.random.split(key)
        return pair[1 - used], pair[used]

    return jax.lax.scan(link, key, length=length)[1]


def action_keys(key: Key, unrolls: int, length: int) -> Key:
    """The keys of all actions of a rollout, `[unrolls · length]`: a chain of unrolls, and a chain in each."""
    each = jax.vmap(lambda key: split_chain(key, length, used=0))(split_chain(key, unrolls, used=0))
    return each.reshape(unrolls * length, *each.shape[2:])
