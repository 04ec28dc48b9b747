"""What crosses between devices in an update, and a prediction of the speed on many GPUs.

    python bench/scaling.py
    python bench/scaling.py minibatches=8 epochs=1 --num-envs 4096 --horizon 64 --steps-per-second 245e6

The number of collectives and their bytes are read from the program that is compiled for eight simulated devices. The
speed is a prediction, not a measurement: every GPU keeps the environments that one GPU had when its speed was measured,
and an update takes as long as there, plus for each collective a latency and the time of a ring:

    t = t_1 + Σ (latency + 2 (D − 1) / D · bytes / bandwidth)

Loops of unknown length, TRPO's solver and line search, count once, and so does PPG's auxiliary phase.
"""

import argparse
import os
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from collectives import Collective, collectives

from lehr.training.plan import make_plan
from lehr.training.runners.device import DeviceRunner

LINKS = {  # assumed: seconds per collective, bytes per second of each GPU
    "8 GPUs, NVLink": (8, 15e-6, 300e9),
    "64 GPUs, 400 Gb/s network": (64, 60e-6, 40e9),
}


def traffic(algorithm: str, settings: dict[str, Any]) -> list[Collective]:
    """The collectives of one update."""
    plan = make_plan(algorithm, {**settings, "devices": 8}).on_devices()
    runner = DeviceRunner(plan.program, plan.state, plan.sharding)
    runner.compile(plan.state)
    return collectives(runner._compiled.as_text() or "")


def predicted(found: list[Collective], seconds: float, devices: int, latency: float, bandwidth: float) -> float:
    """Seconds of an update on so many devices, if it takes `seconds` on one with the same number of environments."""
    moved = 2 * (devices - 1) / devices
    return seconds + sum(one.times * (latency + moved * one.bytes / bandwidth) for one in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="ppo")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=4096, help="environments of each device")
    parser.add_argument("--horizon", type=int, default=64)
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="of the algorithm, such as minibatches=8")
    parser.add_argument("--steps-per-second", type=float, help="measured on one GPU with these sizes")
    given = parser.parse_args()
    # The number of environments does not change what is exchanged; few of them are quicker to compile for.
    settings: dict[str, Any] = {"env": given.env, "num_envs": 64, "horizon": given.horizon, "progress": "false"}
    settings |= dict(setting.split("=", 1) for setting in given.settings)
    found = traffic(given.algorithm, settings)
    count, size = sum(one.times for one in found), sum(one.times * one.bytes for one in found)
    print(f"{given.algorithm} on {given.env}: {count} collectives, {size / 1e6:.3f} MB per update")
    for one in sorted(found, key=lambda one: -one.times * one.bytes)[:5]:
        print(f"  {one.times:4d} x {one.kind} of {one.bytes} bytes")
    if given.steps_per_second is None:
        return
    steps = given.num_envs * given.horizon
    seconds = steps / given.steps_per_second
    for name, (devices, latency, bandwidth) in LINKS.items():
        whole = predicted(found, seconds, devices, latency, bandwidth)
        print(
            f"prediction for {name}: {devices * steps / whole / 1e6:.1f} M steps/s, {seconds / whole:.0%} of linear "
            f"({latency * 1e6:.0f} us and {bandwidth / 1e9:.0f} GB/s assumed)"
        )


if __name__ == "__main__":
    main()
