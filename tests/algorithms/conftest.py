"""What the tests of algorithms share: small settings, small environments, and programs that are compiled once."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr import algorithms
from lehr.algorithms import ppo
from lehr.config import build, describe
from lehr.envs import Environment
from lehr.spaces import Box, Discrete, MultiDiscrete
from lehr.testing import SMALL
from lehr.training.program import Program, assemble
from lehr.training.runners.device import chunk, metric_names
from lehr.types import Timestep, TrainState
from tests.small import trial

MOST = 400
"""The longest run in one call, in updates."""

MORE_SETTINGS: dict[str, dict[str, Any]] = {
    # At the probes' high rate, and without an entropy bonus, the policy would be sure of itself before the model is.
    "dreamer": {"train_ratio": 2.0, "uniform_mix": "0.1 -> 0 over 50%", "imagination_length": 5},
    "ppg": {
        "policy_updates": 2,
        "auxiliary_epochs": 2,
        "auxiliary_minibatches": 2,
        "auxiliary_learning_rate": "0.005 -> 0",
        "normalise_rewards": False,
    },
    # The probes ask for values of observations as they are, some of which no episode begins with, and of rewards.
    "recurrent_ppo": {"normalise_observations": False, "normalise_rewards": False, "critic_torso": "mlp"},
    "trpo": {"value_epochs": 2, "value_minibatches": 2},
}

RATES: dict[str, str] = {"trpo": "value_learning_rate"}
"""What an algorithm calls its learning rate, where that has another name."""

EVERYTHING_ON: dict[str, dict[str, Any]] = {
    "a2c": {"optimiser": "adamw"},
    "impala": {"optimiser": "adamw"},
    # After some gradient steps, returns differ enough for their range to matter; many latents diverge enough.
    "dreamer": {"train_ratio": 8.0, "latents": 64},
    **{
        name: {"minibatching": "prioritised", "advantage": "vtrace"}
        for name in algorithms.names()
        if issubclass(algorithms.find(name).Config, ppo.Config)
    },
}
"""Settings with which an algorithm uses all of its coefficients, where its defaults do not."""

QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0}
"""Compiling takes longer than all that is computed here: machine code that is not optimised takes half as long."""


class Run(NamedTuple):
    """A run after some updates."""

    program: Program
    state: TrainState
    metrics: dict[str, np.ndarray]
    """By name, `[updates]` each."""


@cache
def _compiled(program: Program) -> Callable:
    """The chunk of a program. The state is not donated: a test may look at it again."""
    return jax.jit(partial(chunk, program, MOST), compiler_options=QUICKLY)


_names: dict[Any, tuple[str, ...]] = {}


def small(algorithm: str) -> dict[str, Any]:
    """The settings of a small run of an algorithm, as far as it has them."""
    known = _known(algorithm)
    plain = {"normalise_observations": False, "normalise_rewards": False}
    return {name: value for name, value in SMALL.items() if name in known} | plain | MORE_SETTINGS.get(algorithm, {})


def _known(algorithm: str) -> set[str]:
    return {field.name for cls in algorithms.settings_of(algorithm) for field in describe(cls)}


def _configs(algorithm: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    given = {**small(algorithm), **settings}
    if "torso" not in _known(algorithm):  # its memory is its own
        given.pop("torso", None)
    if "learning_rate" in given:
        given[RATES.get(algorithm, "learning_rate")] = given.pop("learning_rate")
    return build(algorithms.settings_of(algorithm), given)


def _begin(algorithm: str, env: str | Environment, total_steps: int = 10_000, seed: int = 0, **settings: Any) -> Run:
    config, network_config = _configs(algorithm, {**trial(algorithm, env), **settings})
    return Run(*assemble(algorithm, env, config, network_config, total_steps, seed), metrics={})


def _advance(run: Run, updates: int) -> Run:
    kind = run.program, jax.tree.structure(run.state)
    if kind not in _names:
        _names[kind] = metric_names(run.program, run.state)
    state, rows = _compiled(run.program)(run.state, jnp.int32(updates))
    metrics = {name: np.asarray(rows)[:updates, column] for column, name in enumerate(_names[kind])}
    return run._replace(state=state, metrics=metrics)


@pytest.fixture(scope="session")
def configs():
    """`configs(algorithm, settings)`: the configs of a small run, of the algorithm and of its network."""
    return _configs


@pytest.fixture(scope="session")
def begin():
    """`begin(algorithm, env, total_steps, seed, **settings)`: a small run before its first update."""
    return _begin


@pytest.fixture(scope="session")
def advance():
    """`advance(run, updates)`: the run after so many updates more, with their metrics."""
    return _advance


@pytest.fixture(scope="session")
def quickly():
    """Options with which `jax.jit` compiles quickly."""
    return QUICKLY


@pytest.fixture(scope="session")
def rates():
    """By algorithm, what it calls its learning rate, where that has another name."""
    return RATES


@pytest.fixture(scope="session")
def everything_on():
    """By algorithm, settings with which it uses all of its coefficients."""
    return EVERYTHING_ON


# Environments --------------------------------------------------------------------------------------------------------


class PoisonState(NamedTuple):
    count: jax.Array
    poisoned: jax.Array


@dataclass(frozen=True)
class Poison(Environment):
    """Four steps, each rewarded with the action's size; but a state that is marked as poisoned gives a NaN, once."""

    observation_space: ClassVar[Box] = Box(0, 4, (1,))
    action_space: ClassVar[Box] = Box(-1, 1, (1,))

    def reset(self, key):
        return PoisonState(jnp.float32(0), jnp.bool(False)), jnp.zeros(1)

    def step(self, key, state, action):
        count = state.count + 1
        reward = jnp.where(state.poisoned, jnp.nan, action[0])
        return PoisonState(count, jnp.bool(False)), Timestep(count[None], reward, count >= 4, jnp.bool(False), {})


@dataclass(frozen=True)
class Match(Environment):
    """One step, observation −1 or 1, reward 1 if the second of two choices is the third for 1 and the first for −1."""

    observation_space: ClassVar[Box] = Box(-1, 1, (1,))
    action_space: ClassVar[MultiDiscrete] = MultiDiscrete((2, 3))

    def reset(self, key):
        sign = jax.random.rademacher(key, (1,), jnp.float32)
        return sign, sign

    def step(self, key, state, action):
        reward = (action[1] == 1 + state[0]).astype(jnp.float32)
        return state, Timestep(state, reward, jnp.bool(True), jnp.bool(False), {})


@dataclass(frozen=True)
class Recall(Environment):
    """A sign is shown, then nothing twice; the third action is rewarded with 1 if it fits the sign, else with −1."""

    observation_space: ClassVar[Box] = Box(-1, 1, (1,))
    action_space: ClassVar[Discrete] = Discrete(2)

    def reset(self, key):
        sign = jax.random.rademacher(key, (), jnp.float32)
        return (sign, jnp.int32(0)), sign[None]

    def step(self, key, state, action):
        sign, count = state
        last = count == 2
        reward = jnp.where(last, jnp.where((action == 1) == (sign > 0), 1.0, -1.0), 0.0)
        return (sign, count + 1), Timestep(jnp.zeros(1), reward, last, jnp.bool(False), {})


@pytest.fixture(scope="session")
def poison():
    """An environment whose states can be poisoned: the next reward is then a NaN."""
    return Poison()


@pytest.fixture(scope="session")
def match():
    """An environment with two discrete choices at once, of which one counts."""
    return Match()


@pytest.fixture(scope="session")
def recall():
    """An environment in which only a memory helps."""
    return Recall()
