"""Search settings for a task, and confirm the best with seeds that were not used to choose it.

    python bench/search.py                          the searches
    python bench/search.py acrobot mountain-car     some of them
    python bench/search.py acrobot --small          a few members and steps, to try the script
    python bench/search.py acrobot --out found      also write found/acrobot.json, with all scores

Three rounds, each one or a few populations: all candidates with a few seeds, from 0; the best of them again with the
seeds after those; and the best of these two rounds together with other seeds, from 100. Only the last round is a result.
The score is the mean return of `evaluate_episodes` episodes, with the most likely actions unless the search says otherwise.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
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
"""The first seed of the last round."""


class Search(NamedTuple):
    """Settings to choose from."""

    algorithm: str
    settings: dict[str, Any]
    """What all candidates share."""
    candidates: list[dict[str, Any]]
    seeds: tuple[int, int, int] = (6, 20, 20)
    """Seeds of each round."""
    best: int = 6
    """Candidates in the second round."""
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
    {"env": "Acrobot-v1", "total_steps": 1_000_000, "evaluate_episodes": 200, **NORMALISED},
    together(
        [
            {"num_envs": 16, "horizon": 256, "minibatches": 32, "epochs": 4},
            {"num_envs": 16, "horizon": 128, "minibatches": 8, "epochs": 10},
        ],
        grid(
            discount=["0.99", "0.99 -> 0.999", "1"],
            gae_lambda=["0.95", "0.99"],
            learning_rate=["1e-3 -> 0", "3e-3 -> 0"],
            entropy_coef=["0", "0.01 -> 0", "0.05 -> 0"],
        ),
    ),
)
MOUNTAIN_CAR = Search(
    "ppo",
    {"env": "MountainCar-v0", "total_steps": 1_000_000, "evaluate_episodes": 200, **NORMALISED},
    together(
        [
            {"num_envs": 16, "horizon": 16, "minibatches": 4, "epochs": 4},
            {"num_envs": 16, "horizon": 64, "minibatches": 8, "epochs": 4, "action_repeat": 4},
            {"num_envs": 16, "horizon": 64, "minibatches": 8, "epochs": 4, "reward_model": "novelty"},
        ],
        grid(
            discount=["0.99", "0.99 -> 1"],
            gae_lambda=["0.95", "0.98"],
            learning_rate=["1e-3 -> 0", "3e-4"],
            entropy_coef=["0", "0.01 -> 0", "0.1 -> 0"],
        ),
    ),
)
# The bonus must end, or the car keeps looking around.
for _candidate in MOUNTAIN_CAR.candidates:
    if "reward_model" in _candidate:
        _candidate["novelty_coef"] = "1 -> 0 until 50%"
TRPO_MOUNTAIN_CAR = Search(
    "trpo",
    {"env": "MountainCar-v0", "total_steps": 100_000, "evaluate_episodes": 200, **NORMALISED},
    together(
        [
            {"num_envs": 4, "horizon": 64, "action_repeat": 4, "value_epochs": 10, "value_minibatches": 8},
            {"num_envs": 8, "horizon": 32, "action_repeat": 8, "value_epochs": 10, "value_minibatches": 8},
        ],
        grid(
            target_kl=["0.02", "0.05 -> 0.01", "0.1 -> 0.01"],
            discount=["0.97", "0.99", "0.97 -> 1"],
            gae_lambda=["0.95", "0.98"],
            value_learning_rate=["1e-3", "3e-3 -> 3e-4"],
            entropy_coef=["0", "0.03 -> 0"],
        ),
    ),
)
HIDDEN_CARTPOLE = Search(
    "recurrent_ppo",
    {"env": "CartPole-Hidden-v1", "total_steps": 100_000, "evaluate_episodes": 100, "torso": "lstm"}
    | {"recurrent_size": 64, "num_envs": 8, "epochs": 20, **NORMALISED},
    together(
        [
            {"horizon": 32, "minibatches": 1},
            {"horizon": 64, "minibatches": 2},
            {"horizon": 32, "minibatches": 1, "critic_torso": "mlp"},
        ],
        grid(
            learning_rate=["1e-3 -> 0", "2e-3 -> 0", "2e-3 -> 2e-4"],
            clip_range=["0.2 -> 0.001", "0.2"],
            discount=["0.98", "0.98 -> 0.99"],
            gae_lambda=["0.8", "0.95"],
            entropy_coef=["0", "0.01 -> 0"],
        ),
    ),
)
MINATAR: dict[str, Any] = {"num_envs": 64, "horizon": 128, "minibatches": 8, "epochs": 4, "evaluate_episodes": 100}
SPACE_INVADERS = Search(
    "ppo",
    {"env": "gymnax:SpaceInvaders-MinAtar", "total_steps": 10_000_000, **MINATAR},
    together(
        [{"torso": "cnn", "hidden_sizes": [128]}],
        grid(
            learning_rate=["5e-3 -> 0", "2e-3 -> 0", "1e-3 -> 0"], entropy_coef=["0.01"], discount=["0.99", "0.995"]
        ),
    ),
    seeds=(2, 2, 8),
    best=2,
)
SEARCHES = {
    "acrobot": ACROBOT,
    "mountain-car": MOUNTAIN_CAR,
    "trpo-mountain-car": TRPO_MOUNTAIN_CAR,
    "hidden-cartpole": HIDDEN_CARTPOLE,
    "space-invaders": SPACE_INVADERS,
}


def members(search: Search, chosen: Sequence[int], seeds: range, first: int) -> Iterator[Member]:
    """Some candidates with every seed."""
    for number, (index, seed) in enumerate(itertools.product(chosen, seeds), first):
        settings = {**search.settings, **search.candidates[index]}
        yield Member(number, index, seed, {}, settings)


class Rounds:
    """Trains the rounds of a search in one directory."""

    def __init__(self, search: Search, folder: Path) -> None:
        self.search, self.directory = search, SweepDirectory.create(folder)
        self.waves = Waves(self.directory, WaveTrainer(search.algorithm, progress=False))
        self.count = 0

    def train(self, chosen: Sequence[int], seeds: range) -> dict[int, np.ndarray]:
        """Train candidates, and return the score of each seed by candidate; a diverged one counts as the lowest."""
        wanted = list(members(self.search, chosen, seeds, self.count))
        self.count += len(wanted)
        self.waves.train(wanted)
        found: dict[int, float] = {}
        for wave in self.directory.read_waves():
            if wave.members[0].number >= wanted[0].number:
                table = read_wave(self.directory, wave, [self.search.score])
                last = last_known(table[self.search.score])
                found |= {member.number: float(last[place]) for place, member in enumerate(wave.members)}
        scores = np.array([found[member.number] for member in wanted])
        scores = np.where(np.isfinite(scores), scores, np.nanmin(scores)).reshape(len(chosen), len(seeds))
        return dict(zip(chosen, scores, strict=True))


def run(search: Search, folder: Path) -> dict[str, Any]:
    """Make the three rounds, and print the best of each."""
    begin, rounds = time.perf_counter(), Rounds(search, folder)
    first, second, last = search.seeds
    found = rounds.train(range(len(search.candidates)), range(first))
    print(f"  {len(found)} candidates, {time.perf_counter() - begin:.0f} s", flush=True)
    best = _ordered(found)[: search.best]
    again = rounds.train(best, range(first, first + second))
    both = {index: np.concatenate([found[index], again[index]]) for index in best}
    for index in _ordered(both):
        print(f"  {_text(both[index])} {search.candidates[index]}", flush=True)
    winner = _ordered(both)[0]
    fresh = rounds.train([winner], range(FRESH, FRESH + last))[winner]
    print(f"  confirmed with seeds {FRESH} to {FRESH + last - 1}: {_text(fresh)} {np.round(fresh, 1).tolist()}")
    print(f"  {time.perf_counter() - begin:.0f} s, {rounds.waves.compile_seconds:.0f} s of it compiling", flush=True)
    return {
        "algorithm": search.algorithm,
        "settings": {**search.settings, **search.candidates[winner]},
        "fresh": fresh.tolist(),
        "tried": [
            {"candidate": candidate, "scores": both.get(index, found[index]).tolist()}
            for index, candidate in enumerate(search.candidates)
        ],
        "device": f"{jax.devices()[0].device_kind}, jax {jax.__version__}",
    }


def _ordered(found: dict[int, np.ndarray]) -> list[int]:
    """The candidates from the best mean to the worst."""
    return sorted(found, key=lambda index: -found[index].mean())


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
            search = search._replace(settings=settings, candidates=search.candidates[::13], seeds=(2, 2, 2), best=2)
        print(f"{name}: {search.settings}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = run(search, Path(folder) / name)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
