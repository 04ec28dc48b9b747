"""What the report of a sweep shows, as a tree of plain values for JSON: thinned, rounded, NaN as None."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lehr.sweeps.importance import FEWEST_CONFIGURATIONS, Importance, is_numeric, marginals, permutation_importance
from lehr.sweeps.ranking import Ranking
from lehr.sweeps.results import Results
from lehr.sweeps.statistics import Estimate, bootstrap, performance_profile

TOP = 5
"""The number of best configurations that are drawn with colours of their own."""
_MOST_LINES = 1000
"""The maximum number of configurations whose curves are drawn."""
_MOST_POINTS = 100_000
"""The maximum number of points of all curves in one chart."""
_FEWEST_ROWS, _MOST_ROWS = 60, 150
"""Limits of the number of points in one curve."""
_THRESHOLDS = 101
_MOST_CATEGORIES = 20
"""Up to so many different numbers are drawn as names if some configurations have none."""
_LOG_SPREAD = 20
"""The ratio of the highest to the lowest value from which an axis is logarithmic."""
_LOG_DEPTH = 100
"""How far below the lowest of the schedules' peaks a logarithmic axis goes, where schedules reach 0."""


class Studied(NamedTuple):
    """What takes longest in a report, and what it was found from."""

    parameters: dict[str, list[Any]]
    """The values of each parameter, of the configurations with a score."""
    scores: np.ndarray
    """Their scores."""
    importance: Importance


def study(results: Results, ranking: Ranking, known: Studied | None = None) -> Studied | None:
    """The importance of each parameter; `known` if it was found from the same numbers, `None` if there are too few."""
    scored = np.flatnonzero(np.isfinite(ranking.selected.value))
    if not results.parameters or len(scored) < FEWEST_CONFIGURATIONS:
        return None
    parameters = {name: [values[c] for c in scored] for name, values in results.parameters.items()}
    scores = ranking.selected.value[scored]
    if known is not None and known.parameters == parameters and np.array_equal(known.scores, scores):
        return known
    return Studied(parameters, scores, permutation_importance(parameters, scores))


def report_data(results: Results, ranking: Ranking, known: Studied | None = None) -> dict[str, Any]:
    """All that the page draws. Lists with one entry per configuration are in the order of the sweep.

    Args:
        results: of the sweep.
        ranking: of its configurations.
        known: what was found already, perhaps before the last members were trained.
    """
    drawn = _drawn(ranking)
    parameters = {name: _axis(values) for name, values in results.parameters.items()}
    return {
        "top": ranking.order[:TOP].tolist(),
        "parameters": [
            {"name": name, "numeric": is_numeric(values), "log": _is_log(values, name in results.log_scaled)}
            for name, values in parameters.items()
        ],
        "configurations": _configurations(results, ranking, parameters),
        "drawn": drawn.tolist(),
        "returns": _returns(results, ranking, drawn),
        "schedules": _schedules(results, drawn),
        "importance": _importance(study(results, ranking, known)),
        "marginals": _marginals(parameters, ranking),
        "profiles": _profiles(results, ranking),
    }


def command(results: Results, configuration: int) -> str:
    """The settings of one configuration as a command line for a POSIX shell.

    >>> from dataclasses import replace
    >>> results = Results("", "CartPole-v1", "ppo", {}, [{"entropy_coef": "0.03 -> 0"}], *[np.zeros((1, 1))] * 4)
    >>> command(results, 0)
    "lehr train ppo --env CartPole-v1 --entropy-coef '0.03 -> 0'"
    >>> command(replace(results, settings={"tensorboard": "False", "shared": "True"}), 0)
    "lehr train ppo --env CartPole-v1 --no-tensorboard --shared --entropy-coef '0.03 -> 0'"
    """
    words = ["lehr", "train", results.algorithm, "--env", results.env]
    for name, text in (results.settings | results.texts[configuration]).items():
        option = name.replace("_", "-")
        if text in ("True", "False"):  # a switch, which takes no value
            words.append(f"--{option}" if text == "True" else f"--no-{option}")
        else:
            words += [f"--{option}={text}"] if text.startswith("-") else [f"--{option}", text]
    return shlex.join(words)


def _axis(values: list[Any]) -> list[Any]:
    """The values of a parameter as charts draw them: all as text if they are not numbers.

    So are a few numbers of which some configurations have none, since an axis of numbers has no place for none.

    >>> _axis([None, 0.2, 0.2]), _axis([1e-3, "1e-3 -> 0"]), _axis([0.1, 0.2])
    ([None, '0.2', '0.2'], ['0.001', '1e-3 -> 0'], [0.1, 0.2])
    """
    given = {str(value) for value in values if value is not None}
    is_axis = is_numeric(values) and (None not in values or len(given) > _MOST_CATEGORIES)
    return values if is_axis else [None if value is None else str(value) for value in values]


def _configurations(results: Results, ranking: Ranking, parameters: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    seeds = (results.members >= 0).sum(axis=1)
    frozen = np.zeros(len(seeds), int) if results.frozen is None else results.frozen.sum(axis=1)
    halved = results.halved
    return [
        {
            "place": int(ranking.place[c]),
            "selected": plain([values[c] for values in ranking.selected]),
            "fresh": plain(ranking.fresh[c]) if c in ranking.fresh else None,
            "fresh_failed": int(np.isnan(ranking.runs[c]).sum()) if c in ranking.fresh else 0,
            "seeds": int(seeds[c]),
            "failed": int(ranking.failed[c]),
            "frozen": int(frozen[c]),
            "stopped": 0 if halved is None else int(halved.stopped[c].sum()),
            "env_steps": None if halved is None else plain(np.nanmax(halved.env_steps[c])),
            "rung_score": None if halved is None else plain(halved.rung_scores[c][np.nanargmax(halved.env_steps[c])]),
            "values": [plain(values[c]) for values in parameters.values()],
            "settings": " ".join(f"{name}: {text};" for name, text in results.texts[c].items()).rstrip(";"),
            "command": command(results, c),
        }
        for c in range(len(seeds))
    ]


def _drawn(ranking: Ranking) -> np.ndarray:
    """The configurations whose curves are drawn, the best first: all, or if there are too many, evenly by place."""
    count = len(ranking.order)
    if count <= _MOST_LINES:
        return ranking.order
    rest = np.linspace(TOP, count - 1, _MOST_LINES - TOP).round().astype(int)
    return ranking.order[np.concatenate([np.arange(TOP), rest])]


def _returns(results: Results, ranking: Ranking, drawn: np.ndarray) -> dict[str, Any]:
    """The mean return over seeds of every configuration that is drawn, and the range of the seeds of the best."""
    bins = _rows(len(results.env_steps), len(drawn))
    thinned = _bin_means(results.returns, bins)  # [bins, C, S]
    top = thinned[:, ranking.order[:TOP]]
    lowest, highest = np.where(np.isnan(top), np.inf, top).min(-1), np.where(np.isnan(top), -np.inf, top).max(-1)
    return {
        "steps": plain(_bin_means(results.env_steps, bins)),
        "means": plain(_mean_of_known(thinned[:, drawn], lambda each: each.sum(axis=-1)).T),
        "low": plain(lowest.T),
        "high": plain(highest.T),
    }


def _schedules(results: Results, drawn: np.ndarray) -> dict[str, Any]:
    rows = len(results.env_steps)
    kept = np.unique(np.linspace(0, max(rows - 1, 0), _rows(rows, len(drawn))).round().astype(int))
    panels = []
    for name, applied in results.schedules.items():
        values = np.asarray(applied, dtype=float)[kept][:, drawn]
        if not np.isfinite(values).any():  # no configuration has it
            continue
        floor = _log_floor(values)
        panel = {"name": name, "floor": plain(floor), "cut": bool(floor is not None and (values < floor).any())}
        if ((values == values[:1]) | (np.isnan(values) & np.isnan(values[:1]))).all():
            # nothing but constants: their ends are enough
            values, panel["ends"] = values[[0, -1]], True
        panels.append(panel | {"values": plain(values.T if floor is None else np.maximum(values, floor).T)})
    return {"steps": plain(results.env_steps[kept]), "panels": panels}


def _log_floor(values: np.ndarray) -> float | None:
    """The lowest value of a logarithmic axis for schedules `[rows, C]`; None if a linear one is better."""
    known = values[np.isfinite(values)]
    if not known.size or known.min() < 0:
        return None
    if known.min() > 0:
        return float(known.min()) if known.max() / known.min() >= _LOG_SPREAD else None
    peaks = np.nanmax(values[:, np.isfinite(values).any(axis=0)], axis=0)  # a configuration may not have it
    peaks = peaks[peaks > 0]
    if not peaks.size or peaks.max() / peaks.min() < _LOG_SPREAD:
        return None
    return float(peaks.min() / _LOG_DEPTH)


def _importance(studied: Studied | None) -> dict[str, Any] | None:
    if studied is None:
        return None
    found = studied.importance
    return {
        "names": found.names,
        "drops": plain(found.drops),
        "deviations": plain(found.deviations),
        "r_squared": plain(found.r_squared),
    }


def _marginals(parameters: Mapping[str, list[Any]], ranking: Ranking) -> list[list[dict[str, Any]]]:
    """For each parameter, its values or bins, of the configurations with a score."""
    if np.isnan(ranking.worst):
        return []
    known = np.flatnonzero(np.isfinite(ranking.selected.value))
    return [
        [
            {
                "label": each.label,
                "centre": plain(each.centre),
                "count": each.configurations,
                "score": plain(each.score),
            }
            for each in marginals([values[c] for c in known], ranking.selected.value[known])
        ]
        for values in parameters.values()
    ]


def _profiles(results: Results, ranking: Ranking) -> dict[str, Any] | None:
    """The share of runs above each score: of the winner, of the best tenth, and of the whole sweep."""
    if np.isnan(ranking.worst):
        return None
    everything = np.concatenate(ranking.runs)
    lowest, highest = np.nanmin(everything), np.nanmax(everything)
    margin = 0.02 * (highest - lowest) or 1.0
    thresholds = np.linspace(lowest - margin, highest + margin, _THRESHOLDS)
    count = len(ranking.order)
    groups = {"winner": ranking.order[:1]}
    if count >= 20:
        groups[f"best {count // 10} configurations"] = ranking.order[: count // 10]
    if count > 1:
        groups["all configurations"] = ranking.order
    return {
        "thresholds": plain(thresholds),
        "lines": [
            {"name": name, "share": plain(_profile([ranking.runs[c] for c in group], thresholds))}
            for name, group in groups.items()
        ],
    }


def _profile(runs: Sequence[np.ndarray], thresholds: np.ndarray) -> Estimate:
    """The profile of configurations, which may differ in their number of seeds: `[K]` each."""
    counts = sorted({len(each) for each in runs} - {0})
    rectangles = [np.stack([each for each in runs if len(each) == count]) for count in counts]
    total = sum(rectangle.size for rectangle in rectangles)

    def share(*samples: np.ndarray) -> np.ndarray:
        parts = [performance_profile(sample, thresholds) * (sample.shape[-2] * sample.shape[-1]) for sample in samples]
        return np.sum(parts, axis=0) / total

    return bootstrap(share, *rectangles, resamples=500)


# Arrays for JSON ---------------------------------------------------------------------------------------------------


def _rows(rows: int, curves: int) -> int:
    """The number of points of each curve, so that a chart has not too many."""
    return min(rows, max(_FEWEST_ROWS, min(_MOST_ROWS, _MOST_POINTS // max(curves, 1))))


def _bin_means(values: np.ndarray, bins: int) -> np.ndarray:
    """The means of neighbouring rows, without NaNs: `[R, ...]` to `[bins, ...]`; NaN where all are."""
    if not bins:
        return values
    edges = np.linspace(0, len(values), bins, endpoint=False).astype(int)
    return _mean_of_known(values, lambda each: np.add.reduceat(each, edges, axis=0))


def _mean_of_known(values: np.ndarray, add: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The mean of what is finite, NaN where nothing is; `add` says which values belong together."""
    known = np.isfinite(values)
    sums, counts = add(np.where(known, values, 0.0)), add(known.astype(float))
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _is_log(values: Sequence[Any], is_log_scaled: bool) -> bool:
    """Whether an axis of these values is logarithmic: if they were sampled so, or are positive and span many orders."""
    if not is_numeric(values):
        return False
    known = [value for value in values if value is not None and np.isfinite(value)]
    return bool(known) and min(known) > 0 and (is_log_scaled or max(known) / min(known) >= _LOG_SPREAD)


def plain(value: Any) -> Any:
    """Numbers, arrays and trees of them for JSON: rounded to five digits; None for what is not finite.

    >>> plain([np.float32(0.1), np.array([[1.0, np.nan]]), 123456.7])
    [0.1, [[1, None]], 123460]
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray) and value.ndim:
        return _nested(list(map(_number, _rounded(value.astype(float)).ravel().tolist())), value.shape)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return _number(float(f"{value:.5g}"))


def _rounded(values: np.ndarray) -> np.ndarray:
    """The numbers nearest to these that have five digits."""
    with np.errstate(divide="ignore", invalid="ignore"):
        places = 4 - np.floor(np.log10(np.abs(values)))
    places = np.where(np.isfinite(places), places, 0)
    up, down = 10.0 ** np.clip(places, 0, 300), 10.0 ** np.clip(-places, 0, 300)
    return np.rint(values * up / down) * down / up


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _nested(values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """A flat list as nested ones of this shape."""
    for size in reversed(shape[1:]):
        values = [values[begin : begin + size] for begin in range(0, len(values), size)] if size else [[]] * shape[0]
    return values
