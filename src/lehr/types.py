"""The values that pass between the stages of training, each field with its shape.

Axes: `T` steps of a rollout, `N` environments (agents folded in), `A` agents of one environment.
"""

from typing import Any, NamedTuple

import jax

Key = jax.Array
"""A typed PRNG key, as `jax.random.key` makes them."""

PyTree = Any
"""Any nest of tuples, lists, dicts and registered classes whose leaves are arrays."""


NOTHING: Any = ()
"""Stands where a part of a value is left out."""


class Timestep(NamedTuple):
    """What one environment answers to one action. With `A > 1` agents each field has a leading axis `A`."""

    obs: PyTree
    """The observation after the action, a pytree in the environment's observation space."""
    reward: jax.Array
    """float32 `[]`."""
    terminated: jax.Array
    """bool `[]`: the episode ended in a state whose future is worth nothing."""
    truncated: jax.Array
    """bool `[]`: the episode was cut, by a time limit for example; its future still has a value."""
    info: dict[str, Any]
    """More arrays, with the same keys at every step; `{}` when there is nothing to say."""


class Rollout(NamedTuple):
    """`T` steps of `N` environments, as they were lived through: what learning starts from."""

    obs: PyTree
    """Leaves `[T, N, ...]`: the observation that was acted on, normalised if the run normalises."""
    action: PyTree
    """Leaves `[T, N, ...]`: as sampled, before any squashing or clipping to the action space."""
    log_prob: jax.Array
    """float32 `[T, N]`: of the action under the policy that acted."""
    reward: jax.Array
    """float32 `[T, N]`, scaled if the run scales rewards."""
    value: Any
    """float32 `[T, N]`: the critic's value of `obs`; `()` where the algorithm does not need values."""
    next_value: Any
    """float32 `[T, N]`: of the observation that really followed; where an episode was truncated that is its final one,
    and where it terminated no one looks at it. `()` without values."""
    terminated: jax.Array
    """bool `[T, N]`: the episode ended with this step, and its future is worth nothing."""
    done: jax.Array
    """bool `[T, N]`: it ended with this step, terminated or truncated."""
    reset: jax.Array
    """bool `[T, N]`: `obs` is the first of an episode, so a memory is cleared before it."""
    valid: Any
    """bool `[T, N]`: the step was really taken. It was not where an agent is done and waits for the others, or where a
    host environment used a step for its reset; no loss may count it. `()` where every step is valid."""
    carry: PyTree
    """Leaves `[N, ...]`: the memory before the first step; a pytree without leaves for a feed-forward network."""
    final_obs: Any = ()
    """Leaves `[T, N, ...]`: the observation that each step led to, before any reset, normalised if the run normalises;
    `()` where the algorithm does not need them."""
    extras: Any = ()
    """Whatever else `act` kept of each step, by name, leaves `[T, N, ...]`; `()` where it kept nothing."""


class Learner(NamedTuple):
    """What an algorithm learns and remembers."""

    params: PyTree
    """What it acts with."""
    optimiser: PyTree
    """What the optimiser of the parameters remembers."""
    auxiliary: PyTree = ()
    """What else learning changes: a target network, a second optimiser. An update that is not finite is not applied to
    it, as it is not to the parameters."""
    memory: PyTree = ()
    """Data: kept rollouts, a replay. It may be gigabytes, since nothing looks through it: what a non-finite update
    wrote into it stays, so a counter of what is valid in it belongs in `auxiliary`."""


class Actor(NamedTuple):
    """Where acting stands between two rollouts."""

    env_state: PyTree
    """Leaves `[E, ...]`, `E` environments."""
    obs: PyTree
    """Leaves `[N, ...]`: what is acted on next, not normalised."""
    reset: jax.Array
    """bool `[N]`: `obs` is the first of an episode."""
    carry: PyTree
    """Leaves `[N, ...]`: the network's memory."""
    episodes: PyTree
    """`lehr.acting.rollout.RunningEpisodes`, `[N]` each."""


class TrainState(NamedTuple):
    """Everything a run remembers: saved and loaded, it goes on as if it had never stopped."""

    learner: Learner
    actor: Actor
    observation_statistics: PyTree
    """`RunningStatistics`, or `()` for a run that does not normalise observations."""
    reward_scaling: PyTree
    """`RewardScaling`, or `()` for a run that does not scale rewards."""
    reward_model: Learner
    """What the reward model has learned; a `Learner` without leaves where rewards are the environment's."""
    coefficients: PyTree
    """`lehr.schedules.bundle.Coefficients`: the bound coefficients, data like all else here."""
    controllers: dict[str, Any]
    """The state of each coefficient that reacts to metrics."""
    key: Key
    """The run's seed. Every key is derived from it by purpose and clock; it never changes."""
    updates: jax.Array
    """uint32 `[]`: updates made so far. The clock is this times the env steps of one update."""
    rejected: jax.Array
    """uint32 `[]`: updates that were not applied because they were not finite."""
    pending: PyTree
    """What was collected while the last update was learned, to be learned from next; `()` where nothing is."""
    behind: PyTree = ()
    """Leaves `[k, ...]`: the parameters before each of the last k updates, oldest first, where those who act lag behind
    by k updates; `()` where they act with the newest."""

    @property
    def saved(self) -> "TrainState":
        """What a checkpoint of a run holds: the coefficients are in its config, where they can be read and changed."""
        return self._replace(coefficients=())

    @property
    def acting(self) -> PyTree:
        """The parameters that the next rollout is made with."""
        if isinstance(self.behind, tuple):
            return self.learner.params
        return jax.tree.map(lambda x: x[0], self.behind)


Metrics = dict[str, jax.Array]
"""Scalars by name, `[]`, or `[U]` for a chunk of `U` updates."""
