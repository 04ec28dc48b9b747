"""Compare PPO's throughput with the bare loop of the same sizes, in one run, and measure what schedules cost.

    python bench/ppo.py              sizes for a CPU
    python bench/ppo.py --gpu        sizes for one large GPU

Everything is on: metrics, all coefficients scheduled, truncation, episode statistics. The ratio is what matters: above
1, the trainer with all its features is faster than the bare loop without them. PureJaxRL runs beside them if the
variable PUREJAXRL names its folder (see bench/purejaxrl.py), where its networks have the same sizes. The programs of a
row are compiled at the same time, before the first of them is timed.
"""

import argparse
import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import bare
import jax
import jax.numpy as jnp
import numpy as np
import purejaxrl
import together

from lehr.algorithms import ppo
from lehr.config import coefficients
from lehr.networks import NetworkConfig
from lehr.schedules.bundle import population
from lehr.training import compile_options
from lehr.training.program import assemble
from lehr.training.runners.device import chunk

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


VARIANTS = {"scheduled": SCHEDULED, "constant": CONSTANT}


def lehr_runs(settings: Settings, variants: dict[str, Settings], network: Settings) -> dict[str, together.Run]:
    """Compile the updates of a run; return them for each variant of the coefficients, which share the program."""
    plain = {"normalise_observations": False, **settings}  # as in the bare loop
    configs = [ppo.Config(**plain, **variant) for variant in variants.values()]
    program, state = assemble("ppo", "CartPole-v1", configs[0], NetworkConfig(**network), TOTAL)
    found = [coefficients(config, TOTAL) for config in configs]
    stacked = population([{name: one[name] for name in state.coefficients.names} for one in found])
    lowered = jax.jit(partial(chunk, program, 1024), donate_argnums=0).lower(state, np.int32(1))
    compiled = compile_options.compiled(lowered, compile_options.UPDATES)

    def run_of(index: int) -> together.Run:
        own = jax.tree.map(lambda leaf: leaf[index], stacked)
        held = [jax.tree.map(jnp.copy, state._replace(coefficients=own))]

        def run(updates: int) -> Any:
            held[0], rows = compiled(held[0], np.int32(updates))
            return jax.block_until_ready(rows)

        return run

    return {name: run_of(index) for index, name in enumerate(variants)}


def bare_run(sizes: Settings, hidden: int, updates: int) -> dict[str, together.Run]:
    """Compile the bare loop."""
    init, loop = bare.make(**sizes, hidden=hidden)
    held = [init(jax.random.key(0))]
    compiled = loop.lower(held[0], updates).compile()

    def run(count: int) -> Any:
        assert count == updates
        held[0], rows = compiled(held[0])
        return jax.block_until_ready(rows)

    return {"bare": run}


@dataclass
class Row:
    """One row of the table: Lehr and its baselines at the same sizes."""

    sizes: Settings
    updates: int
    turns: int
    hidden: int = 64
    settings: Settings = field(default_factory=lambda: {"minibatching": "segments"})
    network: Settings = field(default_factory=dict)
    is_compared: bool = True

    def makes(self) -> list[together.Make]:
        """What is compiled for it."""
        settings, variants = {**self.settings, **self.sizes}, VARIANTS if self.is_compared else {"lehr": {}}
        network = self.network or {"hidden_sizes": (self.hidden, self.hidden)}
        found: list[together.Make] = [partial(lehr_runs, settings, variants, network)]
        if self.is_compared:
            found.append(partial(bare_run, self.sizes, self.hidden, self.updates))
        if self.is_compared and self.hidden == 64 and purejaxrl.is_there():
            found.append(lambda: {"purejaxrl": purejaxrl.runner(**self.sizes, updates=self.updates)})
        return found

    def measure(self, runs: dict[str, together.Run]) -> str:
        """Time the programs, and return the row."""
        steps = self.sizes["num_envs"] * self.sizes["horizon"]
        found = together.steps_per_second(runs, steps, self.updates, self.turns)
        row = {**self.sizes, **(self.network or {"hidden": self.hidden})}
        row |= {name: float(f"{rate / 1e6:.3g}") for name, rate in found.items()}
        for name in ("bare", "purejaxrl"):
            if name in found:
                row[f"lehr / {name}"] = round(found["scheduled"] / found[name], 2)
        if self.is_compared:
            row["scheduled / constant"] = round(found["scheduled"] / found["constant"], 3)
        return json.dumps(row)


def sized(num_envs: int, horizon: int, minibatches: int, epochs: int) -> Settings:
    return {"num_envs": num_envs, "horizon": horizon, "minibatches": minibatches, "epochs": epochs}


def puffer(num_envs: int, horizon: int, minibatches: int, updates: int, turns: int) -> Row:
    """A row of PufferLib's recipe, which has no bare loop."""
    preset = ppo.Config.PRESETS["puffer"]
    sizes = sized(num_envs, horizon, minibatches, preset["epochs"])
    network = {"torso": "mingru", "recurrent_size": 128, "shared": True}
    return Row(sizes, updates, turns, settings=preset, network=network, is_compared=False)


GPU_ROWS = [
    Row(sized(4096, 64, 8, 1), updates=200, turns=3),
    Row(sized(2048, 16, 32, 4), updates=100, turns=3),
    Row(sized(65536, 64, 8, 1), updates=50, turns=3),
    Row(sized(4096, 64, 8, 1), updates=50, turns=3, hidden=128),
    Row(sized(4096, 64, 8, 1), updates=50, turns=3, hidden=256),
    Row(sized(2048, 16, 32, 4), updates=50, turns=3, hidden=256),
    puffer(4096, 64, 8, updates=50, turns=3),
    puffer(16384, 64, 8, updates=20, turns=3),
]
CPU_ROWS = [
    Row(sized(256, 64, 8, 1), updates=10, turns=3),
    Row(sized(64, 16, 8, 4), updates=20, turns=3),
    Row(sized(4, 128, 4, 4), updates=100, turns=5),  # PureJaxRL's own sizes, and with more environments
    Row(sized(64, 128, 4, 4), updates=20, turns=3),
    puffer(256, 64, 8, updates=3, turns=2),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="use sizes for one large GPU")
    rows = GPU_ROWS if parser.parse_args().gpu else CPU_ROWS
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; millions of env steps per second", flush=True)
    if purejaxrl.is_there():
        purejaxrl.module()  # imports are not for several threads
    else:
        print(f"without PureJaxRL: {purejaxrl.FOLDER} does not name its folder")
    for row in rows:
        runs = {name: run for found in together.compiled(row.makes()) for name, run in found.items()}
        print(row.measure(runs), flush=True)


if __name__ == "__main__":
    main()
