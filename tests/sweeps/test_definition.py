"""The sweep file: what it says, and what is wrong with it."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import lehr
from lehr import config
from lehr.algorithms import ppo
from lehr.config import to_yaml
from lehr.errors import InputError
from lehr.sweeps.definition import Definition, check_trust
from lehr.sweeps.samplers import configurations
from lehr.sweeps.sections import EvolutionSettings, HalvingSettings
from lehr.training.plan import make_plan
from lehr.training.population import Configured

FILE = """
algorithm: ppo
settings:
  env: CartPole-v1
  total-steps: 500k
parameters:
  lr: {low: 1e-4, high: 1e-2, scale: log}
  clip_range: [0.1, 2e-1, "0.3 -> 0.1 cosine", {start: 0.3, end: 0.2}]
  entropy_coef:
    start: {low: 1e-3, high: 0.1, scale: log}
    end: {low: 0, high: 0.01}
    shape: [linear, cosine, exponential]
    until: [50%, 100%]
    warmup: [0, 5%]
  hidden_sizes: [[64, 64], [256, 256]]
conditions:
  - ent_coef.end <= entropy_coef.start
sampler: sobol
samples: 20
seeds: 5
"""
RANGE = {"low": 0.1, "high": 0.3}


@pytest.fixture
def definition(tmp_path):
    return read(tmp_path, FILE)


def read(tmp_path, text, **options):
    path = tmp_path / "sweep.yaml"
    path.write_text(text, encoding="utf-8")
    return Definition.read(path, **options)


def given(parameters=None, **others):
    base = {"algorithm": "ppo", "parameters": {"clip_range": RANGE} if parameters is None else parameters, "samples": 4}
    return Definition.from_mapping({key: value for key, value in (base | others).items() if value is not None})


def test_file(definition):
    assert definition.algorithm == "ppo"
    assert definition.settings == {"env": "CartPole-v1", "total_steps": "500k"}
    assert list(definition.parameters) == ["learning_rate", "clip_range", "entropy_coef", "hidden_sizes"]
    assert (definition.sampler, definition.samples, definition.sampler_seed) == ("sobol", 20, 0)
    assert definition.seeds == (0, 1, 2, 3, 4)
    assert definition.space.total_steps == 500_000
    assert list(definition.space.domains) == [
        "learning_rate",
        "clip_range",
        "entropy_coef.start",
        "entropy_coef.end",
        "entropy_coef.shape",
        "entropy_coef.until",
        "entropy_coef.warmup",
        "hidden_sizes",
    ]


def test_examples_of_the_page(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text(encoding="utf-8")
    found = re.findall(r"^```yaml\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    first, example, conditions, confirm, halving, evolution = found
    assert len(configurations(read(tmp_path, first))) == 32
    assert read(tmp_path, first + confirm).confirm == read(tmp_path, first).confirm == (5, 5)
    assert read(tmp_path, evolution).evolution == EvolutionSettings()
    assert read(tmp_path, first + halving).halving == HalvingSettings(places=16)
    assert read(tmp_path, first + "halving: {}").halving == HalvingSettings()
    assert read(tmp_path, first + halving).confirm == (0, 0)
    assert len(configurations(read(tmp_path, example))) == 200
    more = example.replace("  hidden_sizes", "  epochs: [2, 4, 8]\n  hidden_sizes")
    more = re.sub(r"conditions:\n(  - .*\n)+", conditions, more)
    points = [configuration.point for configuration in configurations(read(tmp_path, more))]
    assert len(points) == 200
    assert all(point["learning_rate"] < 1e-3 or point["epochs"] <= 4 for point in points)


def test_choices_are_numbers_texts_and_lists(definition):
    assert definition.space.domains["clip_range"].values == (0.1, 0.2, "0.3 -> 0.1 cosine", "0.3 -> 0.2")
    assert definition.space.domains["hidden_sizes"].values == ([64, 64], [256, 256])


def test_round_trip(definition, tmp_path):
    assert Definition.from_mapping(definition.to_mapping()) == definition
    to_yaml(tmp_path / "again.yaml", definition.to_mapping())
    assert configurations(Definition.read(tmp_path / "again.yaml")) == configurations(definition)


def test_round_trip_of_a_class_and_a_list_of_seeds():
    found = given(algorithm=ppo.Algorithm, seeds=[3, 7])
    assert found.to_mapping()["algorithm"] == "ppo"
    assert found.to_mapping()["seeds"] == [3, 7]
    assert Definition.from_mapping(found.to_mapping()).seeds == (3, 7)


def test_schedules_of_parts(definition):
    point = {
        "learning_rate": 0.001,
        "clip_range": 0.1,
        "entropy_coef.start": 0.03,
        "entropy_coef.end": 0.0012345,
        "entropy_coef.shape": "cosine",
        "entropy_coef.until": "50%",
        "entropy_coef.warmup": "5%",
        "hidden_sizes": [64, 64],
    }
    found = definition.configuration(7, point)
    assert found.number == 7
    assert found.point == point
    assert found.settings == {
        "env": "CartPole-v1",
        "total_steps": "500k",
        "learning_rate": 0.001,
        "clip_range": 0.1,
        "entropy_coef": "0 -> 0.03 over 5%, 0.03 -> 0.0012345 cosine over 45%",
        "hidden_sizes": [64, 64],
    }
    text = found.settings["entropy_coef"]
    assert math.isclose(lehr.schedule(text, 1000)(275), (0.03 + 0.0012345) / 2, rel_tol=1e-9)


def test_train_accepts_the_settings(definition):
    found = configurations(definition)[3]
    plan = make_plan(definition.algorithm, found.settings | {"seed": 2})
    assert plan.run.total_steps == 500_000
    assert plan.run.seed == 2
    assert plan.coefficient_texts["entropy_coef"] == found.settings["entropy_coef"]
    assert float(plan.coefficient_texts["learning_rate"]) == found.point["learning_rate"]
    assert list(plan.network.hidden_sizes) == found.point["hidden_sizes"]


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ("constant", "0.02"),
        ("linear", "0.02 -> 0.01"),
        ("exponential", "0.02 -> 0.01 exponential"),
        ("cosine", "0.02 -> 0.01 cosine(2)"),
        ("polynomial", "0.02 -> 0.01 polynomial(2)"),
    ],
)
def test_parts_that_a_shape_does_not_take_are_left_out(shape, text):
    shapes = ["constant", "linear", "cosine", "exponential", "polynomial"]
    found = given({"entropy_coef": {"start": [0.02], "end": 0.01, "power": 2, "shape": shapes}})
    point = {"entropy_coef.start": 0.02, "entropy_coef.shape": shape}
    assert found.configuration(0, point).settings["entropy_coef"] == text


def test_repeats_and_delays():
    parts = {"start": 0.02, "end": 0.01, "repeat": {"low": 1, "high": 4}, "from": ["10%", "20%"]}
    found = given({"entropy_coef": parts})
    assert {found.space.domains["entropy_coef.repeat"].at(place) for place in (0.1, 0.4, 0.6, 0.9)} == {1, 2, 3, 4}
    parts = {"start": 0.02, "end": 0.01, "repeat": [2], "shape": "cosine"}
    settings = given({"entropy_coef": parts}, sampler="grid", samples=None).configuration(0, {"entropy_coef.repeat": 2})
    assert settings.settings["entropy_coef"] == "0.02 -> 0.01 cosine repeat 2"


def test_settings_that_are_none():
    found = given({"max_grad_norm": ["none", 0.5]}, sampler="grid", samples=None)
    assert found.space.domains["max_grad_norm"].values == (None, 0.5)


def test_whole_settings_have_whole_ranges():
    domain = given({"num_envs": {"low": 4, "high": 16}}).space.domains["num_envs"]
    assert domain.grid == tuple(range(4, 17))


def test_static_settings_are_told_from_coefficients(definition):
    assert definition.is_static("hidden_sizes")
    assert not definition.is_static("learning_rate")
    assert not definition.is_static("entropy_coef.shape")


def test_groups_share_a_program():
    def group(sizes, rate):
        return Configured.of("ppo", {"hidden_sizes": sizes, "learning_rate": rate}).group

    assert group([64], 1e-3) == group([64], "1e-3 -> 0")
    assert group([64], 1e-3) != group([32], 1e-3)
    assert group([64], 1e-3) != group([64], "adaptive_kl(3e-4, target=0.01)")


SWEPT = {
    "parts": {"lr": {"start": {"low": 1e-4, "high": 1e-2, "scale": "log"}, "end": 0, "shape": ["linear", "cosine"]}},
    "kinds": {"lr": [1e-3, "adaptive_kl(3e-4, target=0.01)", "1e-3 -> 0"], "max_grad_norm": ["none", 0.5]},
    "reward": {"discriminator_learning_rate": {"low": 1e-4, "high": 1e-3}},
    "static": {"lr": RANGE, "hidden_sizes": [[8], [16]]},
}


@pytest.mark.parametrize("swept", SWEPT)
@pytest.mark.parametrize("settings", [{}, {"total_steps": 4096, "optimiser": "sgd", "preset": "classic"}])
def test_configurations_are_parsed_as_each_by_itself(swept, settings):
    algorithm = "gail" if swept == "reward" else "ppo"
    known = {} if swept == "reward" else settings
    for one in configurations(given(SWEPT[swept], algorithm=algorithm, settings=known, sampler="random", samples=6)):
        assert one.parsed == Configured.of(algorithm, one.settings)


def test_what_configurations_share_is_parsed_once(monkeypatch):
    parsed, parse = [], config.parse

    def counted(*arguments):
        parsed.append(arguments)
        return parse(*arguments)

    monkeypatch.setattr(config, "parse", counted)
    monkeypatch.setattr(Configured, "of", None)
    assert len(configurations(given(SWEPT["parts"], samples=16))) == 16
    assert len(parsed) == 1


@dataclass(frozen=True)
class TrustConfig(ppo.Config):
    trust: float | None = None
    """Ten times the clip range, unless it is given."""

    def __post_init__(self):
        if self.trust is None and isinstance(self.clip_range, float):
            object.__setattr__(self, "trust", 10 * self.clip_range)
        super().__post_init__()


class Trusting(ppo.Algorithm):
    Config = TrustConfig


def test_what_a_config_derives_from_a_swept_coefficient_is_derived_for_each_configuration():
    found = configurations(
        given({"clip_range": [0.1, 0.3]}, algorithm=Trusting, settings={"num_envs": 4}, sampler="grid", samples=None)
    )
    assert [one.parsed.configs[1].trust for one in found] == [1, 3]
    assert all(one.parsed == Configured.of(Trusting, one.settings) for one in found)


def test_fixed_shape_with_a_swept_start():
    found = given({"lr": [1e-3, 2e-3]}, settings={"lr_schedule": "cosine"}, sampler="grid", samples=None)
    assert [c.settings for c in configurations(found)] == [
        {"learning_rate_schedule": "cosine", "learning_rate": 0.001},
        {"learning_rate_schedule": "cosine", "learning_rate": 0.002},
    ]


def test_preset():
    found = configurations(given({"clip_range": [0.1]}, settings={"preset": "classic"}, sampler="grid", samples=None))
    assert found[0].settings == {"preset": "classic", "clip_range": 0.1}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"entropy_cof": RANGE}, "no setting 'entropy_cof'; did you mean 'entropy_coef'?"),
        ({"kl_target": RANGE}, "no setting 'kl_target': in RLlib"),
        ({"lr": RANGE, "learning_rate": RANGE}, "learning_rate is given twice, as 'lr' and as 'learning_rate'"),
        ({"entropy_coef": {"strt": RANGE}}, "entropy_coef has the unknown part 'strt'; did you mean 'start'?"),
        (
            {"lr": {"min": "1e-4", "max": "1e-3"}},
            "unknown part 'min'; for a range write {low: 1e-4, high: 1e-3, scale: log}, for a schedule its parts: start",
        ),
        ({"lr": {"lower": 0.1, "upper": 0.3}}, "for a range write {low: 0.1, high: 0.3}, for a schedule"),
        ({"lr": {"values": [0.1, 0.2]}}, r"unknown part 'values'; for choices write a list: \[0.1, 0.2\], for a"),
        ({"lr": {"mu": 1}}, "unknown part 'mu'; for a range write {low: 1e-4, high: 1e-3, scale: log}, for a schedule"),
        ({"num_envs": {"min": 8, "max": 64}}, r"num_envs is .*; for a range write {low: 8, high: 64}\.$"),
        (
            {"entropy_coef": {"start": {"min": 1, "max": 2}, "end": 0}},
            r"entropy_coef.start is .*; for a range write {low: 1, high: 2}\.$",
        ),
        ({"entropy_coef": {"end": RANGE}}, "entropy_coef has no start"),
        ({"entropy_coef": {"start": 1, "end": 0}}, "entropy_coef is one schedule, .*move it to settings"),
        (
            {"entropy_coef": {"start": {"strt": 1}}},
            "entropy_coef.start is .*; give a value, a list of choices or a range",
        ),
        ({"entropy_coef": {"start": 1, "end": []}}, "entropy_coef.end has an empty list"),
        ({"entropy_coef": {"start": 1, "end": 0, "shape": ["linaer"]}}, "shape is 'linaer'; did you mean 'linear'?"),
        ({"entropy_coef": {"start": 1, "end": 0, "shape": RANGE}}, "entropy_coef.shape is .*; give a value"),
        (
            {"entropy_coef": {"start": 1, "end": {"low": -1, "high": 1}}},
            r"entropy_coef.end is '-1', .* stay in \[0, ∞\)",
        ),
        ({"entropy_coef": {"start": [1, -2], "end": 0}}, r"entropy_coef.start is '-2', which reaches -2"),
        ({"entropy_coef": {"start": [1], "end": 0, "over": ["0%"]}}, "entropy_coef.over: .*must be above 0"),
        (
            {"entropy_coef": {"start": [1], "end": 0, "over": ["120%"]}},
            "entropy_coef.over: .*more than 100% of the budget",
        ),
        ({"entropy_coef": {"start": [1], "end": 0, "over": ["soon"]}}, "entropy_coef.over: .*expected"),
        ({"entropy_coef": {"start": [1], "end": 0, "power": [0]}}, "entropy_coef.power: .*must be above 0"),
        ({"entropy_coef": {"start": [1], "end": 0, "repeat": [1.5]}}, "entropy_coef.repeat: .*1.5"),
        ({"entropy_coef": {"start": [1], "end": 0, "repeat": {"low": 0, "high": 3}}}, "entropy_coef.repeat: .*0"),
        ({"clip_range": {"low": 0, "high": 0.3}}, r"clip_range is '0', which reaches 0; it must stay in \(0, ∞\)"),
        ({"discount": {"low": 0.9, "high": 1.1}}, r"discount is '1.1', which reaches 1.1; it must stay in \[0, 1\]"),
        ({"discount": [0.9, "0.9 -> 1.5"]}, "discount is '0.9 -> 1.5.*', which reaches 1.5"),
        ({"clip_range": [0.1, "0.1 ->"]}, "clip_range: In the schedule '0.1 ->'"),
        ({"clip_range": ["none"]}, "clip_range has the choice none; give a number or a schedule"),
        ({"clip_range": []}, "clip_range has an empty list of choices"),
        ({"clip_range": [0.1, "0.1"]}, "clip_range has the choice 0.1 twice"),
        ({"clip_range": 0.1}, "clip_range is 0.1, a single value; sweep a list or a range"),
        ({"clip_range": {"low": 0.3, "high": 0.1}}, "clip_range goes from 0.3 to 0.1, so it is empty"),
        ({"clip_range": {"low": 0, "high": 0.1, "scale": "log"}}, "a log scale cannot reach 0"),
        ({"clip_range": [lambda step: 0.1]}, "clip_range is <function .*>, a function, but a sweep is saved as text"),
        ({"clip_range": [lehr.schedule("0.1 -> 0.2")]}, "clip_range is Schedule.*, an object of type Schedule, but"),
        ({"entropy_coef": {"start": [print], "end": 0}}, "entropy_coef.start is <built-in function print>, a function"),
        ({"hidden_sizes": RANGE}, "hidden_sizes is .*, but it takes whole numbers .*; give a list of choices"),
        ({"hidden_sizes": ["wide"]}, "hidden_sizes is 'wide'; give whole numbers"),
        ({"num_envs": {"low": 1.5, "high": 3}}, "num_envs has the end 1.5; give whole numbers"),
        ({"seed": [0, 1]}, "seed cannot be swept: .*seeds: 5"),
        ({"total-steps": ["100k", "200k"]}, "total_steps cannot be swept: all runs of a sweep have the same budget"),
        ({"env": ["CartPole-v1"]}, "env cannot be swept"),
        ({"preset": ["classic"]}, "preset cannot be swept"),
        ({"reward_model": ["environment"]}, "reward_model cannot be swept: it decides which other settings there are"),
        ({"evaluate_every": [100]}, "evaluate_every cannot be swept: it is the same for all runs"),
        (
            {"ent_coef_schedule": ["linear"]},
            "entropy_coef_schedule cannot be swept by itself; sweep the parts of entropy_",
        ),
    ],
)
def test_bad_parameters(parameters, message):
    with pytest.raises(InputError, match=message) as caught:
        given(parameters)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"sampels": 3}, "A sweep has no key 'sampels'; did you mean 'samples'?"),
        ({"sample": 3}, "A sweep has no key 'sample'; did you mean 'samples'?"),
        ({"sample": "sobol"}, "A sweep has no key 'sample'; did you mean 'sampler'?"),
        ({"total_timesteps": 3}, "no key 'total_timesteps'; move it to settings, or list its values under parameters"),
        (
            {"parameters": {"num_envs": [8, 16]}, "samples": None},
            "add a line such as 'samples: 200', or 'sampler: grid' for all combinations.",
        ),
        ({"halving": 3}, "halving is 3; write lines of 'name: value' under it"),
        ({"halving": {"rungs": 3}}, "halving has no part 'rungs'; known: places, first, factor"),
        ({"halving": {"factor": 1}}, "halving.factor is 1; give a whole number, from 2 to 100000"),
        ({"halving": {"factor": 2.5}}, "halving.factor is 2.5; give a whole number"),
        ({"halving": {"places": 0}}, "halving.places is 0; give a whole number, from 1 to 100000"),
        ({"halving": {"first": "2M"}}, "halving.first is '2M'; it must be above 0 and less than the budget"),
        ({"halving": {"first": "early"}}, "halving.first: .*early"),
        ({"halving": {}, "evolution": {}}, "The sweep has both evolution and halving, .*; remove one of them"),
        ({"halving": {}, "sampler": "optuna:TPESampler"}, "sampler is optuna:TPESampler, which learns from the scores"),
        (
            {"halving": {}, "settings": {"evaluate_every": "1k"}},
            "evaluate_every is '1k', but with halving, members are evaluated only at their end",
        ),
        ({"algorithm": None}, "names no algorithm"),
        ({"algorithm": "pppo"}, "no algorithm 'pppo'; did you mean 'ppo'?"),
        ({"parameters": {}}, "has no parameters; add what to sweep"),
        ({"parameters": [1]}, r"parameters is \[1\]; write lines of 'name: value' under it"),
        ({"settings": "env"}, "settings is 'env'; write lines"),
        ({"settings": {"entropy_cof": 0}}, "no setting 'entropy_cof'; did you mean 'entropy_coef'?"),
        ({"settings": {"clip_range": 0.1}}, "clip_range is both fixed, under settings, and swept, under parameters"),
        ({"settings": {"clip-eps": 0.1}}, "clip_range is both fixed"),
        ({"settings": {"seed": 1}}, "seed is 1, but each configuration is trained with every one of seeds"),
        ({"settings": {"learning_rate": print}}, "learning_rate is <built-in function print>, a function"),
        ({"settings": {"total_steps": 0}}, "total_steps is 0; it must be 1 or more"),
        ({"conditions": "a < b"}, "conditions is 'a < b'; write a list"),
        ({"sampler": "sobel"}, "no sampler 'sobel'; did you mean 'sobol'?"),
        ({"sampler": 3}, "no sampler 3; known: grid"),
        ({"sampler": "grid"}, "samples is 4, but a grid takes every combination; remove samples"),
        ({"sampler": "grid", "samples": None}, "clip_range is a range without steps, which a grid needs"),
        ({"samples": None}, "The sampler sobol needs the number of samples"),
        ({"samples": 0}, "samples is 0; give a whole number, from 1 to 100000"),
        ({"samples": 2.5}, "samples is 2.5; give a whole number"),
        ({"samples": True}, "samples is True; give a whole number"),
        ({"samples": "many"}, "samples is 'many'; give a whole number"),
        ({"samples": 10**6}, "samples is 1000000; give a whole number, from 1 to 100000"),
        ({"sampler_seed": -1}, "sampler_seed is -1; give a whole number, 0 or more"),
        ({"seeds": 0}, "seeds is 0; give a whole number, from 1"),
        ({"seeds": []}, "seeds is an empty list"),
        ({"seeds": [1, 2, 1]}, "seeds has 1 twice"),
        ({"seeds": [7, 2**32 + 7]}, "seeds has 7 and 4294967303, which are the same run"),
        ({"seeds": [0.5]}, "one of seeds is 0.5; give a whole number"),
        ({"seeds": [2**63]}, "one of seeds is 9223372036854775808; give a whole number"),
        ({"parameters": {"clip_range": [0.1, 0.2]}}, "samples is 4, but the parameters have only 2 combinations"),
    ],
)
def test_bad_definitions(others, message):
    with pytest.raises(InputError, match=message) as caught:
        given(**others)
    assert "\n" not in str(caught.value)


def test_grids_too_large():
    ranges = dict.fromkeys(("clip_range", "discount", "gae_lambda"), RANGE | {"steps": 50})
    with pytest.raises(InputError, match="grid has 125000 points, and the maximum is 100000"):
        given(ranges, sampler="grid", samples=None)


def test_configurations_that_train_would_not_accept():
    found = given({"num_envs": [0, 4]}, sampler="grid", samples=None)
    with pytest.raises(
        InputError, match=r"Configuration 0 \(num_envs=0\) is not possible: num_envs is 0; it must be 1 or"
    ):
        configurations(found)


def test_every_coefficient_is_checked_over_the_whole_budget():
    settings = {"total_steps": "100k", "discount": "0.9 -> 1.5 over 200k"}
    found = given({"clip_range": [0.1]}, settings=settings, sampler="grid", samples=None)
    with pytest.raises(InputError, match=r"Configuration 0 .* discount is '0.9 -> 1.5 over 200k', which reaches 1.5"):
        configurations(found)
    found = given({"clip_range": [0.1]}, settings={"gamma": 0.9, "ent_coef": -1}, sampler="grid", samples=None)
    with pytest.raises(InputError, match="entropy_coef is '-1', which reaches -1"):
        configurations(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm: &a ppo\nsettings: {env: *a}", "anchors and aliases"),
        ("algorithm: ppo\nalgorithm: a2c", "'algorithm' is given twice"),
        ("- ppo", "contains a list"),
    ],
)
def test_files_are_read_as_configs_are(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("algorithm: ppo", "algorithm: evil:Algorithm", "has algorithm: evil:Algorithm, which would run code"),
        ("CartPole-v1", "evil:Env", "has env: evil:Env"),
        ("CartPole-v1", "gym:evil:Env-v0", "has env: gym:evil:Env-v0"),
        ("hidden_sizes: [[64, 64], [256, 256]]", "optimiser: [adam, 'evil:make']", "has optimiser: evil:make"),
        ("hidden_sizes: [[64, 64], [256, 256]]", "env: ['evil:Env']", "has env: evil:Env"),
        ("hidden_sizes: [[64, 64], [256, 256]]", "env-parameters: [{id: 'evil:Env'}]", "has env_parameters"),
        ("hidden_sizes: [[64, 64], [256, 256]]", "discount: ['evil:Controller(0.1)']", "has discount: evil:Controller"),
    ],
)
def test_code_named_in_a_file_needs_trust(tmp_path, monkeypatch, old, new, message):
    """The file is refused before the module is imported, which would write a file."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=message):
        read(tmp_path, FILE.replace(old, new))
    assert not Path(tmp_path / "ran").exists()


def test_trusted_code_is_imported(tmp_path, monkeypatch):
    source = "from lehr.algorithms.ppo import Algorithm as Base\nclass Mine(Base): pass\n"
    (tmp_path / "trusted_algorithm.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    text = FILE.replace("algorithm: ppo", "algorithm: trusted_algorithm:Mine")
    with pytest.raises(InputError, match="--trust"):
        read(tmp_path, text)
    assert len(configurations(read(tmp_path, text, trust=True))) == 20


def test_trust_of_a_mapping_that_is_not_a_definition():
    check_trust({"settings": 3, "parameters": [1], "algorithm": 5}, "The sweep", trust=False)
