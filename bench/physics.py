"""Compare Brax's physics, original and written out, in one run: milliseconds per step, and their ratio.

    python bench/physics.py                         256 ants on the spring backend
    python bench/physics.py --num-envs 4096         as many as in training on a GPU
    python bench/physics.py humanoid positional     another environment and backend

Both are compiled, then timed in alternating turns, ten times each; the times are medians.
"""

import argparse
import importlib
import json
import statistics
import time
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from lehr.kernels.written_out import written_out

warnings.simplefilter("ignore")
STEPS = 10


def last_observation(step: Any, state: Any, actions: jax.Array) -> Any:
    """Return the observation after all actions."""
    return jax.lax.scan(lambda state, action: (step(state, action), None), state, actions)[0].obs


def main(name: str, backend: str, num_envs: int) -> None:
    """Measure, and print one row."""
    env = importlib.import_module("brax.envs").get_environment(name, backend=backend)
    state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), num_envs))
    state = jax.tree.map(jnp.asarray, state)
    actions = jax.random.uniform(jax.random.key(1), (STEPS, num_envs, env.action_size), minval=-1, maxval=1)
    seconds: dict[str, list[float]] = {"original": [], "written out": []}
    compiled: dict[str, Any] = {}
    for kind, step in zip(seconds, (env.step, written_out(env.step)), strict=True):
        compiled[kind] = jax.jit(partial(last_observation, jax.vmap(step))).lower(state, actions).compile()
        compiled[kind](state, actions)
    for _ in range(10):
        for kind, run in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(state, actions))
            seconds[kind].append((time.perf_counter() - begin) / STEPS)
    before, after = (statistics.median(found) * 1e3 for found in seconds.values())
    row = {
        "env": name,
        "backend": backend,
        "num_envs": num_envs,
        "ms": round(before, 2),
        "written out": round(after, 2),
    }
    print(json.dumps(row | {"ratio": round(before / after, 2)}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", nargs="?", default="ant")
    parser.add_argument("backend", nargs="?", default="spring")
    parser.add_argument("--num-envs", type=int, default=256)
    arguments = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    main(arguments.env, arguments.backend, arguments.num_envs)
