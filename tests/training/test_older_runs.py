"""Runs that older versions have written go on as if nothing had changed.

Each folder of `older_runs` is a run of format 1, stopped after 2 of its 4 updates, with the parameters that the version
which wrote it had after all 4, in `expected.npz`.
"""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import lehr
from lehr import config
from lehr.training import api, background

RUNS = sorted(Path(__file__).with_name("older_runs").iterdir())
QUICK = ("ppo", "gym_overlap")


@pytest.mark.parametrize(
    "older",
    [pytest.param(run, id=run.name, marks=[] if run.name in QUICK else pytest.mark.slow) for run in RUNS],
)
def test_a_run_of_an_older_version_goes_on(older, tmp_path):
    if older.name.startswith("gym"):
        pytest.importorskip("gymnasium")
    run = tmp_path / "run"
    shutil.copytree(older, run)
    before = lehr.load(run)
    assert int(before.state.updates) == 2
    result = lehr.resume(run)
    assert int(result.state.updates) == 4
    found = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(result.params)}
    with np.load(older / "expected.npz") as expected:
        assert set(found) == set(expected.files)
        for name in expected.files:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-5, err_msg=name)
    assert result.metrics["update"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(("use", "called"), [(lehr.load, "take_memory_as_needed"), (lehr.resume, "start_device")])
def test_memory_of_a_gpu_is_taken_as_needed_before_a_run_is_assembled(tmp_path, monkeypatch, use, called):
    class Called(Exception):
        pass

    def note():
        raise Called

    shutil.copytree(RUNS[0], tmp_path / "run")
    monkeypatch.setattr(background, called, note)
    monkeypatch.setattr(api, "make_plan", lambda *_, **__: pytest.fail("the run was assembled first"))
    with pytest.raises(Called):
        use(tmp_path / "run")


def test_a_run_whose_settings_say_nothing_of_windows_keeps_whole_segments(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(next(path for path in RUNS if path.name == "recurrent_ppo"), run)
    settings = config.from_yaml(run / "config.yaml") | {"horizon": 64}  # long enough for windows
    del settings["window"], settings["burn_in"]
    config.to_yaml(run / "config.yaml", settings)
    kept = lehr.load(run).config
    assert (kept["horizon"], kept["window"], kept["burn_in"]) == (64, None, 0)
