"""Settings of the smallest runs, which several files of tests train with."""

import atexit
import shutil
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lehr import algorithms
from lehr.envs import Environment, make
from lehr.spaces import Spaces

SMALL = {
    "num_envs": 4,
    "horizon": 8,
    "epochs": 2,
    "minibatches": 2,
    "hidden_sizes": (16,),
    "evaluate_episodes": 0,
    "tensorboard": False,
    "progress": False,
}

BACKTRACKING = {"trpo": {"target_kl": 0.95}}
"""So large a step that TRPO's line search has to shrink it."""


def quick_first(cases: Iterable[Any], quick: int = 1) -> list[Any]:
    """Values of one parameter of a test: `make test` takes the first, `make test-all` all of them."""
    return [pytest.param(case, marks=() if number < quick else pytest.mark.slow) for number, case in enumerate(cases)]


def trial(algorithm: str, env: str | Environment) -> dict[str, Any]:
    """The settings without which an algorithm cannot be trained on an environment, such as demonstrations."""
    made = make(env)
    spaces = Spaces(made.observation_space, made.action_space)
    return algorithms.find(algorithm).trial_settings(spaces, Path(_files(spaces)))


@cache
def _files(spaces: Spaces) -> str:
    """A folder for what these settings name: the same for the same spaces, so that programs are."""
    folder = tempfile.mkdtemp(prefix="lehr-trial-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
