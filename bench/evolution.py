"""Population-based training, and training afresh with the schedule that it found, on three tasks.

    python bench/evolution.py [--tasks cartpole acrobot pendulum] [--members 16] [--seeds 5] [--total-steps STEPS]

For each task: the score of the population's best agent, the path of its coefficients as text with the error of the fit,
and the scores of new runs with that text, from their beginning and with fresh seeds.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import lehr

TASKS: dict[str, dict[str, Any]] = {
    "cartpole": {
        **{"env": "CartPole-v1", "total_steps": 100_000, "num_envs": 8, "horizon": 32, "minibatches": 4},
        **{"normalise_observations": False},
    },
    "acrobot": {
        **{"env": "Acrobot-v1", "total_steps": 300_000, "num_envs": 16, "horizon": 64, "minibatches": 4},
        **{"normalise_observations": True},
    },
    "pendulum": {
        **{"env": "Pendulum-v1", "total_steps": 300_000, "num_envs": 8, "horizon": 128, "minibatches": 8, "epochs": 8},
        **{"discount": 0.95, "normalise_observations": False, "normalise_rewards": True},
    },
}


def compare(task: str, members: int, seeds: int, total_steps: int | None, folder: Path) -> dict[str, Any]:
    """Evolve a population, and train its winner's schedule again."""
    definition = {
        "algorithm": "ppo",
        "settings": {**TASKS[task], "evaluate_episodes": 100}
        | ({} if total_steps is None else {"total_steps": total_steps}),
        "parameters": {
            "learning_rate": {"low": 1e-5, "high": 1e-2, "scale": "log"},
            "entropy_coef": {"low": 1e-4, "high": 0.1, "scale": "log"},
        },
        "sampler": "latin_hypercube",
        "samples": members,
        "evolution": {"interval": "5%"},
        "confirm": {"top": 1, "seeds": seeds},
    }
    found = lehr.sweep(definition, out=folder / task, progress=False)
    (again,) = found.results.again.values()
    return {
        "task": task,
        "best agent": round(float(found.results.scores.max()), 1),
        "median agent": round(float(np.median(found.results.scores)), 1),
        "trained afresh": [round(float(score), 1) for score in again],
        "mean": round(float(again.mean()), 1),
        "schedules": {name: str(path.schedule) for name, path in found.winning_paths.items()},
        "error of the fit": {name: round(path.error, 3) for name, path in found.winning_paths.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--total-steps", type=int, help="budget of each member (default: the task's)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for task in arguments.tasks:
            print(
                json.dumps(compare(task, arguments.members, arguments.seeds, arguments.total_steps, Path(folder))),
                flush=True,
            )


if __name__ == "__main__":
    main()
