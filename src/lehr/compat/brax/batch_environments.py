"""The environments of a training: a batch of them, stepped and reset together."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from lehr.compat.brax import upstream
from lehr.compat.brax.epoch import outcome
from lehr.envs.suites.lean_step import LeanStep, lean_step
from lehr.training.sharding import EnvironmentSharding
from lehr.types import Key, PyTree


@dataclass(frozen=True)
class Wrapping:
    """Brax's arguments about how an environment is wrapped."""

    wrap_env: bool
    wrap_env_fn: Callable[..., Any] | None
    episode_length: int | None
    action_repeat: int
    randomization_fn: Callable[..., Any] | None

    def wrap(self, env: Any, count: int, key: Key) -> Any:
        """A batch of `count` environments with time limits and automatic resets; `key` randomises their parameters."""
        if not self.wrap_env:
            return env
        randomise = None
        if self.randomization_fn is not None:
            randomise = partial(self.randomization_fn, rng=jax.random.split(key, count))
        wrapper: Any = self.wrap_env_fn or upstream.wrappers.wrap
        return wrapper(
            env, episode_length=self.episode_length, action_repeat=self.action_repeat, randomization_fn=randomise
        )

    @property
    def limits(self) -> dict[str, int | None]:
        """The options that checkpoints remember."""
        return {"episode_length": self.episode_length, "action_repeat": self.action_repeat}


@dataclass(frozen=True, eq=False)
class BatchEnvironments:
    """How a batch of environments is reset and stepped."""

    num_envs: int
    step: LeanStep
    begin: Callable[[Key], tuple[jax.Array, ...]]
    """Resets all environments, `[N]` keys to the arrays that a step reads, placed on the devices."""
    obs: PyTree
    """The shapes of observations, `[N, ...]`."""
    action_size: int

    @classmethod
    def of(
        cls, name: str, env: Any, keys: Key, sharding: EnvironmentSharding, bootstraps: bool, reports: bool
    ) -> "BatchEnvironments":
        """Find out what a wrapped environment's step reads, and where its arrays are placed.

        Args:
            name: the environment's, for error messages.
            env: the wrapped environment.
            keys: `[N]`, of which only the shape counts.
            sharding: how environments are placed on the devices.
            bootstraps: whether time-outs are used.
            reports: whether episodes are reported.
        """
        reset = jax.jit(env.reset)
        begun = reset.eval_shape(keys)
        action = jax.ShapeDtypeStruct((sharding.num_envs, env.action_size), jnp.float32)
        seen = partial(outcome, bootstraps=bootstraps, reports=reports)
        step = lean_step(name, env.step, begun, action, seen, acted_on=lambda state: state.obs)
        placed = sharding.of(jax.eval_shape(step.kept, begun))
        begin = jax.jit(lambda keys: step.kept(reset(keys)), out_shardings=placed)
        return cls(sharding.num_envs, step, begin, begun.obs, env.action_size)

    @property
    def obs_shape(self) -> PyTree:
        """The shape of one environment's observation."""
        return jax.tree.map(lambda x: x.shape[1:], self.obs)
