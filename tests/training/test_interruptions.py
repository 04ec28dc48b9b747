"""A short version of the campaign of bench/faults_interruptions.py."""

import importlib.util
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "faults_interruptions.py"


@pytest.mark.parametrize(
    ("count", "cases"),
    [
        pytest.param(2, ["ppo"], marks=pytest.mark.slow),
        pytest.param(12, ["recurrent_ppo", "ppo, host, overlap", "ppo, host, async"], marks=pytest.mark.long),
    ],
)
def test_interrupted_runs_end_like_runs_that_were_left_alone(count, cases):
    spec = importlib.util.spec_from_file_location("faults_interruptions", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    held, tried = module.campaign(count, cases)
    assert tried >= count
    assert held == tried
