"""Calls that the pages show, for mypy to check; pytest does not run this file."""

from pathlib import Path
from typing import assert_type

import numpy as np

import lehr
from lehr.acting.evaluation import EpisodeResults
from lehr.acting.policy import Policy


def schedules() -> float:
    entropy_coef = lehr.schedule("0.03 -> 0.001 cosine", total_steps=1_000_000)
    return entropy_coef(500_000) + lehr.schedule("1 -> 0", 100)(50) + lehr.schedule(lambda step: 0.1 * step)(3)


def results(result: lehr.Result) -> None:
    assert_type(result.policy, Policy)
    result.policy(np.zeros(4, np.float32), np.random.default_rng(0))
    assert_type(lehr.evaluate(result.policy, "CartPole-v1", episodes=10), EpisodeResults)
    assert_type(lehr.export(result.policy, to="onnx", out="policy.onnx"), Path)
