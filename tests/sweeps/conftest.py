import pytest

import lehr

SMALL = {
    "env": "CartPole-v1",
    "total_steps": 32 * 20,
    "num_envs": 4,
    "horizon": 8,
    "hidden_sizes": [8],
    "minibatches": 2,
    "epochs": 1,
    "evaluate_episodes": 4,
}
DEFINITION = {
    "algorithm": "ppo",
    "settings": SMALL,
    "parameters": {
        "learning_rate": {"low": 1e-4, "high": 1e-2, "scale": "log"},
        "entropy_coef": {"start": {"low": 1e-3, "high": 0.1, "scale": "log"}, "end": 0.0},
    },
    "sampler": "sobol",
    "samples": 4,
    "seeds": 2,
    "confirm": {"top": 2, "seeds": 2},
}


@pytest.fixture(scope="package")
def swept(tmp_path_factory):
    """A finished sweep: four configurations with two seeds each, and the best two with two fresh seeds."""
    return lehr.sweep(DEFINITION, out=tmp_path_factory.mktemp("sweeps") / "small", progress=False)
