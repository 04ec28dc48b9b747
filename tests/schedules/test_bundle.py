"""All coefficients of a run, evaluated together, are what each is alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.errors import InputError
from lehr.schedules import FunctionSchedule, adaptive_kl, env_steps, schedule, target_entropy
from lehr.schedules.bundle import bundle, population

TOTAL, PER_UPDATE = 6400, 64
TEXTS = {
    "learning_rate": "0.001 -> 0",
    "entropy_coef": "0 -> 0.03 over 5%, 0.03 -> 0.001 cosine",
    "clip_range": "0.2",
    "discount": "0.9 -> 0.99 exponential until 50%",
    "value_coef": "0.5 until 20%, 0.5 -> 0.1 polynomial(2) until 80%",
}


def schedules(texts=TEXTS):
    return {name: schedule(text).bind(TOTAL) for name, text in texts.items()}


def evaluated(coefficients, updates=100):
    """Every coefficient over the updates of a run, in one compiled loop."""

    def body(update, _):
        return update + 1, coefficients.values(coefficients.init(), env_steps(update, PER_UPDATE))

    return jax.jit(lambda: jax.lax.scan(body, jnp.uint32(0), length=updates)[1])()


def test_schedules_with_any_number_of_phases_are_evaluated_as_each_alone():
    values = evaluated(bundle(schedules()))
    assert list(values) == sorted(TEXTS)
    steps = PER_UPDATE * np.arange(100)
    for name, one in schedules().items():
        np.testing.assert_allclose(values[name], one(steps), rtol=1e-5, atol=1e-9, err_msg=name)


def decides(step):
    return 1e-3 if step < 32 else 1e-4


@pytest.mark.parametrize("function", [decides, lambda step: np.sin(step), lambda step: float(step)])
def test_a_function_that_must_know_the_step_is_named_with_its_coefficient(function):
    coefficients = bundle({"learning_rate": schedule(function, TOTAL)})
    assert coefficients.others["learning_rate"](40) == pytest.approx(function(40))  # as a user of it on the host does
    with pytest.raises(InputError, match=r"^learning_rate: <function .*> cannot be compiled, .*; write jnp\.where"):
        evaluated(coefficients)


def test_controllers_and_functions_stand_beside_schedules():
    given = {
        **schedules(),
        "entropy_coef": target_entropy(0.5, rate=0.1, initial=0.02),
        "learning_rate": adaptive_kl(3e-4, target=0.01),
        "gae_lambda": FunctionSchedule(lambda step: 0.9 + 0.05 * step / TOTAL),
    }
    coefficients = bundle(given)
    states = coefficients.init()
    assert set(states) == {"entropy_coef", "learning_rate", "gae_lambda"}
    values = coefficients.values(states, env_steps(50, PER_UPDATE))
    assert list(values) == sorted(given)
    assert {value.dtype for value in values.values()} == {jnp.dtype("float32")}
    assert {value.shape for value in values.values()} == {()}
    assert float(values["entropy_coef"]) == pytest.approx(0.02)
    assert float(values["gae_lambda"]) == pytest.approx(0.925)

    states = coefficients.update(states, {"policy/entropy": 0.0, "policy/approximate_kl": 0.05})
    values = coefficients.values(states, env_steps(51, PER_UPDATE))
    assert float(values["entropy_coef"]) == pytest.approx(0.02 * np.exp(0.05))
    assert float(values["learning_rate"]) == pytest.approx(2e-4)


def test_a_run_without_schedules_or_without_controllers_is_a_run():
    only = bundle({"entropy_coef": target_entropy(0.5)})
    assert only.scheduled is None
    assert list(only.values(only.init(), env_steps(0, 1))) == ["entropy_coef"]
    assert bundle(schedules()).init() == {}


def test_other_numbers_and_other_shapes_are_the_same_program(count_traces):
    counted = count_traces(lambda coefficients, clock: coefficients.values({}, clock))
    evaluate = jax.jit(counted)
    plain = {"learning_rate": "0.001", "clip_range": "0.2"}
    found = []
    for change in (
        {},
        {"clip_range": "0.1"},
        {"clip_range": "0.3 -> 0.1 cosine"},
        {"learning_rate": "0.1 -> 0.01 exponential"},
    ):
        values = evaluate(bundle(schedules(plain | change)), env_steps(jnp.uint32(50), PER_UPDATE))
        found.append([round(float(value), 6) for value in values.values()])
    assert found == [[0.2, 0.001], [0.1, 0.001], [0.2, 0.001], [0.2, round(np.sqrt(0.001), 6)]]
    assert counted.traces == 1


def test_a_population_holds_different_schedules_and_controllers():
    texts = "0.2", "0.2 -> 0.1", "0.4 -> 0.1 exponential until 50%, 0.1 -> 0.3"
    members = [
        {
            **schedules({"clip_range": text, "discount": "0.9"}),
            "entropy_coef": target_entropy(0.5, initial=0.01 * number),
        }
        for number, text in enumerate(texts, 1)
    ]
    together = population(members)
    states = jax.vmap(lambda one: one.init())(together)
    values = jax.vmap(lambda one, state: one.values(state, env_steps(75, PER_UPDATE)))(together, states)
    np.testing.assert_allclose(values["clip_range"], [0.2, 0.125, 0.2], rtol=1e-6)
    np.testing.assert_allclose(values["entropy_coef"], [0.01, 0.02, 0.03], rtol=1e-6)
    np.testing.assert_allclose(values["discount"], 0.9, rtol=1e-6)


def test_the_members_of_a_population_have_the_same_coefficients():
    with pytest.raises(InputError, match="Member 2 of a population has the coefficients"):
        population([schedules({"discount": "0.9"}), schedules({"clip_range": "0.2"})])
