"""What action masks are worth: tasks in which a forbidden action ends the episode, with their mask and without it.

`python bench/masks.py` trains PPO on Jumanji's Knapsack, once following the mask and once with the mask as an input,
and on tic-tac-toe of PettingZoo by self-play, and prints tables in Markdown. Random is the policy before training, with
the mask. The player of tic-tac-toe then plays against one that moves at random, half of the games as the first player.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import lehr
from lehr.envs import HostEnvironment, make
from lehr.training.plan import make_plan

TASKS = {"jumanji:Knapsack-v1": 500_000}
SETTINGS = {"num_envs": 64, "horizon": 64, "minibatches": 8, "epochs": 4, "learning_rate": "1e-3 -> 0"}
GAME, GAME_STEPS = "pettingzoo:classic.tictactoe_v3", 400_000


def quiet(folder: str) -> dict[str, Any]:
    """Settings of a run whose directory is thrown away."""
    return {"progress": False, "tensorboard": False, "evaluate_episodes": 0, "run_dir": Path(folder) / "run"}


def train(env: str, steps: int, seed: int, **settings: Any) -> Any:
    """Train PPO and return its policy."""
    with tempfile.TemporaryDirectory() as folder:
        return lehr.train("ppo", env=env, total_steps=steps, seed=seed, **quiet(folder), **settings).policy


def untrained(env: str, seed: int, **settings: Any) -> Any:
    """Return the policy before training."""
    plan = make_plan("ppo", {"env": env, "total_steps": 10_000, "seed": seed, **settings})
    return plan.policy(plan.state)


def mean_return(policy: Any, env: str) -> float:
    """Return the mean over 512 episodes, with sampled actions."""
    return float(lehr.evaluate(policy, make(env), episodes=512, greedy=False).returns.mean())


def score(policy: Any, games: int, seed: int) -> tuple[float, float, float]:
    """Return the shares of games won, drawn and lost against an opponent that moves at random."""
    env = make(GAME)
    assert isinstance(env, HostEnvironment)
    rng, batch = np.random.default_rng(seed), env.start(games)
    ours = np.arange(games) % 2  # the index of our player in each game
    rows = 2 * np.arange(games) + ours
    obs = batch.reset(rng.integers(2**32, size=games, dtype=np.uint32))
    result, is_open = np.zeros(games), np.ones(games, bool)
    while is_open.any():
        chosen = np.asarray(policy(obs))
        random = np.array([rng.choice(np.flatnonzero(mask)) for mask in obs["action_mask"]])
        action = random.copy()
        action[rows] = chosen[rows]
        step = batch.step(action)
        done = (step.terminated | step.truncated)[rows]
        result += np.where(is_open, step.reward[rows], 0)
        is_open &= ~done
        obs = step.obs
    batch.close()
    return float(np.mean(result > 0)), float(np.mean(result == 0)), float(np.mean(result < 0))


def main() -> None:
    """Train, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="*", default=[*TASKS, GAME])
    parser.add_argument("--games", type=int, default=1000)
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    print("| task | steps | random, with the mask | trained without the mask | trained with the mask |")
    print("|---|---|---|---|---|")
    for env in TASKS:
        if env in arguments.tasks:
            random = [mean_return(untrained(env, seed, **SETTINGS), env) for seed in seeds]
            both = [
                [mean_return(train(env, TASKS[env], seed, action_mask=mask, **SETTINGS), env) for seed in seeds]
                for mask in (False, True)
            ]
            cells = " | ".join(", ".join(f"{value:.3g}" for value in values) for values in (random, *both))
            print(f"| `{env}` | {TASKS[env]} | {cells} |", flush=True)
    if GAME in arguments.tasks:
        print("\n| tic-tac-toe against random moves | won | drawn | lost |\n|---|---|---|---|")
        settings = {"num_envs": 16, "horizon": 64, "torso": "mlp", "entropy_coef": "0.02 -> 0.005"}
        settings["critic_obs"] = ("action_mask", "observation")  # the mask tells whose turn it is
        for seed in seeds:
            for name, policy in (
                ("untrained", untrained(GAME, seed, **settings)),
                (f"{GAME_STEPS} steps of self-play", train(GAME, GAME_STEPS, seed, **settings)),
            ):
                shares = " | ".join(f"{share:.1%}" for share in score(policy, arguments.games, seed))
                print(f"| {name} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
