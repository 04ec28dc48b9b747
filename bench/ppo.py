"""Compare PPO's throughput with the bare loop of the same sizes, in one run, and measure what schedules cost.

    python bench/ppo.py              sizes for a CPU
    python bench/ppo.py --gpu        sizes for one large GPU

Everything is on: metrics, all coefficients scheduled, truncation, episode statistics. The ratio is what matters: above
1, the trainer with all its features is faster than the bare loop without them. PureJaxRL runs beside them if the
variable PUREJAXRL names its folder (see bench/purejaxrl.py), where its networks have the same sizes.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import bare
import jax
import jax.numpy as jnp
import purejaxrl

from lehr.algorithms import ppo
from lehr.config import coefficients
from lehr.networks import NetworkConfig
from lehr.schedules.bundle import population
from lehr.training.program import assemble
from lehr.training.runners.device import chunk

Runner = Callable[[int], Any]
Settings = dict[str, Any]
TOTAL = 10**12
SCHEDULED = {
    "learning_rate": "3e-3 -> 1e-3 cosine",
    "entropy_coef": "warmup 5%, 0.01 -> 0.001 exponential",
    "value_coef": "0.5 -> 0.4",
    "clip_range": "0.2 -> 0.1",
    "discount": "0.98 -> 0.99",
    "gae_lambda": "0.95 -> 0.9",
    "max_grad_norm": "0.5 -> 0.4",
}
CONSTANT = {name: text.split(", ")[-1].split(" ")[0] for name, text in SCHEDULED.items()}


def lehr_runners(settings: Settings, variants: dict[str, Settings], network: Settings) -> dict[str, Runner]:
    """Return a function that makes updates for each variant of the coefficients; all share one compiled program."""
    plain = {"normalise_observations": False, **settings}  # as in the bare loop
    configs = [ppo.Config(**plain, **variant) for variant in variants.values()]
    program, state = assemble("ppo", "CartPole-v1", configs[0], NetworkConfig(**network), TOTAL)
    found = [coefficients(config, TOTAL) for config in configs]
    stacked = population([{name: one[name] for name in state.coefficients.names} for one in found])
    compiled = jax.jit(partial(chunk, program, 1024), donate_argnums=0)

    def runner(index: int) -> Runner:
        own = jax.tree.map(lambda leaf: leaf[index], stacked)
        held = [jax.tree.map(jnp.copy, state._replace(coefficients=own))]

        def run(updates: int) -> Any:
            held[0], rows = compiled(held[0], jnp.int32(updates))
            return jax.block_until_ready(rows)

        return run

    return {name: runner(index) for index, name in enumerate(variants)}


def bare_runner(num_envs: int, horizon: int, minibatches: int, epochs: int, hidden: int) -> Runner:
    init, compiled = bare.make(num_envs, horizon, minibatches, epochs, hidden)
    held = [init(jax.random.key(0))]

    def run(updates: int) -> Any:
        held[0], rows = compiled(held[0], updates)
        return jax.block_until_ready(rows)

    return run


def steps_per_second(
    runners: dict[str, Callable[[int], Any]], steps: int, updates: int, turns: int
) -> dict[str, float]:
    """Return the best time of each over a few alternating turns, so that noise affects all of them alike."""
    best = dict.fromkeys(runners, float("inf"))
    for run in runners.values():
        run(updates)
    for _ in range(turns):
        for name, run in runners.items():
            begin = time.perf_counter()
            run(updates)
            best[name] = min(best[name], time.perf_counter() - begin)
    return {name: steps * updates / seconds for name, seconds in best.items()}


def compare(
    num_envs: int, horizon: int, minibatches: int, epochs: int, updates: int, turns: int, hidden: int = 64
) -> None:
    sizes = {"num_envs": num_envs, "horizon": horizon, "minibatches": minibatches, "epochs": epochs}
    settings = {**sizes, "minibatching": "segments"}
    variants = {"scheduled": SCHEDULED, "constant": CONSTANT}
    runners = {
        "bare": bare_runner(**sizes, hidden=hidden),
        **lehr_runners(settings, variants, {"hidden_sizes": (hidden, hidden)}),
    }
    if hidden == 64 and purejaxrl.is_there():
        runners["purejaxrl"] = purejaxrl.runner(**sizes, updates=updates)
    found = steps_per_second(runners, num_envs * horizon, updates, turns)
    row = {**sizes, "hidden": hidden, **{name: float(f"{rate / 1e6:.3g}") for name, rate in found.items()}}
    row |= {
        f"lehr / {name}": round(found["scheduled"] / found[name], 2) for name in ("bare", "purejaxrl") if name in found
    }
    row["scheduled / constant"] = round(found["scheduled"] / found["constant"], 3)
    print(json.dumps(row), flush=True)


def puffer(num_envs: int, horizon: int, minibatches: int, updates: int, turns: int) -> None:
    settings = {**ppo.Config.PRESETS["puffer"], "num_envs": num_envs, "horizon": horizon, "minibatches": minibatches}
    network = {"torso": "mingru", "recurrent_size": 128, "shared": True}
    found = steps_per_second(lehr_runners(settings, {"puffer": {}}, network), num_envs * horizon, updates, turns)
    row = {"preset": "puffer", "num_envs": num_envs, "horizon": horizon, "minibatches": minibatches}
    print(json.dumps({**row, "Msteps/s": round(found["puffer"] / 1e6, 2)}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="use sizes for one large GPU")
    arguments = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; millions of env steps per second")
    if not purejaxrl.is_there():
        print(f"without PureJaxRL: {purejaxrl.FOLDER} does not name its folder")
    if arguments.gpu:
        compare(4096, 64, 8, 1, updates=200, turns=3)
        compare(2048, 16, 32, 4, updates=100, turns=3)
        compare(65536, 64, 8, 1, updates=50, turns=3)
        for hidden in (128, 256):
            compare(4096, 64, 8, 1, updates=50, turns=3, hidden=hidden)
        compare(2048, 16, 32, 4, updates=50, turns=3, hidden=256)
        puffer(4096, 64, 8, updates=50, turns=3)
        puffer(16384, 64, 8, updates=20, turns=3)
    else:
        compare(256, 64, 8, 1, updates=10, turns=3)
        compare(64, 16, 8, 4, updates=20, turns=3)
        compare(4, 128, 4, 4, updates=100, turns=5)  # PureJaxRL's own sizes, and with more environments
        compare(64, 128, 4, 4, updates=20, turns=3)
        puffer(256, 64, 8, updates=3, turns=2)
