"""Train every combination of some learning-rate, entropy and clip schedules on many tasks, several seeds each.

    python bench/atlas.py --out atlas                       all tasks, on one large GPU
    python bench/atlas.py --out atlas cartpole acrobot      some of them
    python bench/atlas.py --out atlas --small               a few members and steps, to try the script

All members of a task are one population. First the grid: 12 learning rates x 6 entropy coefficients x 3 clip ranges x
5 seeds. The best of it is in part the luckiest, so the best configuration of each kind (all constants, one coefficient
annealed, and any) is then trained again with 180 fresh seeds. Each task writes OUT/<task>.json and skips itself if that
is there; `bench/atlas_page.py` draws the pictures and prints the tables of docs/atlas.md from these files.
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

from lehr import zoo
from lehr.sweeps.directory import Member, SweepDirectory
from lehr.sweeps.gathering import scores
from lehr.sweeps.running import Waves, WaveTrainer
from lehr.training.plan import use_compilation_cache


class Task(NamedTuple):
    """A task, and the settings that all members share."""

    algorithm: str
    settings: dict[str, Any]


MEMORY = zoo.find("recurrent_ppo", "CartPole-Hidden-v1")
SMALL = {"num_envs": 8, "horizon": 64, "minibatches": 4, "epochs": 4}
PLAIN: dict[str, Any] = {"normalise_observations": False, "normalise_rewards": False}
PHYSICS: dict[str, Any] = {"num_envs": 16, "horizon": 64, "minibatches": 8, "epochs": 4, "normalise_observations": True}
PHYSICS |= {"total_steps": 150_000, "env_parameters": {"backend": "spring"}, "evaluate_episodes": 8}
TASKS = {
    "cartpole": Task("ppo", {"env": "CartPole-v1", "total_steps": 100_000, **SMALL}),
    "acrobot": Task("ppo", {"env": "Acrobot-v1", "total_steps": 200_000, "normalise_observations": True, **SMALL}),
    "pendulum": Task(
        "ppo",
        {"env": "Pendulum-v1", "total_steps": 200_000, "discount": 0.95, "normalise_rewards": True}
        | {**SMALL, "minibatches": 8, "epochs": 8},
    ),
    "mountain-car": Task(
        "ppo",
        {"env": "MountainCarContinuous-v0", "total_steps": 100_000, "action_repeat": 10, "discount": 0.95}
        | {"initial_log_std": 0.5, "normalise_observations": True, **SMALL},
    ),
    "chain": Task("ppo", {"env": "DeepChain-v0", "total_steps": 100_000, **SMALL}),
    "hidden-cartpole": Task(
        "recurrent_ppo",
        {**MEMORY.learning, **PLAIN, "env": MEMORY.env, "total_steps": 100_000, "horizon": 64, "epochs": 4},
    ),
    "breakout": Task(
        "ppo", {"env": "gymnax:Breakout-MinAtar", "total_steps": 300_000, **SMALL, "num_envs": 16, "torso": "mlp"}
    ),
    "space-invaders": Task(
        "ppo", {"env": "gymnax:SpaceInvaders-MinAtar", "total_steps": 300_000, **SMALL, "num_envs": 16, "torso": "mlp"}
    ),
    "double-pendulum": Task("ppo", {"env": "brax:inverted_double_pendulum", **PHYSICS}),
    "reacher": Task("ppo", {"env": "brax:reacher", **PHYSICS}),
}

RATES = ("3e-4", "1e-3", "3e-3")
RATE_KINDS = {"constant": "{0}", "linear": "{0} -> 0", "cosine": "{0} -> 0 cosine", "warm-up": "warmup 5%, {0} -> 0"}
ENTROPIES = ("0.003", "0.03")
ENTROPY_KINDS = {"constant": "{0}", "linear": "{0} -> 0", "linear to half": "{0} -> 0 until 50%"}
CLIPS = {"constant 0.2": "0.2", "constant 0.1": "0.1", "0.2 to 0.02": "0.2 -> 0.02"}
SEEDS, FRESH = 5, 180


class Choice(NamedTuple):
    """A configuration: the level and the kind of each schedule."""

    rate: str
    rate_kind: str
    entropy: str
    entropy_kind: str
    clip_kind: str

    @property
    def settings(self) -> dict[str, str]:
        """The schedules as texts."""
        return {
            "learning_rate": RATE_KINDS[self.rate_kind].format(self.rate),
            "entropy_coef": ENTROPY_KINDS[self.entropy_kind].format(self.entropy),
            "clip_range": CLIPS[self.clip_kind],
        }

    @property
    def annealed(self) -> frozenset[str]:
        """The coefficients that are not constant."""
        kinds = {"rate": self.rate_kind, "entropy": self.entropy_kind, "clip": self.clip_kind}
        return frozenset(name for name, kind in kinds.items() if not kind.startswith("constant"))


CHOICES = [Choice(*one) for one in itertools.product(RATES, RATE_KINDS, ENTROPIES, ENTROPY_KINDS, CLIPS)]
CONTENDERS = {
    "all constant": lambda choice: not choice.annealed,
    "learning rate annealed": lambda choice: choice.annealed == {"rate"},
    "entropy annealed": lambda choice: choice.annealed == {"entropy"},
    "clip range annealed": lambda choice: choice.annealed == {"clip"},
    "rate and entropy annealed": lambda choice: choice.annealed == {"rate", "entropy"},
    "anything": lambda choice: True,
}


def members(
    task: Task, chosen: Sequence[Choice], seeds: range, first: int = 0, *, fresh: bool = False
) -> Iterator[Member]:
    """Every configuration with every seed."""
    for number, (choice, seed) in enumerate(itertools.product(chosen, seeds), first):
        settings = {"evaluate_episodes": 32, **PLAIN, **task.settings, **choice.settings}
        yield Member(number, CHOICES.index(choice), seed, dict(choice._asdict()), settings, fresh)


def measure(task: Task, choices: Sequence[Choice], seeds: int, fresh: int, folder: Path) -> dict[str, Any]:
    """Train the grid, and the best configuration of each kind again with fresh seeds."""
    directory = SweepDirectory.create(folder)
    waves = Waves(directory, WaveTrainer(task.algorithm, progress=False))
    begin = time.perf_counter()
    grid = list(members(task, choices, range(seeds)))
    waves.train(grid)
    found = scores(directory, grid).reshape(len(choices), seeds)
    seconds, compiled = time.perf_counter() - begin, waves.compile_seconds
    means = np.nan_to_num(found, nan=-np.inf).mean(1)
    best = {
        name: max((index for index, choice in enumerate(choices) if rule(choice)), key=lambda index: means[index])
        for name, rule in CONTENDERS.items()
        if any(map(rule, choices))
    }
    again = list(
        members(task, [choices[index] for index in best.values()], range(seeds, seeds + fresh), len(grid), fresh=True)
    )
    waves.train(again)
    confirmed = scores(directory, again).reshape(len(best), fresh)
    return {
        "algorithm": task.algorithm,
        "settings": task.settings,
        "choices": [choice._asdict() for choice in choices],
        "scores": _listed(found),
        "contenders": {
            name: {"choice": index, "schedules": choices[index].settings, "scores": _listed(one)}
            for (name, index), one in zip(best.items(), confirmed, strict=True)
        },
        "seconds of the grid": round(seconds, 1),
        "of which compiling": round(compiled, 1),
        "device": f"{jax.devices()[0].device_kind}, jax {jax.__version__}",
    }


def _listed(values: np.ndarray) -> list[Any]:
    """As JSON stores it: four digits, and None for a member that was frozen."""
    return json.loads(json.dumps(np.vectorize(lambda x: float(f"{x:.4g}"))(values).tolist()).replace("NaN", "null"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help=f"some of: {', '.join(TASKS)} (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--small", action="store_true", help="a few members and steps, to try the script")
    arguments = parser.parse_args()
    if unknown := set(arguments.tasks) - set(TASKS):
        parser.error(f"there is no task named {sorted(unknown)[0]}; choose from {', '.join(TASKS)}")
    use_compilation_cache()
    arguments.out.mkdir(parents=True, exist_ok=True)
    choices, seeds, fresh = (CHOICES[::31], 2, 3) if arguments.small else (CHOICES, SEEDS, FRESH)
    for name in arguments.tasks or TASKS:
        path = arguments.out / f"{name}.json"
        if path.exists():
            continue
        task = TASKS[name]
        if arguments.small:
            task = task._replace(settings={**task.settings, "total_steps": 4096})
        with tempfile.TemporaryDirectory() as folder:
            found = measure(task, choices, seeds, fresh, Path(folder) / name)
        path.write_text(json.dumps(found), encoding="utf-8")
        best = {
            name: round(float(np.nanmean(np.array(one["scores"], float))), 2)
            for name, one in found["contenders"].items()
        }
        print(
            f"{name}: {found['seconds of the grid']} s, {found['of which compiling']} s of it compiling; {best}",
            flush=True,
        )


if __name__ == "__main__":
    main()
