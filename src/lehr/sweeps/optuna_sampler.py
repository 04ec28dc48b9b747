"""Optuna's samplers, which choose configurations by the scores so far."""

import inspect
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from lehr.errors import InputError, closest
from lehr.plugins import require
from lehr.sweeps.definition import Configuration, Definition
from lehr.sweeps.domains import Choices
from lehr.sweeps.sections import OPTUNA
from lehr.sweeps.space import Point

MOST_ASKED = 20
"""After so many refused points in a row, the next ones are random: some samplers ask for the same point forever."""
MOST_REFUSED = 2_000
"""So many refused points in a row end the sweep."""
_NOT_OFFERED = ("BaseGASampler", "BaseSampler", "BruteForceSampler", "GridSampler", "PartialFixedSampler")
"""Base classes, samplers that need more than a seed, and those for spaces without ranges, which Lehr's grid is for."""


class OptunaSampler:
    """One of Optuna's samplers; it sees each range as an interval [0, 1], and each list as categories.

    Points that violate a condition, or that no schedule can have, are reported to Optuna as pruned, and it is asked
    again.
    """

    def __init__(self, definition: Definition) -> None:
        self._optuna = require("optuna", "optuna", f"The sampler {definition.sampler}")
        self._definition = definition
        distributions = self._optuna.distributions
        self._distributions = {
            key: distributions.CategoricalDistribution(tuple(range(len(domain.values))))
            if isinstance(domain, Choices)
            else distributions.FloatDistribution(0.0, 1.0)
            for key, domain in definition.space.domains.items()
        }
        sampler = _sampler(self._optuna, definition.sampler.removeprefix(OPTUNA), definition.sampler_seed)
        verbosity = self._optuna.logging.get_verbosity()
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._study = self._optuna.create_study(direction="maximize", sampler=sampler)
        self._optuna.logging.set_verbosity(verbosity)
        self._generator = np.random.default_rng(definition.sampler_seed)
        self._trials: dict[int, Any] = {}
        """The trials without a score, by the number of the configuration."""
        self._asked = 0

    def ask(self, count: int) -> list[Configuration]:
        """Return up to `count` configurations, none of which knows the scores of the others."""
        left = (self._definition.samples or 0) - self._asked
        return [self._next() for _ in range(min(count, left))]

    def tell(self, configurations: Sequence[Configuration], scores: Sequence[float]) -> None:
        """Report the score of each configuration, the higher the better; not finite if it failed."""
        for configuration, score in zip(configurations, scores, strict=True):
            trial = self._trials.pop(configuration.number)
            if math.isfinite(score):
                self._study.tell(trial, float(score))
            else:
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)

    def _next(self) -> Configuration:
        refusal: InputError | None = None
        for attempt in range(MOST_REFUSED):
            if attempt >= MOST_ASKED:
                self._study.enqueue_trial(self._random_places())
            trial = self._ask()
            point = self._point(trial.params)
            try:
                if self._definition.holds(point):
                    configuration = self._definition.configuration(self._asked, point)
                    self._trials[self._asked] = trial
                    self._asked += 1
                    return configuration
            except InputError as error:
                refusal = error
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        if refusal is not None:
            raise refusal
        raise InputError(
            f"None of {MOST_REFUSED} points in a row satisfies the conditions of the sweep; change the conditions or "
            "the parameters."
        )

    def _ask(self) -> Any:
        try:
            return self._study.ask(self._distributions)
        except ImportError as error:  # some samplers import what they need when they are asked
            raise InputError(
                f"The sampler {self._definition.sampler} needs the package {error.name}: pip install {error.name}."
            ) from None

    def _random_places(self) -> dict[str, Any]:
        return {
            key: int(self._generator.integers(len(domain.values)))
            if isinstance(domain, Choices)
            else self._generator.random()
            for key, domain in self._definition.space.domains.items()
        }

    def _point(self, places: dict[str, Any]) -> Point:
        return {
            key: domain.values[places[key]] if isinstance(domain, Choices) else domain.at(places[key])
            for key, domain in self._definition.space.domains.items()
        }


def _sampler(optuna: Any, name: str, seed: int) -> Any:
    """Return one of Optuna's samplers by the name of its class, with a seed."""
    known = [found for found in optuna.samplers.__all__ if found.endswith("Sampler") and found not in _NOT_OFFERED]
    if name not in known:
        raise InputError(f"There is no sampler '{OPTUNA}{name}'; {closest(name, known)}")
    made = getattr(optuna.samplers, name)
    # With constant_liar, TPE avoids the neighbourhood of points whose scores are not known yet: those of its own wave.
    options = {"seed": seed % 2**32, "constant_liar": True, "warn_independent_sampling": False}
    accepted = inspect.signature(made).parameters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one option is experimental, another deprecated
        return made(**{option: value for option, value in options.items() if option in accepted})
