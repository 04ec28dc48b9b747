"""Learning curves: the return of one or more runs over env steps, above the coefficients that varied."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from lehr import garbage
from lehr.errors import InputError, closest
from lehr.report.plots import COLOURS, plain, save_figure, steps_text, tidy
from lehr.schedules.phases import MOST_STEPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Columns = Mapping[str, np.ndarray]
"""The metrics of a run by name, one entry per row, as returned by `lehr.report.loggers.jsonl.read`."""

MAIN_COEFFICIENTS = ("entropy_coef", "learning_rate", "clip_range")
"""Shown first, if they change."""
MOST_COEFFICIENTS = 4
"""Shown at most, unless the user names them."""
_MOST_POINTS = 1000
_SMOOTHING = 0.01
"""The width of the moving average (the thick line), as a fraction of the steps."""
_LARGEST = float(np.finfo(np.float32).max)
_TITLE_WIDTH = 92
"""The number of characters that fit above a panel."""


def load() -> None:
    """Import what a figure needs, which takes as long as drawing it, and draw one: the first finds the fonts."""
    with garbage.paused():
        from matplotlib.figure import Figure

        made = Figure(layout="constrained")
        made.subplots().set_title("return")
        made.savefig(io.BytesIO(), format="png")


def learning_curve(
    runs: Mapping[str, Columns],
    path: str | Path,
    coefficients: Sequence[str] | None = None,
    *,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Save `learning_figure` as PNG or SVG, depending on the file extension."""
    save_figure(learning_figure(runs, coefficients, texts=texts), path)


def learning_figure(
    runs: Mapping[str, Columns],
    coefficients: Sequence[str] | None = None,
    *,
    texts: Mapping[str, str] | None = None,
) -> "Figure":
    """Plot the episode return over env steps, with a panel for each coefficient below it.

    The thin line is the mean return of each update, the thick line its moving average. Points with a band are
    evaluations, plus and minus one standard deviation. Updates in which no episode ended are skipped; if none ended in
    any run, the mean reward per step takes the place of the return.

    Args:
        runs: the metrics of each run by its name, which is its label in the legend.
        coefficients: the names of the coefficients to plot. By default those that change over time, then constants
            that differ between runs; the main ones first among each, at most 4 in all.
        texts: a text to show next to a coefficient's name, such as its schedule.
    """
    from matplotlib.figure import Figure

    if not runs:
        raise InputError("There is no run to plot; give at least one.")
    for run, columns in runs.items():
        if "env_steps" not in columns:
            raise InputError(f"The run '{run}' has no metrics yet; plot it after its first update.")
        if not _is_numeric(columns["env_steps"]):
            raise InputError(f"The run '{run}' has env_steps that are not numbers; mend its metrics.jsonl.")
    names = _chosen(runs, coefficients)
    heights = [3.2 + 0.2 * len(runs)] + [1.25] * len(names)
    made = Figure(figsize=(7, sum(heights)), layout="constrained")
    top, *panels = made.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights).flat
    title = _draw_returns(top, runs)
    _style(top, title)
    for axes, name in zip(panels, names, strict=True):
        text = (texts or {}).get(name)
        _draw_coefficient(axes, runs, name)
        _style(axes, plain(fill(f"{name}:  {text}" if text else name, _TITLE_WIDTH)))
    bottom = [top, *panels][-1]
    bottom.set_xlabel("env steps")
    bottom.set_xlim(0, max(_last_step(columns) for columns in runs.values()))
    bottom.xaxis.set_major_formatter(lambda step, _: steps_text(step))
    made.legend(loc="outside upper left", frameon=False)
    return made


def band_figure(
    env_steps: np.ndarray, returns: np.ndarray, interval: Callable[[np.ndarray], Sequence[np.ndarray]], label: str
) -> "Figure":
    """Plot the mean return of several seeds over env steps, with a band around it and a thin line for each seed.

    Each seed's returns are smoothed as in `learning_figure`; rows in which none of its episodes ended are filled from
    their neighbours.

    Args:
        env_steps: `[R]`.
        returns: `[R, S]`, NaN where a seed has no return.
        interval: from `[R, S]` to the mean and the ends of the band, `[R]` each.
        label: what the band is, for the legend.
    """
    from matplotlib.figure import Figure

    made = Figure(figsize=(7, 3.6), layout="constrained")
    axes = made.subplots()
    has_any = np.isfinite(returns).any(axis=0)
    rows = np.unique(np.linspace(0, len(env_steps) - 1, _MOST_POINTS).astype(int))
    lines = []
    for column in returns.T[has_any]:
        known = np.isfinite(column)
        steps, values = _averaged(env_steps[known]), _averaged(column[known])
        smooth = _smoothed(steps, values, _SMOOTHING * float(env_steps[-1]))
        lines.append(np.interp(env_steps[rows], steps, smooth, left=np.nan))
    if lines:
        steps, curves = env_steps[rows], np.stack(lines, axis=-1)
        mean, low, high = interval(curves)
        axes.plot(steps, curves, color=COLOURS[0], linewidth=0.7, alpha=0.4)
        _draw_line(axes, steps, mean, COLOURS[0], label=f"mean of {curves.shape[1]} seeds")
        axes.fill_between(steps, low, high, color=COLOURS[0], alpha=0.2, linewidth=0, label=label)
        axes.set_xlim(0, float(env_steps[-1]))
        made.legend(loc="outside upper left", frameon=False, ncols=2)
    else:
        _say_none_ended(axes)
    axes.set_xlabel("env steps")
    axes.xaxis.set_major_formatter(lambda step, _: steps_text(step))
    _style(axes, "episode return")
    return made


def _chosen(runs: Mapping[str, Columns], asked: Sequence[str] | None) -> list[str]:
    """Return the coefficients to plot: those requested, or by default those that take more than one value."""
    found = {name: column for columns in runs.values() for name, column in columns.items()}
    known = {name.removeprefix("coef/") for name in found if name.startswith("coef/") and _is_numeric(found[name])}
    if asked is None:
        varied = [name for name in sorted(known) if len(np.unique(_values(runs, f"coef/{name}"))) > 1]
        varied.sort(key=lambda name: (not _changes(runs, name), (*MAIN_COEFFICIENTS, name).index(name)))
        return varied[:MOST_COEFFICIENTS]
    for name in asked:
        if name not in known:
            raise InputError(f"No run has a coefficient '{name}'; {closest(name, sorted(known))}")
    return list(asked)


def _changes(runs: Mapping[str, Columns], coefficient: str) -> bool:
    """Whether a coefficient changes over time, in one of the runs at least."""
    return any(len(np.unique(_points(columns, f"coef/{coefficient}")[1])) > 1 for columns in runs.values())


def _values(runs: Mapping[str, Columns], metric: str) -> np.ndarray:
    """Return all finite values of a metric, concatenated over runs."""
    return np.concatenate([_points(columns, metric)[1] for columns in runs.values()])


def _points(columns: Columns, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values of the rows where a metric is a finite float32; one of other things has no rows.

    >>> steps, values = _points({"env_steps": np.array([8, 16, 24]), "x": np.array([1.0, np.nan, 3.0])}, "x")
    >>> steps.tolist(), values.tolist()
    ([8, 24], [1.0, 3.0])
    """
    steps = columns["env_steps"]
    values = columns.get(name, np.full(len(steps), np.nan))
    if not _is_numeric(values):
        values = np.full(len(steps), np.nan)
    finite = (np.abs(values) <= _LARGEST) & _is_step(steps)
    return steps[finite], values[finite]


def _is_numeric(column: np.ndarray) -> bool:
    return column.dtype.kind in "fiu"


def _is_step(steps: np.ndarray) -> np.ndarray:
    return (steps >= 0) & (steps <= MOST_STEPS)


def _last_step(columns: Columns) -> float:
    """Return the last step of a run, at least 1, so that the axis is not empty."""
    steps = columns["env_steps"]
    return float(np.max(steps[_is_step(steps)], initial=1))


def _averaged(values: np.ndarray) -> np.ndarray:
    """Average neighbouring values if there are more than can be seen."""
    if len(values) <= _MOST_POINTS:
        return values
    return np.array([np.mean(group) for group in np.array_split(values, _MOST_POINTS)])


def _smoothed(steps: np.ndarray, values: np.ndarray, width: float) -> np.ndarray:
    """Smooth with a Gaussian kernel over steps, which handles uneven spacing.

    >>> _smoothed(np.array([1, 2, 1000]), np.array([0.0, 2.0, 5.0]), width=10).round(2).tolist()
    [1.0, 1.0, 5.0]
    """
    weights = np.exp(-0.5 * ((steps[:, None] - steps[None]) / width) ** 2)
    return weights @ values / np.sum(weights, axis=1)


def _draw_returns(axes: "Axes", runs: Mapping[str, Columns]) -> str:
    """Plot the returns of all runs, each in its colour, with legend labels; return the title of the panel."""
    points: dict[str, Any] = {"marker": "o", "markersize": 4.5, "linestyle": "none"}
    evaluation, shown, title = "", "episode/return", "episode return"
    known = [name for name in ("episode/return", "evaluate/return", "rollout/reward") if len(_values(runs, name))]
    if known[:1] == ["rollout/reward"]:
        shown, title = "rollout/reward", "mean reward per step (no episode has ended)"
    for number, (run, columns) in enumerate(runs.items()):
        colour = COLOURS[number % len(COLOURS)]
        steps, returns = map(_averaged, _points(columns, shown))
        axes.plot(steps, returns, color=colour, linewidth=0.7, alpha=0.4)
        smoothed = _smoothed(steps, returns, _SMOOTHING * _last_step(columns))
        _draw_line(axes, steps, smoothed, colour, label=plain(run))
        steps, means = map(_averaged, _points(columns, "evaluate/return"))
        if len(steps):
            axes.plot(steps, means, color=colour, markeredgecolor="white", clip_on=False, zorder=3, **points)
            evaluation = evaluation or "evaluation"
        spread_steps, spreads = map(_averaged, _points(columns, "evaluate/return_std"))
        if len(steps) and np.array_equal(steps, spread_steps):
            low, high = means - spreads, means + spreads
            axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
            if len(steps) == 1:  # a band through one point cannot be seen
                axes.vlines(steps, low, high, color=colour, alpha=0.5, clip_on=False)
            evaluation = "evaluation ± 1 standard deviation"
    if evaluation:
        axes.plot([], [], color="0.4", label=evaluation, **points)
    if not np.all(np.isfinite(axes.dataLim.intervaly)):
        _say_none_ended(axes)
    return title


def _say_none_ended(axes: "Axes") -> None:
    axes.set_yticks([])
    axes.text(0.5, 0.5, "no episode has ended", color="0.4", ha="center", transform=axes.transAxes)


def _draw_coefficient(axes: "Axes", runs: Mapping[str, Columns], name: str) -> None:
    """Plot a coefficient of all runs, on a logarithmic axis if most values are far below the largest."""
    for number, columns in enumerate(runs.values()):
        steps, values = _points(columns, f"coef/{name}")
        every = 1 + len(steps) // _MOST_POINTS
        _draw_line(axes, steps[::every], values[::every], COLOURS[number % len(COLOURS)])
    values = _values(runs, f"coef/{name}")
    if len(values) and np.min(values) > 0 and np.median(values) < np.max(values) / 10:
        axes.set_yscale("log")
        axes.locator_params(axis="y", numticks=4)
    else:
        axes.locator_params(axis="y", nbins=4)


def _draw_line(axes: "Axes", steps: np.ndarray, values: np.ndarray, colour: str, label: str | None = None) -> None:
    """Plot a thick line, or a dot if there is only one point."""
    marker = "." if len(steps) == 1 else None
    axes.plot(steps, values, color=colour, linewidth=2, label=label, marker=marker, clip_on=marker is None)


def _style(axes: "Axes", title: str) -> None:
    """Style a panel."""
    axes.set_title(title, loc="left", fontsize="medium")
    tidy(axes)
