"""Controllers: the rules by hand, and that they are data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.errors import InputError
from lehr.schedules import adaptive_kl, plateau, schedule, stack, target_entropy


def run(controller, name, metrics):
    """The coefficients applied while these values of the metric came in."""
    state, applied = controller.init(), []
    for metric in metrics:
        applied.append(float(controller.value(state, 0)))
        state = controller.update(state, {name: metric})
    return [*applied, float(controller.value(state, 0))]


def test_target_entropy_raises_below_and_lowers_above():
    controller = target_entropy(0.5, rate=0.1, initial=0.01)
    below, at, above = (run(controller, "policy/entropy", [entropy])[1] for entropy in (0.2, 0.5, 0.9))
    assert below == pytest.approx(0.01 * np.exp(0.03))
    assert at == pytest.approx(0.01)
    assert above == pytest.approx(0.01 * np.exp(-0.04))


def test_target_entropy_finds_the_coefficient_that_holds_the_target():
    """A policy whose entropy follows the coefficient: the only fixed point is where the two agree."""
    controller = target_entropy(0.5, rate=0.1, initial=0.001)
    state = controller.init()
    for _ in range(2000):
        coefficient = controller.value(state, 0)
        state = controller.update(state, {"policy/entropy": 1 - jnp.exp(-30 * coefficient)})
    assert float(controller.value(state, 0)) == pytest.approx(np.log(2) / 30, rel=1e-4)


def test_target_entropy_stays_within_its_limits():
    controller = target_entropy(0.5, rate=10.0, minimum=0.001, maximum=0.1)
    assert min(run(controller, "policy/entropy", [9.0] * 5)) == pytest.approx(0.001)
    assert max(run(controller, "policy/entropy", [-9.0] * 5)) == pytest.approx(0.1)
    assert controller.bounds() == (0.001, 0.1)


def test_plateau_waits_then_multiplies_and_waits_anew():
    controller = plateau(0.04, factor=0.5, patience=2, minimum=0.015)
    returns = [1, 2, 2, 2, 3, 3, 3, 3, 3]
    expected = [0.04, 0.04, 0.04, 0.04, 0.02, 0.02, 0.02, 0.015, 0.015, 0.015]
    assert run(controller, "episode/return", returns) == pytest.approx(expected)


def test_plateau_asks_for_more_than_its_threshold():
    assert run(plateau(1.0, 0.5, 1), "episode/return", [1, 1.1, 1.2])[-1] == 1.0
    assert run(plateau(1.0, 0.5, 1, threshold=0.5), "episode/return", [1, 1.1, 1.2])[-1] == 0.25


def test_adaptive_kl_moves_outside_its_band_only():
    controller = adaptive_kl(3e-4, target=0.01)
    divergences = [0.021, 0.019, 0.0051, 0.0049, 0.0, 0.01]
    expected = [3e-4, 2e-4, 2e-4, 2e-4, 3e-4, 3e-4, 3e-4]
    assert run(controller, "policy/approximate_kl", divergences) == pytest.approx(expected)


def test_adaptive_kl_stays_within_its_limits():
    controller = adaptive_kl(3e-4, target=0.01, minimum=1e-4, maximum=1e-3)
    assert run(controller, "policy/approximate_kl", [1.0] * 9)[-1] == pytest.approx(1e-4)
    assert run(controller, "policy/approximate_kl", [1e-4] * 9)[-1] == pytest.approx(1e-3)


@pytest.mark.parametrize("metric", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("controller", "name"),
    [
        (target_entropy(0.5), "policy/entropy"),
        (plateau(0.03, patience=1), "episode/return"),
        (adaptive_kl(3e-4), "policy/approximate_kl"),
    ],
)
def test_a_metric_that_is_not_finite_changes_nothing(controller, name, metric):
    before = controller.update(controller.init(), {name: 0.3})
    after = controller.update(before, {name: metric})
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, after))


TEXTS = {
    "auto(target_entropy=0.5)": target_entropy(0.5),
    "auto(target_entropy=0.5, rate=0.1, value=0.02)": target_entropy(0.5, 0.1, initial=0.02),
    "plateau(0.03, factor=0.5, patience=10)": plateau(0.03, 0.5, 10),
    "plateau(0.03, 0.1, 5, metric=evaluate/return)": plateau(0.03, 0.1, 5, metric="evaluate/return"),
    "adaptive_kl(3e-4, target=0.01)": adaptive_kl(3e-4, 0.01),
    "adaptive_kl(value=3e-4, maximum=1e-3)": adaptive_kl(3e-4, maximum=1e-3),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text):
    assert schedule(text) == TEXTS[text]
    assert schedule(str(schedule(text))) == schedule(text)
    assert schedule(text, total_steps=100).is_bound


def test_controllers_follow_the_protocol_of_schedules_inside_one_program(count_traces):
    """The same loop drives a schedule, a function and a controller."""

    def loop(coefficient, metrics):
        def update(state, step_and_metric):
            step, metric = step_and_metric
            return coefficient.update(state, {"episode/return": metric}), coefficient.value(state, step)

        return jax.lax.scan(update, coefficient.init(), (jnp.arange(4), metrics))[1]

    counted = count_traces(loop)
    compiled = jax.jit(counted)
    flat = jnp.ones(4)
    assert compiled(plateau(1.0, 0.5, 1), flat).tolist() == [1.0, 1.0, 0.5, 0.25]
    assert compiled(plateau(2.0, 0.1, 9), flat).tolist() == [2.0] * 4
    assert counted.traces == 1
    assert compiled(schedule("1 -> 0 over 4"), flat).tolist() == [1.0, 0.75, 0.5, 0.25]
    assert compiled(schedule(lambda step: 1 - step / 4), flat).tolist() == [1.0, 0.75, 0.5, 0.25]


def test_an_unknown_metric_is_named_inside_a_compiled_program_too():
    with pytest.raises(InputError, match="Plateau needs the metric 'episode/return', which is not measured"):
        jax.jit(lambda controller: controller.update(controller.init(), {"loss/total": 1.0}))(plateau(0.03))


def test_a_population_of_controllers():
    members = [plateau(1.0, 0.5, 1), plateau(4.0, 0.1, 1), plateau(4.0, 0.1, 9)]
    stacked = stack(members)
    states = jax.vmap(lambda member: member.init())(stacked)
    for episode_return in (1.0, 1.0):
        states = jax.vmap(lambda member, state, r=episode_return: member.update(state, {"episode/return": r}))(
            stacked, states
        )
    np.testing.assert_allclose(states.value, [0.5, 0.4, 4.0])


def test_the_state_is_arrays():
    for controller in (target_entropy(0.5), plateau(0.03), adaptive_kl(3e-4)):
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(controller.init()))
        low, high = controller.bounds()
        assert low <= float(controller.value(controller.init(), 0)) <= high
