"""The returns that others publish, with their budget, beside ours.

    python bench/references.py                 all rows
    python bench/references.py pendulum        those whose name holds a word

"Meets" means: with the same budget the mean over our seeds is not below theirs minus one of their standard deviations.
CleanRL's figures are of the policy that trains, so ours are of sampled actions; SB3's are of the most probable ones.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import lehr


class Row(NamedTuple):
    """A published figure, and the settings that we meet it with."""

    name: str
    env: str
    total_steps: int
    published: float
    deviation: float
    source: str
    metric: str
    settings: dict[str, Any]


CLASSIC = {"preset": "classic"}
SAMPLED, GREEDY = "evaluate/return_sampled", "evaluate/return"
PENDULUM = {
    "num_envs": 4,
    "horizon": 512,
    "minibatches": 32,
    "epochs": 10,
    "learning_rate": "1e-3 -> 0",
    "discount": 0.95,
    "entropy_coef": 0.0,
}
MOUNTAIN_CAR_CONTINUOUS = {
    "num_envs": 4,
    "horizon": 25,
    "minibatches": 4,
    "epochs": 10,
    "action_repeat": 20,
    "learning_rate": 1e-3,
    "discount": 0.95,
    "entropy_coef": "0.01 -> 0",
    "normalise_observations": True,
    "initial_log_std": 0.5,
}
ROWS = [
    Row("cartpole", "CartPole-v1", 500_000, 490.0, 6.1, "CleanRL", SAMPLED, CLASSIC),
    Row("acrobot", "Acrobot-v1", 500_000, -86.4, 1.3, "CleanRL", SAMPLED, CLASSIC),
    Row("pendulum", "Pendulum-v1", 100_000, -172.0, 0.0, "SB3 Zoo", GREEDY, PENDULUM),
    Row(
        "mountaincar-continuous",
        "MountainCarContinuous-v0",
        20_000,
        88.3,
        0.0,
        "SB3 Zoo",
        GREEDY,
        MOUNTAIN_CAR_CONTINUOUS,
    ),
]
SEEDS = 3


def measure(row: Row) -> str:
    begin = time.perf_counter()
    found = []
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            settings: dict[str, Any] = {
                **row.settings,
                "evaluate_episodes": 500,
                "progress": False,
                "tensorboard": False,
            }
            where = Path(folder) / "run"
            run = lehr.train("ppo", row.env, total_steps=row.total_steps, seed=seed, run_dir=where, **settings)
            found.append(run.final[row.metric])
    seconds = (time.perf_counter() - begin) / SEEDS
    published = f"{row.published:g}" + (f" ± {row.deviation:g}" if row.deviation else "")
    meets = "yes" if np.mean(found) >= row.published - row.deviation else "no"
    ours = f"{np.mean(found):.1f} ± {np.std(found):.1f}"
    each = ", ".join(f"{value:.1f}" for value in found)
    steps = f"{row.total_steps // 1000}k"
    return f"| {row.env} | {steps} | {published} ({row.source}) | {ours} | {each} | {meets} | {seconds:.0f} s |"


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    print(
        "| task | env steps | published | ours | each seed | meets | a run |\n|---|---|---|---|---|---|---|", flush=True
    )
    for row in ROWS:
        if wanted in row.name:
            print(measure(row), flush=True)
