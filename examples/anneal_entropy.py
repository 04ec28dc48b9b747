"""Why anneal: a task whose reward only exploration finds, with a constant entropy coefficient and with annealed ones.

Run it with `python examples/anneal_entropy.py`. It takes about twenty seconds.
"""

import lehr

SETTINGS = {
    "env": "DeepChain-v0",
    "total_steps": 100_000,
    "num_envs": 16,
    "horizon": 12,
    "minibatches": 4,
    "epochs": 4,
    "learning_rate": 1e-3,
    "discount": 1.0,
    "hidden_sizes": (32, 32),
    "progress": False,
}

# A schedule is data, not code: all of these run the same compiled program, so only the first waits for the compiler.
for entropy_coef in [0.01, 0.3, 3, "1 -> 0", "3 -> 0", "3 -> 0 cosine"]:
    result = lehr.train("ppo", **SETTINGS, entropy_coef=entropy_coef)
    applied = result.metrics["coef/entropy_coef"]
    print(
        f"{entropy_coef!s:14} from {applied[0]:.2f} to {applied[-1]:.2f}: return {result.final['evaluate/return']:.2f}"
    )
