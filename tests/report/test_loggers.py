"""Several backends as one."""

import pytest

from lehr.report.loggers import JsonLines, Loggers, TensorBoard, jsonl


class Recorder:
    def __init__(self, fails=False):
        self.calls = []
        self.fails = fails

    def log(self, row):
        self.calls.append(row)

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")
        if self.fails:
            raise OSError("disk full")


def test_every_backend_gets_every_call_in_order():
    backends = [Recorder(), Recorder()]
    with Loggers(*backends) as loggers:
        loggers.log({"update": 1})
        loggers.flush()
        loggers.log({"update": 2})
    for backend in backends:
        assert backend.calls == [{"update": 1}, "flush", {"update": 2}, "close"]


def test_all_are_closed_although_the_first_fails():
    backends = [Recorder(fails=True), Recorder()]
    with pytest.raises(OSError, match="disk full"):
        Loggers(*backends).close()
    assert [backend.calls for backend in backends] == [["close"], ["close"]]


def test_the_real_ones_work_together(tmp_path):
    with Loggers(JsonLines(tmp_path / "metrics.jsonl"), TensorBoard(tmp_path / "tensorboard")) as loggers:
        loggers.log({"update": 1, "env_steps": 128, "loss/total": 0.5})
    assert jsonl.read(tmp_path / "metrics.jsonl")["loss/total"].tolist() == [0.5]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
