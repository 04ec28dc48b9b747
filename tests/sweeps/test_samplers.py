"""Which points of a space each sampler tries."""

import itertools

import numpy as np
import pytest
from scipy.stats import qmc

from lehr.errors import InputError
from lehr.sweeps import sobol
from lehr.sweeps.definition import Definition
from lehr.sweeps.samplers import _sobol, configurations, make_sampler

LOG = {"low": 1e-4, "high": 1e-2, "scale": "log"}
LINEAR = {"low": 0.1, "high": 0.3}


def definition(sampler, parameters=None, samples=64, **others):
    mapping = {"algorithm": "ppo", "parameters": parameters or {"learning_rate": LOG, "clip_range": LINEAR}, **others}
    return Definition.from_mapping(mapping | {"sampler": sampler} | ({} if samples is None else {"samples": samples}))


def unit_points(found):
    """The points of the two parameters above, mapped back to the unit square."""
    rates = np.array([configuration.point["learning_rate"] for configuration in found])
    clips = np.array([configuration.point["clip_range"] for configuration in found])
    return np.stack([np.log(rates / 1e-4) / np.log(100), (clips - 0.1) / 0.2], axis=1)


def test_grid_by_hand():
    parameters = {
        "clip_range": {"low": 0.1, "high": 0.3, "steps": 2},
        "entropy_coef": {"start": [0.01, "2e-2"], "end": 0, "shape": ["linear", "cosine"], "over": "50%"},
    }
    found = configurations(definition("grid", parameters, None, settings={"env": "CartPole-v1"}))
    assert [(c.number, c.settings["clip_range"], c.settings["entropy_coef"]) for c in found] == [
        (0, 0.1, "0.01 -> 0 over 50%"),
        (1, 0.1, "0.01 -> 0 cosine over 50%"),
        (2, 0.1, "0.02 -> 0 over 50%"),
        (3, 0.1, "0.02 -> 0 cosine over 50%"),
        (4, 0.3, "0.01 -> 0 over 50%"),
        (5, 0.3, "0.01 -> 0 cosine over 50%"),
        (6, 0.3, "0.02 -> 0 over 50%"),
        (7, 0.3, "0.02 -> 0 cosine over 50%"),
    ]
    assert found[2].point == {"clip_range": 0.1, "entropy_coef.start": 0.02, "entropy_coef.shape": "linear"}
    assert {c.settings["env"] for c in found} == {"CartPole-v1"}


def test_grid_leaves_out_what_violates_a_condition():
    parameters = {"entropy_coef": {"start": [0.01, 0.02, 0.03], "end": [0.01, 0.02, 0.03]}}
    found = configurations(definition("grid", parameters, None, conditions=["entropy_coef.end < entropy_coef.start"]))
    assert [c.settings["entropy_coef"] for c in found] == ["0.02 -> 0.01", "0.03 -> 0.01", "0.03 -> 0.02"]
    assert [c.number for c in found] == [0, 1, 2]


def test_sobol_is_scipys_sequence():
    expected = qmc.Sobol(2, rng=np.random.default_rng(5)).random_base2(7)[:100]
    found = unit_points(configurations(definition("sobol", samples=100, sampler_seed=5)))
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("dimensions", [1, 2, 9, sobol.MOST_DIMENSIONS])
@pytest.mark.parametrize("count", [1, 2, 64])
def test_sobol_sequences_are_scipys_point_for_point(dimensions, count):
    found = sobol.sobol(dimensions, count, np.random.default_rng(dimensions))
    engine = qmc.Sobol(dimensions, rng=np.random.default_rng(dimensions))
    for _ in range(3):
        assert np.array_equal(next(found), engine.random(count))


def test_sobol_in_more_dimensions_than_lehr_knows_is_scipys():
    dimensions = sobol.MOST_DIMENSIONS + 1
    found = next(_sobol(dimensions, 8, seed=3))
    assert np.array_equal(found, qmc.Sobol(dimensions, rng=np.random.default_rng(3)).random(8))


@pytest.mark.parametrize(("sampler", "samples"), [("latin_hypercube", 7), ("latin_hypercube", 64), ("sobol", 64)])
def test_each_slice_of_each_axis_is_hit_once(sampler, samples):
    found = np.sort(unit_points(configurations(definition(sampler, samples=samples))), axis=0)
    slices = np.arange(samples)[:, None] / samples
    rounding = 1e-4
    assert (found >= slices - rounding).all()
    assert (found <= slices + 1 / samples + rounding).all()


def test_sobol_continues_its_sequence_where_conditions_leave_points_out():
    sequence = configurations(definition("sobol", samples=256))
    found = configurations(definition("sobol", samples=50, conditions=["clip_range > 0.2"]))
    accepted = [c.point for c in sequence if c.point["clip_range"] > 0.2]
    assert [c.point for c in found] == accepted[:50]


def test_latin_hypercubes_follow_each_other_where_conditions_leave_points_out():
    """Half of a hypercube of 40 points are in the upper half of the clip range, so the first two give all 40."""
    found = configurations(definition("latin_hypercube", samples=40, conditions=["clip_range > 0.2"]))
    first, second = np.sort(unit_points(found)[:, 1].reshape(2, 20), axis=1)
    slices = 0.5 + np.arange(20) / 40
    for clips in (first, second):
        np.testing.assert_allclose(clips, slices + 0.0125, atol=0.0126)


def test_random_points_are_uniform_in_their_scale():
    found = unit_points(configurations(definition("random", samples=500, sampler_seed=5)))
    np.testing.assert_allclose(found, np.random.default_rng(5).random((500, 2)), atol=2e-4)


@pytest.mark.parametrize("sampler", ["random", "sobol", "latin_hypercube", "optuna:RandomSampler"])
def test_conditions_hold_for_all(sampler):
    if sampler.startswith("optuna"):
        pytest.importorskip("optuna")
    parameters = {
        "entropy_coef": {
            "start": {"low": 1e-3, "high": 0.1},
            "end": {"low": 0, "high": 0.1},
            "warmup": {"low": "0%", "high": "40%"},
            "until": {"low": "10%", "high": "100%"},
        }
    }
    conditions = ["entropy_coef.end <= entropy_coef.start", "entropy_coef.warmup < entropy_coef.until"]
    found = make_sampler(definition(sampler, parameters, 100, conditions=conditions)).ask(1000)
    assert len(found) == 100
    points = [c.point for c in found]
    assert all(point["entropy_coef.end"] <= point["entropy_coef.start"] for point in points)
    assert all(float(p["entropy_coef.warmup"][:-1]) < float(p["entropy_coef.until"][:-1]) for p in points)


@pytest.mark.parametrize("sampler", ["random", "sobol", "latin_hypercube"])
def test_same_definition_same_configurations(sampler):
    first, again = (configurations(definition(sampler, sampler_seed=3)) for _ in range(2))
    other = configurations(definition(sampler, sampler_seed=4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("sampler", ["random", "sobol", "latin_hypercube"])
def test_small_spaces_have_no_point_twice(sampler):
    parameters = {"clip_range": [0.1, 0.2, 0.3], "epochs": {"low": 1, "high": 4}}
    found = configurations(definition(sampler, parameters, 12))
    points = {(c.point["clip_range"], c.point["epochs"]) for c in found}
    assert points == set(itertools.product([0.1, 0.2, 0.3], [1, 2, 3, 4]))


def test_waves():
    given = definition("sobol", samples=10)
    sampler = make_sampler(given)
    waves = []
    while wave := sampler.ask(4):
        sampler.tell(wave, [0.0] * len(wave))
        waves.append(wave)
    assert [len(wave) for wave in waves] == [4, 4, 2]
    assert list(itertools.chain(*waves)) == configurations(given)


@pytest.mark.parametrize("sampler", ["random", "sobol", "latin_hypercube"])
def test_impossible_conditions(sampler):
    with pytest.raises(InputError, match=r"Of 10000 points, 0 are .* satisfy the conditions 'clip_range > 0.3', but"):
        configurations(definition(sampler, conditions=["clip_range > 0.3"]))


def test_impossible_conditions_of_a_grid():
    with pytest.raises(
        InputError, match=r"None of the 2 points of the grid satisfies the conditions 'clip_range > 0.3'"
    ):
        configurations(definition("grid", {"clip_range": [0.1, 0.2]}, None, conditions=["clip_range > 0.3"]))


def test_more_samples_than_the_conditions_leave():
    parameters = {"clip_range": [0.1, 0.2, 0.3]}
    with pytest.raises(InputError, match=r"2 are different and satisfy .*, but samples is 3"):
        configurations(definition("random", parameters, 3, conditions=["clip_range < 0.3"]))


def test_every_configuration_is_checked():
    parameters = {"entropy_coef": {"start": [0.1], "end": [0.01, 0], "shape": ["linear", "exponential"]}}
    message = (
        r"Configuration 3 \(entropy_coef.start=0.1, entropy_coef.end=0.0, entropy_coef.shape=exponential\) is not "
    )
    with pytest.raises(InputError, match=message + "possible: entropy_coef: .* exponential cannot reach 0"):
        configurations(definition("grid", parameters, None))
    conditions = ["entropy_coef.end > 0 or entropy_coef.shape != exponential"]
    assert len(configurations(definition("grid", parameters, None, conditions=conditions))) == 3
