"""What a newcomer gets: every on-policy algorithm with its defaults, 300k env steps, several seeds of each.

    python bench/defaults.py                                        every algorithm on CartPole, Acrobot and Pendulum
    python bench/defaults.py ppo impala --tasks Pendulum-v1         some algorithms, some tasks
    python bench/defaults.py --seeds 20 --first-seed 100            other seeds
    python bench/defaults.py ppo --set learning_rate="3e-4 -> 0"    another setting than the default

The seeds of an algorithm on a task are one population. A score is the mean return of 200 episodes with the most likely
actions after training. A seed reaches the figure of a task if its score is at least that. The figures of the first
three tasks are near those of SB3 Zoo: 500 on CartPole, -83.4 (A2C) and -83.1 (TRPO) on Acrobot, -163 (A2C) to -175
(TRPO) on Pendulum.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lehr.sweeps.directory import Member, SweepDirectory
from lehr.sweeps.gathering import scores
from lehr.sweeps.running import Waves, WaveTrainer
from lehr.training.plan import use_compilation_cache

ALGORITHMS = ("ppo", "a2c", "trpo", "ppg", "impala", "appo", "recurrent_ppo")
FIGURES = {
    "CartPole-v1": 475.0,
    "Acrobot-v1": -85.0,
    "Pendulum-v1": -180.0,
    "MountainCarContinuous-v0": 90.0,
    "CartPole-Hidden-v1": 475.0,
    "Swarm-v0": 4.0,
    "DeepChain-v0": 0.8,
}
"""By task, the score that a seed must reach."""
CHOSEN_ON = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1")


def measure(algorithm: str, settings: Mapping[str, Any], seeds: range) -> np.ndarray:
    """Train one configuration with every seed; return their scores, the worst possible one if a seed diverged."""
    members = [Member(number, 0, seed, {}, dict(settings)) for number, seed in enumerate(seeds)]
    with tempfile.TemporaryDirectory() as folder:
        directory = SweepDirectory.create(Path(folder) / "sweep")
        Waves(directory, WaveTrainer(algorithm, progress=False)).train(members)
        return np.nan_to_num(scores(directory, members), nan=-np.inf)


def row(algorithm: str, task: str, found: np.ndarray, seconds: float) -> str:
    """The line of the table for one algorithm on one task."""
    reached = int(np.sum(found >= FIGURES[task]))
    cells = (
        algorithm,
        task,
        f"{reached} of {len(found)}",
        f"{found.mean():.1f}",
        f"{np.median(found):.1f}",
        f"{found.min():.1f}",
        f"{seconds:.0f} s",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", metavar="ALGORITHM", help=f"by default {', '.join(ALGORITHMS)}")
    parser.add_argument("--tasks", nargs="+", default=list(CHOSEN_ON), choices=[*FIGURES], metavar="TASK")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds (10)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--total-steps", default="300k", help="env steps (300k)")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings instead of the defaults")
    arguments = parser.parse_args()
    use_compilation_cache()
    given = dict(text.split("=", 1) for text in arguments.set)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    columns = ("algorithm", "task", "reach the figure", "mean", "median", "worst", "time")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for algorithm in arguments.algorithms or ALGORITHMS:
        for task in arguments.tasks:
            settings = {"env": task, "total_steps": arguments.total_steps, "evaluate_episodes": 200, **given}
            begin = time.perf_counter()
            found = measure(algorithm, settings, seeds)
            print(row(algorithm, task, found, time.perf_counter() - begin), flush=True)


if __name__ == "__main__":
    main()
