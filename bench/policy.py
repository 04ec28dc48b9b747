"""Time one call of a policy, as it is and exported, beside Stable-Baselines3's `predict` with the same network.

    python bench/policy.py              one observation and batches of 64
    python bench/policy.py --batch 256

All are called on the CPU with NumPy arrays and give NumPy arrays. Each number is the median of the fastest of several
rounds, which alternate. The policies are untrained, which does not change the time. Without Stable-Baselines3 or ONNX
Runtime (`pip install stable-baselines3 onnxruntime`), their rows are left out. PyTorch and ONNX Runtime use one thread.
"""

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.export
import numpy as np

import lehr
from lehr.acting.export.numpy_policy import NumpyPolicy
from lehr.acting.policy import Policy, PolicyParameters, PolicyProgram
from lehr.algorithms import ppo
from lehr.networks import NetworkConfig, actor_critic
from lehr.spaces import Box, Discrete, Space, to_gymnasium

TASKS: dict[str, tuple[int, Space, tuple[int, ...]]] = {
    "4 numbers to 2 choices, 64 × 64": (4, Discrete(2), (64, 64)),
    "17 numbers to 6 numbers, 256 × 256": (17, Box(-1, 1, (6,)), (256, 256)),
}
SAMPLED = ", sampled"
Call = Callable[[np.ndarray], Any]


def lehr_policy(size: int, action_space: Space, hidden_sizes: tuple[int, ...]) -> Policy:
    observation_space = Box(-10, 10, (size,))
    config = NetworkConfig(hidden_sizes=hidden_sizes)
    network, params = actor_critic(observation_space, action_space, config, jax.random.key(0))
    program = PolicyProgram(ppo.Algorithm(ppo.Config(), network), observation_space, action_space)
    return Policy(program, PolicyParameters(params, ()))


def lehr_calls(policy: Policy, folder: Path) -> tuple[dict[str, Call], dict[str, float]]:
    """Return what is called, and the size of each exported file in kB, by name."""
    rng = np.random.default_rng(0)
    files = {to: lehr.export(policy, to, folder / f"policy{suffix}") for to, suffix in formats().items()}
    exported = NumpyPolicy(files["numpy"])
    program = jax.jit(jax.export.deserialize(bytearray(files["stablehlo"].read_bytes())).call)

    def stablehlo(obs: np.ndarray) -> Any:
        batch = obs if obs.ndim > 1 else obs[None]
        return np.asarray(program(batch)["action"])

    calls: dict[str, Call] = {
        "policy": policy,
        f"policy{SAMPLED}": lambda obs: policy(obs, rng),
        "numpy": exported,
        f"numpy{SAMPLED}": lambda obs: exported(obs, rng),
        "stablehlo": stablehlo,
    }
    if "onnx" in files:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(files["onnx"], options)
        calls["onnx"] = lambda obs: session.run(["action"], {"obs": obs if obs.ndim > 1 else obs[None]})
    return calls, {name: path.stat().st_size / 1000 for name, path in files.items()}


def formats() -> dict[str, str]:
    """Return the suffix of each format that can be run here."""
    known = {"numpy": ".npz", "stablehlo": ".stablehlo", "onnx": ".onnx"}
    return {to: suffix for to, suffix in known.items() if to != "onnx" or importlib.util.find_spec("onnxruntime")}


def baseline_calls(
    size: int, action_space: Space, hidden_sizes: tuple[int, ...], folder: Path
) -> tuple[dict[str, Call], dict[str, float]]:
    """The same for Stable-Baselines3, or nothing without it."""
    if importlib.util.find_spec("stable_baselines3") is None:
        return {}, {}
    import gymnasium
    import stable_baselines3
    import torch

    torch.set_num_threads(1)

    class Still(gymnasium.Env):
        """An environment for its spaces alone."""

        def __init__(self) -> None:
            self.observation_space = gymnasium.spaces.Box(-10, 10, (size,), np.float32)
            self.action_space = to_gymnasium(action_space)

    kinds = {"net_arch": list(hidden_sizes)}
    model = stable_baselines3.PPO("MlpPolicy", Still(), policy_kwargs=kinds, device="cpu")
    model.save(folder / "baseline.zip")
    calls: dict[str, Call] = {
        "sb3": lambda obs: model.predict(obs, deterministic=True)[0],
        f"sb3{SAMPLED}": lambda obs: model.predict(obs)[0],
    }
    return calls, {"sb3": (folder / "baseline.zip").stat().st_size / 1000}


def milliseconds(calls: dict[str, Call], obs: np.ndarray, rounds: int = 7, repeats: int = 300) -> dict[str, float]:
    """Return the median time of each call in its fastest round."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            call(obs)
            times = []
            for _ in range(repeats):
                begin = time.perf_counter()
                call(obs)
                times.append(time.perf_counter() - begin)
            best[name] = min(best[name], 1e3 * statistics.median(times))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="observations in a batch (default: 64)")
    arguments = parser.parse_args()
    for task, (size, action_space, hidden_sizes) in TASKS.items():
        print(task)
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            calls, sizes = lehr_calls(lehr_policy(size, action_space, hidden_sizes), folder)
            theirs, their_sizes = baseline_calls(size, action_space, hidden_sizes, folder)
            calls, sizes = calls | theirs, sizes | their_sizes
        rng = np.random.default_rng(0)
        one, many = (rng.normal(size=shape).astype(np.float32) for shape in ((size,), (arguments.batch, size)))
        single, batch = milliseconds(calls, one), milliseconds(calls, many)
        for name in calls:
            row: dict[str, Any] = {"what": name, "one, ms": round(single[name], 4)}
            row[f"{arguments.batch}, ms"] = round(batch[name], 4)
            reference = f"sb3{SAMPLED}" if name.endswith(SAMPLED) else "sb3"
            if theirs:
                row |= {"sb3 / this": round(single[reference] / single[name], 1)}
                row |= {f"sb3 / this, {arguments.batch}": round(batch[reference] / batch[name], 1)}
            if name in sizes:
                row["file, kB"] = round(sizes[name], 1)
            print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    main()
