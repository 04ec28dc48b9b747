"""What an algorithm's own data costs at every update: milliseconds with 1 GB of it beside 1 kB, on this machine.

    python bench/guard.py
    python bench/guard.py --megabytes 4096

The algorithm writes one row of its data at every update, as a replay does. The guard against non-finite updates looks
at what was learned and never at this data, which is donated, so its size should not matter.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp

from lehr.algorithms.base import ActorCriticAlgorithm
from lehr.algorithms.settings import Settings
from lehr.networks import NetworkConfig
from lehr.training.program import assemble
from lehr.training.runners.device import chunk
from lehr.types import Key, Learner, Metrics, PyTree, Rollout

ROW = 256


@dataclass(frozen=True)
class Config(Settings):
    """The settings, and how much is remembered."""

    rows: int = 1
    """Rows of 1 kB in the data."""


@dataclass(frozen=True)
class Keeper(ActorCriticAlgorithm):
    """Learns next to nothing, and writes one row at every update."""

    Config: ClassVar[type] = Config

    def init(self, key: Key, params: PyTree, example: Rollout) -> Learner:
        """Zeros, and where the next row goes."""
        return Learner(params, (), jnp.int32(0), jnp.zeros((self.config.rows, ROW)))

    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Move the parameters by the mean reward, and keep a row."""
        mean = jnp.mean(rollout.reward)
        params = jax.tree.map(lambda x: x + 1e-6 * mean, learner.params)
        memory = learner.memory.at[learner.auxiliary].set(jnp.full(ROW, mean))
        place = (learner.auxiliary + 1) % self.config.rows
        return Learner(params, (), place, memory), {"loss/total": mean, "kept": memory[place, 0]}


def milliseconds(rows: int, updates: int, repeats: int) -> float:
    """Of one update with so many rows of data."""
    config = Config(num_envs=4, horizon=8, rows=rows)
    program, state = assemble(Keeper, "CartPole-v1", config, NetworkConfig(hidden_sizes=(16,)), 10**9)
    run = jax.jit(partial(chunk, program, updates), donate_argnums=0)
    state, _ = jax.block_until_ready(run(state, jnp.int32(updates)))
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(run(state, jnp.int32(updates)))
        seconds.append((time.perf_counter() - begin) / updates)
    return 1000 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    small = milliseconds(1, arguments.updates, arguments.repeats)
    large = milliseconds(arguments.megabytes * 1024, arguments.updates, arguments.repeats)
    print(f"1 kB: {small:.3f} ms an update; {arguments.megabytes} MB: {large:.3f} ms; {large - small:+.3f} ms")


if __name__ == "__main__":
    main()
