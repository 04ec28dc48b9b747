"""Throughput of each algorithm with its defaults on CartPole: env steps per second, training included.

    python bench/algorithms.py                         sizes for a CPU, all algorithms that need no files
    python bench/algorithms.py --gpu                   4,096 environments x 64 steps
    python bench/algorithms.py --gpu ppg trpo          some of them

The last column is the rate divided by that of PPO in the same run.
"""

import argparse
from functools import partial
from typing import Any

import jax
import numpy as np
import together

from lehr import algorithms
from lehr.config import build
from lehr.training import compile_options
from lehr.training.program import assemble
from lehr.training.runners.device import chunk

TOTAL = 10**12
LEFT_OUT = {"gail", "dreamer"}
"""One needs demonstrations; the other learns from its replay, so its rate says nothing beside these."""


def compiled(name: str, num_envs: int, horizon: int) -> dict[str, together.Run]:
    """Compile the updates of an algorithm."""
    given: dict[str, Any] = {"num_envs": num_envs, "horizon": horizon}
    if name == "recurrent_ppo":
        given["torso"] = "mingru"
    settings, network = build(algorithms.settings_of(name), given)
    program, state = assemble(name, "CartPole-v1", settings, network, TOTAL)
    held = [state]
    lowered = jax.jit(partial(chunk, program, 1024), donate_argnums=0).lower(state, np.int32(1))
    compiled = compile_options.compiled(lowered, compile_options.UPDATES)

    def run(updates: int) -> Any:
        held[0], rows = compiled(held[0], np.int32(updates))
        return jax.block_until_ready(rows)

    return {name: run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name in algorithms.names() if name not in LEFT_OUT]
    parser.add_argument("names", nargs="*", metavar="ALGORITHM", help=f"of: {', '.join(known)}")
    parser.add_argument("--gpu", action="store_true", help="use sizes for one large GPU")
    arguments = parser.parse_args()
    names = ["ppo", *(name for name in arguments.names or known if name != "ppo")]
    num_envs, horizon, updates = (4096, 64, 32) if arguments.gpu else (64, 16, 8)
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; {num_envs} environments x {horizon} steps")
    print("| algorithm | million env steps / s | of PPO's |")
    print("|---|---|---|")
    runs = together.compiled([partial(compiled, name, num_envs, horizon) for name in names])
    found: dict[str, float] = {}
    for run in runs:
        found |= together.steps_per_second(run, num_envs * horizon, updates, turns=3)
        name = next(reversed(found))
        print(f"| {name} | {found[name] / 1e6:.3g} | {found[name] / found['ppo']:.3g} |", flush=True)


if __name__ == "__main__":
    main()
