"""Optuna's samplers behind Lehr's protocol."""

import importlib

import numpy as np
import pytest

from lehr.errors import InputError
from lehr.sweeps.definition import Definition
from lehr.sweeps.samplers import configurations, make_sampler

MAPPING = {
    "algorithm": "ppo",
    "parameters": {
        "learning_rate": {"low": 1e-4, "high": 1e-2, "scale": "log"},
        "entropy_coef": {"start": {"low": 0.01, "high": 0.1}, "end": {"low": 0, "high": 0.1}},
        "clip_range": [0.1, "0.3 -> 0.1"],
    },
    "conditions": ["entropy_coef.end <= entropy_coef.start"],
    "sampler": "optuna:TPESampler",
    "samples": 48,
    "sampler_seed": 1,
}


def score(configuration):
    """The best learning rate is 1e-3, and the best clip range is a schedule."""
    off = abs(np.log10(configuration.point["learning_rate"]) + 3)
    return -off - (configuration.point["clip_range"] == 0.1)


def trained(definition, wave=8):
    sampler, found = make_sampler(definition), []
    while asked := sampler.ask(wave):
        sampler.tell(asked, [score(configuration) for configuration in asked])
        found += asked
    return found


@pytest.fixture(autouse=True)
def _needs_optuna(request):
    if "without" not in request.node.name:
        pytest.importorskip("optuna")


def test_it_learns_from_the_scores():
    found = trained(Definition.from_mapping(MAPPING))
    assert [configuration.number for configuration in found] == list(range(48))
    scores = [score(configuration) for configuration in found]
    assert np.mean(scores[-16:]) > np.mean(scores[:16]) + 0.3


def test_conditions_hold():
    points = [configuration.point for configuration in trained(Definition.from_mapping(MAPPING))]
    assert all(point["entropy_coef.end"] <= point["entropy_coef.start"] for point in points)


def test_history_can_be_replayed():
    definition = Definition.from_mapping(MAPPING)
    first = trained(definition)
    assert trained(definition) == first
    assert trained(Definition.from_mapping(MAPPING | {"sampler_seed": 2**40})) != first


def test_other_scores_give_other_configurations():
    definition = Definition.from_mapping(MAPPING)
    sampler = make_sampler(definition)
    found = []
    while asked := sampler.ask(8):
        sampler.tell(asked, [-score(configuration) for configuration in asked])
        found += asked
    assert found[:8] == trained(definition)[:8]
    assert found != trained(definition)


def test_failed_runs():
    sampler = make_sampler(Definition.from_mapping(MAPPING))
    wave = sampler.ask(4)
    sampler.tell(wave, [float("nan"), float("-inf"), float("inf"), 1.0])
    assert [configuration.number for configuration in sampler.ask(2)] == [4, 5]


def test_points_that_no_schedule_can_have_are_not_given_out():
    parameters = {"entropy_coef": {"start": 0.1, "end": [0, 0.01], "shape": ["linear", "exponential"]}}
    given = MAPPING | {"parameters": parameters, "conditions": [], "samples": 30}
    found = make_sampler(Definition.from_mapping(given)).ask(30)
    assert {configuration.settings["entropy_coef"] for configuration in found} == {
        "0.1 -> 0",
        "0.1 -> 0.01",
        "0.1 -> 0.01 exponential",
    }


def test_impossible_conditions():
    given = MAPPING | {"conditions": ["learning_rate > 1"], "sampler": "optuna:RandomSampler"}
    with pytest.raises(InputError, match="None of 2000 points in a row satisfies the conditions"):
        make_sampler(Definition.from_mapping(given)).ask(1)


def test_unknown_name():
    with pytest.raises(InputError, match=r"no sampler 'optuna:TPESmpler'; did you mean 'TPESampler'?"):
        make_sampler(Definition.from_mapping(MAPPING | {"sampler": "optuna:TPESmpler"}))


def test_configurations_cannot_be_listed():
    with pytest.raises(InputError, match="depend on scores"):
        configurations(Definition.from_mapping(MAPPING))


def test_without_optuna(monkeypatch):
    real = importlib.import_module

    def without(name, *arguments):
        if name == "optuna":
            raise ModuleNotFoundError("No module named 'optuna'", name="optuna")
        return real(name, *arguments)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(InputError, match=r"optuna:TPESampler needs the package optuna.*pip install 'lehr\[optuna\]'"):
        make_sampler(Definition.from_mapping(MAPPING))
