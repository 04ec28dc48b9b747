"""Resets that environments share: what they cost, and how much their episodes have in common.

    python bench/resets.py [--envs brax:reacher ...] [--num-envs 32] [--steps 400]

Steps a batch of environments with random actions and prints, for each way of resetting them:
- the env steps per second relative to a reset of its own for every environment at every step;
- the fraction of episodes that start from a state of their own;
- the mean correlation of two environments' episode ends over time: 1 if all end together.

`own` computes a reset for every environment, `shared` one for 16 environments that those which end in this step share,
`pool` (Lehr's) puts these into a pool.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.envs import AutoReset, Environment, TimeLimit, make
from lehr.envs.wrappers import Wrapper


@dataclass(frozen=True)
class OwnResets(Wrapper):
    """Every environment computes its own reset."""

    @property
    def environments_per_reset(self) -> int:
        """None is shared."""
        return 1

    def reset(self, key: Any) -> Any:
        """Start an episode."""
        return self.env.reset(key)

    def step(self, key: Any, state: Any, action: Any) -> Any:
        """Take one step."""
        return self.env.step(key, state, action)


@dataclass(frozen=True)
class SharedResets(OwnResets):
    """Sixteen environments share a reset of the step in which they end."""

    def step_batch(self, keys: Any, states: Any, actions: Any, pool: Any) -> Any:
        """Step a batch; the pool is empty."""
        resetting = AutoReset(self.env)
        next_states, timesteps = jax.vmap(resetting._advance)(keys, states, actions)
        count = -(-len(keys) // self.env.environments_per_reset)
        fresh = jax.vmap(resetting._fresh)(keys[:count])
        turn = (jnp.cumsum(timesteps.terminated | timesteps.truncated) - 1) % count
        given = jax.tree.map(lambda x: jnp.take(x, turn, axis=0, mode="clip"), fresh)
        return *jax.vmap(resetting._select)(next_states, timesteps, given), pool


def program(env: Environment, kind: str, num_envs: int, steps: int) -> Callable[[Any], Any]:
    """A compiled rollout with random actions: its observations after each step, and its ends."""
    batch: Any = AutoReset(OwnResets(env) if kind != "pool" else env)
    step_batch = SharedResets(env).step_batch if kind == "shared" else batch.step_batch

    def step(carried: Any, key: Any) -> Any:
        action_key, env_key = jax.random.split(key)
        actions = jax.vmap(env.action_space.sample)(jax.random.split(action_key, num_envs))
        states, timestep, pool = step_batch(jax.random.split(env_key, num_envs), carried[0], actions, carried[1])
        first = jnp.concatenate([x.reshape(num_envs, -1).astype(float) for x in jax.tree.leaves(timestep.obs)], 1)
        return (states, pool), (first, timestep.terminated | timestep.truncated)

    def rollout(key: Any) -> Any:
        states, _, pool = batch.reset_batch(key, num_envs)
        return jax.lax.scan(step, (states, pool), jax.random.split(key, steps))[1]

    return jax.jit(rollout)


def measure(name: str, num_envs: int, steps: int, limit: int, turns: int) -> dict[str, Any]:
    """Measure all ways to reset one environment."""
    made: Any = make(name)
    while isinstance(made, TimeLimit):
        made = made.env
    env = TimeLimit(made, limit)
    row: dict[str, Any] = {"env": name, "num_envs": num_envs, "time_limit": limit}
    programs = {kind: program(env, kind, num_envs, steps) for kind in ("own", "shared", "pool")}
    seconds = dict.fromkeys(programs, float("inf"))
    for kind, run in programs.items():
        first, ends = jax.tree.map(np.asarray, run(jax.random.key(0)))  # compiles
        begins = first[ends]
        row[f"{kind}: distinct starts"] = round(len(np.unique(begins, axis=0)) / len(begins), 3)
        together = np.corrcoef(ends[:, ends.any(0)].T.astype(float))
        row[f"{kind}: correlation of ends"] = round(float(np.mean(together[~np.eye(len(together), dtype=bool)])), 3)
    for turn in range(turns):
        for kind, run in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(jax.random.key(turn)))
            seconds[kind] = min(seconds[kind], time.perf_counter() - begin)
    for kind in ("shared", "pool"):
        row[f"{kind}: speed / own"] = round(seconds["own"] / seconds[kind], 2)
    row["pool: speed / shared"] = round(seconds["shared"] / seconds["pool"], 2)
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=["brax:inverted_pendulum", "brax:reacher", "jumanji:Maze-v0"])
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400, help="steps of each environment (default: 400)")
    parser.add_argument("--limit", type=int, default=50, help="time limit of an episode (default: 50)")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    for name in arguments.envs:
        sizes = arguments.num_envs, arguments.steps, arguments.limit, arguments.turns
        print(json.dumps(measure(name, *sizes)), flush=True)
