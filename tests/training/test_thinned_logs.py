"""The rows of a run with `log_every`: the same after a stop, and the means of what a run without it logs."""

import json

import numpy as np

import lehr
from lehr.report.loggers.jsonl import read
from tests.small import SMALL

STEPS = 4 * 8
SETTINGS = SMALL | {"total_steps": 23 * STEPS, "checkpoint_every": 7 * STEPS}


def rows(run):
    """The rows without what depends on the clock on the wall."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if "time/" not in name} for line in lines]


def test_rows_are_thinned_for_every_logger_and_a_resumed_run_has_the_same(tmp_path):
    seen = []

    class Logger:
        def log(self, row):
            seen.append(row["update"])

        def flush(self): ...
        def close(self): ...

    lehr.train(run_dir=tmp_path / "all", **SETTINGS)
    lehr.train(run_dir=tmp_path / "whole", **SETTINGS, log_every=5 * STEPS, loggers=[Logger()])
    every, whole = read(tmp_path / "all" / "metrics.jsonl"), read(tmp_path / "whole" / "metrics.jsonl")
    assert every["update"].tolist() == list(range(1, 24))
    assert whole["update"].tolist() == seen == [5, 10, 15, 20, 23]
    np.testing.assert_array_equal(whole["coef/learning_rate"], every["coef/learning_rate"][[4, 9, 14, 19, 22]])
    parts = np.split(every["loss/total"], [5, 10, 15, 20])
    np.testing.assert_allclose(whole["loss/total"], [part.mean() for part in parts], rtol=1e-12)
    assert whole["episode/count"].sum() == every["episode/count"].sum() > 0

    lehr.train(run_dir=tmp_path / "stopped", **SETTINGS, log_every=5 * STEPS, progress_fn=lambda *_: True)
    stopped = lehr.load(tmp_path / "stopped")
    assert int(stopped.state.updates) % 5  # in the middle of a row
    lehr.resume(tmp_path / "stopped")
    assert rows(tmp_path / "stopped") == rows(tmp_path / "whole")
