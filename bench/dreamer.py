"""Train Dreamer on a few tasks, several seeds each, and measure env steps and gradient steps per second.

    python bench/dreamer.py                  CartPole and Pendulum, sizes for two cores
    python bench/dreamer.py --gpu            dm_control's swing-up, with PPO on the same steps, and images
    python bench/dreamer.py --gpu swingup    only the tasks with this word in their names
    python bench/dreamer.py --speed          the speed of one seed alone

All seeds of a task are one population. Returns are means over 100 episodes with the most likely actions; a line per
tenth of the run has those of the episodes that ended in it, with sampled actions. The swing-up needs `playground`, the
images `gymnax`.
"""

import argparse
import json
import time
import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from imitation import train

from lehr import algorithms
from lehr.config import build
from lehr.envs import ActionRepeat, AnyEnvironment, make
from lehr.training.compilation_cache import use_compilation_cache
from lehr.training.program import assemble
from lehr.training.runners.device import chunk, metric_names


class Row(NamedTuple):
    """A task, and what to train on it."""

    algorithm: str
    env: str
    total_steps: int
    settings: dict[str, Any]
    repeat: int = 1
    """How often each action is repeated; every repetition is an env step."""

    def make(self) -> AnyEnvironment:
        """Return the environment."""
        env: Any = make(self.env)
        return ActionRepeat(env, self.repeat) if self.repeat > 1 else env


SWINGUP = {"num_envs": 16, "train_ratio": 128, "learning_rate": 3e-4, "entropy_coef": 1e-3}
PPO_SWINGUP = {"num_envs": 16, "horizon": 256, "normalise_observations": True, "learning_rate": "1e-3 -> 0"}
BREAKOUT = {"train_ratio": 64, "image_depth": 16, "entropy_coef": 1e-3}
TASKS = [Row("dreamer", "CartPole-v1", 15_000, {}), Row("dreamer", "Pendulum-v1", 15_000, {})]
GPU_TASKS = [
    Row("dreamer", "playground:CartpoleSwingup", 250_000, SWINGUP, repeat=2),
    Row("ppo", "playground:CartpoleSwingup", 250_000, PPO_SWINGUP, repeat=2),
    Row("dreamer", "gymnax:Breakout-MinAtar", 140_000, BREAKOUT),
]


def trained(row: Row, seeds: range) -> dict[str, Any]:
    """Train all seeds, and return the row of the table."""
    begin = time.perf_counter()

    def report(steps: int, rows: dict[str, np.ndarray]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # no episode may have ended
            means = {name: np.nanmean(values, 1).round(3).tolist() for name, values in rows.items()}
        print(f"  {steps} env steps, {time.perf_counter() - begin:.0f} s: {means}", flush=True)

    run = train(row.algorithm, row.make(), row.total_steps, seeds, row.settings, report)
    returns, unexplained = run.returns, run.curves.get("model/unexplained", np.zeros((0, 1)))[:, -10:].mean(1)
    return {
        "algorithm": row.algorithm,
        "task": row.env,
        "env steps": row.total_steps,
        "return": f"{np.mean(returns):.1f} ± {np.std(returns):.1f}",
        "each seed": [round(float(value), 1) for value in returns],
        "unexplained": [round(float(value), 3) for value in unexplained],
        "seconds": round(time.perf_counter() - begin),
    }


def speed(row: Row, updates: int = 10) -> dict[str, Any]:
    """Return the compile time, and the rates of a run whose replay is filled."""
    settings, network = build(algorithms.settings_of(row.algorithm), row.settings)
    program, state = assemble(row.algorithm, row.make(), settings, network, 10**9)
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
    parser.add_argument("--speed", action="store_true", help="the speed of one seed alone, instead")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    use_compilation_cache()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}", flush=True)
    for row in GPU_TASKS if arguments.gpu else TASKS:
        if all(word.lower() in f"{row.algorithm} {row.env}".lower() for word in arguments.words):
            if not arguments.speed:
                print(json.dumps(trained(row, seeds)), flush=True)
            elif row.algorithm == "dreamer":
                print(json.dumps(speed(row)), flush=True)
