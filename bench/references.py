"""Train the entries of the zoo with fresh seeds, beside what others publish for the same budgets.

    python bench/references.py                        all entries, seeds 100 to 104
    python bench/references.py trpo                   those of one algorithm
    python bench/references.py a2c pendulum           and those whose environment contains this word
    python bench/references.py a2c --seeds 10 --first-seed 50
    python bench/references.py a2c --write            also write what they reach into the zoo's files

"Meets" means: with the same budget, the mean over our seeds is not below theirs minus one of their standard deviations.
CleanRL evaluates the training policy, so we compare with sampled actions; SB3 uses the most likely actions, as we do.
"""

import argparse
import time
from dataclasses import replace

import jax

from lehr import zoo
from lehr.cli.zoo import protocol, retrained
from lehr.zoo import Entry, Published

CLASSIC = {"preset": "classic", "total_steps": 500_000, "evaluate_episodes": 500}
MEMORY = zoo.find("recurrent_ppo", "CartPole-Hidden-v1")
WINDOWS = {"horizon": 128, "window": 32, "burn_in": 8, "minibatches": 8, "epochs": 10, "clip_range": 0.2}
LSTM = {"torso": "lstm", **WINDOWS, "gae_lambda": 0.95, "discount": "0.98 -> 0.99"}
"""The best of four settings on seeds 904 to 907, instead of those of a MinGRU."""
OTHERS = [
    Entry("ppo", "CartPole-v1", CLASSIC, actions="sampled", published=Published(490.0, "CleanRL", 6.1)),
    Entry("ppo", "Acrobot-v1", CLASSIC, actions="sampled", published=Published(-86.4, "CleanRL", 1.3)),
    Entry("recurrent_ppo", "CartPole-v1", MEMORY.settings),
    Entry("recurrent_ppo", MEMORY.env, {**MEMORY.settings, **LSTM}, published=MEMORY.published),
]
"""Rows that are not in the zoo: those of CleanRL, whose settings are a preset, and two with those of an entry."""


def measured(entry: Entry, seeds: range, machine: str) -> Entry:
    """Train an entry, and return it with what it reaches."""
    returns = {seed: round(float(value), 3) for seed, value in zip(seeds, retrained(entry, seeds, False), strict=True)}
    return replace(entry, returns=returns, machine=machine)


def row(entry: Entry, seconds: float) -> str:
    """The row of the table."""
    cells = (
        entry.algorithm,
        entry.env,
        f"{entry.total_steps // 1000}k",
        "no figure" if entry.published is None else str(entry.published),
        f"{entry.mean:.1f} ± {entry.deviation:.1f}",
        ", ".join(f"{value:.1f}" for value in entry.returns.values()),
        {True: "yes", False: "no", None: ""}[entry.meets],
        protocol(entry),
        f"{seconds:.0f} s",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="an algorithm, and words that the environment contains")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--write", action="store_true", help="write the returns into the zoo's files")
    parser.add_argument("--machine", default="two CPU cores", help="what --write says that they were measured on")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    machine = f"{arguments.machine}, jax {jax.__version__}"
    columns = ("algorithm", "task", "env steps", "published", "ours", "each seed", "meets", "evaluation", "all seeds")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for entry in [*OTHERS, *zoo.entries()]:
        if all(word == entry.algorithm or word.lower() in entry.env.lower() for word in arguments.words):
            begin = time.perf_counter()
            found = measured(entry, seeds, machine)
            print(row(found, time.perf_counter() - begin), flush=True)
            if arguments.write and entry not in OTHERS:
                key = entry.algorithm, entry.env
                rest = zoo.entries(entry.algorithm)
                zoo.write(entry.algorithm, [found if (one.algorithm, one.env) == key else one for one in rest])


if __name__ == "__main__":
    main()
