"""Entropy annealing from the command line to the metrics, for every algorithm, under both styles of naming."""

import numpy as np
import pytest

import lehr
from lehr import algorithms
from lehr.algorithms.vocabulary import resolve_entropy_coefficient
from lehr.cli import main
from lehr.testing import SMALL
from tests.algorithms.conftest import small
from tests.small import trial

ENV = "CartPole-v1"
UPDATES = 8
STEPS = SMALL["num_envs"] * SMALL["horizon"]
TOTAL = UPDATES * STEPS
QUIET = ["--no-tensorboard", "--no-progress", "--evaluate-episodes=0"]


def flag(name, value):
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"


def trained(algorithm, folder, *flags):
    settings = {**small(algorithm), **trial(algorithm, ENV), "hidden_sizes": 8}
    words = [flag(name.replace("_", "-"), value) for name, value in settings.items()]
    given = [f"--env={ENV}", f"--total-steps={TOTAL}", f"--run-dir={folder}", *QUIET, *words, *flags]
    assert main(["train", algorithm, *given]) == 0
    return lehr.load(folder)


QUICK = ("ppo", "a2c")  # of the others, tests of all algorithms show that their coefficients are applied


@pytest.mark.parametrize(
    "algorithm",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in algorithms.names()],
)
def test_both_spellings_anneal_alike_and_the_applied_value_is_in_the_metrics(algorithm, tmp_path, capsys):
    theirs = trained(
        algorithm,
        tmp_path / "theirs",
        "--ent-coef=0.05",
        "--ent-coef-schedule=cosine",
        f"--ent-coef-warmup-steps={2 * STEPS}",
    )
    ours = trained(algorithm, tmp_path / "ours", f"--entropy-coef=0 -> 0.05 over {2 * STEPS}, 0.05 -> 0 cosine")
    applied = theirs.metrics["coef/entropy_coef"]
    np.testing.assert_array_equal(applied, ours.metrics["coef/entropy_coef"])
    np.testing.assert_array_equal(theirs.metrics["loss/total"], ours.metrics["loss/total"])
    config = {"ent_coef": 0.05, "ent_coef_schedule": "cosine", "ent_coef_warmup_steps": 2 * STEPS}
    expected = [resolve_entropy_coefficient(config, number * STEPS, TOTAL) for number in range(UPDATES)]
    np.testing.assert_allclose(applied, expected, rtol=1e-5, atol=1e-9)
    assert applied.max() == np.float32(0.05)
    for result in (theirs, ours):
        assert result.final["coef/entropy_coef"] == pytest.approx(expected[-1], rel=1e-5)
