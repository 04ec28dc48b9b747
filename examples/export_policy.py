"""A policy that leaves the house: train, export it for NumPy alone, and compare it with the original.

Run it with `python examples/export_policy.py`. It takes a few seconds.
"""

import importlib.util

import numpy as np

import lehr

result = lehr.train("ppo", env="CartPole-v1", total_steps=150_000, entropy_coef="0.03 -> 0.001 cosine")
file = result.run_dir / "policy.npz"
lehr.export(result.policy, to="numpy", out=file)

# policy.py beside the arrays needs only NumPy; on another machine, `from policy import NumpyPolicy`.
found = importlib.util.spec_from_file_location("policy", file.with_name("policy.py"))
module = importlib.util.module_from_spec(found)
found.loader.exec_module(module)
exported = module.NumpyPolicy(file)

observations = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
same = np.mean(exported(observations) == result.policy(observations))
print(f"{file} has {file.stat().st_size / 1024:.0f} KiB; it acts as the policy does in {same:.1%} of 1000 observations")
