"""Logs of a long run: the size of `metrics.jsonl` and of TensorBoard's file, and the seconds to read and to plot them.

    python bench/logs.py [--updates 1000000] [--log-every 1]

Rows have the names and types of a PPO run, with random numbers. Without `--log-every`, they are thinned as in a run
with the default settings; `--log-every 1` writes a row for every update, to compare.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from lehr.report.curves import learning_curve
from lehr.report.loggers import JsonLines, Logger, TensorBoard
from lehr.report.loggers.jsonl import read
from lehr.report.loggers.thinning import Thinning

COEFFICIENTS = ("clip_range", "discount", "entropy_coef", "gae_lambda", "learning_rate", "max_grad_norm", "value_coef")
LOSSES = ("total", "policy", "value", "entropy", "kl", "clip_fraction", "explained_variance", "grad_norm")
NAMES = (
    *(f"coef/{name}" for name in COEFFICIENTS),
    "environment/broken_obs",
    "environment/broken_rewards",
    "episode/count",
    "episode/length",
    "episode/return",
    *(f"loss/{name}" for name in LOSSES),
    "update/rejected",
)


def write(directory: Path, updates: int, every: int | None) -> tuple[int, float]:
    """Log a run of so many updates; return the number of rows, and the seconds that logging took per update."""
    random, thinning, rows = np.random.default_rng(0), Thinning(every), 0
    backends: list[Logger] = [JsonLines(directory / "metrics.jsonl"), TensorBoard(directory / "tensorboard")]
    table = random.random((1000, len(NAMES)), np.float32)
    seconds = 0.0
    for update in range(1, updates + 1):
        row: dict[str, float] = {"update": update, "env_steps": 2048 * update}
        row |= dict(zip(NAMES, table[update % 1000].tolist(), strict=True))
        row |= {"time/elapsed": 0.01 * update, "time/steps_per_second": 204_800.0}
        begin = time.process_time()
        logged = thinning.add(row, always=update == updates)
        if logged is not None:
            rows += 1
            for backend in backends:
                backend.log(logged)
        seconds += time.process_time() - begin
    for backend in backends:
        backend.close()
    return rows, seconds / updates


def main() -> None:
    """Print one line per number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--log-every", type=int, help="updates from row to row (default: Lehr's rule)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        rows, seconds = write(directory, arguments.updates, arguments.log_every)
        metrics = directory / "metrics.jsonl"
        sizes = [metrics.stat().st_size, sum(path.stat().st_size for path in (directory / "tensorboard").iterdir())]
        begin = time.process_time()
        columns = read(metrics)
        reading = time.process_time() - begin
        begin = time.process_time()
        learning_curve({"run": columns}, directory / "curve.png")
        plotting = time.process_time() - begin
    print(f"updates          {arguments.updates}")
    print(f"rows             {rows}")
    print(f"logging          {1e6 * seconds:.1f} us per update")
    print(f"metrics.jsonl    {sizes[0] / 1e6:.1f} MB")
    print(f"TensorBoard      {sizes[1] / 1e6:.1f} MB")
    print(f"reading          {reading:.2f} s of CPU time")
    print(f"plotting         {plotting:.2f} s of CPU time")


if __name__ == "__main__":
    main()
