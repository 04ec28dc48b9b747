"""A sweep from its definition to its winner."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import lehr
from lehr.errors import InputError
from lehr.sweeps import api, running
from lehr.sweeps.api import members_of
from lehr.sweeps.definition import Definition
from lehr.sweeps.directory import SweepDirectory
from lehr.sweeps.samplers import configurations
from lehr.training import columns
from lehr.training.plan import make_plan

from .conftest import DEFINITION, SMALL


def table(path, wave=0):
    found = columns.read_all(SweepDirectory(path).wave_path(wave) / "metrics")
    return {name: column for name, column in found.items() if not name.startswith("time/")}


def assert_same(path, other):
    waves = SweepDirectory(path).read_waves()
    assert waves == SweepDirectory(other).read_waves()
    for wave in waves:
        here, there = table(path, wave.number), table(other, wave.number)
        assert here.keys() == there.keys()
        for name in here:
            assert here[name].tobytes() == there[name].tobytes(), name


def test_every_configuration_is_trained_with_every_seed_and_the_best_again(swept):
    results = swept.results
    assert swept.is_finished
    assert results.scores.shape == (4, 2)
    assert np.isfinite(results.scores).all()
    assert results.members.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    means = results.scores.mean(1)
    assert set(results.again) == set(np.argsort(-means, kind="stable")[:2].tolist())
    assert all(len(fresh) == 2 for fresh in results.again.values())
    seeds = [
        (member.configuration, member.seed, member.fresh)
        for wave in SweepDirectory(swept.directory).read_waves()
        for member in wave.members
    ]
    assert len(set(seeds)) == 12
    assert {seed for _, seed, fresh in seeds if fresh} == {2, 3}
    assert (swept.directory / "report.html").stat().st_size > 10_000
    assert json.loads((swept.directory / "status.json").read_text())["status"] == "finished"


def test_a_member_is_the_run_that_its_settings_describe(swept, tmp_path):
    waves = SweepDirectory(swept.directory).read_waves()
    member = waves[0].members[3]
    alone = lehr.train(
        "ppo", run_dir=tmp_path / "run", **member.settings, seed=member.seed, progress=False, tensorboard=False
    )
    there = table(swept.directory)
    for name in ("coef/learning_rate", "coef/entropy_coef"):
        np.testing.assert_array_equal(there[name][:, 3], alone.metrics[name].astype(np.float32))
    np.testing.assert_allclose(there["loss/total"][:5, 3], alone.metrics["loss/total"][:5], rtol=1e-4, atol=1e-5)


def test_results_are_those_of_the_members(swept):
    results, there = swept.results, table(swept.directory)
    np.testing.assert_array_equal(results.scores.ravel(), there["evaluate/return"][-1, :8])
    np.testing.assert_array_equal(results.returns[:, 2, 1], there["episode/return"][:, 5])
    np.testing.assert_allclose(results.schedules["entropy_coef"][:, 1], there["coef/entropy_coef"][:, 2])
    np.testing.assert_array_equal(results.env_steps, 32 * np.arange(1, 21))
    assert results.texts[0]["entropy_coef"].endswith(" -> 0")
    assert [float(text["learning_rate"]) for text in results.texts] == results.parameters["learning_rate"]


def test_a_sweep_in_waves_trains_the_same_members(swept, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "FILLED_ON_CPU", running.FILLED)
    waved = lehr.sweep(DEFINITION, out=tmp_path / "waves", wave_size=3, progress=False)
    waves = SweepDirectory(waved.directory).read_waves()
    assert [len(wave.members) for wave in waves] == [3, 3, 2, 3, 1]
    assert {wave.size for wave in waves} == {3}  # idle places fill the last ones, so that all share a program
    np.testing.assert_allclose(waved.results.schedules["entropy_coef"], swept.results.schedules["entropy_coef"])
    np.testing.assert_array_equal(waved.results.returns[:5], swept.results.returns[:5])


def test_a_small_wave_is_filled_up_only_where_idle_places_take_no_time(tmp_path, monkeypatch):
    definition = Definition.from_mapping(DEFINITION)
    members = members_of(configurations(definition), range(2))
    fresh = [replace(member, number=8 + member.number, fresh=True) for member in members[:4]]
    for backend, size in (("cpu", 4), ("gpu", 8)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        directory = tmp_path / backend
        directory.mkdir()
        waves = running.Waves(SweepDirectory(directory), running.WaveTrainer("ppo"))
        waves._append(members, least=1)
        waves._append(fresh, least=1)
        assert [(len(wave.members), wave.size) for wave in waves.waves] == [(8, 8), (4, size)]


def test_a_sweep_that_began_with_other_defaults_is_refused(swept, tmp_path):
    path = tmp_path / "older"
    shutil.copytree(swept.directory, path)
    saved = json.loads((path / "settings.json").read_text())
    (path / "settings.json").write_text(json.dumps(saved | {"gae_lambda": 0.8, "window": 16, "gone": 1}))
    with pytest.raises(InputError) as error:
        lehr.resume_sweep(path, progress=False)
    assert str(error.value) == (
        f"'{path}' began with other settings than those of now, defaults included: gae_lambda was 0.8 and is 0.95, "
        f"window was 16 and is None; write the earlier ones under settings in '{path}/sweep.yaml'."
    )
    (path / "settings.json").write_text("[")
    with pytest.raises(InputError, match="is damaged"):
        lehr.resume_sweep(path, progress=False)


def test_a_sweep_of_a_version_that_saved_no_settings_goes_on(swept, tmp_path):
    shutil.copytree(swept.directory, tmp_path / "older")
    (tmp_path / "older" / "settings.json").unlink()
    found = lehr.resume_sweep(tmp_path / "older", progress=False)
    np.testing.assert_array_equal(found.results.scores, swept.results.scores)
    assert not (tmp_path / "older" / "settings.json").exists()


@pytest.mark.parametrize(
    ("backend", "wave_size", "sizes"),
    [("gpu", None, [1024]), ("cpu", None, [1000]), ("gpu", 1000, [1000]), ("gpu", 500, [500, 500])],
)
def test_a_wave_on_a_gpu_has_a_few_idle_places_if_that_is_faster(tmp_path, monkeypatch, backend, wave_size, sizes):
    definition = Definition.from_mapping(DEFINITION)
    configuration = configurations(definition)[0]
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    trainer = running.WaveTrainer("ppo")
    trainer.know([configuration])
    plan = make_plan("ppo", configuration.settings, None, abstract=True)
    trainer.use(running.Base(configuration.parsed.group, plan))
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(plan.state.learner.params))
    assert math.gcd(parameters, 512) == 1
    waves = running.Waves(SweepDirectory(tmp_path), trainer, wave_size)
    waves._append(members_of([configuration], range(1000)), least=1)
    assert [wave.size for wave in waves.waves] == sizes
    if len(sizes) == 1:  # idle places are dropped before a wave that does not fit is halved
        waves._split(waves.waves[0], "9 GiB")
        assert [wave.size for wave in waves.waves] == ([1000] if sizes == [1024] else [500, 500])
        assert sum(len(wave.members) for wave in waves.waves) == 1000


def test_waves_are_halved_until_they_fit_into_memory(tmp_path, monkeypatch):
    tried = []
    compile = running.make_population

    def limited(algorithm, settings, *others, **more):
        tried.append(len(settings))
        if len(settings) > 3:
            raise running.TooLarge("8.0 GiB of 4.0 GiB")
        return compile(algorithm, settings, *others, **more)

    monkeypatch.setattr(running, "make_population", limited)
    found = lehr.sweep({**DEFINITION, "confirm": False}, out=tmp_path / "s", progress=False)
    assert tried == [8, 4, 2, 2, 2, 2]
    assert np.isfinite(found.results.scores).all()


def test_settings_that_shape_the_program_form_groups(tmp_path):
    definition = {
        "algorithm": "ppo",
        "settings": {name: value for name, value in SMALL.items() if name != "horizon"},
        "parameters": {"horizon": [8, 16], "clip_range": [0.1, 0.2]},
        "sampler": "grid",
        "confirm": False,
    }
    found = lehr.sweep(definition, out=tmp_path / "groups", progress=False)
    assert [len(wave.members) for wave in SweepDirectory(found.directory).read_waves()] == [2, 2]
    assert found.results.scores.shape == (4, 1)
    assert found.results.returns.shape[1:] == (4, 1)
    assert found.results.env_steps[-1] == 640
    np.testing.assert_allclose(found.results.schedules["clip_range"][-1], [0.1, 0.2] * 2)


def test_a_sweep_that_is_stopped_and_resumed_ends_the_same(swept, tmp_path, monkeypatch):
    monkeypatch.setattr("lehr.training.loop._next_count", lambda *_: 3)
    reports = []

    def interrupt(loop):
        reports.append(loop.done)
        if len(reports) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("lehr.training.loop.Loop._report", interrupt)
    stopped = lehr.sweep(DEFINITION, out=tmp_path / "s", progress=False)
    assert not stopped.is_finished
    assert len(reports) < 6
    assert json.loads((tmp_path / "s" / "status.json").read_text())["status"] == "stopped"
    monkeypatch.undo()
    resumed = lehr.resume_sweep(tmp_path / "s", progress=False)
    assert resumed.is_finished
    assert_same(resumed.directory, swept.directory)


def test_an_adaptive_sampler_is_told_the_scores(tmp_path):
    definition = {**DEFINITION, "sampler": "optuna:TPESampler", "samples": 6, "seeds": 1, "confirm": False}
    found = lehr.sweep(definition, out=tmp_path / "tpe", progress=False)
    again = lehr.resume_sweep(found.directory, progress=False)
    assert found.results.scores.shape == (6, 1)
    assert again.results.parameters == found.results.parameters


def test_without_the_packages_of_the_report_a_sweep_is_complete(tmp_path, monkeypatch):
    def missing(*_):
        raise InputError("The report needs plotly; install it with pip install 'lehr[sweeps]'.")

    monkeypatch.setattr("lehr.sweeps.api.write_report", missing)
    found = lehr.sweep({**DEFINITION, "samples": 2, "seeds": 1, "confirm": False}, out=tmp_path / "s", progress=False)
    assert found.is_finished
    assert not (found.directory / "report.html").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"wave_size": 0}, "wave_size is 0; it must be 1 or more."),
        ({"out": "there"}, "The directory .* is not empty"),
    ],
)
def test_bad_arguments_are_one_sentence(change, sentence, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    options = {"out": tmp_path / change.pop("out", "new"), "progress": False, **change}
    with pytest.raises(InputError, match=sentence):
        lehr.sweep(DEFINITION, **options)


def test_a_sweep_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match="There is no sweep"):
        lehr.load_sweep(tmp_path / "none")
    with pytest.raises(InputError, match="There is no sweep"):
        lehr.pick(tmp_path / "none", out=tmp_path / "run")


def test_the_best_are_chosen_by_the_statistic_that_ranks_them(monkeypatch, tmp_path):
    """One lucky seed of four moves the mean, but not the interquartile mean."""
    definition = Definition.from_mapping({**DEFINITION, "samples": 2, "seeds": 4, "confirm": {"top": 1, "seeds": 1}})
    tried = members_of(configurations(definition), definition.seeds)
    monkeypatch.setattr(api, "scores", lambda *_: np.array([100.0, 100.0, 100.0, 500.0, 150.0, 150.0, 150.0, 150.0]))
    asked = []
    waves = SimpleNamespace(train=asked.extend)
    api._confirm(definition, SweepDirectory(tmp_path), waves, tried)
    assert [(member.configuration, member.seed, member.fresh) for member in asked] == [(1, 4, True)]


TINY = {**DEFINITION, "samples": 2, "seeds": 1, "confirm": False}


def test_an_environment_object_is_named_in_the_definition(tmp_path):
    """Otherwise a resumed sweep would train on the default environment."""
    env = lehr.envs.TimeLimit(lehr.envs.make("Acrobot-v1").env, 50)
    definition = {**TINY, "settings": {name: value for name, value in SMALL.items() if name != "env"}}
    found = lehr.sweep(definition, out=tmp_path / "s", env=env, progress=False)
    assert found.results.env == "<TimeLimit>"
    assert found.results.scores.max() < 0  # each step of Acrobot costs 1, each of CartPole earns 1
    (SweepDirectory(tmp_path / "s").wave_path(0) / "status.json").unlink()
    with pytest.raises(InputError, match="The environment was <TimeLimit>, which cannot be created from the files"):
        lehr.resume_sweep(tmp_path / "s", progress=False)


def test_an_environment_object_with_a_name_is_saved_with_its_parameters():
    env = lehr.envs.make("CartPole-v1", gravity=2.0)
    wanted = {"horizon": 8, "env": "CartPole-v1", "env_parameters": {"gravity": 2.0}}
    assert api._with_environment({"horizon": 8, "env": "Acrobot-v1"}, env) == wanted
    assert api._with_environment(wanted, env) == wanted


def test_if_all_members_diverge_nothing_is_the_best(tmp_path):
    definition = {**TINY, "parameters": {"learning_rate": [1e38, 3e38]}}
    found = lehr.sweep(definition, out=tmp_path / "s", progress=False)
    assert found.is_finished
    assert np.isnan(found.results.scores).all()
    assert found.summary == "No run has a score, so there is nothing to rank."
    for which in ("best", "top2"):
        with pytest.raises(InputError, match="has a score, since all of them diverged, so none is the best"):
            lehr.pick(found, which, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (run,) = lehr.pick(found, 1, out=tmp_path / "run")
    assert lehr.load(run).config["learning_rate"] == 3e38


def test_a_coefficient_may_be_none_or_without_use(tmp_path):
    """Those are other programs, whose metrics do not have it."""
    parameters = {"value_clip_range": ["none", 0.2], "priority_exponent": [0.5, 0.8]}
    definition = {**DEFINITION, "parameters": parameters, "sampler": "grid", "samples": None, "seeds": 1}
    found = lehr.sweep({**definition, "confirm": {"top": 1, "seeds": 1}}, out=tmp_path / "s", progress=False)
    results = found.results
    assert found.is_finished
    assert np.isfinite(results.scores).all()
    assert np.isnan(results.schedules["value_clip_range"][:, :2]).all()
    np.testing.assert_array_equal(results.schedules["value_clip_range"][:, 2:], np.float32(0.2))
    assert np.isnan(results.schedules["priority_exponent"]).all()
    assert results.parameters["value_clip_range"] == [None, None, 0.2, 0.2]
    assert [texts["value_clip_range"] for texts in results.texts] == ["none", "none", "0.2", "0.2"]
    assert (found.directory / "report.html").stat().st_size > 10_000
    again = lehr.resume_sweep(found.directory, progress=False)
    np.testing.assert_array_equal(again.results.scores, results.scores)
    (run,) = lehr.pick(again, 0, out=tmp_path / "run")
    assert lehr.load(run).config["value_clip_range"] is None
    (damaged,) = (SweepDirectory(found.directory).wave_path(1) / "metrics").iterdir()
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"001/metrics/0+\.npz' has no readable metrics .*; restore it from a"):
        _ = lehr.load_sweep(found.directory).results


KILLED = """
import sys, os, signal, threading, json
import lehr
from lehr.training import loop
order = json.loads(sys.argv[1])
loop.CHUNK_SECONDS = 0.02
compile = loop.Loop._compile
def begin(self):
    compile(self)
    threading.Timer(order["seconds"], os.kill, (os.getpid(), signal.SIGKILL)).start()
if order["seconds"]:
    loop.Loop._compile = begin
import lehr.training.population as population
population.SAVE_SECONDS = 0.05
if os.path.exists(order["out"] + "/sweep.yaml"):
    lehr.resume_sweep(order["out"], progress=False)
else:
    lehr.sweep(order["definition"], out=order["out"], progress=False)
"""


@pytest.mark.parametrize(
    ("changes", "least", "most", "seconds"),
    [
        *(pytest.param(changes, 2, 3, 120, marks=pytest.mark.slow) for changes in ("nothing", "evolution")),
        *(
            pytest.param(changes, 20, 20, 1800, marks=pytest.mark.long)
            for changes in ("nothing", "evolution", "halving")
        ),
    ],
)
def test_sweeps_that_are_killed_at_random_places_end_with_the_same_bits(changes, least, most, seconds, tmp_path):
    definition = {**DEFINITION, "settings": {**SMALL, "total_steps": 32 * max(600, 100 * most)}}
    if changes == "halving":
        definition |= {"halving": {"places": 3, "first": 32 * 70, "factor": 2}, "confirm": False}
    if changes == "evolution":
        definition |= {
            "evolution": {"interval": "10%"},
            "parameters": {"learning_rate": {"low": 1e-5, "high": 1e-2, "scale": "log"}},
            "confirm": {"top": 1, "seeds": 2},
        }
    rng = np.random.default_rng(len(changes))

    def ended(path, after):
        order = {"definition": definition, "out": str(path), "seconds": after}
        process = subprocess.run(
            [sys.executable, "-c", KILLED, json.dumps(order)], capture_output=True, text=True, timeout=300
        )
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, process.stderr
        return process.returncode == 0

    assert ended(tmp_path / "whole", 0)
    kills, begin = 0, time.monotonic()
    while not ended(
        tmp_path / "killed",
        float(rng.uniform(0.01, min(0.6, 3 / most))) if kills < most and time.monotonic() - begin < seconds else 0,
    ):
        kills += 1
    assert kills >= least
    assert_same(tmp_path / "killed", tmp_path / "whole")
