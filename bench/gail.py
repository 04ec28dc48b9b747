"""GAIL from four expert episodes: is the expert's return reached, for which inputs, and what breaks it?

    python bench/gail.py                     all parts, 3 seeds
    python bench/gail.py --parts pendulum    some of them
    python bench/gail.py --seeds 10

Experts are trained first, and their demonstrations are kept in --folder. All seeds of a setting are one
population. The score of a return R is (R − random) / (expert − random): 1 is the expert, 0 are random actions.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from imitation import ShuffledGAIL, policy_of, random_return, train

from lehr import zoo
from lehr.acting.evaluation import evaluate
from lehr.acting.policy import Policy
from lehr.acting.recording import record
from lehr.envs import make
from lehr.training.compilation_cache import use_compilation_cache

EPISODES = 4
ENVS: dict[str, Any] = {
    "pendulum": make("Pendulum-v1"),
    "cartpole-full": make("CartPole-v1", terminates=False),
    "cartpole": make("CartPole-v1"),
    "mountaincar": make("MountainCar-v0"),
}
EXPERTS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "pendulum": ("trpo", "pendulum", 200_000, zoo.find("trpo", "Pendulum-v1").learning),
    "cartpole-full": ("ppo", "cartpole", 300_000, {}),  # one that never falls is an expert of both
    "cartpole": ("ppo", "cartpole", 300_000, {}),
}
"""By task: the algorithm of its expert, the task that it is trained on, env steps and settings."""
GAIL_PENDULUM = {  # each rollout is a whole episode of every environment, so that it shows all of its phases
    "num_envs": 32,
    "horizon": 200,
    "minibatches": 32,
    "epochs": 4,
    "learning_rate": "1e-3 -> 0",
    "entropy_coef": 0.0,
    "normalise_observations": True,
    "imitation_reward": "logit",
    "gradient_penalty_coef": 0.05,
    "discriminator_learning_rate": "3e-4 -> 3e-5",
}
GAIL_CARTPOLE = {"normalise_observations": True, "entropy_coef": "0.01 -> 0"}
GAIL_CARTPOLE_FULL = {
    **GAIL_CARTPOLE,
    "num_envs": 16,
    "horizon": 500,
    "minibatches": 16,
    "imitation_reward": "logit",
}


GAIL_MOUNTAIN_CAR = {
    "num_envs": 16,
    "horizon": 200,
    "minibatches": 16,
    "epochs": 4,
    "entropy_coef": "0.01 -> 0",
    "normalise_observations": True,
    "imitation_reward": "negative",
}

PARTS: dict[str, tuple[str, Any, int, dict[str, Any]]] = {
    "pendulum": ("pendulum", "gail", 2_000_000, GAIL_PENDULUM),
    "pendulum-transition": ("pendulum", "gail", 2_000_000, {**GAIL_PENDULUM, "discriminator_input": "transition"}),
    "pendulum-shuffled": ("pendulum", ShuffledGAIL, 2_000_000, GAIL_PENDULUM),
    "cartpole-full": ("cartpole-full", "gail", 600_000, GAIL_CARTPOLE_FULL),
    "cartpole-full-shuffled": ("cartpole-full", ShuffledGAIL, 600_000, GAIL_CARTPOLE_FULL),
    "cartpole": ("cartpole", "gail", 300_000, GAIL_CARTPOLE),
}
MIXES: dict[str, dict[str, Any]] = {
    "task-only": {"imitation_coef": 0.0, "task_coef": 1.0},
    "imitation-only": {"imitation_coef": 1.0, "task_coef": 0.0},
    "scheduled": {"imitation_coef": "1 -> 0 until 60%", "task_coef": "0 -> 1 until 60%"},
}
for _name, _weights in MIXES.items():
    PARTS[f"mix-{_name}"] = ("mountaincar", "gail", 200_000, {**GAIL_MOUNTAIN_CAR, **_weights})
"""By name: the task, the algorithm, env steps and settings."""


def trained(task: str) -> Policy:
    """The expert of a task, trained."""
    algorithm, origin, steps, settings = EXPERTS[task]
    return train(algorithm, ENVS[origin], steps, [1000], settings).policies[0]


def hesitant() -> Policy:
    """A driver of MountainCar who gets there, but does not push to the left beside the hill on the right."""
    env = ENVS["mountaincar"]

    def act(params: Any, carry: Any, obs: Any, *others: Any) -> Any:
        return carry, jnp.where(obs[:, 1] >= 0, 2, jnp.where(obs[:, 0] < -0.5, 0, 1)), {}

    return policy_of(env, act)


def expert(task: str, folder: Path) -> tuple[Path, float]:
    """Train the expert of a task and record it, unless it is there; return the file and the expert's mean return."""
    path, note = folder / f"{task}.npz", folder / f"{task}.txt"
    if not path.exists():
        policy = hesitant() if task == "mountaincar" else trained(task)
        folder.mkdir(parents=True, exist_ok=True)
        record(policy, ENVS[task], episodes=20, seed=7, out=path)
        note.write_text(str(float(evaluate(policy, ENVS[task], 100, seed=1).returns.mean())))
    return path, float(note.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), metavar="PART")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("demonstrations"))
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings to change, for trials")
    parser.add_argument("--total-steps", type=int)
    arguments = parser.parse_args()
    use_compilation_cache()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    changes = dict(pair.split("=", 1) for pair in arguments.set)
    print(
        f"| part | expert | random | returns of {len(seeds)} seeds | with sampled actions | lowest score | mean score "
        "| seconds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for part in arguments.parts:
        task, algorithm, steps, settings = PARTS[part]
        path, best = expert(task, arguments.folder)
        worst = random_return(ENVS[task])
        begin = time.perf_counter()
        given = {**settings, "demonstrations": str(path), "demonstration_episodes": EPISODES, **changes}
        runs = train(algorithm, ENVS[task], arguments.total_steps or steps, seeds, given)
        found = runs.returns
        scores = (found - worst) / (best - worst)
        shown, sampled = (", ".join(f"{value:.1f}" for value in part) for part in (found, runs.sampled))
        row = f"{best:.1f} | {worst:.1f} | {shown} | {sampled} | {scores.min():.3f} | {scores.mean():.3f}"
        print(f"| {part} | {row} | {time.perf_counter() - begin:.0f} |", flush=True)
        assert np.isfinite(found).all()


if __name__ == "__main__":
    main()
