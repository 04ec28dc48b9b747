"""Check which runs repeat bit for bit on this device, by comparing every array of the last checkpoint.

    python bench/repeat.py                      all tasks in parallel
    python bench/repeat.py cartpole ant         some of them
    python bench/repeat.py --kill               kill the repeated run with kill -9, and resume it

Each task runs once, and is then repeated in other processes: with the same compiled program; recompiled, with a new
cache; and twice with XLA's deterministic operations, recompiled each time.
"""

import argparse
import concurrent.futures
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ANT = {
    "env": "brax:ant",
    "env_parameters": {"backend": "spring"},
    "total_steps": 2_000_000,
    "num_envs": 1024,
    "horizon": 20,
    "minibatches": 32,
    "hidden_sizes": (256, 256),
    "normalise_observations": True,
    "normalise_rewards": True,
}
HIDDEN = {  # whole segments, as in the table of docs/runs.md
    "env": "CartPole-Hidden-v1",
    "total_steps": 100_000,
    "num_envs": 8,
    "horizon": 32,
    "window": None,
    "burn_in": 0,
    "epochs": 20,
    "minibatches": 1,
    "normalise_observations": True,
    "learning_rate": "1e-3 -> 0",
    "entropy_coef": 0.0,
    "clip_range": "0.2 -> 0.001",
    "discount": 0.98,
    "gae_lambda": 0.8,
}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "cartpole": ("ppo", {"env": "CartPole-v1", "total_steps": 2_000_000, "num_envs": 256, "horizon": 32}),
    "acrobot": ("a2c", {"env": "Acrobot-v1", "total_steps": 1_000_000, "num_envs": 64}),
    "hidden": ("recurrent_ppo", HIDDEN),
    "puffer": ("ppo", {"env": "Pendulum-v1", "total_steps": 2_000_000, "num_envs": 512, "preset": "puffer"}),
    "ant": ("ppo", ANT),
    "breakout": ("ppo", {"env": "gymnax:Breakout-MinAtar", "total_steps": 500_000, "num_envs": 64, "horizon": 128}),
}
NEEDS = {"ant": "brax", "breakout": "gymnax"}
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
CHILD = """
import json, sys, warnings
warnings.simplefilter("ignore")
import lehr
algorithm, settings, place = json.loads(sys.argv[1])
if settings is None:
    lehr.resume(place)
else:
    lehr.train(algorithm, run_dir=place, evaluate_episodes=0, progress=False, **settings)
"""


def start(run: Path, order: list[Any], cache: Path, flags: str) -> subprocess.Popen[bytes]:
    more = {"LEHR_CACHE": str(cache), "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    others = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, "-c", CHILD, json.dumps([*order, str(run)])]
    return subprocess.Popen(command, env=others | more, stdout=subprocess.DEVNULL)


def checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints, latest last."""
    return sorted(path for path in run.glob("checkpoints/*") if path.name.isdigit())


def train(run: Path, task: str, cache: Path, flags: str = "", kill: bool = False) -> str:
    """Train and return a digest of the last checkpoint; with `kill`, kill the run early and resume it."""
    process = start(run, list(TASKS[task]), cache, flags)
    if kill:
        while process.poll() is None and not any(int(path.name) for path in checkpoints(run)):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            raise SystemExit(f"{task} finished before it could be killed.")
        process = start(run, [TASKS[task][0], None], cache, flags)
    if process.wait():
        raise SystemExit(f"{task} failed with exit code {process.returncode}.")
    return digest(run)


def digest(run: Path) -> str:
    found = hashlib.sha256()
    with np.load(checkpoints(run)[-1] / "state.npz") as arrays:
        for name in sorted(arrays.files):
            found.update(arrays[name].tobytes())
    return found.hexdigest()


def repeat(task: str, kill: bool) -> None:
    """Repeat a task, and print which repetitions give the same bits."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        first = train(root / "first", task, root / "a")
        row = {"task": task, "killed": kill, "same program": train(root / "again", task, root / "a", "", kill) == first}
        row["recompiled"] = train(root / "anew", task, root / "b") == first
        fixed = train(root / "fixed", task, root / "c", DETERMINISTIC)
        row["recompiled, deterministic"] = train(root / "fixed anew", task, root / "d", DETERMINISTIC, kill) == fixed
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help=f"tasks; by default all of {', '.join(TASKS)} that are installed")
    parser.add_argument("--kill", action="store_true", help="kill the repeated run, and resume it")
    arguments = parser.parse_args()
    if unknown := set(arguments.tasks) - set(TASKS):
        parser.error(f"there is no task {unknown.pop()!r}; known: {', '.join(TASKS)}")
    here = [name for name in TASKS if importlib.util.find_spec(NEEDS.get(name, "lehr"))]
    print(f"jax {metadata.version('jax')}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(len(TASKS)) as pool:
        list(pool.map(lambda task: repeat(task, arguments.kill), arguments.tasks or here))
