"""PPO on Gymnasium's environments beside Stable-Baselines3's PPO: the same environment, sizes and settings, in one run.

    python bench/host.py                              CartPole-v1
    python bench/host.py --env InvertedPendulum-v5

It needs Stable-Baselines3 (`pip install stable-baselines3`). Both make the same number of env steps in turns, and the
best turn of each counts; evaluations, checkpoints and compilation are left out for both. Lehr has all of its metrics on.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import stable_baselines3
import torch
from stable_baselines3.common.env_util import make_vec_env

import lehr

SIZES: dict[str, Any] = {"num_envs": 8, "horizon": 128, "epochs": 4, "minibatches": 4}


def baseline(env: str, steps: int) -> float:
    """Env steps per second of Stable-Baselines3."""
    made = make_vec_env(env, n_envs=SIZES["num_envs"], seed=0)
    batch_size = SIZES["num_envs"] * SIZES["horizon"] // SIZES["minibatches"]
    model = stable_baselines3.PPO(
        "MlpPolicy",
        made,
        n_steps=SIZES["horizon"],
        batch_size=batch_size,
        n_epochs=SIZES["epochs"],
        learning_rate=2.5e-4,
        ent_coef=0.01,
        seed=0,
        device="cpu",
    )
    model.learn(SIZES["num_envs"] * SIZES["horizon"])  # the first update warms up
    begin = time.perf_counter()
    model.learn(steps)
    return steps / (time.perf_counter() - begin)


def ours(env: str, steps: int, overlap: bool, vectorization: str) -> float:
    """Env steps per second of Lehr, from its own metrics after the first update."""
    with tempfile.TemporaryDirectory() as place:
        result = lehr.train(
            "ppo",
            env=f"gym:{env}",
            total_steps=steps,
            learning_rate=2.5e-4,
            overlap=overlap,
            env_parameters={"vectorization": vectorization},
            evaluate_episodes=0,
            progress=False,
            run_dir=Path(place) / "run",
            **SIZES,
        )
        elapsed, done = result.metrics["time/elapsed"], result.metrics["env_steps"]
        return float((done[-1] - done[0]) / (elapsed[-1] - elapsed[0]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1", help="its name in Gymnasium (default: CartPole-v1)")
    parser.add_argument("--steps", type=int, default=40_960, help="env steps of a turn (default: 40960)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each (default: 3)")
    parser.add_argument("--vector", action="store_true", help="also the environment's own vectorised version")
    arguments = parser.parse_args()
    print(f"stable-baselines3 {stable_baselines3.__version__}, torch {torch.__version__}, {arguments.env}; env steps/s")
    runs: dict[str, Any] = {
        "stable-baselines3": lambda: baseline(arguments.env, arguments.steps),
        "lehr": lambda: ours(arguments.env, arguments.steps, False, "sync"),
        "lehr, overlap": lambda: ours(arguments.env, arguments.steps, True, "sync"),
    }
    if arguments.vector:
        runs["lehr, vector"] = lambda: ours(arguments.env, arguments.steps, True, "vector")
    best = dict.fromkeys(runs, 0.0)
    for _ in range(arguments.turns):
        for name, run in runs.items():
            best[name] = max(best[name], run())
    row: dict[str, Any] = {name: round(rate) for name, rate in best.items()}
    row |= {
        f"{name} / sb3": round(best[name] / best["stable-baselines3"], 2)
        for name in runs
        if name != "stable-baselines3"
    }
    print(json.dumps(row), flush=True)
