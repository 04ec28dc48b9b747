"""Successive halving against training every configuration to its end: the same sweep on CartPole, both ways.

    python bench/halving.py [--samples 27] [--places 9] [--first 10%] [--seeds 0 1 2 3 4] [--steps 30000] [--fresh 5]

For each sampler seed: the best score of the full sweep, and the score in the full sweep of the configuration that
halving chose (its runs are the same, up to rounding); the same two configurations trained again with fresh seeds; the
share of env steps that halving trained, and the seconds of both without compiling.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import lehr


def definition(samples: int, seed: int, steps: int) -> dict[str, Any]:
    """The sweep: learning rates from hopeless to too high, and entropy coefficients."""
    return {
        "algorithm": "ppo",
        "settings": {
            **{"env": "CartPole-v1", "total_steps": steps, "num_envs": 8, "horizon": 32, "minibatches": 4},
            "evaluate_episodes": 100,
            "normalise_observations": False,
        },
        "parameters": {
            "learning_rate": {"low": 1e-5, "high": 1e-1, "scale": "log"},
            "entropy_coef": {"low": 1e-4, "high": 0.3, "scale": "log"},
        },
        "sampler": "latin_hypercube",
        "samples": samples,
        "sampler_seed": seed,
        "confirm": False,
    }


def compare(given: dict[str, Any], halving: dict[str, Any], fresh: int, folder: Path) -> dict[str, Any]:
    """Run a sweep in full and with halving, and train the winners of both again."""
    full = lehr.sweep(given, out=folder / "full", progress=False)
    halved = lehr.sweep(given | {"halving": halving}, out=folder / "halved", progress=False)
    chosen = {"full": full.ranking.winner, "halving": halved.ranking.winner}
    scores = full.results.scores[:, 0]
    far = halved.results.halved
    assert far is not None
    return {
        "sampler seed": given["sampler_seed"],
        "chosen": chosen,
        "score in the full sweep": {how: round(float(scores[c]), 1) for how, c in chosen.items()},
        "median score": round(float(np.nanmedian(scores)), 1),
        "place of halving's choice": int((scores > scores[chosen["halving"]]).sum()) + 1,
        "with fresh seeds": {how: again(given, full.results.texts[c], fresh) for how, c in chosen.items()},
        "share of env steps": round(float(np.nansum(far.env_steps)) / (len(scores) * full.results.env_steps[-1]), 3),
        "seconds": {
            how: round(found.seconds - found.compile_seconds, 1) for how, found in (("full", full), ("halving", halved))
        },
    }


def again(given: dict[str, Any], texts: dict[str, str], seeds: int) -> float:
    """The mean score of a configuration with seeds that did not select it."""
    settings = given["settings"] | texts
    parameters = {"learning_rate": [settings.pop("learning_rate")]}
    repeated = {**given, "settings": settings, "parameters": parameters, "sampler": "grid"}
    repeated |= {"samples": None, "seeds": list(range(100, 100 + seeds))}
    with tempfile.TemporaryDirectory() as folder:
        found = lehr.sweep(repeated, out=Path(folder) / "again", progress=False)
    return round(float(found.results.scores[0].mean()), 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.replace("%", "%%"), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=27)
    parser.add_argument("--places", type=int, default=9)
    parser.add_argument("--first", default="10%")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--fresh", type=int, default=5)
    arguments = parser.parse_args()
    halving = {"places": arguments.places, "first": arguments.first, "factor": 3}
    for seed in arguments.seeds:
        given = definition(arguments.samples, seed, arguments.steps)
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(compare(given, halving, arguments.fresh, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
