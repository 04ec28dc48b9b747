"""Seconds that a user waits for a run: to its first metrics, and to its end; from Python and from the shell.

    python bench/start.py                     500k steps of CartPole with the defaults
    python bench/start.py --steps 50000000 --settings num_envs=4096 horizon=64

`train` is measured from the call, without imports; `shell` is `lehr train` with everything, Python's start too. Each is
a process of its own; `second` is another seed in the same process as the first. The first process of each kind has no
compiled programs to read, the others read those of the first: the best of two is told, or of more rounds with --repeat.
Python keeps the modules that it has compiled, as it does unless
told otherwise. The first row is what JAX alone needs, after its imports, until it has added two numbers on the device.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

ONE = """
import sys, time
import lehr
lehr.train  # imports it
settings = dict(pair.split("=") for pair in sys.argv[3:])
for seed in range(2):
    first = []
    begin = time.perf_counter()
    lehr.train(
        "ppo", "CartPole-v1", total_steps=int(sys.argv[1]), seed=seed, run_dir=f"{sys.argv[2]}-{seed}", progress=False,
        progress_fn=lambda step, metrics: first.append(time.perf_counter()), **{k: int(v) for k, v in settings.items()},
    )
    print(first[0] - begin, time.perf_counter() - begin)
"""

JAX_ALONE = """
import time
import jax
begin = time.perf_counter()
jax.block_until_ready(jax.device_put(1.0) + 1.0)
print(time.perf_counter() - begin)
"""


def of_jax() -> float:
    """Return the seconds in which JAX starts the device and adds two numbers."""
    command = [sys.executable, "-c", JAX_ALONE]
    return min(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(2))


def of_call(folder: Path, name: str, cache: str, steps: int, settings: list[str]) -> list[tuple[float, float]]:
    """Train twice in a process of their own; return the seconds to the first metrics and to the end, for both."""
    command = [sys.executable, "-c", ONE, str(steps), str(folder / name), *settings]
    environment = os.environ | {"LEHR_CACHE": str(folder / cache)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if found.returncode:
        sys.exit(found.stderr)
    numbers = list(map(float, found.stdout.split()[-4:]))
    return [(numbers[0], numbers[1]), (numbers[2], numbers[3])]


def of_shell(folder: Path, name: str, cache: str, steps: int, settings: list[str]) -> list[tuple[float, float]]:
    """The same for the shell command, from its start; the first metrics are a line in the file of metrics."""
    command = [sys.executable, "-m", "lehr", "train", "ppo", "--env", "CartPole-v1", "--total-steps", str(steps)]
    command += ["--run-dir", str(folder / name)]
    command += [f"--{pair}" for pair in settings]
    metrics, first = folder / name / "metrics.jsonl", None
    begin = time.perf_counter()
    with (folder / "output").open("w+") as output:
        environment = os.environ | {"LEHR_CACHE": str(folder / cache)}
        running = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        while running.poll() is None:
            if first is None and metrics.exists() and metrics.stat().st_size:
                first = time.perf_counter() - begin
            time.sleep(0.005)
        if running.returncode or first is None:
            output.seek(0)
            sys.exit(output.read())
    return [(first, time.perf_counter() - begin)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500_000, help="budget in env steps (default: 500000)")
    parser.add_argument("--repeat", type=int, default=1, help="rounds, of which the best is told (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the seconds of all as JSON instead")
    parser.add_argument(
        "--settings", nargs="*", default=[], metavar="NAME=NUMBER", help="settings besides the defaults"
    )
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling modules again takes up to two seconds
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(arguments.repeat):
        for kind, measure in (("train", of_call), ("shell", of_shell)):
            with tempfile.TemporaryDirectory() as folder:
                for name in ("cold", "warm", "again"):
                    one, *second = measure(Path(folder), name, "cache", arguments.steps, arguments.settings)
                    found.setdefault(f"{kind} {'cold' if name == 'cold' else 'warm'}", []).append(one)
                    if second:
                        found.setdefault("second", []).extend(second)
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"jax {jax.__version__}, {arguments.steps} steps {' '.join(arguments.settings)}")
    print("| | first metrics | end |\n|---|---|---|")
    print(f"| JAX alone | {of_jax():.1f} s | |")
    for name, all_seconds in found.items():
        first, end = (min(column) for column in zip(*all_seconds, strict=True))
        print(f"| {name} | {first:.1f} s | {end:.1f} s |")


if __name__ == "__main__":
    main()
