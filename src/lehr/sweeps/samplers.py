"""Samplers: which points of its space a sweep tries."""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from lehr.errors import InputError
from lehr.sweeps import sobol
from lehr.sweeps.definition import Configuration, Definition
from lehr.sweeps.sections import OPTUNA
from lehr.sweeps.space import Point

FEWEST_ACCEPTED = 0.001
"""The least share of the points drawn that must satisfy the conditions."""
FEWEST_DRAWN = 10_000
"""This many points are drawn before conditions are called impossible."""


class Sampler(Protocol):
    """Gives out the configurations of a sweep in waves, and learns from their scores if it can.

    The configurations follow from the definition and the waves and scores so far, so a sweep that is resumed asks and
    tells again what it asked and told before.
    """

    def ask(self, count: int) -> list[Configuration]:
        """Return up to `count` more configurations; none when the sweep has had all of its samples."""
        ...

    def tell(self, configurations: Sequence[Configuration], scores: Sequence[float]) -> None:
        """Report the score of each configuration, the higher the better; NaN if it failed."""
        ...


def make_sampler(definition: Definition) -> Sampler:
    """Return the sampler that the definition names."""
    if definition.sampler.startswith(OPTUNA):
        from lehr.sweeps.optuna_sampler import OptunaSampler

        return OptunaSampler(definition)
    return ListSampler(configurations(definition))


class ListSampler:
    """Gives out a list of configurations; their scores change nothing."""

    def __init__(self, listed: Sequence[Configuration]) -> None:
        self._left = iter(listed)

    def ask(self, count: int) -> list[Configuration]:
        """Return the next configurations of the list."""
        return list(itertools.islice(self._left, count))

    def tell(self, configurations: Sequence[Configuration], scores: Sequence[float]) -> None:
        """Do nothing."""


def configurations(definition: Definition) -> list[Configuration]:
    """Return all configurations of a sweep, each checked; the same for the same definition.

    >>> definition = Definition.from_mapping({
    ...     "algorithm": "ppo",
    ...     "parameters": {"clip_range": [0.1, 0.2], "entropy_coef": {"start": [0.01, 0.02], "end": 0}},
    ...     "sampler": "grid",
    ... })
    >>> for configuration in configurations(definition):
    ...     print(configuration.number, configuration.settings)
    0 {'clip_range': 0.1, 'entropy_coef': '0.01 -> 0'}
    1 {'clip_range': 0.1, 'entropy_coef': '0.02 -> 0'}
    2 {'clip_range': 0.2, 'entropy_coef': '0.01 -> 0'}
    3 {'clip_range': 0.2, 'entropy_coef': '0.02 -> 0'}
    """
    if definition.sampler.startswith(OPTUNA):
        raise InputError(
            f"The configurations of the sampler {definition.sampler} depend on scores, so they cannot be listed before "
            "the sweep; use make_sampler."
        )
    points = _grid(definition) if definition.sampler == "grid" else _drawn(definition)
    return [definition.configuration(number, point) for number, point in enumerate(points)]


def _grid(definition: Definition) -> list[Point]:
    """Return every combination that satisfies the conditions; the last parameter changes fastest."""
    domains = definition.space.domains
    combinations = itertools.product(*(domain.grid or () for domain in domains.values()))
    points = [dict(zip(domains, values, strict=True)) for values in combinations]
    accepted = [point for point in points if definition.holds(point)]
    if not accepted:
        raise InputError(
            f"None of the {len(points)} points of the grid satisfies {_conditions(definition)}; change the conditions "
            "or the parameters."
        )
    return accepted


def _drawn(definition: Definition) -> list[Point]:
    """Draw points until enough of them satisfy the conditions; a point that was drawn before is left out."""
    domains, samples = definition.space.domains, definition.samples or 1
    blocks = _UNIT_POINTS[definition.sampler](len(domains), samples, definition.sampler_seed)
    accepted: dict[str, Point] = {}
    for drawn, places in enumerate(itertools.chain.from_iterable(blocks), 1):
        point = {key: domain.at(place) for (key, domain), place in zip(domains.items(), places.tolist(), strict=True)}
        if definition.holds(point):
            accepted.setdefault(repr(point), point)
        if len(accepted) == samples:
            break
        if drawn >= FEWEST_DRAWN and len(accepted) < FEWEST_ACCEPTED * drawn:
            raise InputError(
                f"Of {drawn} points, {len(accepted)} are different and satisfy {_conditions(definition)}, but samples "
                f"is {samples}; change the conditions or the parameters, or give fewer samples."
            )
    return list(accepted.values())


def _conditions(definition: Definition) -> str:
    texts = [f"'{condition}'" for condition in definition.conditions]
    return f"the conditions {' and '.join(texts)}" if texts else "the conditions"


# Points of the unit cube, in endless blocks of shape [points, dimensions] -------------------------------------------


def _random(dimensions: int, samples: int, seed: int) -> Iterator[np.ndarray]:
    """Independent points."""
    generator = np.random.default_rng(seed)
    while True:
        yield generator.random((samples, dimensions))


def _sobol(dimensions: int, samples: int, seed: int) -> Iterator[np.ndarray]:
    """A scrambled Sobol sequence, which each block continues; its first 2^k points are balanced."""
    count = 2 ** math.ceil(math.log2(samples))
    if dimensions <= sobol.MOST_DIMENSIONS:
        yield from sobol.sobol(dimensions, count, np.random.default_rng(seed))
    engine = _engine("Sobol", dimensions, seed)
    while True:
        yield engine.random(count)


def _latin_hypercube(dimensions: int, samples: int, seed: int) -> Iterator[np.ndarray]:
    """Latin hypercubes: each block has one point in each of `samples` equal slices of every axis."""
    engine = _engine("LatinHypercube", dimensions, seed)
    while True:
        yield engine.random(samples)


def _engine(name: str, dimensions: int, seed: int) -> Any:
    from scipy.stats import qmc  # slow to import, and seldom needed

    made = getattr(qmc, name)
    argument = "rng" if "rng" in inspect.signature(made).parameters else "seed"  # renamed in SciPy 1.15
    return made(dimensions, **{argument: np.random.default_rng(seed)})


_UNIT_POINTS: dict[str, Callable[[int, int, int], Iterator[np.ndarray]]] = {
    "random": _random,
    "sobol": _sobol,
    "latin_hypercube": _latin_hypercube,
}
