"""Probe environments: tasks so small that the value a critic must learn is known in closed form.

Each isolates one thing that an algorithm can get wrong: if `ConstantReward` fails, the value loss is wrong; if
`TwoStep` fails, the discounting is wrong; if `Truncated` fails, a time limit is treated as a termination; and so on.
Each has two actions, or with `continuous=True` one action in [−1, 1]. Run them under `TimeLimit(probe, TIME_LIMIT)`,
which only the last two reach; creating them by name applies it.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr.envs.base import Environment
from lehr.envs.registry import register
from lehr.spaces import Box, Discrete
from lehr.types import Key, Timestep

TIME_LIMIT = 3
"""The standard time limit of the probes, in steps."""

_ZERO: Any = np.zeros(1, np.float32)
_ONE: Any = np.ones(1, np.float32)


class Values(NamedTuple):
    """The solution of a probe: every observation `[M, 1]`, its optimal value `[M]`, and its best action."""

    observations: np.ndarray
    values: np.ndarray
    actions: np.ndarray | None
    """int `[M]`, or float `[M, 1]` with continuous actions; `None` if all actions are equally good."""


@dataclass(frozen=True)
class Probe(Environment):
    """Abstract base class. The state is the observation, one number from −1 to 1."""

    continuous: bool = False

    @property
    def observation_space(self) -> Box:
        """One number."""
        return Box(-1, 1, (1,))

    @property
    def action_space(self) -> Box | Discrete:
        """Two actions, or one number."""
        return Box(-1, 1, (1,)) if self.continuous else Discrete(2)

    def reset(self, key: Key) -> tuple[jax.Array, jax.Array]:
        """Start in state 0."""
        return _ZERO, _ZERO

    @abstractmethod
    def expected_values(self, discount: float) -> Values:
        """Return the observations with their optimal values and best actions."""

    def _score(self, action: jax.Array, sign: jax.Array | float) -> jax.Array:
        """Return the reward of an action; the best action is 1 (sign 1) or 0 (sign −1), or sign / 2 if continuous.

        Discrete: 1 for the best action, −1 for the other. Continuous: 1 − (action − sign / 2)², so that the expected
        reward of a policy with the right mean and standard deviation σ is 1 − σ² if its actions are not clipped.
        """
        if self.continuous:
            return 1 - (action[0] - sign / 2) ** 2
        return jnp.where((action == 1) == (sign > 0), 1.0, -1.0)

    def _best(self, signs: np.ndarray) -> np.ndarray:
        """Return the best actions, `[M]` or `[M, 1]`, for these signs."""
        return signs[:, None] / 2 if self.continuous else (signs > 0).astype(np.int32)


def _timestep(obs: jax.Array, reward: jax.Array | float, terminated: jax.Array | bool) -> Timestep:
    return Timestep(obs, jnp.float32(reward), jnp.asarray(terminated), jnp.asarray(False), {})


def _random_sign(key: Key) -> tuple[jax.Array, jax.Array]:
    sign = jax.random.rademacher(key, (1,), jnp.float32)
    return sign, sign


@register("Probe-ConstantReward-v0", TIME_LIMIT)
@dataclass(frozen=True)
class ConstantReward(Probe):
    """One step, observation 0, reward 1: V(0) = 1. Tests only the value loss."""

    def step(self, key: Key, state: jax.Array, action: jax.Array) -> tuple[jax.Array, Timestep]:
        """End with reward 1."""
        return state, _timestep(state, 1.0, True)

    def expected_values(self, discount: float) -> Values:
        """V(0) = 1."""
        return Values(np.zeros((1, 1)), np.ones(1), None)


@register("Probe-ObservationReward-v0", TIME_LIMIT)
@dataclass(frozen=True)
class ObservationReward(Probe):
    """One step, random observation −1 or 1, reward o: V(o) = o. Tests that the critic uses the observation."""

    def reset(self, key: Key) -> tuple[jax.Array, jax.Array]:
        """Start in −1 or 1."""
        return _random_sign(key)

    def step(self, key: Key, state: jax.Array, action: jax.Array) -> tuple[jax.Array, Timestep]:
        """End with the observation as the reward."""
        return state, _timestep(state, state[0], True)

    def expected_values(self, discount: float) -> Values:
        """V(o) = o."""
        signs = np.array([-1.0, 1.0])
        return Values(signs[:, None], signs, None)


@register("Probe-TwoStep-v0", TIME_LIMIT)
@dataclass(frozen=True)
class TwoStep(Probe):
    """Observation 0 and reward 0, then observation 1 and reward 1: V(0) = γ, V(1) = 1. Tests the discount."""

    def step(self, key: Key, state: jax.Array, action: jax.Array) -> tuple[jax.Array, Timestep]:
        """Go from 0 to 1, or end from 1."""
        return _ONE, _timestep(_ONE, state[0], state[0] == 1)

    def expected_values(self, discount: float) -> Values:
        """V(0) = γ, V(1) = 1."""
        return Values(np.array([[0.0], [1.0]]), np.array([discount, 1.0]), None)


@register("Probe-PolicyReward-v0", TIME_LIMIT)
@dataclass(frozen=True)
class PolicyReward(Probe):
    """One step, observation 0, reward 1 for the best action and less for others: V(0) = 1. Tests the policy loss."""

    def step(self, key: Key, state: jax.Array, action: jax.Array) -> tuple[jax.Array, Timestep]:
        """End with a reward for the action; the best is 1, or 0.5 if continuous."""
        return state, _timestep(state, self._score(action, 1.0), True)

    def expected_values(self, discount: float) -> Values:
        """V(0) = 1."""
        return Values(np.zeros((1, 1)), np.ones(1), self._best(np.ones(1)))


@register("Probe-PolicyObservationReward-v0", TIME_LIMIT)
@dataclass(frozen=True)
class PolicyObservationReward(Probe):
    """One step, observation −1 or 1, on which the best action depends: V(o) = 1. Tests that the policy uses it."""

    def reset(self, key: Key) -> tuple[jax.Array, jax.Array]:
        """Start in −1 or 1."""
        return _random_sign(key)

    def step(self, key: Key, state: jax.Array, action: jax.Array) -> tuple[jax.Array, Timestep]:
        """End with a reward for the action; the best is 1 if o = 1 and 0 if o = −1, or o / 2 if continuous."""
        return state, _timestep(state, self._score(action, state[0]), True)

    def expected_values(self, discount: float) -> Values:
        """V(o) = 1."""
        signs = np.array([-1.0, 1.0])
        return Values(signs[:, None], np.ones(2), self._best(signs))


@register("Probe-Truncated-v0", TIME_LIMIT)
@dataclass(frozen=True)
class Truncated(Probe):
    """Endless, observation 0, reward 1: V(0) = 1 / (1 − γ), whatever the time limit. Tests truncation handling."""

    def step(self, key: Key, state: jax.Array, action: jax.Array) -> tuple[jax.Array, Timestep]:
        """Continue with reward 1."""
        return state, _timestep(state, 1.0, False)

    def expected_values(self, discount: float) -> Values:
        """V(0) = 1 / (1 − γ)."""
        return Values(np.zeros((1, 1)), np.array([1 / (1 - discount)]), None)

    def merged_value(self, discount: float, max_steps: int = TIME_LIMIT) -> float:
        """Return the wrong V(0) learned if a time limit of n steps counts as termination: 1 / (1 − γ (1 − 1/n)).

        This is the value for one-step bootstrapping.
        """
        return 1 / (1 - discount * (1 - 1 / max_steps))


@register("Probe-FinalObservation-v0", TIME_LIMIT)
@dataclass(frozen=True)
class FinalObservation(Probe):
    """Observation 0 and reward 0, then observation 1 and reward 1 without end: V(0) = γ / (1 − γ), V(1) = 1 / (1 − γ).

    Always truncated in 1 and reset to 0. Tests that a truncated episode bootstraps from its final observation, not from
    the first one of the next episode.
    """

    def step(self, key: Key, state: jax.Array, action: jax.Array) -> tuple[jax.Array, Timestep]:
        """Go to 1 or stay there."""
        return _ONE, _timestep(_ONE, state[0], False)

    def expected_values(self, discount: float) -> Values:
        """V(0) = γ / (1 − γ), V(1) = 1 / (1 − γ)."""
        return Values(np.array([[0.0], [1.0]]), np.array([discount, 1.0]) / (1 - discount), None)

    def reset_value(self, discount: float, max_steps: int = TIME_LIMIT) -> float:
        """Return the wrong V(1) that one-step bootstrapping learns if it uses the observation after the reset.

        With a limit of n steps, a fraction q = 1 / (n − 1) of the steps in 1 is truncated, so
        V(1) = 1 / (1 − γ (1 − q) − γ² q).
        """
        cut = 1 / (max_steps - 1)
        return 1 / (1 - discount * (1 - cut) - discount**2 * cut)


PROBES: tuple[type[Probe], ...] = (
    ConstantReward,
    ObservationReward,
    TwoStep,
    PolicyReward,
    PolicyObservationReward,
    Truncated,
    FinalObservation,
)
