"""All coefficients by their names, and a config's value for one."""

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

from lehr.algorithms.vocabulary import (
    coefficient,
    coefficients,
    resolve_coefficient,
    resolve_entropy_coefficient,
    spellings,
)
from lehr.errors import InputError
from lehr.schedules import linear, schedule

TOTAL = 1000


def entropy(config, *steps):
    return pytest.approx([resolve_entropy_coefficient(config, step, TOTAL) for step in steps])


@pytest.mark.parametrize("style", ["ent_coef", "entropy_coef", "entropy_cost"])
class TestBothNamingStyles:
    def test_no_schedule_is_the_fixed_coefficient(self, style):
        assert entropy({style: 0.01}, 0, 500, 5000) == [0.01] * 3
        assert entropy({style: 0}, 0) == [0]
        assert entropy({style: 0.01, f"{style}_schedule": None, f"{style}_warmup_steps": None}, 7) == [0.01]
        assert entropy({style: 0.01, f"{style}_warmup_steps": 0}, 0) == [0.01]

    @pytest.mark.parametrize(
        ("shape", "at"), [("linear", [0.02, 0.015, 0.01, 0.0]), ("cosine", [0.02, 0.01 + 0.01 * 0.5**0.5, 0.01, 0.0])]
    )
    def test_a_bare_shape_decays_from_the_fixed_value_to_zero(self, style, shape, at):
        assert entropy({style: 0.02, f"{style}_schedule": shape}, 0, 250, 500, 1000) == at
        assert entropy({style: 0.02, f"{style}_schedule": {"type": shape}}, 0, 250, 500, 1000) == at

    def test_warmup_ends_at_the_start_and_the_rest_takes_the_rest(self, style):
        config = {style: 0.02, f"{style}_schedule": "linear", f"{style}_warmup_steps": 200}
        assert entropy(config, 0, 100, 200, 600, 1000, 2000) == [0, 0.01, 0.02, 0.01, 0, 0]

    def test_warmup_of_a_fixed_value(self, style):
        assert entropy({style: 0.02, f"{style}_warmup_steps": "20%"}, 0, 100, 200, 1000) == [0, 0.01, 0.02, 0.02]

    def test_a_whole_schedule_needs_no_fixed_value(self, style):
        assert entropy({f"{style}_schedule": "0.03 -> 0.01"}, 0, 500, 1000) == [0.03, 0.02, 0.01]
        assert entropy({style: "0.03 -> 0.01"}, 0, 500, 1000) == [0.03, 0.02, 0.01]
        assert entropy({style: 0.03, f"{style}_schedule": "0.03 -> 0.01"}, 0, 1000) == [0.03, 0.01]
        assert entropy({style: "3e-2", f"{style}_schedule": "0.03 -> 0.01"}, 0, 1000) == [0.03, 0.01]

    def test_other_forms_of_a_schedule(self, style):
        key = f"{style}_schedule"
        assert entropy({style: 0.03, key: {"shape": "linear", "end": 0.01}}, 0, 1000) == [0.03, 0.01]
        assert entropy({key: {"shape": "linear", "start": 0.03, "end": 0.01, "over": "50%"}}, 250) == [0.02]
        assert entropy({key: [[0, 0.1], [500, 0.0]]}, 250, 900) == [0.05, 0]
        assert entropy({key: linear(0.1, 0)}, 250) == [0.075]
        assert entropy({key: optax.linear_schedule(0.1, 0.0, 1000)}, 250) == [0.075]
        assert entropy({style: 0.03, key: "warmup 10%, 0.03 -> 0"}, 0, 100, 1000) == [0, 0.03, 0]

    def test_warmup_of_a_schedule_with_shares(self, style):
        config = {f"{style}_schedule": "0.1 until 50%, 0.1 -> 0", f"{style}_warmup_steps": 200}
        assert entropy(config, 100, 200, 600, 800, 1000) == [0.05, 0.1, 0.1, 0.05, 0]

    def test_a_contradiction_says_what_to_remove(self, style):
        with pytest.raises(
            InputError, match=f"{style} is 0.05 but {style}_schedule starts at 0.03; remove {style}, or"
        ):
            entropy({style: 0.05, f"{style}_schedule": "0.03 -> 0.01"}, 0)
        with pytest.raises(
            InputError,
            match=f"{style} is already a schedule, '1 -> 0'; give {style} as a number, or remove {style}_sch",
        ):
            entropy({style: "1 -> 0", f"{style}_schedule": "linear"}, 0)

    def test_a_misspelt_key_is_not_ignored(self, style):
        with pytest.raises(InputError, match=f"unknown key '{style}_shedule'; did you mean '{style}_schedule'"):
            entropy({style: 0.01, f"{style}_shedule": "linear"}, 0)

    def test_values_below_zero_at_any_step_are_refused_at_once(self, style):
        with pytest.raises(InputError, match=r"which reaches -0\.01; it must stay in \[0, ∞\) at every step"):
            entropy({f"{style}_schedule": "0.03 -> -0.01"}, 0)
        with pytest.raises(InputError, match=r"which reaches -0\.5; it must stay"):
            entropy({style: -0.5}, 0)
        with pytest.raises(InputError, match="at every step"):
            entropy({f"{style}_schedule": lambda step: 0.01 - 0.0001 * step}, 0)


def test_both_styles_at_once_is_an_error():
    with pytest.raises(
        InputError, match="spells entropy_coef in two ways, entropy_coef and ent_coef_schedule; remove one"
    ):
        entropy({"entropy_coef": 0.01, "ent_coef_schedule": "linear"}, 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "The config has no entropy_coef; give entropy_coef or entropy_coef_schedule."),
        ({"ent_coef_schedule": "linear"}, "'linear', which has no start, and ent_coef is not given; give ent_coef."),
        ({"ent_coef": 0.1, "ent_coef_schedule": "exponential"}, "an exponential cannot reach 0 or change sign"),
        ({"ent_coef": 0.1, "ent_coef_schedule": "cosin"}, "ent_coef_schedule: In the schedule 'cosin', character 1"),
        (
            {"ent_coef": 0.1, "ent_coef_warmup_steps": 1000},
            "ent_coef_warmup_steps is 1000, but the whole budget is 1000",
        ),
        ({"ent_coef": 0.1, "ent_coef_warmup_steps": -1}, "The position -1 is below 0"),
        (
            {"ent_coef": "0 -> 1", "ent_coef_warmup_steps": 10},
            "the schedule '0 -> 1' already starts at 0; remove ent_coef_w",
        ),
        ({"ent_coef": float("nan")}, "ent_coef: The start is nan; it must be a finite number."),
        (
            {"ent_coef": "auto(target_entropy=0.5)"},
            "a controller, which reacts to metrics instead of the step; use its init, value",
        ),
        ({"ent_coef": 0.1, "ent_coef_schedule": "plateau(0.1)"}, "which has its own start; remove ent_coef."),
        ({"ent_coef": "plateau(0.1)", "ent_coef_warmup_steps": 10}, "reacts to metrics and cannot be warmed up"),
    ],
)
def test_bad_configs(config, message):
    with pytest.raises(InputError) as error:
        resolve_entropy_coefficient(config, 0, TOTAL)
    assert message in str(error.value)


def test_a_budget_of_zero_is_an_error():
    with pytest.raises(
        InputError, match=r"total_steps is 0; the budget must be finite, above 0 and at most 2\^48 env steps"
    ):
        resolve_entropy_coefficient({"ent_coef": 0.1}, 0, 0)


def test_other_coefficients_by_any_name():
    config = {"lr": 3e-4, "lr_schedule": "linear", "gamma": "0.9 -> 0.99", "clip_range_vf": 0.2, "clip_coef": 0.1}
    assert resolve_coefficient("learning_rate", config, 500, TOTAL) == pytest.approx(1.5e-4)
    assert resolve_coefficient("gamma", config, 500, TOTAL) == pytest.approx(0.945)
    assert resolve_coefficient("value_clip_range", config, 500, TOTAL) == pytest.approx(0.2)
    assert resolve_coefficient("clip_range", config, 500, TOTAL) == pytest.approx(0.1)
    with pytest.raises(
        InputError, match=r"discount is '0.9 -> 1.1 over 1k', which reaches 1.1; it must stay in \[0, 1\]"
    ):
        resolve_coefficient("discount", {"discount": "0.9 -> 1.1"}, 0, TOTAL)
    with pytest.raises(InputError, match=r"it must stay in \(0, ∞\)"):
        resolve_coefficient("clip_range", {"clip_range": "0.2 -> 0"}, 0, TOTAL)


def test_a_name_that_means_something_else_elsewhere_is_no_misspelling():
    """RLlib's configs have both, and its second is no coefficient of ours."""
    assert resolve_coefficient("clip_param", {"clip_param": 0.3, "vf_clip_param": 10.0}, 0, TOTAL) == 0.3
    with pytest.raises(InputError, match="no value_clip_range"):
        resolve_coefficient("value_clip_range", {"vf_clip_param": 10.0}, 0, TOTAL)


def test_inside_a_compiled_program():
    config = {"ent_coef": 0.02, "ent_coef_schedule": "cosine", "ent_coef_warmup_steps": 200}
    traced = jax.jit(lambda step: resolve_entropy_coefficient(config, step, TOTAL))
    for step in (0, 100, 200, 600, 1000):
        assert float(traced(jnp.int32(step))) == pytest.approx(
            resolve_entropy_coefficient(config, step, TOTAL), abs=1e-8
        )


def test_the_table_is_sound():
    assert len(spellings()) == len(set(spellings()))
    asked_for = "entropy_coef value_coef learning_rate clip_range value_clip_range discount gae_lambda rho_clip c_clip"
    asked_for += " priority_exponent importance_exponent max_grad_norm target_kl"
    assert set(asked_for.split()) <= set(coefficients())
    for entry in coefficients().values():
        assert entry.description
        assert entry.minimum < entry.maximum
        inside = entry.minimum + 0.5 * (min(entry.maximum, 1.0) - entry.minimum)
        entry.check(schedule(inside))
        with pytest.raises(InputError, match=entry.name):
            entry.check(schedule(entry.minimum - 0.1))
        if not math.isinf(entry.maximum):
            with pytest.raises(InputError, match=entry.name):
                entry.check(schedule(entry.maximum + 0.1))
    assert coefficient("gamma") is coefficients()["discount"]


def test_an_unknown_name_is_met_with_the_nearest():
    with pytest.raises(InputError, match=r"^There is no coefficient 'entropy'; did you mean 'entropy_coef'\?$"):
        resolve_coefficient("entropy", {}, 0, 1)


def test_shared_coefficients_are_looked_up_without_importing_an_algorithm():
    """Whoever only wants a schedule in a loop of their own does not wait for networks and optimisers to be imported."""
    code = (
        "import sys, lehr;"
        "assert lehr.resolve_entropy_coefficient({'ent_coef': 0.1}, 0, 10) == 0.1;"
        "assert 'flax' not in sys.modules and 'lehr.algorithms.ppo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
