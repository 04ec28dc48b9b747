"""Seconds that a user waits for `lehr.train`: from the call to the first metrics, and to the end.

    python bench/start.py                     500k steps of CartPole with the defaults
    python bench/start.py --steps 50000000 --settings num_envs=4096 horizon=64

Each call is a process of its own, and imports are not counted. The first has no compiled programs to read, the others
read those of the first: the best of two is told.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ONE = """
import sys, time
import lehr
settings = dict(pair.split("=") for pair in sys.argv[3:])
first = []
begin = time.perf_counter()
lehr.train(
    "ppo", "CartPole-v1", total_steps=int(sys.argv[1]), run_dir=sys.argv[2], progress=False,
    progress_fn=lambda step, metrics: first.append(time.perf_counter()), **{k: int(v) for k, v in settings.items()},
)
print(first[0] - begin, time.perf_counter() - begin)
"""


def seconds(folder: Path, name: str, steps: int, settings: list[str]) -> tuple[float, float]:
    """Train once in a process of its own; return the seconds to the first metrics, and to the end."""
    command = [sys.executable, "-c", ONE, str(steps), str(folder / name), *settings]
    found = subprocess.run(
        command, env=os.environ | {"LEHR_CACHE": str(folder / "cache")}, capture_output=True, text=True, check=False
    )
    if found.returncode:
        sys.exit(found.stderr)
    first, end = map(float, found.stdout.split()[-2:])
    return first, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500_000, help="budget in env steps (default: 500000)")
    parser.add_argument(
        "--settings", nargs="*", default=[], metavar="NAME=NUMBER", help="settings besides the defaults"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cold, *warm = (
            seconds(Path(folder), name, arguments.steps, arguments.settings) for name in ("cold", "warm", "again")
        )
    best = [min(column) for column in zip(*warm, strict=True)]
    print(f"{arguments.steps} steps {' '.join(arguments.settings)}: seconds to the first metrics / to the end")
    print(f"nothing compiled: {cold[0]:.1f} / {cold[1]:.1f}; compiled before: {best[0]:.1f} / {best[1]:.1f}")


if __name__ == "__main__":
    main()
