"""Compare Brax's PPO with Lehr's drop-in replacement, in one run: env steps per second, their ratio, and the curves.

    python bench/brax_ppo.py              inverted_pendulum on a CPU, five seeds
    python bench/brax_ppo.py --gpu        ant with Brax's published configuration, 50 million steps
    python bench/brax_ppo.py --gpu --num-timesteps 20000000
    python bench/brax_ppo.py --gpu --seeds 2 --first-seed 3
    python bench/brax_ppo.py --speed ant CheetahRun     speed only, of ant and of a Playground task

Both get the same arguments and seeds. Newer JAX versions lack a function that Brax calls; this script restores it. The
rate is that of training only: the median over all epochs after the second, when everything is compiled. With --speed,
an epoch is one training step, and nothing is evaluated.
"""

import argparse
import importlib
import itertools
import json
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

warnings.simplefilter("ignore")

ANT = {
    "num_timesteps": 50_000_000,
    "num_evals": 10,
    "reward_scaling": 10,
    "episode_length": 1000,
    "normalize_observations": True,
    "action_repeat": 1,
    "unroll_length": 5,
    "num_minibatches": 32,
    "num_updates_per_batch": 4,
    "discounting": 0.97,
    "learning_rate": 3e-4,
    "entropy_cost": 1e-2,
    "num_envs": 4096,
    "batch_size": 2048,
}
PENDULUM = {
    "num_timesteps": 200_000,
    "num_evals": 9,
    "episode_length": 200,
    "num_envs": 128,
    "num_eval_envs": 64,
    "unroll_length": 10,
    "batch_size": 64,
    "num_minibatches": 4,
    "num_updates_per_batch": 4,
    "normalize_observations": True,
    "discounting": 0.97,
    "learning_rate": 3e-4,
    "entropy_cost": 1e-2,
}
SPEED_EPOCHS = 8
"""Training steps that are timed with --speed; the first two are not counted."""


def brax_train() -> Callable[..., Any]:
    """Return Brax's `train`, patched for newer JAX versions."""
    if not hasattr(jax, "device_put_replicated"):

        def replicate(tree: Any, devices: Any) -> Any:
            return jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * len(devices)), tree)

        vars(jax)["device_put_replicated"] = replicate
    try:
        importlib.import_module("brax.training.agents.ppo.checkpoint")
    except ImportError:  # an optional package is missing; this benchmark writes no checkpoints
        stand_in = types.ModuleType("brax.training.agents.ppo.checkpoint")
        sys.modules[stand_in.__name__] = stand_in
        vars(importlib.import_module("brax.training.agents.ppo"))["checkpoint"] = stand_in
    return importlib.import_module("brax.training.agents.ppo.train").train


def measure(train: Callable[..., Any], name: str, backend: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train once; return the rate, the rewards at each evaluation, and the duration."""
    envs = importlib.import_module("brax.envs")
    rewards, rates = [], []

    def progress(step: int, metrics: Any) -> None:
        rewards.append(round(float(metrics["eval/episode_reward"]), 1))
        rates.append(float(metrics.get("training/sps", 0.0)))

    begin = time.perf_counter()
    with jax.numpy_rank_promotion("allow"):
        train(envs.get_environment(name, backend=backend), seed=seed, progress_fn=progress, **options)
    seconds = time.perf_counter() - begin
    return {"steps/s": statistics.median(rates[3:]), "seconds": round(seconds, 1), "rewards": rewards, "rates": rates}


def compare(name: str, backend: str, options: dict[str, Any], seeds: range) -> None:
    both = {"brax": brax_train(), "lehr": importlib.import_module("lehr.compat.brax").train}
    rates: dict[str, list[float]] = {which: [] for which in both}
    for seed in seeds:
        for which, train in both.items():
            found = measure(train, name, backend, options, seed)
            rates[which].append(found["steps/s"])
            epochs = [round(rate) for rate in found.pop("rates")[1:]]
            row = {"which": which, "seed": seed, **found, "steps/s": round(found["steps/s"]), "epochs": epochs}
            print(json.dumps(row), flush=True)
    theirs, ours = (statistics.median(rates[which]) for which in both)
    print(json.dumps({"brax": round(theirs), "lehr": round(ours), "lehr / brax": round(ours / theirs, 3)}), flush=True)


def speed(name: str) -> None:
    """Time a few training steps of both on Brax's ant or on a Playground task, and print the rates and their ratio."""
    if name == "ant":
        env = importlib.import_module("brax.envs").get_environment(name, backend="spring")
        options: dict[str, Any] = dict(ANT)
    else:
        playground = importlib.import_module("mujoco_playground")
        configs = importlib.import_module("mujoco_playground.config.dm_control_suite_params")
        env = playground.registry.load(name, config_overrides={"impl": "jax"})
        options = dict(configs.brax_ppo_config(name)) | {"wrap_env_fn": playground.wrapper.wrap_for_brax_training}
        options.pop("num_resets_per_eval", None)
    steps = options["batch_size"] * options["num_minibatches"] * options["unroll_length"] * options["action_repeat"]
    options |= {"num_timesteps": SPEED_EPOCHS * steps, "num_evals": SPEED_EPOCHS + 1, "run_evals": False}
    rates = {}
    for which, train in {"brax": brax_train(), "lehr": importlib.import_module("lehr.compat.brax").train}.items():
        times: list[float] = []
        with jax.numpy_rank_promotion("allow"):
            train(env, policy_params_fn=lambda *_, times=times: times.append(time.perf_counter()), **options)
        seconds = [after - before for before, after in itertools.pairwise(times)]
        rates[which] = steps / statistics.median(seconds[2:])
        row = {"env": name, "which": which, "steps/s": round(rates[which]), "seconds": [round(x, 3) for x in seconds]}
        print(json.dumps(row), flush=True)
    print(json.dumps({"env": name, "lehr / brax": round(rates["lehr"] / rates["brax"], 3)}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="ant, for one large GPU")
    parser.add_argument("--num-timesteps", type=int, help="budget in env steps")
    parser.add_argument("--seeds", type=int, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument(
        "--speed", nargs="+", metavar="ENV", help="time training steps only, of ant or Playground tasks"
    )
    arguments = parser.parse_args()
    budget = {"num_timesteps": arguments.num_timesteps} if arguments.num_timesteps else {}
    count = arguments.seeds or (1 if arguments.gpu else 5)
    seeds = range(arguments.first_seed, arguments.first_seed + count)
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    if arguments.speed:
        for env_name in arguments.speed:
            speed(env_name)
    elif arguments.gpu:
        compare("ant", "spring", ANT | budget, seeds)
    else:
        compare("inverted_pendulum", "spring", PENDULUM | budget, seeds)
