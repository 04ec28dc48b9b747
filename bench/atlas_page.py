"""Draw the pictures and print the tables of docs/atlas.md from the results of `bench/atlas.py`.

    python bench/atlas_page.py atlas --out docs/img

Intervals are 95% bootstrap intervals over seeds, stratified by configuration; a run that diverged scores as the lowest.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from atlas import CONTENDERS, TASKS

from lehr.sweeps.statistics import Estimate, bootstrap, mean, probability_of_improvement

matplotlib.use("Agg")
from matplotlib import pyplot as plt

VARIANTS = {
    "rate_kind": ("learning rate", {"linear": "constant", "cosine": "constant", "warm-up": "linear"}),
    "entropy_kind": ("entropy", {"linear": "constant", "linear to half": "constant"}),
    "clip_kind": ("clip range", {"0.2 to 0.02": "constant 0.2", "constant 0.1": "constant 0.2"}),
}
"""By factor of the grid: its name, and each kind with the one it is compared with."""
RESAMPLES = 500


class Found(NamedTuple):
    """The results of a task."""

    name: str
    raw: dict[str, Any]
    choices: list[dict[str, str]]
    scores: np.ndarray
    """`[C, S]`."""

    @classmethod
    def read(cls, path: Path) -> "Found":
        """Read what `bench/atlas.py` wrote."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(path.stem, raw, raw["choices"], _filled(raw["scores"]))

    @property
    def contenders(self) -> dict[str, np.ndarray]:
        """By kind: the scores of the fresh seeds of its best configuration."""
        return {name: _filled(one["scores"]) for name, one in self.raw["contenders"].items()}

    def pairs(self, factor: str, kind: str, other: str) -> tuple[np.ndarray, np.ndarray]:
        """The scores of all configurations of a kind, and of those that differ from them in that kind alone."""
        places = {tuple(sorted(choice.items())): index for index, choice in enumerate(self.choices)}
        chosen = [choice for choice in self.choices if choice[factor] == kind]
        first = [places[tuple(sorted(choice.items()))] for choice in chosen]
        second = [places[tuple(sorted({**choice, factor: other}.items()))] for choice in chosen]
        return self.scores[first], self.scores[second]


def _filled(scores: Any) -> np.ndarray:
    found = np.array(scores, float)
    return np.where(np.isnan(found), np.nanmin(found), found)


def improvement(factor: str, kind: str, other: str, tasks: list[Found]) -> list[Estimate]:
    """For each task and for all of them: how often a run of a kind scores higher than its counterpart."""
    pairs = [task.pairs(factor, kind, other) for task in tasks]

    def average(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return probability_of_improvement(x, y).mean(-1)

    single = [bootstrap(average, *pair, resamples=RESAMPLES) for pair in pairs]

    def over_tasks(*samples: np.ndarray) -> np.ndarray:
        return np.mean([average(x, y) for x, y in zip(samples[::2], samples[1::2], strict=True)], axis=0)

    together = bootstrap(over_tasks, *(one for pair in pairs for one in pair), resamples=RESAMPLES)
    return [*single, together]


def print_improvements(tasks: list[Found]) -> None:
    print("| schedule | against | " + " | ".join(task.name for task in tasks) + " | all |")
    print("|---|---|" + "---|" * (len(tasks) + 1))
    for factor, (title, variants) in VARIANTS.items():
        for kind, other in variants.items():
            cells = [_cell(one) for one in improvement(factor, kind, other, tasks)]
            print(f"| {title}: {kind} | {other} | " + " | ".join(cells) + " |")
    print()


def _cell(one: Estimate) -> str:
    text = f"{100 * one.value:.0f}"
    return f"**{text}**" if one.low > 0.5 or one.high < 0.5 else text


def print_contenders(tasks: list[Found]) -> None:
    print("| task | kind | return (95% interval) | schedules: rate; entropy; clip |")
    print("|---|---|---|---|")
    for task in tasks:
        for name, scores in task.contenders.items():
            value, low, high = bootstrap(mean, scores)
            texts = "; ".join(f"`{text}`" for text in task.raw["contenders"][name]["schedules"].values())
            print(f"| {task.name} | {name} | {value:.4g} ({low:.4g} to {high:.4g}) | {texts} |")
    print()


def print_levels(tasks: list[Found]) -> None:
    """The mean of each level and kind over everything else."""
    for level, factor in (("rate", "rate_kind"), ("entropy", "entropy_kind")):
        names = list(dict.fromkeys((choice[level], choice[factor]) for choice in tasks[0].choices))
        print(f"| {level} | " + " | ".join(task.name for task in tasks) + " |")
        print("|---|" + "---|" * len(tasks))
        for start, kind in names:
            cells = []
            for task in tasks:
                chosen = [(choice[level], choice[factor]) == (start, kind) for choice in task.choices]
                cells.append(f"{task.scores[chosen].mean():.4g}")
            print(f"| {start} {kind} | " + " | ".join(cells) + " |")
        print()


def draw(tasks: list[Found], path: Path) -> None:
    """The fresh scores of the best configuration of each kind, a panel for each task."""
    columns = min(5, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.1 * columns, 2.3 * rows), squeeze=False, sharey=True)
    names = list(CONTENDERS)
    colours = plt.get_cmap("tab10")(range(len(names)))
    for axis, task in zip(axes.flat, tasks, strict=False):
        for place, name in enumerate(names):
            if name not in task.contenders:
                continue
            value, low, high = bootstrap(mean, task.contenders[name])
            axis.errorbar(value, place, xerr=[[value - low], [high - value]], fmt="o", color=colours[place], capsize=3)
            if place == 0:
                axis.axvline(value, color=colours[0], linewidth=0.8, linestyle=":")
        axis.set_title(task.name, fontsize=10)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.tick_params(axis="x", labelsize=8)
        axis.locator_params(axis="x", nbins=4)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(tasks) :]:
        axis.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="results of bench/atlas.py")
    parser.add_argument("--out", type=Path, default=Path("docs/img"), help="folder of the pictures")
    arguments = parser.parse_args()
    paths = [arguments.folder / f"{name}.json" for name in TASKS]
    tasks = [Found.read(path) for path in paths if path.exists()]
    if not tasks:
        parser.error(f"there are no results in {arguments.folder}; run bench/atlas.py first")
    printers: list[Callable[[list[Found]], None]] = [print_improvements, print_contenders, print_levels]
    for printer in printers:
        printer(tasks)
    draw(tasks, arguments.out / "atlas.png")


if __name__ == "__main__":
    main()
