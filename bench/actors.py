"""Compare asynchronous actors with a learner that acts itself, in one run.

    python bench/actors.py             none, threads, processes and ray
    python bench/actors.py processes   one of them, compared to none

IMPALA on gym:CartPole-v1, with the same settings. "acting" is the total time that the actors acted, "learning" the time
that the learner was not waiting, and "wall" the duration of the run: if it is below the sum of both, they overlapped.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import lehr

KINDS = ("none", "threads", "processes", "ray")
SETTINGS: dict[str, Any] = {
    "total_steps": 200_000,
    "num_actors": 2,
    "num_envs": 16,
    "horizon": 32,
    "hidden_sizes": (256, 256),
    "normalise_observations": False,
    "evaluate_episodes": 0,
    "tensorboard": False,
    "progress": False,
}


def measure(kind: str) -> tuple[float, str]:
    """Return env steps per second, and a row of the table without the ratio."""
    with tempfile.TemporaryDirectory() as folder:
        run = lehr.train("impala", "gym:CartPole-v1", actors=kind, run_dir=Path(folder) / "run", **SETTINGS)
        rows = run.metrics
    # Skip the first updates, which include compilation.
    first = len(rows["update"]) // 10
    elapsed = rows["time/elapsed"]
    wall = elapsed[-1] - elapsed[first]
    steps = rows["env_steps"][-1] - rows["env_steps"][first]
    speed = steps / wall
    lag = rows["rollout/lag"][first:].mean()
    if kind == "none":
        return speed, f"{speed:,.0f} | {wall:.1f} s | | | {lag:.1f}"
    each = SETTINGS["num_envs"] * SETTINGS["horizon"]
    acting = sum(SETTINGS["num_actors"] * each / rows["actors/steps_per_second"][first:])
    learning = wall - rows["learner/waited"][first:].sum()
    return speed, f"{speed:,.0f} | {wall:.1f} s | {acting:.1f} s | {learning:.1f} s | {lag:.1f}"


if __name__ == "__main__":
    kinds = ["none", *sys.argv[1:]] if sys.argv[1:] else KINDS
    print(
        "| actors | steps/s | wall | acting | learning | mean lag | vs. none |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    bare = None
    for kind in kinds:
        speed, cells = measure(kind)
        bare = bare or speed
        print(f"| {kind} | {cells} | {speed / bare:.2f} |", flush=True)
