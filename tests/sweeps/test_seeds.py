"""Several seeds of one configuration, trained at once."""

import contextlib
import io
import shutil

import numpy as np
import pytest

import lehr
from lehr.cli.summary import exit_code_of_members, summarise_seeds
from lehr.errors import InputError
from lehr.report.loggers.jsonl import read
from lehr.sweeps.directory import SweepDirectory
from lehr.training import columns

from .conftest import SMALL


@pytest.fixture(scope="module")
def told():
    """What is told while the seeds train."""
    return io.StringIO()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, told):
    # As many members as in the other sweeps, so that they share the program.
    given = {"clip_range": "0.2 -> 0.1 over 5M", "run_dir": tmp_path_factory.mktemp("seeds") / "s", **SMALL}
    with contextlib.redirect_stderr(told):
        return lehr.train(seeds=[*range(3, 11)], **given)


def test_each_seed_has_its_metrics_and_a_score(trained):
    assert [member.seed for member in SweepDirectory(trained.directory).read_waves()[0].members] == [*range(3, 11)]
    scores = [read(trained.directory / "seeds" / f"{seed}.jsonl")["evaluate/return"][-1] for seed in range(3, 11)]
    np.testing.assert_array_equal(trained.results.scores, [scores])
    assert len(set(scores)) > 1
    assert (trained.directory / "curve.png").stat().st_size > 1000
    loaded = lehr.load_sweep(trained.directory)
    assert (loaded.is_finished, loaded.definition.seeds) == (True, tuple(range(3, 11)))


def test_the_summary_has_the_mean_with_its_interval(trained, capsys):
    summarise_seeds(trained)
    out = capsys.readouterr().out
    scores = trained.results.scores[0]
    half = 2.364624 * scores.std(ddof=1) / np.sqrt(8)  # Student's t with 7 degrees of freedom
    assert f"greedy {scores.mean():.4g} ± {half:.3g} (mean of 8 seeds, 95% interval)" in out
    assert f"lehr pick {trained.directory} best --out runs/best" in out


def test_what_is_hardly_meant_of_a_schedule_is_told_once(trained, told):
    note = "The schedule of clip_range ends after 5M env steps, later than the run: its last value will be 0.2."
    assert " ".join(told.getvalue().split()).count(note) == 1


@pytest.mark.parametrize(
    ("count", "outcome", "following", "code"),
    [
        (1, "finished; 1 of 8 seeds diverged", "lehr pick", 0),
        (8, "finished, but all 8 seeds diverged: too many of their", "train with a lower learning rate", 1),
    ],
)
def test_seeds_of_which_no_update_was_applied_diverged(trained, tmp_path, capsys, count, outcome, following, code):
    path = shutil.copytree(trained.directory, tmp_path / "seeds")
    metrics = SweepDirectory(path).wave_path(0) / "metrics"
    table = columns.read_all(metrics)
    table["update/rejected"][:, :count] = table["update"][:, None]
    columns.cut(metrics, 0)
    columns.write(metrics, 0, table)
    found = lehr.load_sweep(path)
    assert np.isnan(found.results.scores[0]).tolist() == [True] * count + [False] * (8 - count)
    summarise_seeds(found)
    out = capsys.readouterr().out
    assert f"outcome      {outcome}" in out
    assert f"next         {following}" in out
    assert "nan ±" not in out
    assert exit_code_of_members(found) == code


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seeds": 1}, "seeds is 1; give 2 or more"),
        ({"seeds": 2, "seed": 3}, "seed is 3, but seeds is 2; drop one of them"),
        ({"seeds": 2, "from_run": "runs/x"}, "from_run is for a single run"),
        ({"seeds": 2, "env": "gym:CartPole-v1"}, "gym:CartPole-v1 runs on the host, .* start a run for each"),
    ],
)
def test_mistakes(given, message):
    if "env" in given:
        pytest.importorskip("gymnasium")
    with pytest.raises(InputError, match=message):
        lehr.train(**given)
