"""Compare our returns with published ones, for the same budgets.

    python bench/references.py                 all rows
    python bench/references.py trpo            rows of one algorithm
    python bench/references.py a2c pendulum    rows that contain all of these words

"Meets" means: with the same budget, the mean over our seeds is not below theirs minus one of their standard deviations.
CleanRL evaluates the training policy, so we compare with sampled actions; SB3 uses the most likely actions, as we do.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import lehr


class Row(NamedTuple):
    """A published figure, and our settings for the same task."""

    algorithm: str
    env: str
    total_steps: int
    published: float | None
    """`None` if there is no published figure for this task."""
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
    "normalise_observations": False,
    "normalise_rewards": False,
}
SLOW_CAR = {
    "num_envs": 4,
    "action_repeat": 20,
    "discount": 0.95,
    "initial_log_std": 0.5,
    "normalise_observations": True,
}
MOUNTAIN_CAR_CONTINUOUS = {
    **SLOW_CAR,
    "horizon": 25,
    "minibatches": 4,
    "epochs": 10,
    "learning_rate": 1e-3,
    "entropy_coef": "0.01 -> 0",
    "normalise_rewards": False,
}
A2C_ACROBOT = {
    "num_envs": 16,
    "horizon": 32,
    "optimiser": "adam",
    "learning_rate": "6e-3 -> 0",
    "gae_lambda": 0.95,
    "standardise_advantages": True,
}
A2C_PENDULUM = {
    "num_envs": 16,
    "horizon": 16,
    "optimiser": "adam",
    "learning_rate": "3e-3 -> 0",
    "value_coef": 2.0,
    "discount": "0.9 -> 0.95",
    "gae_lambda": 0.95,
    "entropy_coef": "0.1 -> 0",
    "standardise_advantages": True,
    "normalise_rewards": True,
    "normalise_observations": False,
}
A2C_MOUNTAIN_CAR_CONTINUOUS = {
    **SLOW_CAR,
    "horizon": 10,
    "optimiser": "adam",
    "learning_rate": "5e-3 -> 0",
    "gae_lambda": 0.95,
    "normalise_rewards": True,
}
TRPO_MOUNTAIN_CAR_CONTINUOUS = {
    **SLOW_CAR,
    "horizon": 50,
    "action_repeat": 10,
    "discount": 0.98,
    "target_kl": 0.05,
    "value_minibatches": 4,
    "normalise_rewards": False,
}
TRPO_ACROBOT = {"num_envs": 16, "horizon": 64, "target_kl": "0.05 -> 0.005"}
TRPO_PENDULUM = {
    "num_envs": 4,
    "horizon": 512,
    "target_kl": "0.05 -> 0.01",
    "discount": "0.9 -> 0.97",
    "value_learning_rate": "2e-3 -> 5e-4",
    "value_epochs": 20,
    "value_minibatches": 32,
    "normalise_observations": False,
    "normalise_rewards": False,
}
IMPALA_PENDULUM = {
    "num_envs": 16,
    "horizon": 16,
    "optimiser": "adam",
    "learning_rate": "2e-3 -> 0",
    "value_coef": 2.0,
    "discount": "0.9 -> 0.95",
    "gae_lambda": 0.9,
    "entropy_coef": "0.1 -> 0",
    "standardise_advantages": True,
    "normalise_rewards": True,
    "normalise_observations": False,
}
APPO_PENDULUM = {
    "num_envs": 16,
    "horizon": 128,
    "minibatches": 32,
    "discount": 0.95,
    "gae_lambda": 0.9,
    "entropy_coef": 0.0,
    "normalise_rewards": True,
    "normalise_observations": False,
}
PPG_PENDULUM = {
    "num_envs": 4,
    "horizon": 512,
    "epochs": 10,
    "minibatches": 32,
    "policy_updates": 8,
    "discount": 0.95,
    "entropy_coef": 0.0,
    "normalise_observations": False,
}
RECURRENT_PENDULUM = {
    "horizon": 256,
    "window": 32,
    "burn_in": 8,
    "epochs": 10,
    "minibatches": 16,
    "clip_range": 0.2,
    "discount": 0.95,
    "gae_lambda": 0.95,
    "normalise_observations": False,
    "normalise_rewards": True,
}


def zoo(algorithm: str, env: str, total_steps: int, published: float, settings: dict[str, Any]) -> Row:
    """Return a row of SB3 Zoo: one run, so no standard deviation."""
    return Row(algorithm, env, total_steps, published, 0.0, "SB3 Zoo", GREEDY, settings)


def unpublished(algorithm: str, env: str, total_steps: int, settings: dict[str, Any]) -> Row:
    """Return a row without a published figure."""
    return Row(algorithm, env, total_steps, None, 0.0, "", GREEDY, settings)


ROWS = [
    Row("ppo", "CartPole-v1", 500_000, 490.0, 6.1, "CleanRL", SAMPLED, CLASSIC),
    Row("ppo", "Acrobot-v1", 500_000, -86.4, 1.3, "CleanRL", SAMPLED, CLASSIC),
    zoo("ppo", "Pendulum-v1", 100_000, -172.0, PENDULUM),
    zoo("ppo", "MountainCarContinuous-v0", 20_000, 88.3, MOUNTAIN_CAR_CONTINUOUS),
    zoo("a2c", "CartPole-v1", 500_000, 500.0, {}),
    zoo("a2c", "Acrobot-v1", 500_000, -83.4, A2C_ACROBOT),
    zoo("a2c", "Pendulum-v1", 1_000_000, -163.0, A2C_PENDULUM),
    zoo("a2c", "MountainCarContinuous-v0", 100_000, 91.2, A2C_MOUNTAIN_CAR_CONTINUOUS),
    zoo("trpo", "CartPole-v1", 100_000, 500.0, {}),
    zoo("trpo", "Acrobot-v1", 100_000, -83.1, TRPO_ACROBOT),
    zoo("trpo", "Pendulum-v1", 100_000, -175.0, TRPO_PENDULUM),
    zoo("trpo", "MountainCarContinuous-v0", 50_000, 92.5, TRPO_MOUNTAIN_CAR_CONTINUOUS),
    unpublished("impala", "CartPole-v1", 500_000, {}),
    unpublished("impala", "Pendulum-v1", 1_000_000, IMPALA_PENDULUM),
    unpublished("appo", "CartPole-v1", 500_000, {}),
    unpublished("appo", "Pendulum-v1", 300_000, APPO_PENDULUM),
    unpublished("ppg", "CartPole-v1", 100_000, {}),
    unpublished("ppg", "Acrobot-v1", 100_000, {}),
    unpublished("ppg", "Pendulum-v1", 100_000, PPG_PENDULUM),
    unpublished("recurrent_ppo", "CartPole-v1", 100_000, {}),
    zoo("recurrent_ppo", "CartPole-Hidden-v1", 100_000, 500.0, {}),
    zoo("recurrent_ppo", "CartPole-Hidden-v1", 100_000, 500.0, {"torso": "lstm"}),
    unpublished("recurrent_ppo", "Pendulum-v1", 100_000, RECURRENT_PENDULUM),
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
            run = lehr.train(row.algorithm, row.env, total_steps=row.total_steps, seed=seed, run_dir=where, **settings)
            found.append(run.final[row.metric])
    seconds = (time.perf_counter() - begin) / SEEDS
    published, meets = "no figure", ""
    if row.published is not None:
        published = f"{row.published:g}" + (f" ± {row.deviation:g}" if row.deviation else "") + f" ({row.source})"
        meets = "yes" if np.mean(found) >= row.published - row.deviation else "no"
    cells = (
        row.algorithm.upper(),
        row.env,
        f"{row.total_steps // 1000}k",
        published,
        f"{np.mean(found):.1f} ± {np.std(found):.1f}",
        ", ".join(f"{value:.1f}" for value in found),
        meets,
        f"{seconds:.0f} s",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    columns = ("algorithm", "task", "env steps", "published", "ours", "each seed", "meets", "a run")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for row in ROWS:
        if all(word.lower() in f"{row.algorithm} {row.env}".lower() for word in sys.argv[1:]):
            print(measure(row), flush=True)
