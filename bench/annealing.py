"""Why anneal: a task that needs exploration early and none late, with schedules and constants side by side.

    python bench/annealing.py                     the table
    python bench/annealing.py --plot docs/img/annealing.svg

All runs, every entropy coefficient with every seed, are one population: one compiled program, a schedule per member.
"""

import argparse
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.algorithms import ppo
from lehr.config import coefficients
from lehr.envs.builtin.chain import DeepChain
from lehr.networks import NetworkConfig, actor_critic
from lehr.report.plots import COLOURS, save_figure, steps_text, tidy
from lehr.schedules.bundle import population
from lehr.training.compilation_cache import use_compilation_cache
from lehr.training.iteration import iteration
from lehr.training.program import assemble, initial_state

CONSTANTS = ["0", "0.01", "0.03", "0.1", "0.3", "0.5", "1", "3"]
SCHEDULES = ["1 -> 0", "3 -> 0", "3 -> 0 cosine"]
TOTAL, SEEDS = 100_000, 10
ENV = DeepChain()
CONFIG = ppo.Config(num_envs=16, horizon=12, minibatches=4, epochs=4, learning_rate=1e-3, discount=1.0)
NETWORK = NetworkConfig(hidden_sizes=(32, 32))


def train() -> tuple[np.ndarray, int]:
    """Return mean episode returns `[coefficients, seeds, updates]`, and the env steps per update."""
    program, first = assemble("ppo", ENV, CONFIG, NETWORK, TOTAL)
    members = [coefficients(replace(CONFIG, entropy_coef=text), TOTAL) for text in CONSTANTS + SCHEDULES]
    stacked = population([{name: one[name] for name in first.coefficients.names} for one in members])
    updates = TOTAL // program.steps_per_update

    def begin(seed: jax.Array) -> Any:
        key = jax.random.key(seed)
        _, params = actor_critic(ENV.observation_space, ENV.action_space, NETWORK, key)
        return initial_state(program, first.coefficients, params, key)

    def run(coefficients: Any, state: Any) -> jax.Array:
        state = state._replace(coefficients=coefficients)

        def update(state: Any, _: None) -> tuple[Any, jax.Array]:
            state, metrics = iteration(program, state)
            return state, metrics["episode/return"]

        return jax.lax.scan(update, state, None, length=updates)[1]

    states = jax.vmap(begin)(jnp.arange(SEEDS))
    by_seed = jax.vmap(run, in_axes=(None, 0))
    return np.asarray(jax.jit(jax.vmap(by_seed, in_axes=(0, None)))(stacked, states)), program.steps_per_update


def draw(returns: np.ndarray, steps: int, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    window = 20
    x = np.arange(returns.shape[-1] - window + 1) * steps
    smooth = np.array([np.convolve(row.mean(0), np.ones(window) / window, "valid") for row in returns])
    for number, text in enumerate(CONSTANTS + SCHEDULES):
        is_schedule = text in SCHEDULES
        colour = COLOURS[SCHEDULES.index(text)] if is_schedule else str(0.8 - 0.08 * number)
        axes.plot(x, smooth[number], color=colour, linewidth=2.5 if is_schedule else 1.2, label=text)
    axes.axhline(1 - ENV.cost, color="0.6", linestyle=":", linewidth=1)
    axes.set_xlabel("env steps")
    axes.set_ylabel("episode return")
    axes.xaxis.set_major_formatter(lambda step, _: steps_text(step))
    axes.set_xlim(0, TOTAL)
    tidy(axes)
    figure.legend(loc="outside right upper", frameon=False, title="entropy_coef")
    save_figure(figure, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE", help="save a plot as .png or .svg")
    arguments = parser.parse_args()
    use_compilation_cache()
    returns, steps = train()
    final = np.nanmean(returns[:, :, -returns.shape[-1] // 20 :], axis=-1)
    print(f"DeepChain of length {ENV.length}, {TOTAL} env steps, {SEEDS} seeds; the best return is {1 - ENV.cost:g}\n")
    print("| entropy_coef | return in the last 5 % | seeds that found the reward |\n|---|---|---|")
    for text, row in zip(CONSTANTS + SCHEDULES, final, strict=True):
        print(f"| `{text}` | {row.mean():.3f} ± {row.std():.3f} | {int((row > 0.5).sum())} of {SEEDS} |")
    if arguments.plot:
        draw(returns, steps, arguments.plot)
