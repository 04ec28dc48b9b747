"""Synthetic results of a sweep, for tests and to look at its report: `python -m tests.sweeps.example_results OUT.html`.

The return rises to a level that the learning rate sets (best at 1e-3) and the start of the entropy coefficient tilts;
`clip_range` and `activation` do nothing.
"""

import sys
from pathlib import Path

import numpy as np

from lehr.sweeps.results import Results


def example_results(
    configurations=60, seeds=5, rows=120, failures=0.02, again=5, fresh_seeds=5, seed=0, title="Example"
):
    """Results of the given sizes; `failures` is the share of members that failed."""
    generator = np.random.default_rng(seed)
    learning_rate = 10 ** generator.uniform(-4.5, -2, configurations)
    start = 10 ** generator.uniform(-3, -0.7, configurations)
    end = start * generator.uniform(0, 1, configurations)
    clip_range = generator.uniform(0.1, 0.3, configurations)
    activation = generator.choice(["tanh", "relu", "swish"], configurations).tolist()

    env_steps = np.linspace(0, 500_000, rows + 1)[1:]
    done = (env_steps / env_steps[-1])[:, None]
    level = 480 * np.exp(-((np.log10(learning_rate) + 3) ** 2) / 0.5) - 200 * np.abs(start - 0.03) + 15
    noise = generator.normal(0, 12, (configurations, seeds))
    rise = 1 - np.exp(-done[..., None] * generator.uniform(3, 9, (configurations, seeds)))
    returns = np.clip((level[:, None] + noise) * rise + generator.normal(0, 8, (rows, configurations, seeds)), 0, 500)
    scores = np.clip(level[:, None] + noise + generator.normal(0, 6, noise.shape), 0, 500)

    frozen = generator.random(scores.shape) < failures
    scores[frozen] = np.nan
    for member in np.argwhere(frozen):
        returns[generator.integers(rows) :, *member] = np.nan
    best = np.argsort(-np.nan_to_num(scores).mean(axis=1))[:again]
    return Results(
        title=title,
        env="CartPole-v1",
        algorithm="ppo",
        parameters={
            "learning_rate": learning_rate.tolist(),
            "entropy_coef.start": start.tolist(),
            "entropy_coef.end": end.tolist(),
            "clip_range": clip_range.tolist(),
            "activation": activation,
        },
        texts=[
            {
                "learning_rate": f"{learning_rate[c]:.3g}",
                "entropy_coef": f"{start[c]:.3g} -> {end[c]:.3g} cosine",
                "clip_range": f"{clip_range[c]:.3g}",
                "activation": activation[c],
            }
            for c in range(configurations)
        ],
        members=np.arange(configurations * seeds).reshape(configurations, seeds),
        env_steps=env_steps,
        returns=returns,
        scores=scores,
        schedules={
            "learning_rate": np.broadcast_to(learning_rate, (rows, configurations)).copy(),
            "entropy_coef": end + (start - end) * (1 + np.cos(np.pi * done)) / 2,
            "clip_range": np.broadcast_to(clip_range, (rows, configurations)).copy(),
        },
        frozen=frozen,
        again={int(c): np.clip(level[c] + generator.normal(0, 13, fresh_seeds), 0, 500) for c in best},
        notes={"device": "NVIDIA H200", "wall time": "14.2 s, of which compiling 6.1 s", "lehr": "0.1.0"},
    )


if __name__ == "__main__":
    from lehr.sweeps.report import write_report

    sizes = [int(argument) for argument in sys.argv[2:]]
    write_report(example_results(*sizes), Path(sys.argv[1]))
