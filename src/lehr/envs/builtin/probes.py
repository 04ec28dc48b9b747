"""Probe environments: tasks so small that the value every critic must learn is known in closed form.

Each isolates one thing that an algorithm can get wrong: if `ConstantReward` fails the value loss is wrong, if
`TwoStep` fails the discount is, if `Truncated` fails a time limit counts as an end, and so on. Each takes one of two
actions, or with `continuous=True` a number in [−1, 1]. Run them under `TimeLimit(probe, TIME_LIMIT)`, which only the
last two reach, or by name, which does the same.
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
    """What an optimal policy is worth: every observation `[M, 1]`, its value `[M]`, and the best action in it."""

    observations: np.ndarray
    values: np.ndarray
    actions: np.ndarray | None
    """int `[M]`, or float `[M, 1]` with continuous actions; `None` where every action is as good as another."""


@dataclass(frozen=True)
class Probe(Environment):
    """The abstract parent. The state is the observation, one number from −1 to 1."""

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
        """Begin in state 0."""
        return _ZERO, _ZERO

    @abstractmethod
    def expected_values(self, discount: float) -> Values:
        """The observations, and their values and best actions under an optimal policy."""

    def _score(self, action: jax.Array, sign: jax.Array | float) -> jax.Array:
        """The reward for an action where the best one is 1 (sign 1) or 0 (sign −1), or the number sign / 2.

        Two actions: 1 for the best, −1 for the other. Numbers: 1 − (action − sign / 2)², so that a policy with the
        right mean and standard deviation σ is worth 1 − σ², its actions not clipped.
        """
        if self.continuous:
            return 1 - (action[0] - sign / 2) ** 2
        return jnp.where((action == 1) == (sign > 0), 1.0, -1.0)

    def _best(self, signs: np.ndarray) -> np.ndarray:
        """The best actions `[M]` or `[M, 1]` for these signs."""
        return signs[:, None] / 2 if self.continuous else (signs > 0).astype(np.int32)


def _timestep(obs: jax.Array, reward: jax.Array | float, terminated: jax.Array | bool) -> Timestep:
    return Timestep(obs, jnp.float32(reward), jnp.asarray(terminated), jnp.asarray(False), {})


def _random_sign(key: Key) -> tuple[jax.Array, jax.Array]:
    sign = jax.random.rademacher(key, (1,), jnp.float32)
    return sign, sign


@register("Probe-ConstantReward-v0", TIME_LIMIT)
@dataclass(frozen=True)
class ConstantReward(Probe):
    """One step, observation 0, reward 1: V(0) = 1. Tests the value loss alone."""

    def step(self, key: Key, state: jax.Array, action: jax.Array) -> tuple[jax.Array, Timestep]:
        """End with reward 1."""
        return state, _timestep(state, 1.0, True)

    def expected_values(self, discount: float) -> Values:
        """V(0) = 1."""
        return Values(np.zeros((1, 1)), np.ones(1), None)


@register("Probe-ObservationReward-v0", TIME_LIMIT)
@dataclass(frozen=True)
class ObservationReward(Probe):
    """One step, observation −1 or 1 at random, which is the reward: V(o) = o. Tests that the critic sees."""

    def reset(self, key: Key) -> tuple[jax.Array, jax.Array]:
        """Begin in −1 or 1."""
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
    """One step, observation 0, reward 1 for the best action and less for another: V(0) = 1. Tests the policy loss."""

    def step(self, key: Key, state: jax.Array, action: jax.Array) -> tuple[jax.Array, Timestep]:
        """End with a reward for the action: the best is 1, or the number 0.5."""
        return state, _timestep(state, self._score(action, 1.0), True)

    def expected_values(self, discount: float) -> Values:
        """V(0) = 1."""
        return Values(np.zeros((1, 1)), np.ones(1), self._best(np.ones(1)))


@register("Probe-PolicyObservationReward-v0", TIME_LIMIT)
@dataclass(frozen=True)
class PolicyObservationReward(Probe):
    """One step, observation −1 or 1, and the best action depends on it: V(o) = 1. Tests that the policy sees."""

    def reset(self, key: Key) -> tuple[jax.Array, jax.Array]:
        """Begin in −1 or 1."""
        return _random_sign(key)

    def step(self, key: Key, state: jax.Array, action: jax.Array) -> tuple[jax.Array, Timestep]:
        """End with a reward for the action: the best is 1 where the observation is 1, else 0; or the number o / 2."""
        return state, _timestep(state, self._score(action, state[0]), True)

    def expected_values(self, discount: float) -> Values:
        """V(o) = 1."""
        signs = np.array([-1.0, 1.0])
        return Values(signs[:, None], np.ones(2), self._best(signs))


@register("Probe-Truncated-v0", TIME_LIMIT)
@dataclass(frozen=True)
class Truncated(Probe):
    """Endless, observation 0, reward 1: V(0) = 1 / (1 − γ), however short the time limit. Tests the two flags."""

    def step(self, key: Key, state: jax.Array, action: jax.Array) -> tuple[jax.Array, Timestep]:
        """Go on, with reward 1."""
        return state, _timestep(state, 1.0, False)

    def expected_values(self, discount: float) -> Values:
        """V(0) = 1 / (1 − γ)."""
        return Values(np.zeros((1, 1)), np.array([1 / (1 - discount)]), None)

    def merged_value(self, discount: float, max_steps: int = TIME_LIMIT) -> float:
        """What one-step bootstrapping gives if a time limit of n steps counts as an end: 1 / (1 − γ (1 − 1/n))."""
        return 1 / (1 - discount * (1 - 1 / max_steps))


@register("Probe-FinalObservation-v0", TIME_LIMIT)
@dataclass(frozen=True)
class FinalObservation(Probe):
    """Observation 0 and reward 0, then observation 1 and reward 1 without end: V(0) = γ / (1 − γ), V(1) = 1 / (1 − γ).

    Always truncated in 1 and reset to 0. Tests that a truncated episode is worth its final observation, not the next
    episode's first.
    """

    def step(self, key: Key, state: jax.Array, action: jax.Array) -> tuple[jax.Array, Timestep]:
        """Go to 1 or stay there."""
        return _ONE, _timestep(_ONE, state[0], False)

    def expected_values(self, discount: float) -> Values:
        """V(0) = γ / (1 − γ), V(1) = 1 / (1 − γ)."""
        return Values(np.array([[0.0], [1.0]]), np.array([discount, 1.0]) / (1 - discount), None)

    def reset_value(self, discount: float, max_steps: int = TIME_LIMIT) -> float:
        """What one-step bootstrapping gives for V(1) if it uses the observation after the reset.

        With a limit of n steps a share q = 1 / (n − 1) of the steps in 1 is cut, so V(1) = 1 / (1 − γ (1 − q) − γ² q).
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
