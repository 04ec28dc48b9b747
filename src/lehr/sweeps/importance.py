"""What each swept parameter does to the score: its importance in a random forest, and a plain table of its values."""

import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from lehr import garbage
from lehr.errors import InputError
from lehr.sweeps.statistics import Estimate, bootstrap, mean

FEWEST_CONFIGURATIONS = 20
"""The fewest configurations that a forest learns anything from."""
_TREES = 100
_TREES_OF_FOLD = 40
"""Fewer, since the drops are averaged over the folds."""
_FOLDS = 5
_REPEATS = 5
_BINS = 5


@dataclass(frozen=True)
class Importance:
    """The importance of `P` parameters, the highest first."""

    names: list[str]
    drops: np.ndarray
    """`[P]`: how much of R² is lost on configurations that the forest has not seen if the parameter is shuffled."""
    deviations: np.ndarray
    """`[P]`: the standard deviation of each drop, over folds and shuffles."""
    r_squared: float
    """R² of the forest out of bag: near 1, it predicts the score and its importances can be believed; near 0 or below,
    it does not and they cannot. NaN if all scores are equal."""


class Marginal(NamedTuple):
    """The score of all configurations with a value, or with values in a range, of one parameter."""

    label: str
    centre: float
    """The median of the values; NaN for a category."""
    configurations: int
    """How many they are."""
    score: Estimate
    """The mean over the configurations, with its bootstrap interval."""


def permutation_importance(parameters: Mapping[str, Sequence[Any]], scores: np.ndarray, seed: int = 0) -> Importance:
    """The permutation importance of each parameter in a random-forest regression of the score (Breiman, 2001).

        drop_p = mean over folds of  R²(forest on the fold) − R²(forest on the fold with column p shuffled)

    Each fold is predicted by a forest that was fitted to the others: on its own training data, a forest finds noise
    important. Interactions are part of the drop of every parameter that takes part in them.

    Args:
        parameters: by name, `C` numbers, texts or None (a parameter that a configuration does not have).
        scores: `[C]`, one number per configuration: the seeds of one are no separate evidence of its parameters.
        seed: of the forests, the folds and the shuffles.
    """
    if len(scores) < FEWEST_CONFIGURATIONS:
        raise InputError(
            f"The importance of parameters was asked for with {len(scores)} configurations; sweep at least "
            f"{FEWEST_CONFIGURATIONS}."
        )
    if not np.isfinite(scores).all():
        raise InputError(
            "The importance of parameters was asked for with scores that are not finite; fill those first."
        )
    names = list(parameters)
    if not names or np.ptp(scores) == 0:
        return Importance(names, np.zeros(len(names)), np.zeros(len(names)), np.nan)
    ensemble, selection = load_packages()
    generator = np.random.default_rng(seed)
    columns = np.stack([_column(values) for values in parameters.values()], axis=1)

    def forest(trees: int, inputs: np.ndarray, outputs: np.ndarray, **options: Any) -> Any:
        made = ensemble.RandomForestRegressor(trees, min_samples_leaf=2, random_state=seed, n_jobs=-1, **options)
        # Trees grow on all cores, but predict in their order, so that sums of floats are always the same.
        return made.fit(inputs, outputs).set_params(n_jobs=1)

    drops = []
    for train, test in selection.KFold(_FOLDS, shuffle=True, random_state=seed).split(columns):
        fitted = forest(_TREES_OF_FOLD, columns[train], scores[train])
        drops.append(_drops(fitted, columns[test], scores[test], generator))
    together = np.concatenate(drops, axis=1)
    order = np.argsort(-together.mean(axis=1), kind="stable")
    whole = forest(_TREES, columns, scores, oob_score=True)
    return Importance(
        [names[p] for p in order], together.mean(axis=1)[order], together.std(axis=1)[order], float(whole.oob_score_)
    )


def _drops(fitted: Any, columns: np.ndarray, scores: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The loss of R² for each shuffle of each column: `[n, P]` and `[n]` to `[P, repeats]`."""
    rows, count = columns.shape
    shuffled = np.tile(columns, (count, _REPEATS, 1, 1))  # [P, repeats, n, P]
    for p in range(count):
        shuffled[p, ..., p] = generator.permuted(shuffled[p, ..., p], axis=-1)
    # One call for all: each costs more than the trees' work.
    predicted = fitted.predict(np.concatenate([columns, shuffled.reshape(-1, count)]))
    errors = np.mean((predicted.reshape(-1, rows) - scores) ** 2, axis=1)
    spread = np.var(scores)
    lost = (errors[1:] - errors[0]) / spread if spread else np.zeros(len(errors) - 1)
    return lost.reshape(count, _REPEATS)


def marginals(values: Sequence[Any], scores: np.ndarray, seed: int = 0) -> list[Marginal]:
    """The mean score for each value of a parameter; for a number with many values, in bins of equally many.

    Args:
        values: `C` numbers, texts or None.
        scores: `[C]`, one number per configuration.
        seed: of the bootstrap, which resamples the configurations of each bin.

    >>> for found in marginals([0.1, 0.1, 0.9], np.array([1.0, 3.0, 7.0])):
    ...     print(found.label, found.configurations, float(found.score.value))
    0.1 2 2.0
    0.9 1 7.0
    >>> [found.label for found in marginals(range(1, 101), np.zeros(100))]
    ['1 – 20', '21 – 40', '41 – 60', '61 – 80', '81 – 100']
    """
    column = _column(values)
    given = np.isfinite(column)
    distinct = np.unique(column[given])
    if is_numeric(values) and len(distinct) > _BINS + 1:
        edges = np.quantile(column[given], np.linspace(0, 1, _BINS + 1)[1:-1])
        groups = np.where(given, np.searchsorted(edges, column), _BINS)
    else:
        groups = np.where(given, np.searchsorted(distinct, column), len(distinct))
    found = []
    for group in np.unique(groups):
        inside = np.flatnonzero(groups == group).tolist()
        centre = float(np.median(column[inside])) if is_numeric(values) else np.nan
        score = Estimate(*map(float, bootstrap(mean, scores[inside], seed=seed)))
        found.append(Marginal(_label([values[c] for c in inside]), centre, len(inside), score))
    return found


def is_numeric(values: Sequence[Any]) -> bool:
    """Whether all values that are given are numbers.

    >>> is_numeric([1, 0.5, None]), is_numeric([1, "tanh"]), is_numeric([True, False]), is_numeric([None])
    (True, False, False, False)
    """
    given = [value for value in values if value is not None]
    return bool(given) and all(isinstance(value, Real) and not isinstance(value, bool) for value in given)


def _column(values: Sequence[Any]) -> np.ndarray:
    """`[C]` numbers for a forest: the values, or the places of categories in their order; NaN for None."""
    if is_numeric(values):
        return np.array([np.nan if value is None else float(value) for value in values])
    places = {value: place for place, value in enumerate(sorted({str(value) for value in values if value is not None}))}
    return np.array([np.nan if value is None else places[str(value)] for value in values], dtype=float)


def _label(values: Sequence[Any]) -> str:
    if not is_numeric(values):
        return "not set" if values[0] is None else str(values[0])
    low, high = min(values), max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g} – {high:.3g}"


def load_packages() -> tuple[Any, Any]:
    """Import the packages for forests and for folds, which takes a second."""
    try:
        with warnings.catch_warnings(), garbage.paused():
            warnings.simplefilter("ignore", DeprecationWarning)  # of its own imports
            return importlib.import_module("sklearn.ensemble"), importlib.import_module("sklearn.model_selection")
    except ImportError:
        raise InputError(
            "The importance of parameters needs scikit-learn, which is not installed; run pip install 'lehr[sweeps]'."
        ) from None
