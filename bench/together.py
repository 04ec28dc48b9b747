"""Compile the programs of a benchmark at the same time, then time them in turns, so that noise affects all alike."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Run = Callable[[int], Any]
"""Makes a number of updates, and returns once they are done."""
Make = Callable[[], Mapping[str, Run]]
"""Compiles a program; returns what it runs, by name."""


def compiled(makes: Sequence[Make]) -> list[dict[str, Run]]:
    """Compile all programs; XLA uses one core for most of a program, and here they have all of them."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [dict(found) for found in pool.map(lambda make: make(), makes)]


def steps_per_second(runs: Mapping[str, Run], steps: int, updates: int, turns: int) -> dict[str, float]:
    """Return the best rate of each over a few alternating turns.

    Args:
        runs: what to time, by name.
        steps: env steps of an update.
        updates: how many of them are one turn.
        turns: how often each is timed.
    """
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run(updates)
    for _ in range(turns):
        for name, run in runs.items():
            begin = time.perf_counter()
            run(updates)
            best[name] = min(best[name], time.perf_counter() - begin)
    return {name: steps * updates / seconds for name, seconds in best.items()}
