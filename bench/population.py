"""Train many members with different schedules at once, beside a bare loop with constants, in one run.

    python bench/population.py                       64 members on a CPU, also one after the other
    python bench/population.py --gpu                 1, 512 and 2,048 members on one large GPU

CartPole at the sizes that PureJaxRL uses: 4 environments x 128 steps, 4 minibatches x 4 epochs. Each member has
schedules and a seed of its own, and everything is on; the bare loop is `jax.vmap` of a PPO without any features, on
one device. On a CPU, members are shared between the cores.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import bare
import jax
import jax.numpy as jnp
import numpy as np

from lehr.training.cores import use_cores
from lehr.training.population import make_population
from lehr.training.runners.population import PopulationRunner

SIZES = {"num_envs": 4, "horizon": 128, "minibatches": 4, "epochs": 4}
STEPS = SIZES["num_envs"] * SIZES["horizon"]
TOTAL = 10**9


def members(count: int) -> list[dict[str, Any]]:
    """Settings with schedules drawn at random."""
    rng = np.random.default_rng(0)
    found = []
    for seed in range(count):
        rate, entropy, clip = 10 ** rng.uniform(-4, -2), 10 ** rng.uniform(-3, -1), rng.uniform(0.1, 0.3)
        shape = rng.choice(["linear", "cosine", "exponential"])
        found.append(
            {
                "env": "CartPole-v1",
                "total_steps": TOTAL,
                "seed": seed,
                "learning_rate": f"{rate:.4g} -> {rate / 10:.4g} {shape}",
                "entropy_coef": f"warmup 5%, {entropy:.4g} -> {entropy / 100:.4g} {shape}",
                "clip_range": f"{clip:.4g} -> {clip / 2:.4g}",
                "progress": False,
                "normalise_observations": False,
                **SIZES,
            }
        )
    return found


class Timed:
    """A function that makes updates, and how long it took to compile."""

    def __init__(self, run: Callable[[int], Any], count: int) -> None:
        self.run, self.count = run, count
        begin = time.perf_counter()
        run(1)
        self.compile_seconds = time.perf_counter() - begin
        self.best = float("inf")

    def measure(self, updates: int) -> None:
        """Keep the best time of one update."""
        begin = time.perf_counter()
        self.run(updates)
        self.best = min(self.best, (time.perf_counter() - begin) / updates)

    @property
    def rate(self) -> float:
        """Env steps per second, of all members."""
        return STEPS * self.count / self.best


def lehr_population(count: int) -> Timed:
    population = make_population("ppo", members(count))
    state = population.plan.state
    runner = PopulationRunner(population.plan.program, state, window=8, sharding=population.sharding)
    held = [state]

    def run(updates: int) -> None:
        if not hasattr(runner, "_compiled"):
            runner.compile(held[0])
        held[0], rows = runner.advance(held[0], updates)
        jax.block_until_ready(rows)

    return Timed(run, count)


def bare_population(count: int) -> Timed:
    init, compiled = bare.make(**SIZES)
    held = [jax.jit(jax.vmap(init))(jax.random.split(jax.random.key(0), count))]
    together = jax.jit(jax.vmap(lambda carry: compiled(carry, 8)), donate_argnums=0)

    def run(updates: int) -> None:
        for _ in range(max(1, updates // 8)):
            held[0], rows = together(held[0])
        jax.block_until_ready(rows)

    return Timed(run, count)


def compare(count: int, updates: int, turns: int) -> Timed:
    found = {"lehr": lehr_population(count), "bare": bare_population(count)}
    for _ in range(turns):
        for timed in found.values():
            timed.measure(updates)
    row: dict[str, Any] = {"members": count}
    row |= {name: round(timed.rate / 1e6, 3) for name, timed in found.items()}
    row["lehr / bare"] = round(found["lehr"].rate / found["bare"].rate, 2)
    row |= {f"{name} compiled in": round(timed.compile_seconds, 1) for name, timed in found.items()}
    print(json.dumps(row), flush=True)
    return found["lehr"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="use sizes for one large GPU")
    arguments = parser.parse_args()
    use_cores()  # as `lehr sweep` does
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; millions of env steps per second, all members")
    jnp.zeros(()).block_until_ready()
    if arguments.gpu:
        for count in (1, 512, 2048):
            compare(count, updates=64, turns=3)
        return
    one = compare(1, updates=64, turns=3)
    many = compare(64, updates=16, turns=3)
    print(f"64 members at once make {many.rate / one.rate:.2f} times the steps/s of one after the other")


if __name__ == "__main__":
    main()
