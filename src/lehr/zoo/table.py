"""`python -m lehr.zoo.table`: the tables of docs/zoo.md, from the zoo's files."""

from collections.abc import Iterator, Sequence

import numpy as np

from lehr import zoo
from lehr.report.loggers.progress import short_number
from lehr.zoo import Entry

SUITES = {
    "built-in": "Built-in environments",
    "gymnax": "Gymnax",
    "brax": "Brax",
    "playground": "MuJoCo Playground",
    "jumanji": "Jumanji",
    "gym": "Gymnasium",
}
"""The headings, in their order."""
HEADER = "| task | algorithm | env steps | return | seeds | published | evaluation | measured on |\n" + "|---" * 8 + "|"


def tables() -> str:
    """A table for each suite, with a row for each entry."""
    return "\n\n".join(f"### {title}\n\n{_table(suite)}" for suite, title in SUITES.items())


def _table(suite: str) -> str:
    found = [entry for entry in zoo.entries() if entry.suite == suite]
    names = list(dict.fromkeys(entry.env for entry in found))  # all rows of a task together
    return "\n".join([HEADER, *(_row(entry) for name in names for entry in found if entry.env == name)])


def _row(entry: Entry) -> str:
    return f"| {' | '.join(_cells(entry))} |"


def number_text(value: float) -> str:
    """A return with four digits, and no exponent.

    >>> number_text(13843.7), number_text(-73.444), number_text(0.9)
    ('13844', '-73.44', '0.9')
    """
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def spread_text(returns: Sequence[float] | np.ndarray) -> str:
    """The mean return and its standard deviation over seeds; of one seed, the return alone. NaN is left out.

    >>> spread_text([8189.6, 2226.8]), spread_text([-169.3, -182.1]), spread_text([500.0, 500.0]), spread_text([97.0])
    ('5208 ± 2981', '-175.7 ± 6.4', '500 ± 0.0', '97')
    """
    mean, deviation = float(np.nanmean(returns)), float(np.nanstd(returns))
    if len(returns) == 1:
        return number_text(mean)
    if deviation >= 99.5 or abs(mean) >= 1000:
        return f"{mean:.0f} ± {deviation:.0f}"
    return f"{number_text(mean)} ± {deviation:.0f}" if deviation >= 9.95 else f"{number_text(mean)} ± {deviation:#.2g}"


def _cells(entry: Entry) -> Iterator[str]:
    actions = "sampled" if entry.actions == "sampled" else "greedy"
    yield f"`{entry.env}`"
    yield f"`{entry.algorithm}`"
    yield short_number(entry.total_steps)
    yield spread_text(list(entry.returns.values()))
    yield f"{min(entry.seeds)} to {max(entry.seeds)}" if len(entry.seeds) > 1 else str(entry.seeds[0])
    yield "" if entry.published is None else f"{entry.published}{'' if entry.meets else ', **not met**'}"
    yield f"{entry.settings['evaluate_episodes']} episodes, {actions}"
    yield entry.machine


if __name__ == "__main__":
    print(tables())
