"""Train Dreamer on a few tasks, several seeds each, and measure env steps and gradient steps per second.

    python bench/dreamer.py                  CartPole and Pendulum, sizes for two cores
    python bench/dreamer.py --gpu            dm_control's swing-up, with PPO on the same steps, and images
    python bench/dreamer.py --gpu swingup    only the tasks with this word in their names
    python bench/dreamer.py --speed          only the speed

Returns are means over 100 episodes with the most likely actions. The swing-up needs `playground`, the images `gymnax`.
"""

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import lehr
from lehr import algorithms
from lehr.config import build
from lehr.envs import make
from lehr.training.program import assemble
from lehr.training.runners.device import chunk, metric_names


class Row(NamedTuple):
    """A task, and what to train on it."""

    algorithm: str
    env: str
    total_steps: int
    settings: dict[str, Any]


SWINGUP = {"preset": "1m", "num_envs": 16, "horizon": 16, "train_ratio": 512, "learning_rate": "warmup 1%, 3e-4"}
PPO_SWINGUP = {"num_envs": 16, "horizon": 256, "normalise_observations": True, "learning_rate": "1e-3 -> 0"}
BREAKOUT = {"preset": "1m", "train_ratio": 64, "image_depth": 16, "learning_rate": "warmup 1%, 3e-4"}
TASKS = [Row("dreamer", "CartPole-v1", 15_000, {}), Row("dreamer", "Pendulum-v1", 15_000, {})]
GPU_TASKS = [
    Row("dreamer", "playground:CartpoleSwingup", 300_000, SWINGUP),
    Row("ppo", "playground:CartpoleSwingup", 300_000, PPO_SWINGUP),
    Row("dreamer", "gymnax:Breakout-MinAtar", 400_000, BREAKOUT),
]
SEEDS = 3


def trained(row: Row) -> dict[str, Any]:
    """Train all seeds, and return the row of the table."""
    returns, unexplained, begin = [], [], time.perf_counter()
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            quiet: dict[str, Any] = {"evaluate_episodes": 100, "progress": False, "tensorboard": False}
            place = Path(folder) / "run"
            run = lehr.train(
                row.algorithm, row.env, total_steps=row.total_steps, seed=seed, run_dir=place, **quiet, **row.settings
            )
            returns.append(run.final["evaluate/return"])
            if "model/unexplained" in run.metrics:
                unexplained.append(float(np.mean(run.metrics["model/unexplained"][-10:])))
    return {
        "algorithm": row.algorithm,
        "task": row.env,
        "env steps": row.total_steps,
        "return": f"{np.mean(returns):.1f} ± {np.std(returns):.1f}",
        "each seed": [round(value, 1) for value in returns],
        "unexplained": [round(value, 3) for value in unexplained],
        "seconds a run": round((time.perf_counter() - begin) / SEEDS),
    }


def speed(row: Row, updates: int = 10) -> dict[str, Any]:
    """Return the compile time, and the rates of a run whose replay is filled."""
    settings, network = build(algorithms.settings_of(row.algorithm), row.settings)
    program, state = assemble(row.algorithm, make(row.env), settings, network, 10**9)
    names = metric_names(program, state)
    begin = time.perf_counter()
    advance = jax.jit(partial(chunk, program, 1024), donate_argnums=0).lower(state, jnp.int32(1)).compile()
    compiled = time.perf_counter() - begin
    filled = -(-settings.prefill // program.steps_per_update) + 2
    state, _ = jax.block_until_ready(advance(state, jnp.int32(filled)))
    begin = time.perf_counter()
    state, rows = jax.block_until_ready(advance(state, jnp.int32(updates)))
    seconds = time.perf_counter() - begin
    gradient_steps = float(np.asarray(rows)[:updates, names.index("replay/gradient_steps")].sum())
    return {
        "task": row.env,
        "train ratio": settings.train_ratio,
        "env steps/s": round(updates * program.steps_per_update / seconds, 1),
        "gradient steps/s": round(gradient_steps / seconds, 2),
        "compile s": round(compiled, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="words that a task's name contains")
    parser.add_argument("--gpu", action="store_true", help="tasks for one large GPU")
    parser.add_argument("--speed", action="store_true", help="only the speed")
    arguments = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}", flush=True)
    for row in GPU_TASKS if arguments.gpu else TASKS:
        if all(word.lower() in f"{row.algorithm} {row.env}".lower() for word in arguments.words):
            if row.algorithm == "dreamer":
                print(json.dumps(speed(row)), flush=True)
            if not arguments.speed:
                print(json.dumps(trained(row)), flush=True)
