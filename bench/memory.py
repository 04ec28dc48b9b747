"""Compare the peak memory of a run with that of one ten times as long: the ratio must be 1, on any device.

    python bench/memory.py              a short run of 200 updates and a long one of 2,000
    python bench/memory.py --updates 1000 --num-envs 4096

Each run has its own process, because a process's peak never decreases. A first run fills the compilation cache, so that
the two measured runs compile alike. Everything is on: checkpoints, evaluations, TensorBoard files and the learning
curve. To plot the curve, a run reads its whole history at the end, about 0.3 kB per update: "at its end" includes this,
"training" does not.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TIMES = 10


def measure(updates: int, num_envs: int, run_dir: str) -> dict[str, Any]:
    """Train in this process and return its peaks in MiB."""
    import jax

    import lehr

    horizon, peaks = 16, [0.0]
    lehr.train(
        progress_fn=lambda step, metrics: peaks.append(peak()),
        run_dir=run_dir,
        num_envs=num_envs,
        horizon=horizon,
        total_steps=updates * num_envs * horizon,
        evaluate_every=updates * num_envs * horizon // 5,
        progress=False,
    )
    found = {"updates": updates, "host, training": peaks[-1], "host, at its end": peak()}
    statistics = jax.local_devices()[0].memory_stats() or {}  # a CPU has no device memory of its own
    if "peak_bytes_in_use" in statistics:
        found["device"] = statistics["peak_bytes_in_use"] / 2**20
    return found | {"name": jax.local_devices()[0].device_kind}


def peak() -> float:
    """Return the peak memory of this process in MiB; Linux reports KiB, macOS bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def measure_apart(updates: int, num_envs: int, place: Path) -> dict[str, Any]:
    """Run `measure` in a new process."""
    words = [sys.executable, __file__, "--updates", str(updates), "--num-envs", str(num_envs)]
    run_dir = place / f"run-{len(list(place.iterdir()))}"
    surroundings = os.environ | {"LEHR_CACHE": str(place / "compiled")}
    # Otherwise JAX allocates most of a GPU's memory at the start, and the peak is meaningless.
    surroundings.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    answer = subprocess.run([*words, "--in", str(run_dir)], env=surroundings, stdout=subprocess.PIPE, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200, help="updates of the short run (default: 200)")
    parser.add_argument("--num-envs", type=int, default=64, help="number of parallel environments (default: 64)")
    parser.add_argument("--in", dest="run_dir", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_dir:
        print(json.dumps(measure(arguments.updates, arguments.num_envs, arguments.run_dir)))
        return
    with tempfile.TemporaryDirectory() as place:
        counts = (arguments.updates, arguments.updates, TIMES * arguments.updates)
        _, short, long = (measure_apart(count, arguments.num_envs, Path(place)) for count in counts)
    print(f"peak memory on {short.pop('name')} in MiB; the ratio of the long run to the short one should be 1")
    for kind in [name for name in ("host, training", "host, at its end", "device") if name in short]:
        row = {"memory": kind, f"{short['updates']} updates": round(short[kind], 1)}
        row |= {f"{long['updates']} updates": round(long[kind], 1), "long / short": round(long[kind] / short[kind], 3)}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
