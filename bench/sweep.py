"""Seconds from the command `lehr sweep` to its report, for many schedules on CartPole, trained at once.

    python bench/sweep.py                                   1,000 schedules x 500k env steps, on one large GPU
    python bench/sweep.py --schedules 16 --steps 20000      fewer, on a CPU

Each member has its own learning rate, entropy coefficient and clip range, each with a start, an end and a shape, at the
sizes that PureJaxRL uses: 4 environments x 128 steps, 4 minibatches x 4 epochs. Every call is a process of its own, so
imports count. The first has no compiled programs to read, the others read those of the first; all of them are told.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILE = """
algorithm: ppo
settings:
  env: CartPole-v1
  total_steps: {steps}
  num_envs: 4
  horizon: 128
  minibatches: 4
  epochs: 4
parameters:
  learning_rate:
    start: {{low: 1e-4, high: 1e-2, scale: log}}
    end: {{low: 1e-6, high: 1e-3, scale: log}}
    shape: [linear, cosine, exponential]
  entropy_coef:
    start: {{low: 1e-3, high: 0.1, scale: log}}
    end: {{low: 1e-5, high: 1e-2, scale: log}}
    shape: [linear, cosine, exponential]
  clip_range:
    start: {{low: 0.1, high: 0.3}}
    end: {{low: 0.05, high: 0.2}}
sampler: sobol
samples: {schedules}
seeds: 1
"""


def sweep(folder: Path, name: str) -> tuple[float, str]:
    """Run the sweep in a process of its own; return its seconds, and what it says of the time itself."""
    command = [sys.executable, "-m", "lehr", "sweep", str(folder / "sweep.yaml"), "--out", str(folder / name)]
    begin = time.perf_counter()
    found = subprocess.run(
        [*command, "--no-progress"],
        env=os.environ | {"LEHR_CACHE": str(folder / "cache"), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - begin
    if found.returncode:
        sys.exit(found.stderr)
    assert (folder / name / "report.html").stat().st_size > 0
    told = re.search(r"^\s*time\s+(.*)$", found.stdout, re.MULTILINE)
    return seconds, told.group(1).strip() if told else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000, help="number of members (1000)")
    parser.add_argument("--steps", type=int, default=500_000, help="env steps of each (500000)")
    parser.add_argument("--turns", type=int, default=2, help="number of calls with programs compiled before (2)")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling modules again takes up to two seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sweep.yaml").write_text(FILE.format(steps=arguments.steps, schedules=arguments.schedules))
        print(f"{arguments.schedules} schedules x {arguments.steps} env steps, from the command to the report")
        for turn in range(arguments.turns + 1):
            seconds, told = sweep(folder, f"sweep-{turn}")
            print(
                f"{'compiled before' if turn else 'nothing compiled'}: {seconds:.1f} s; by its own clock {told}",
                flush=True,
            )


if __name__ == "__main__":
    main()
