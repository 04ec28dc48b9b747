"""Weights & Biases, played by a stand-in that records the calls."""

import sys
from types import SimpleNamespace

import pytest

from lehr.errors import InputError
from lehr.report.loggers import WeightsAndBiases


class Stub:
    """The part of wandb that is used. Its `init` fails online when there is no network."""

    class Error(Exception):
        pass

    def __init__(self, network):
        self.network = network
        self.calls = []

    def init(self, **options):
        if not self.network and options["mode"] != "offline":
            raise self.Error("no network")
        self.calls.append(("init", options))
        names = ("define_metric", "log", "finish")
        return SimpleNamespace(**{name: lambda *a, name=name, **o: self.calls.append((name, a, o)) for name in names})


def log_one_row(directory, **options):
    log = WeightsAndBiases(directory, {"discount": 0.99}, **options)
    log.log({"env_steps": 10, "loss/total": 0.5})
    log.flush()
    log.close()


def test_rows_are_sent_to_a_run_named_after_the_directory(tmp_path, monkeypatch):
    stub = Stub(network=True)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    log_one_row(tmp_path / "ppo-s0", project="mine")
    (_, options), *calls = stub.calls
    assert options == {
        "id": "ppo-s0",
        "name": "ppo-s0",
        "project": "mine",
        "dir": tmp_path / "ppo-s0",
        "config": {"discount": 0.99},
        "mode": None,
        "resume": "allow",
    }
    assert calls == [
        ("define_metric", ("*",), {"step_metric": "env_steps"}),
        ("log", ({"env_steps": 10, "loss/total": 0.5},), {}),
        ("finish", (), {}),
    ]


def test_without_a_network_the_rows_are_kept_offline(tmp_path, monkeypatch):
    stub = Stub(network=False)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    log_one_row(tmp_path)
    assert stub.calls[0][1]["mode"] == "offline"
    assert ("log", ({"env_steps": 10, "loss/total": 0.5},), {}) in stub.calls


def test_when_it_is_missing_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="needs wandb, which is not installed; run pip install wandb"):
        WeightsAndBiases(tmp_path, {})
