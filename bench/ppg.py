"""Compare PPG with PPO on MinAtar's games, with a CNN, 1M env steps and fresh seeds.

    python bench/ppg.py                    all games
    python bench/ppg.py Asterix            some of them
    python bench/ppg.py Asterix --small    a few seeds and steps, to try the script

PPG has two networks, as in its paper; PPO has two as well, or one torso that actor and critic share. The settings below
were chosen on seeds 0 to 2, see docs/ppg.md. A score is the mean return of 100 episodes with sampled actions; the last
column has the 95% interval of the difference (Welch).
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import stats
from search import SAMPLED, Search, Training

from lehr.training.plan import use_compilation_cache

COMMON: dict[str, Any] = {"total_steps": 1_000_000, "num_envs": 128, "horizon": 32, "minibatches": 8}
COMMON |= {"torso": "cnn", "hidden_sizes": [128], "normalise_rewards": True, "normalise_observations": False}
COMMON |= {"clip_range": 0.2, "discount": 0.99, "gae_lambda": 0.95, "entropy_coef": 0.01, "value_coef": 0.5}
COMMON |= {"evaluate_episodes": 100}
PPG: dict[str, Any] = {"policy_updates": 8, "auxiliary_epochs": 3, "auxiliary_minibatches": 8, "epochs": 4}
PPG |= {"shared": False, "learning_rate": "5e-3 -> 0"}


class Comparison(NamedTuple):
    """What is compared on a game."""

    ppo: dict[str, dict[str, Any]]
    """By what the table calls it."""
    ppg: dict[str, Any]
    seeds: range


GAMES = {
    "Asterix": Comparison(
        {
            "a shared torso": {"shared": True, "epochs": 4, "learning_rate": "5e-3 -> 0"},
            "two networks": {"shared": False, "epochs": 4, "learning_rate": "1e-2 -> 0"},
        },
        PPG | {"auxiliary_learning_rate": "2e-3 -> 0"},
        range(400, 424),
    ),
    "Breakout": Comparison(
        {"a shared torso": {"shared": True, "epochs": 8, "learning_rate": "2.5e-3 -> 0"}},
        PPG | {"auxiliary_learning_rate": "5e-4 -> 0"},
        range(300, 316),
    ),
    "SpaceInvaders": Comparison(
        {"two networks": {"shared": False, "epochs": 4, "learning_rate": "5e-3 -> 0"}},
        PPG | {"auxiliary_learning_rate": "2e-3 -> 0"},
        range(300, 316),
    ),
}


def scores(algorithm: str, settings: dict[str, Any], seeds: range) -> np.ndarray:
    """Train every seed, all in one program, and return their scores."""
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Search(algorithm, COMMON, [settings], score=SAMPLED), Path(folder) / "search")
        return training.scores([0], seeds)[0]


def compare(game: str, small: bool) -> None:
    """Print the rows of a game."""
    begin, compared = time.perf_counter(), GAMES[game]
    changes = {"env": f"gymnax:{game}-MinAtar", **({"total_steps": 70_000} if small else {})}
    seeds = compared.seeds[:2] if small else compared.seeds
    ppg = scores("ppg", compared.ppg | changes, seeds)
    for name, settings in compared.ppo.items():
        ppo = scores("ppo", settings | changes, seeds)
        low, high = stats.ttest_ind(ppg, ppo, equal_var=False).confidence_interval()
        each = " | ".join(f"{one.mean():.2f} ± {one.std(ddof=1):.2f}" for one in (ppo, ppg))
        difference = f"{ppg.mean() - ppo.mean():+.2f} ({low:+.2f} to {high:+.2f})"
        seconds = time.perf_counter() - begin
        print(f"| {game} | {name} | {len(ppo)} | {each} | {difference} | {seconds:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", nargs="*", help=f"some of: {', '.join(GAMES)} (default: all)")
    parser.add_argument("--small", action="store_true", help="a few seeds and steps, to try the script")
    arguments = parser.parse_args()
    if unknown := set(arguments.games) - set(GAMES):
        parser.error(f"there is no game named {sorted(unknown)[0]}; choose from {', '.join(GAMES)}")
    use_compilation_cache()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; {COMMON['total_steps']} env steps")
    print("| game | PPO has | seeds | PPO | PPG | PPG - PPO, 95% interval | seconds |\n|---|---|---|---|---|---|---|")
    for game in arguments.games or GAMES:
        compare(game, arguments.small)


if __name__ == "__main__":
    main()
