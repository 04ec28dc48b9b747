"""Compare PPG with PPO on MinAtar's games, both with a torso that actor and critic share.

    python bench/ppg.py                           all games
    python bench/ppg.py Breakout Freeway          some of them
    python bench/ppg.py Breakout --small          a few members and steps, to try the script

For each game, both algorithms choose the best of as many candidates on seeds 0 to 2; the table has what that one
reaches with seeds from 100 on: the mean return of 100 episodes with sampled actions, and the difference with its 95%
interval.
"""

import argparse
import time
from typing import Any

import jax
from scipy import stats
from search import SAMPLED, Search, grid, run

from lehr.training.plan import use_compilation_cache

GAMES = ("Breakout", "SpaceInvaders", "Asterix", "Freeway")
COMMON: dict[str, Any] = {"total_steps": 1_000_000, "num_envs": 128, "horizon": 32, "minibatches": 8}
COMMON |= {"shared": True, "torso": "cnn", "hidden_sizes": [128], "normalise_rewards": True, "evaluate_episodes": 100}
COMMON |= {"normalise_observations": False, "clip_range": 0.2, "discount": 0.99, "gae_lambda": 0.95}
PPO = COMMON | {"epochs": 4, "value_coef": 0.5}
PPG = COMMON | {"epochs": 4, "policy_updates": 8, "auxiliary_epochs": 3, "auxiliary_minibatches": 8, "value_coef": 0.5}
RATES = ["1e-3 -> 0", "2.5e-3 -> 0", "5e-3 -> 0"]
PPO_CANDIDATES = grid(learning_rate=RATES, entropy_coef=[0.01, 0.03])
PPG_CANDIDATES = grid(learning_rate=RATES, auxiliary_learning_rate=["5e-4 -> 0", "1e-3 -> 0"], entropy_coef=[0.01])


def compare(game: str, small: bool) -> None:
    """Print the row of a game."""
    begin, env = time.perf_counter(), f"gymnax:{game}-MinAtar"
    changes = {"env": env, **({"total_steps": 70_000} if small else {})}
    found = {}
    for name, settings, candidates in (("ppo", PPO, PPO_CANDIDATES), ("ppg", PPG, PPG_CANDIDATES)):
        seeds = (2, 2) if small else (3, 12)
        search = Search(name, settings | changes, candidates[::3] if small else candidates, seeds, SAMPLED)
        print(f"{name} on {env}", flush=True)
        found[name] = run(search).fresh
    ppo, ppg = found["ppo"], found["ppg"]
    test = stats.ttest_ind(ppg, ppo, equal_var=False)
    low, high = test.confidence_interval()
    each = " | ".join(f"{one.mean():.2f} ± {one.std(ddof=1):.2f}" for one in (ppo, ppg))
    seconds = time.perf_counter() - begin
    print(
        f"| {env} | {len(ppo)} | {each} | {ppg.mean() - ppo.mean():+.2f} ({low:+.2f} to {high:+.2f}) | {seconds:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", nargs="*", help=f"some of: {', '.join(GAMES)} (default: all)")
    parser.add_argument("--small", action="store_true", help="a few members and steps, to try the script")
    arguments = parser.parse_args()
    if unknown := set(arguments.games) - set(GAMES):
        parser.error(f"there is no game named {sorted(unknown)[0]}; choose from {', '.join(GAMES)}")
    use_compilation_cache()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; {COMMON['total_steps']} env steps")
    print("| task | seeds | PPO | PPG | PPG - PPO, 95% interval | seconds |\n|---|---|---|---|---|---|", flush=True)
    for game in arguments.games or GAMES:
        compare(game, arguments.small)


if __name__ == "__main__":
    main()
