"""Where the time of an update goes on a GPU: its kernels by time and number of launches, and the time between them.

    python bench/gpu_profile.py ppo:0 ppo:4            rows of bench/ppo.py --gpu, by their number
    python bench/gpu_profile.py ppg trpo               algorithms with their defaults, 4,096 environments x 64 steps
    python bench/gpu_profile.py population:2048        members of bench/population.py

Microseconds of one update. "busy" is the time in which at least one kernel runs; the rest of an update is launches and
waiting.
"""

import argparse
import collections
import re
import tempfile
import time
from pathlib import Path

import algorithms
import jax
import population
import ppo
import together
from jax.profiler import ProfileData

UPDATES = 8


def program_of(name: str) -> together.Run:
    """What makes updates, compiled."""
    kind, _, number = name.partition(":")
    if kind == "ppo" and number:
        row = ppo.GPU_ROWS[int(number)]
        settings = {**row.settings, **row.sizes}
        network = row.network or {"hidden_sizes": (row.hidden, row.hidden)}
        return ppo.lehr_runs(settings, {"scheduled": ppo.SCHEDULED if row.is_compared else {}}, network)["scheduled"]
    if kind == "population":
        return population.lehr_population(int(number)).run
    return algorithms.compiled(kind, 4096, 64)[kind]


def kernels(run: together.Run) -> tuple[dict[str, tuple[int, float]], float]:
    """Return launches and microseconds of each kernel, and the microseconds in which one of them runs."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(UPDATES)
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = ProfileData.from_file(str(file))
    found: dict[str, list[float]] = collections.defaultdict(list)
    spans: list[tuple[float, float]] = []
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if "Stream" not in line.name:
                continue
            for event in line.events:
                found[re.sub(r"_\d+$", "", event.name)[:60]].append(event.duration_ns / 1e3)
                spans.append((event.start_ns / 1e3, (event.start_ns + event.duration_ns) / 1e3))
    busy, end = 0.0, 0.0
    for first, last in sorted(spans):
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return {name: (len(times), sum(times)) for name, times in found.items()}, busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="PROGRAM")
    parser.add_argument("--most", type=int, default=16, help="kernels to show of each (default: 16)")
    arguments = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    for name in arguments.names:
        run = program_of(name)
        run(UPDATES)
        begin = time.perf_counter()
        run(UPDATES)
        whole = (time.perf_counter() - begin) * 1e6 / UPDATES
        found, busy = kernels(run)
        launches = sum(count for count, _ in found.values())
        print(f"\n{name}: {whole:.0f} µs, busy {busy / UPDATES:.0f} µs, {launches / UPDATES:.0f} launches")
        for kernel, (count, total) in sorted(found.items(), key=lambda item: -item[1][1])[: arguments.most]:
            print(f"  {total / UPDATES:9.1f} µs {count / UPDATES:8.1f} x {total / count:8.2f}  {kernel}", flush=True)


if __name__ == "__main__":
    main()
