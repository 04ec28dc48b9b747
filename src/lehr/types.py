"""The values passed between the stages of training, with the shape of each field.

Axes: `T` steps of a rollout, `N` environments times agents, `A` agents of one environment.
"""

import contextlib
import contextvars
import functools
import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from lehr.errors import InputError

Key = jax.Array
"""A typed PRNG key, as returned by `jax.random.key`."""


def derive(key: Key, purpose: str, clock: jax.Array | int = 0) -> Key:
    """Derive a key for a purpose and a clock value. Stopping and resuming a run does not change it."""
    return jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(purpose.encode())), clock)


PyTree = Any
"""Nested tuples, lists, dicts and registered classes whose leaves are arrays."""


NOTHING: Any = ()
"""Placeholder for an omitted part of a value."""


class Timestep(NamedTuple):
    """What an environment returns for an action. With `A > 1` agents, each field has a leading axis `A`."""

    obs: PyTree
    """The observation after the action, a pytree in the environment's observation space."""
    reward: jax.Array
    """float32 `[]`."""
    terminated: jax.Array
    """bool `[]`: the episode ended in a terminal state, whose value is 0."""
    truncated: jax.Array
    """bool `[]`: the episode was cut off, by a time limit for example; its last state still has a value."""
    info: dict[str, Any]
    """Additional arrays, with the same keys at every step; may be `{}`."""


class Rollout(NamedTuple):
    """`T` steps of `N` environments: the data that an update learns from."""

    obs: PyTree
    """Leaves `[T, N, ...]`: the observation that the action is based on, normalised if the run normalises."""
    action: PyTree
    """Leaves `[T, N, ...]`: the sampled action, before squashing or clipping to the action space."""
    log_prob: jax.Array
    """float32 `[T, N]`: log-probability of the action under the policy that acted."""
    reward: jax.Array
    """float32 `[T, N]`, scaled if the run scales rewards."""
    value: Any
    """float32 `[T, N]`: the critic's value of `obs`; `()` if the algorithm does not need values."""
    next_value: Any
    """float32 `[T, N]`: value of the next observation; after a truncated episode, of its final observation; unused
    after termination. `()` without values."""
    terminated: jax.Array
    """bool `[T, N]`: the episode ended with this step in a terminal state, whose value is 0."""
    done: jax.Array
    """bool `[T, N]`: the episode ended with this step, terminated or truncated."""
    reset: jax.Array
    """bool `[T, N]`: `obs` is the first of an episode, so the recurrent state is reset before it."""
    valid: Any
    """bool `[T, N]`: the agent really took this step. False while a done agent waits for the others, or when a host
    environment uses a step to reset; losses must ignore such steps. `()` if every step is valid."""
    carry: PyTree
    """Leaves `[N, ...]`: the recurrent state before the first step; without leaves for a feed-forward network."""
    final_obs: Any = ()
    """Leaves `[T, N, ...]`: the observation after each step, before any reset, normalised if the run normalises; `()`
    if the algorithm does not need it."""
    taken: Any = ()
    """Leaves `[T, N, ...]`: the action as the environment took it, squashed or clipped to its space; `()` if nobody
    needs it."""
    extras: Any = ()
    """What else `act` stored of each step, by name, leaves `[T, N, ...]`; `()` if nothing."""


class Packed(NamedTuple):
    """Gradients that are already in the form that the optimiser works on."""

    gradients: PyTree
    norm: jax.Array | None = None
    """Their norm, float32 `[]`, if it is known."""


class Learner(NamedTuple):
    """The state of an algorithm."""

    params: PyTree
    """Parameters of the networks."""
    optimiser: PyTree
    """State of the optimiser of the parameters."""
    auxiliary: PyTree = ()
    """Other learned state: a target network, a second optimiser. Like the parameters, it does not change in a
    non-finite update."""
    memory: PyTree = ()
    """Data: stored rollouts, a replay buffer. It may be gigabytes, because it is never checked for non-finite values:
    what a non-finite update wrote into it stays, so keep a counter of its valid entries in `auxiliary`."""
    data: PyTree = ()
    """What was loaded from outside, demonstrations for example. It is never changed and never saved: a resumed run
    loads it again."""


class Loaded(NamedTuple):
    """What a run loads from outside before it starts."""

    data: PyTree = ()
    """Goes to `Learner.data`."""
    sources: tuple[tuple[str, str], ...] = ()
    """The name of each file or data set, and its SHA-256; a resumed run reports those that changed."""
    summary: str = ""
    """What was loaded, in one sentence for the user."""


class Actor(NamedTuple):
    """The state of acting between two rollouts."""

    env_state: PyTree
    """Leaves `[E, ...]`, `E` environments."""
    obs: PyTree
    """Leaves `[N, ...]`: the observation for the next action, not normalised."""
    reset: jax.Array
    """bool `[N]`: `obs` is the first of an episode."""
    carry: PyTree
    """Leaves `[N, ...]`: the network's recurrent state."""
    episodes: PyTree
    """`lehr.acting.rollout.RunningEpisodes`, `[N]` each."""
    resets: PyTree = ()
    """`lehr.envs.wrappers.ResetPool`, or `()` if every environment computes its own resets."""


class TrainState(NamedTuple):
    """The full state of a run: saved and loaded, the run continues as if it had never stopped."""

    learner: Learner
    actor: Actor
    observation_statistics: PyTree
    """`RunningStatistics`, or `()` for a run that does not normalise observations."""
    reward_scaling: PyTree
    """`RewardScaling`, or `()` for a run that does not scale rewards."""
    reward_model: Learner
    """State of the reward model; without leaves if rewards are the environment's."""
    coefficients: PyTree
    """`lehr.schedules.bundle.Coefficients`: the bound coefficients, as data."""
    controllers: dict[str, Any]
    """State of each controller, by coefficient."""
    key: Key
    """The run's random seed as a key. Every key is derived from it by purpose and clock; it never changes."""
    updates: jax.Array
    """uint32 `[]`: updates so far. The clock is this times the env steps per update."""
    rejected: jax.Array
    """uint32 `[]`: non-finite updates so far, which were not applied."""
    pending: PyTree
    """The rollout collected during the last update, to learn from next; `()` without overlap."""
    behind: PyTree = ()
    """Leaves `[k, ...]`: the parameters before each of the last k updates, oldest first, if the acting policy is k
    updates behind; `()` if it is not behind."""

    def __repr__(self) -> str:
        return f"TrainState(updates={self.updates}, {len(jax.tree.leaves(self))} arrays)"

    @property
    def saved(self) -> "TrainState":
        """The part that a checkpoint stores.

        Coefficients are in the config instead, where they can be changed, and data is where it was loaded from.
        """
        return self._with(coefficients=(), data=((), ()))

    def completed(self, other: "TrainState") -> "TrainState":
        """Return this saved part together with the parts of another state that are not saved."""
        return self._with(other.coefficients, (other.learner.data, other.reward_model.data))

    def _with(self, coefficients: PyTree, data: tuple[PyTree, PyTree]) -> "TrainState":
        return self._replace(
            coefficients=coefficients,
            learner=self.learner._replace(data=data[0]),
            reward_model=self.reward_model._replace(data=data[1]),
        )

    @property
    def memories(self) -> tuple[PyTree, PyTree]:
        """The `memory` of the learner and that of the reward model."""
        return self.learner.memory, self.reward_model.memory

    def with_memories(self, learner: PyTree, reward_model: PyTree) -> "TrainState":
        """Return this state with another `memory` of the learner and of the reward model."""
        return self._replace(
            learner=self.learner._replace(memory=learner), reward_model=self.reward_model._replace(memory=reward_model)
        )

    @property
    def acting(self) -> PyTree:
        """The parameters that collect the next rollout."""
        if isinstance(self.behind, tuple):
            return self.learner.params
        return jax.tree.map(lambda x: x[0], self.behind)


Metrics = dict[str, jax.Array]
"""Scalars `[]` by name, or `[U]` for a chunk of `U` updates."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MetricRow:
    """Metrics in one array, `[..., M]`; their names are static, so every JAX transformation preserves them.

    >>> _, rows = jax.lax.scan(lambda x, _: (x + 1, MetricRow.of({"a": x, "b": 2 * x})), jnp.float32(0), length=3)
    >>> {name: float(value) for name, value in rows.mean().items()}
    {'a': 1.0, 'b': 2.0}
    """

    values: jax.Array
    names: tuple[str, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, metrics: Metrics) -> "MetricRow":
        """Build a row from scalars."""
        names = tuple(sorted(metrics))
        return cls(jnp.stack([metrics[name].astype(jnp.float32) for name in names]), names)

    def mean(self) -> Metrics:
        """Return means over the first axis, by name."""
        return dict(zip(self.names, jnp.mean(self.values, axis=0), strict=True))


@dataclass(frozen=True)
class TreeShapes:
    """The shapes and dtypes of a pytree of arrays: hashable, to find again what was compiled for them.

    >>> shapes = TreeShapes.of({"weights": jnp.zeros((4, 2))})
    >>> shapes.tree["weights"].shape, shapes == TreeShapes.of({"weights": jnp.ones((4, 2))})
    ((4, 2), True)
    """

    structure: Any
    leaves: tuple[tuple[tuple[int, ...], Any], ...]
    """Of each leaf its shape and its dtype, or the name of the type of a Python number."""

    @classmethod
    def of(cls, tree: PyTree) -> "TreeShapes":
        """Those of a pytree of arrays, of `jax.ShapeDtypeStruct` or of Python numbers."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple((jnp.shape(leaf), getattr(leaf, "dtype", type(leaf).__name__)) for leaf in leaves))

    @property
    def tree(self) -> PyTree:
        """The pytree, with `jax.ShapeDtypeStruct` as leaves; none of them was a Python number."""
        return jax.tree.unflatten(self.structure, [jax.ShapeDtypeStruct(*leaf) for leaf in self.leaves])


def check_same_shape(**arrays: jax.Array) -> None:
    """Raise an error for different shapes, which would silently broadcast to a wrong result.

    >>> check_same_shape(values=jnp.zeros((8, 1)), returns=jnp.zeros(8))
    Traceback (most recent call last):
    ValueError: values (8, 1), returns (8,) must have the same shape; reshape or squeeze those that differ.
    """
    if len({array.shape for array in arrays.values()}) > 1:
        given = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"{given} must have the same shape; reshape or squeeze those that differ.")


_T = TypeVar("_T")


@contextlib.contextmanager
def in_scope(variable: contextvars.ContextVar[_T], value: _T) -> Iterator[None]:
    """Give a context variable this value in the scope, and its old one afterwards."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_sharing: contextvars.ContextVar[int] = contextvars.ContextVar("_sharing", default=1)


def shared_between(devices: int) -> contextlib.AbstractContextManager[None]:
    """Let `check_fits` compare with the memory of so many devices."""
    return in_scope(_sharing, devices)


def check_fits(what: str, advice: str, **shapes: PyTree) -> None:
    """Raise an error if arrays of these shapes need more memory than there is; nothing is allocated.

    >>> check_fits("The network", "choose smaller layers", weights=jax.ShapeDtypeStruct((10**7, 10**7), jnp.float32))
    Traceback (most recent call last):
    lehr.errors.InputError: The network needs 372529 GiB of memory, but there are only ...; choose smaller layers.
    """
    need = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    room = memory_size() * (1 if jax.local_devices()[0].platform == "cpu" else _sharing.get())
    if need > room:
        sizes = f"{need / 2**30:.0f} GiB of memory, but there are only {room / 2**30:.0f} GiB"
        raise InputError(f"{what} needs {sizes}; {advice}.")


@functools.cache
def memory_size() -> int:
    """The memory of one device in bytes: of the GPU if there is one, otherwise what this process may use."""
    device = jax.local_devices()[0]
    if device.platform != "cpu" and (stats := device.memory_stats()) and "bytes_limit" in stats:
        return stats["bytes_limit"]
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):  # the limit of a container: a number, or "max"
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes)
