"""What sb3-contrib's RecurrentPPO reaches on CartPole without velocities, with RL Zoo's settings and several seeds.

    python bench/recurrent_sb3.py                               seeds 1000 to 1004
    python bench/recurrent_sb3.py --seeds 3 --first-seed 0      others

RL Zoo publishes one run, with 500. A score here is the mean return of 100 episodes with the most likely actions, after
100k env steps: the protocol of bench/references.py. Needs lehr[sb3]. A seed takes minutes.
"""

import argparse
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv

STEPS, EPISODES = 100_000, 100
SETTINGS: dict[str, Any] = {
    "n_steps": 32,
    "batch_size": 256,
    "gae_lambda": 0.8,
    "gamma": 0.98,
    "n_epochs": 20,
    "ent_coef": 0.0,
}


class HiddenVelocities(gymnasium.ObservationWrapper):
    """CartPole whose observations have zeros for the two velocities."""

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Return position and angle alone."""
        return observation * np.array([1, 0, 1, 0], np.float32)


def environments(seed: int) -> VecEnv:
    """Eight of them."""
    return make_vec_env("CartPole-v1", n_envs=8, seed=seed, wrapper_class=HiddenVelocities)


def score(seed: int) -> float:
    """Train with a seed, and return the mean return after training."""
    model = RecurrentPPO(
        "MlpLstmPolicy",
        environments(seed),
        learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left,
        seed=seed,
        device="cpu",
        **SETTINGS,
    )
    model.learn(STEPS)
    found, _ = evaluate_policy(model, environments(seed + 10_000), EPISODES, deterministic=True)
    return float(np.mean(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (5)")
    parser.add_argument("--first-seed", type=int, default=1000, help="the first of them (1000)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scores = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        begin = time.perf_counter()
        scores.append(score(seed))
        print(f"seed {seed}: {scores[-1]:.1f}, {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"{np.mean(scores):.1f} ± {np.std(scores):.1f} over {len(scores)} seeds, lowest {min(scores):.1f}")


if __name__ == "__main__":
    main()
