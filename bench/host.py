"""Compare PPO on Gymnasium environments with Stable-Baselines3's: same environment, sizes and settings, in one run.

    python bench/host.py                              CartPole-v1
    python bench/host.py --env Pendulum-v1

Requires Stable-Baselines3 (`pip install stable-baselines3`). Both make the same number of env steps, in alternating
turns, and the best turn of each counts; evaluations, checkpoints and compilation are excluded for both. All of Lehr's
metrics are on.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import stable_baselines3
import torch
from stable_baselines3.common.env_util import make_vec_env

import lehr

SIZES: dict[str, dict[str, Any]] = {
    "the RL Zoo's for CartPole": {"num_envs": 8, "horizon": 32, "epochs": 20, "minibatches": 1},
    "CleanRL's": {"num_envs": 4, "horizon": 128, "epochs": 4, "minibatches": 4},
    "many environments": {"num_envs": 32, "horizon": 64, "epochs": 8, "minibatches": 8},
}


def baseline(env: str, sizes: dict[str, Any], steps: int) -> float:
    """Return the env steps per second of Stable-Baselines3."""
    model = stable_baselines3.PPO(
        "MlpPolicy",
        make_vec_env(env, n_envs=sizes["num_envs"], seed=0),
        n_steps=sizes["horizon"],
        batch_size=sizes["num_envs"] * sizes["horizon"] // sizes["minibatches"],
        n_epochs=sizes["epochs"],
        learning_rate=2.5e-4,
        ent_coef=0.01,
        seed=0,
        device="cpu",
    )
    model.learn(sizes["num_envs"] * sizes["horizon"])  # the first update warms up
    begin = time.perf_counter()
    model.learn(steps)
    return steps / (time.perf_counter() - begin)


def ours(env: str, sizes: dict[str, Any], steps: int, overlap: bool) -> float:
    """Return the env steps per second of Lehr, from its metrics after the first update."""
    with tempfile.TemporaryDirectory() as place:
        result = lehr.train(
            "ppo",
            env=f"gym:{env}",
            total_steps=steps,
            learning_rate=2.5e-4,
            normalise_observations=False,
            normalise_rewards=False,
            overlap=overlap,
            evaluate_episodes=0,
            progress=False,
            run_dir=Path(place) / "run",
            **sizes,
        )
        elapsed, done = result.metrics["time/elapsed"], result.metrics["env_steps"]
        return float((done[-1] - done[0]) / (elapsed[-1] - elapsed[0]))


def compare(env: str, title: str, steps: int, turns: int) -> None:
    sizes = SIZES[title]
    size = sizes["num_envs"] * sizes["horizon"]
    steps = max(1, steps // size) * size
    runs: dict[str, Callable[[], float]] = {
        "stable-baselines3": partial(baseline, env, sizes, steps),
        "lehr": partial(ours, env, sizes, steps, overlap=False),
        "lehr, overlap": partial(ours, env, sizes, steps, overlap=True),
    }
    best = dict.fromkeys(runs, 0.0)
    for _ in range(turns):
        for name, run in runs.items():
            best[name] = max(best[name], run())
    row: dict[str, Any] = {"sizes": title, **sizes, **{name: round(rate) for name, rate in best.items()}}
    for name in ("lehr", "lehr, overlap"):
        row[f"{name} / sb3"] = round(best[name] / best["stable-baselines3"], 2)
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1", help="name of the Gymnasium environment (default: CartPole-v1)")
    parser.add_argument("--steps", type=int, default=20_000, help="env steps per turn (default: 20000)")
    parser.add_argument("--turns", type=int, default=3, help="turns for each library (default: 3)")
    arguments = parser.parse_args()
    print(f"stable-baselines3 {stable_baselines3.__version__}, torch {torch.__version__}, {arguments.env}; env steps/s")
    for title in SIZES:
        compare(arguments.env, title, arguments.steps, arguments.turns)
