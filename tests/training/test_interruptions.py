"""A short version of the campaign of bench/faults_interruptions.py."""

import importlib.util
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "faults_interruptions.py"


@pytest.mark.slow
def test_interrupted_runs_end_like_runs_that_were_left_alone():
    spec = importlib.util.spec_from_file_location("faults_interruptions", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    held, tried = module.campaign(6, ["ppo", "ppo, host, async"])
    assert tried >= 6
    assert held == tried
