"""PureJaxRL's PPO, unchanged, as a baseline of the benchmarks, if it is there.

    git clone https://github.com/luchris429/purejaxrl && export PUREJAXRL=$PWD/purejaxrl/purejaxrl
    pip install gymnax
    python bench/purejaxrl.py           its PPO on CartPole at its own sizes

It was written for older packages. What has changed since stands in for them here: Gymnax 1.0 tells terminations from
truncations, distrax does not import with a new JAX, and its wrappers import Brax and NAVIX, which CartPole does not
use.
"""

import importlib
import os
import sys
import time
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

FOLDER = "PUREJAXRL"
"""The variable that names the folder of PureJaxRL's `ppo.py`."""


class Categorical:
    """The part of `distrax.Categorical` that PureJaxRL uses."""

    def __init__(self, logits: jax.Array) -> None:
        self.logits = jax.nn.log_softmax(logits)

    def sample(self, seed: jax.Array) -> jax.Array:
        """Draw actions."""
        return jax.random.categorical(seed, self.logits)

    def log_prob(self, value: jax.Array) -> jax.Array:
        """Return log-probabilities of actions."""
        return jnp.take_along_axis(self.logits, value[..., None], -1)[..., 0]

    def entropy(self) -> jax.Array:
        """Return the entropy."""
        return -jnp.sum(jnp.exp(self.logits) * self.logits, -1)


class FiveValues:
    """A Gymnax environment whose `step` returns five values, as before Gymnax 1.0."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, *arguments: Any) -> tuple[Any, ...]:
        """Take one step; an episode that is truncated is done too."""
        obs, state, reward, *ending, info = self._env.step(*arguments)
        return obs, state, reward, jnp.any(jnp.stack(ending), 0), info


def is_there() -> bool:
    """Whether PureJaxRL and Gymnax can be imported."""
    return FOLDER in os.environ and Path(os.environ[FOLDER], "ppo.py").is_file()


STAND_INS = ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix", "distrax")


@cache
def module() -> Any:
    """PureJaxRL's `ppo.py`, imported; afterwards nobody else sees the stand-ins."""
    gymnax = importlib.import_module("gymnax")
    hidden = {name: sys.modules.pop(name, None) for name in (*STAND_INS, "ppo", "wrappers")}
    stand_ins: dict[str, Any] = {name: types.ModuleType(name) for name in STAND_INS}
    stand_ins["brax"].envs = stand_ins["brax.envs"]
    stand_ins["distrax"].Categorical = Categorical
    training = stand_ins["brax.envs.wrappers.training"]
    training.EpisodeWrapper = training.AutoResetWrapper = object
    sys.modules.update(stand_ins)
    sys.path.insert(0, os.environ[FOLDER])
    found: Any = importlib.import_module("ppo")
    sys.path.remove(os.environ[FOLDER])
    for name, own in hidden.items():
        del sys.modules[name]
        if own is not None:
            sys.modules[name] = own

    def make(name: str) -> tuple[Any, Any]:
        env, params = gymnax.make(name)
        return FiveValues(env), params

    found.gymnax = types.SimpleNamespace(make=make)
    return found


def runner(
    num_envs: int, horizon: int, minibatches: int, epochs: int, updates: int, members: int = 1
) -> Callable[[int], Any]:
    """Return a function that makes `updates` updates on CartPole, from the beginning: its `train`, compiled."""
    config = {
        "LR": 2.5e-4,
        "NUM_ENVS": num_envs,
        "NUM_STEPS": horizon,
        "TOTAL_TIMESTEPS": num_envs * horizon * updates,
        "UPDATE_EPOCHS": epochs,
        "NUM_MINIBATCHES": minibatches,
        "GAMMA": 0.99,
        "GAE_LAMBDA": 0.95,
        "CLIP_EPS": 0.2,
        "ENT_COEF": 0.01,
        "VF_COEF": 0.5,
        "MAX_GRAD_NORM": 0.5,
        "ACTIVATION": "tanh",
        "ENV_NAME": "CartPole-v1",
        "ANNEAL_LR": True,
    }
    train = module().make_train(config)
    keys = jax.random.PRNGKey(0) if members == 1 else jax.random.split(jax.random.PRNGKey(0), members)
    compiled = jax.jit(train if members == 1 else jax.vmap(train)).lower(keys).compile()

    def run(count: int) -> Any:
        assert count == updates
        return jax.block_until_ready(compiled(keys))

    return run


def main() -> None:
    if not is_there():
        sys.exit(f"Set {FOLDER} to the folder of PureJaxRL's ppo.py.")
    updates, turns = 200, 3
    for num_envs in (4, 64):
        begin = time.perf_counter()
        run = runner(num_envs, 128, 4, 4, updates)
        run(updates)
        first = time.perf_counter() - begin
        best = float("inf")
        for _ in range(turns):
            begin = time.perf_counter()
            out = run(updates)
            best = min(best, time.perf_counter() - begin)
        reached = out["metrics"]["returned_episode_returns"][-1].mean()
        rate = num_envs * 128 * updates / best / 1e3
        print(f"{num_envs} x 128, 4 x 4: {rate:.1f} k env steps/s; first call {first:.1f} s; return {reached:.0f}")


if __name__ == "__main__":
    main()
