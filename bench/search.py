"""Search settings for a task, and confirm the best with seeds that were not used to choose it.

    python bench/search.py                          the searches
    python bench/search.py acrobot mountain-car     some of them
    python bench/search.py acrobot --small          a few members and steps, to try the script
    python bench/search.py acrobot --out found      also write found/acrobot.json, with all scores

All candidates train with seeds 0, 1, ... at once, those that shape the program alike in one population. The one with
the best mean is chosen and trained again; its returns with the seeds from 100 on, which had no part in that, are the
result. The score is the mean return of `evaluate_episodes` episodes, with the most likely actions unless the search
says otherwise.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from lehr.sweeps.directory import Member, SweepDirectory
from lehr.sweeps.running import Waves, WaveTrainer
from lehr.sweeps.statistics import mean_interval
from lehr.sweeps.wave_metrics import last_known, read_wave
from lehr.training.plan import use_compilation_cache

GREEDY, SAMPLED = "evaluate/return", "evaluate/return_sampled"
FRESH = 100
"""The first of the seeds that confirm."""


class Search(NamedTuple):
    """Settings to choose from."""

    algorithm: str
    settings: dict[str, Any]
    """What all candidates share."""
    candidates: list[dict[str, Any]]
    seeds: tuple[int, int] = (6, 10)
    """Seeds to choose on, and seeds that confirm."""
    score: str = GREEDY


def grid(**choices: Sequence[Any]) -> list[dict[str, Any]]:
    """Every combination of some settings."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def together(groups: Sequence[dict[str, Any]], coefficients: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every group of settings that shape the program, with every choice of coefficients."""
    return [{**group, **coefficient} for group, coefficient in itertools.product(groups, coefficients)]


NORMALISED = {"normalise_observations": True, "normalise_rewards": True}
ACROBOT = Search(
    "ppo",
    {"env": "Acrobot-v1", "total_steps": 1_000_000, "evaluate_episodes": 200, **NORMALISED}
    | {"num_envs": 32, "horizon": 128, "minibatches": 8, "epochs": 8, "gae_lambda": 0.95}
    | {"learning_rate": "1e-3 -> 0", "entropy_coef": "0.01 -> 0"},
    grid(discount=["0.99", "0.99 -> 0.999", "1"]),
    seeds=(2, 5),
)
MOUNTAIN_CAR = Search(
    "ppo",
    {"env": "MountainCar-v0", "total_steps": 1_000_000, "evaluate_episodes": 200, **NORMALISED, "action_repeat": 4}
    | {"num_envs": 16, "horizon": 64, "minibatches": 8, "epochs": 4, "gae_lambda": 0.95}
    | {"learning_rate": "1e-3 -> 0", "entropy_coef": "0.01 -> 0"},
    grid(discount=["0.97", "0.99", "0.97 -> 1"]),
    seeds=(3, 6),
)
TRPO_MOUNTAIN_CAR = Search(
    "trpo",
    {"env": "MountainCar-v0", "total_steps": 100_000, "evaluate_episodes": 200, **NORMALISED, "action_repeat": 4}
    | {"num_envs": 8, "horizon": 32, "value_epochs": 20, "value_minibatches": 4, "value_learning_rate": "3e-3 -> 3e-4"},
    grid(
        target_kl=["0.03", "0.05 -> 0.01", "0.05 -> 0.002"],
        discount=["0.98", "0.99"],
        gae_lambda=["0.95", "0.98"],
        entropy_coef=["0", "0.01 -> 0"],
    ),
    seeds=(8, 2),
)
HIDDEN_CARTPOLE = Search(
    "recurrent_ppo",
    {"env": "CartPole-Hidden-v1", "total_steps": 100_000, "evaluate_episodes": 100, "torso": "lstm"}
    | {"recurrent_size": 64, "num_envs": 8, "horizon": 32, "minibatches": 1, "epochs": 20, **NORMALISED},
    together(
        [{}, {"critic_torso": "mlp"}],
        grid(
            learning_rate=["1e-3 -> 0", "2e-3 -> 0", "2e-3 -> 5e-4", "4e-3 -> 0"],
            clip_range=["0.2 -> 0.001", "0.2 -> 0.05"],
            discount=["0.98", "0.98 -> 0.99"],
            gae_lambda=["0.8", "0.95"],
            entropy_coef=["0", "0.01 -> 0"],
        ),
    ),
)
MINATAR: dict[str, Any] = {"num_envs": 64, "horizon": 128, "minibatches": 8, "epochs": 4, "evaluate_episodes": 100}
SPACE_INVADERS = Search(
    "ppo",
    {"env": "gymnax:SpaceInvaders-MinAtar", "total_steps": 10_000_000, **MINATAR}
    | {"torso": "mlp", "hidden_sizes": [128, 128], "activation": "relu"},  # a CNN takes much longer
    grid(learning_rate=["5e-3 -> 0", "2.5e-3 -> 0", "1e-3 -> 0"]),
    seeds=(2, 4),
)
SEARCHES = {
    "acrobot": ACROBOT,
    "mountain-car": MOUNTAIN_CAR,
    "trpo-mountain-car": TRPO_MOUNTAIN_CAR,
    "hidden-cartpole": HIDDEN_CARTPOLE,
    "space-invaders": SPACE_INVADERS,
}


class Training:
    """Trains candidates of a search with some seeds; those that shape the program alike share it."""

    def __init__(self, search: Search, folder: Path) -> None:
        self.search = search
        self.directory = SweepDirectory.create(folder)
        self.waves = Waves(self.directory, WaveTrainer(search.algorithm, progress=False))
        self._members = 0

    def scores(self, candidates: Sequence[int], seeds: Sequence[int]) -> np.ndarray:
        """Train these candidates, by number, and return `[candidates, seeds]`; a diverged member has the lowest."""
        members = [
            Member(number, index, seed, {}, {**self.search.settings, **self.search.candidates[index]})
            for number, (index, seed) in enumerate(itertools.product(candidates, seeds), self._members)
        ]
        self._members += len(members)
        self.waves.train(members)
        found: dict[int, float] = {}
        for wave in self.directory.read_waves():
            last = last_known(read_wave(self.directory, wave, [self.search.score])[self.search.score])
            found |= {member.number: float(last[place]) for place, member in enumerate(wave.members)}
        scores = np.array([found[member.number] for member in members])
        return np.where(np.isfinite(scores), scores, np.nanmin(scores)).reshape(len(candidates), len(seeds))


class Found(NamedTuple):
    """What a search found."""

    chosen: dict[str, Any]
    """The candidate."""
    fresh: np.ndarray
    """Its scores with the seeds that confirm."""
    scores: np.ndarray
    """`[candidates, seeds]`: those of all candidates, with the seeds to choose on."""


def run(search: Search) -> Found:
    """Train, print the best candidates with the seeds to choose on, and train the chosen one with the others."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        training = Training(search, Path(folder) / "search")
        tried = training.scores(range(len(search.candidates)), range(search.seeds[0]))
        order = np.argsort(-tried.mean(axis=1), kind="stable")
        for index in order[:8]:
            print(f"  {_text(tried[index])} {search.candidates[index]}", flush=True)
        fresh = training.scores([int(order[0])], range(FRESH, FRESH + search.seeds[1]))[0]
    seeds = f"seeds {FRESH} to {FRESH + search.seeds[1] - 1}"
    print(f"  confirmed with {seeds}: {_text(fresh)} {np.round(fresh, 1).tolist()}")
    print(
        f"  {len(tried)} candidates, {tried.size + fresh.size} members, {time.perf_counter() - begin:.0f} s", flush=True
    )
    return Found(search.candidates[order[0]], fresh, tried)


def _text(scores: np.ndarray) -> str:
    mean, low, _ = mean_interval(scores)
    return f"{mean:.2f} ± {mean - low:.2f} (lowest {scores.min():.1f}, {len(scores)} seeds)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(SEARCHES)} (default: all)")
    parser.add_argument("--out", type=Path, help="folder for the scores, as JSON")
    parser.add_argument("--small", action="store_true", help="a few members and steps, to try the script")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(SEARCHES):
        parser.error(f"there is no search named {sorted(unknown)[0]}; choose from {', '.join(SEARCHES)}")
    use_compilation_cache()
    for name in arguments.names or SEARCHES:
        search = SEARCHES[name]
        if arguments.small:
            settings = {**search.settings, "total_steps": 20_000}
            search = search._replace(settings=settings, candidates=search.candidates[::13], seeds=(2, 2))
        print(f"{name}: {search.settings}", flush=True)
        found = run(search)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
            written = {"chosen": found.chosen, "candidates": search.candidates, "scores": found.scores.tolist()}
            written |= {"fresh": found.fresh.tolist()}
            (arguments.out / f"{name}.json").write_text(json.dumps(written | {"device": device}), encoding="utf-8")


if __name__ == "__main__":
    main()
