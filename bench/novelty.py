"""Annealed exploration by a bonus: a chain so long that no entropy schedule ever finds its reward.

    python bench/novelty.py                 10 seeds
    python bench/novelty.py --length 30     a longer chain

Walking right at every step of an episode is rewarded at the end; each step to the right has a small cost. A policy that
moves at random finds the reward in one of 2^length episodes.
"""

import argparse
import time

import numpy as np
from imitation import train

from lehr.envs.builtin.chain import DeepChain
from lehr.training.compilation_cache import use_compilation_cache

TOTAL = 300_000
COMMON = {
    "num_envs": 16,
    "horizon": 60,
    "minibatches": 4,
    "epochs": 4,
    "learning_rate": 1e-3,
    "discount": 0.99,
    "hidden_sizes": (32, 32),
}
ENTROPY = ["0", "0.01", "0.1", "1", "1 -> 0", "3 -> 0", "3 -> 0 cosine"]
NOVELTY = ["1", "1 -> 0", "1 -> 0 cosine"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--total-steps", type=int, default=TOTAL)
    parser.add_argument("--entropy", nargs="*", default=ENTROPY, metavar="SCHEDULE")
    parser.add_argument("--novelty", nargs="*", default=NOVELTY, metavar="SCHEDULE")
    arguments = parser.parse_args()
    use_compilation_cache()
    env = DeepChain(arguments.length)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    steps = arguments.total_steps
    print(f"DeepChain of length {env.length}, {steps} env steps; the best return is {1 - env.cost:g}\n")
    print("| setting | return after training | seeds that found the reward | seconds |\n|---|---|---|---|")
    rows = [(f"entropy_coef={text}", {"entropy_coef": text}) for text in arguments.entropy]
    rows += [
        (f"novelty_coef={text}", {"entropy_coef": 0.01, "reward_model": "novelty", "novelty_coef": text})
        for text in arguments.novelty
    ]
    for name, settings in rows:
        begin = time.perf_counter()
        found = train("ppo", env, steps, seeds, {**COMMON, **settings}).returns
        solved = int(np.sum(found > 0.5))
        seconds = time.perf_counter() - begin
        print(f"| `{name}` | {found.mean():.3f} | {solved} of {len(seeds)} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
