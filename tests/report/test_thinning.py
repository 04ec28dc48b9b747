"""Rows of a long run: which updates have one, and what it says of the updates since the one before."""

import json
import math

import numpy as np
import pytest

from lehr.report.loggers import thinning
from lehr.report.loggers.thinning import Thinning, is_logged


def test_the_default_rule_halves_the_rows_with_every_doubling():
    logged = np.array([update for update in range(1, 160_001) if is_logged(update)])
    gaps = np.diff(logged)
    assert logged[:10_000].tolist() == list(range(1, 10_001))
    for begin, end, gap in ((10_000, 20_000, 2), (20_000, 40_000, 4), (40_000, 80_000, 8), (80_000, 160_000, 16)):
        inside = gaps[(logged[:-1] >= begin) & (logged[1:] <= end)]
        assert set(inside.tolist()) == {gap}
        assert len(inside) == 5000


def test_a_million_updates_have_as_many_rows_as_the_page_says():
    assert sum(map(is_logged, range(1, 10**6 + 1))) == 42_812
    assert "42,812 rows" in thinning.__doc__


@pytest.mark.parametrize("every", [1, 3, 7])
def test_a_given_interval_holds_from_the_first_update_on(every):
    assert [update for update in range(1, 30) if is_logged(update, every)] == list(range(every, 30, every))


def table(updates=23):
    """Rows as training makes them: returns only where an episode ended, and one loss that is not finite."""
    random = np.random.default_rng(0)
    rows = []
    for update in range(1, updates + 1):
        count = float(random.integers(0, 4)) * (update % 3 > 0)
        rows.append(
            {
                "update": update,
                "env_steps": 64 * update,
                "coef/learning_rate": 1 / update,
                "episode/count": count,
                "episode/return": random.normal() if count else math.nan,
                "environment/broken_obs": float(update == 4),
                "loss/total": math.inf if update == 6 else random.normal(),
                "time/elapsed": 0.5 * update,
                "update/rejected": float(update >= 6),
            }
        )
    return rows


def test_a_row_stands_for_the_updates_since_the_one_before():
    rows, thinned = table(), Thinning(every=5)
    logged = [row for row in (thinned.add(row, always=row["update"] == 23) for row in rows) if row]
    assert [row["update"] for row in logged] == [5, 10, 15, 20, 23]
    for row in logged:
        first = {5: 0, 10: 5, 15: 10, 20: 15, 23: 20}[row["update"]]
        part = {name: np.array([one[name] for one in rows[first : row["update"]]]) for name in row}
        for name in ("update", "env_steps", "coef/learning_rate", "time/elapsed", "update/rejected"):
            assert row[name] == part[name][-1]
        for name in ("episode/count", "environment/broken_obs"):
            assert row[name] == part[name].sum()
        ended = part["episode/count"] > 0
        expected = np.average(part["episode/return"][ended], weights=part["episode/count"][ended])
        assert row["episode/return"] == pytest.approx(expected, rel=1e-12)
        finite = part["loss/total"][np.isfinite(part["loss/total"])]
        assert row["loss/total"] == pytest.approx(finite.mean(), rel=1e-12)


def test_without_thinning_rows_are_as_they_are():
    thinned = Thinning()
    for row in table():
        assert thinned.add(row) == pytest.approx(row, nan_ok=True)


def test_what_waits_goes_on_exactly_after_a_stop_anywhere():
    rows = table()
    whole = Thinning(every=5)
    expected = [whole.add(row) for row in rows]
    for stop in range(len(rows)):
        before = Thinning(every=5)
        found = [before.add(row) for row in rows[:stop]]
        after = Thinning(every=5, waiting=json.loads(json.dumps(before.waiting)))
        found += [after.add(row) for row in rows[stop:]]
        assert repr(found) == repr(expected)


def test_no_episode_and_no_finite_loss_are_missing_values():
    thinned = Thinning(every=2)
    empty = {"update": 1, "episode/count": 0.0, "episode/return": math.nan, "loss/total": math.nan}
    assert thinned.add(empty) is None
    row = thinned.add(empty | {"update": 2})
    assert row["episode/count"] == 0
    assert math.isnan(row["episode/return"])
    assert math.isnan(row["loss/total"])
