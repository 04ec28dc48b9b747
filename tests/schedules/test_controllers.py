"""Controllers: the rules by hand, and that they are data."""

import math
import sys
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.config import Coef, build, coefficients, to_mapping
from lehr.errors import InputError
from lehr.schedules import Controller, adaptive_kl, plateau, schedule, stack, target_entropy
from lehr.schedules.controllers import Plateau, Value


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


def test_a_controller_has_no_value_at_a_step():
    with pytest.raises(InputError, match=r"'auto\(target_entropy=0.5.*' is a controller, whose value depends on"):
        schedule("auto(target_entropy=0.5)")(10)


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


# A controller of the user's own --------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proportional(Controller):
    """A coefficient that grows with the distance of a metric from its goal."""

    goal: Any
    gain: Any = 0.1
    minimum: Any = 0.0
    maximum: Any = math.inf
    delay: int = field(default=0, metadata={"static": True})
    clips: bool = field(default=True, metadata={"static": True})
    metric: str = field(default="episode/return", metadata={"static": True})

    def init(self):
        return Value(jnp.asarray(self.minimum, jnp.float32))

    def update(self, state, metrics):
        return Value(jnp.clip(self.gain * (self.goal - self._observed(metrics)), self.minimum, self.maximum))


@dataclass(frozen=True)
class NoPytree(Controller):
    """What is wrong here: it is not registered."""

    def init(self):
        return Value(jnp.zeros(()))

    def update(self, state, metrics):
        return state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NoUpdate(Controller):
    """What is wrong here: it does not react."""

    def init(self):
        return Value(jnp.zeros(()))


class NoDataclass(Controller):
    """What is wrong here: it has no fields."""


NOT_ONE = 3


@pytest.fixture
def module(monkeypatch):
    """This module under a name by which it can be imported, whatever pytest calls it."""
    name = "own_controllers"
    monkeypatch.setitem(sys.modules, name, sys.modules[__name__])
    for kind in (Proportional, NoPytree, NoUpdate, NoDataclass):
        monkeypatch.setattr(kind, "__module__", name)
    return name


@pytest.mark.parametrize(
    ("controller", "inside"),
    [
        (Proportional(goal=200), "goal=200"),
        (Proportional(goal=200.0), "goal=200.0"),
        (Proportional(goal=-1e-05, gain=0.1, maximum=1.0), "goal=-1e-05, maximum=1.0"),
        (Proportional(goal=np.float32(0.5), minimum=-math.inf), "goal=0.5, minimum=-inf"),
        (Proportional(goal=jnp.float32(0.5)), "goal=0.5"),
        (Proportional(goal=0.5, delay=3, clips=False), "goal=0.5, delay=3, clips=false"),
        (Proportional(goal=0.5, metric="policy/entropy"), "goal=0.5, metric=policy/entropy"),
        (Proportional(goal=0.5, metric="7"), "goal=0.5, metric=7"),
        (Proportional(goal=None), "goal=none"),
    ],
)
def test_the_text_of_an_own_controller_gives_it_back(module, controller, inside):
    text = f"{module}:Proportional({inside})"
    assert str(controller) == text
    again = schedule(text)
    assert again == controller
    assert str(again) == text
    kinds = [[type(getattr(one, name)) for name in ("goal", "delay", "clips", "metric")] for one in (controller, again)]
    if not isinstance(controller.goal, np.generic | jax.Array):
        assert kinds[0] == kinds[1], "10 and 10.0 trace differently"


@pytest.mark.parametrize(
    "controller",
    [
        Proportional(goal=jnp.zeros(3)),
        Proportional(goal=(1, 2)),
        Proportional(goal=0.5, metric="one, two"),
        Proportional(goal="0.5"),
        Proportional(goal=math.nan),
    ],
    ids=["array", "tuple", "comma", "number as text", "nan"],
)
def test_what_no_text_can_hold_is_described(module, controller):
    assert str(controller) == "<object Proportional>"


def test_a_subclass_of_a_built_in_controller_is_not_taken_for_it(module):
    @jax.tree_util.register_dataclass
    @dataclass(frozen=True)
    class Patient(Plateau):
        patience: Any = 100

    text = str(Patient(0.1))
    assert text.startswith("<object ")
    assert text.endswith("Patient>")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Proportional(gaol=3)", "Unknown argument 'gaol' in '.*:Proportional.gaol=3.'; did you mean 'goal'"),
        ("Proportional(3)", "The argument '3' in .* has no name; write name=value with one of goal, gain, "),
        ("Proportional(goal=3, goal=4)", "The argument 'goal' appears twice"),
        ("Proportional()", "':?.*Proportional..' is missing goal; write own_controllers:Proportional.goal=....."),
        ("NOT_ONE()", "'own_controllers:NOT_ONE' is 3, which is no controller; name a class that inherits from lehr"),
        ("Nothing()", "The controller 'own_controllers:Nothing' could not be imported"),
        ("NoDataclass()", "The controller 'own_controllers:NoDataclass' is not a dataclass; decorate it"),
    ],
)
def test_mistakes_in_the_text_of_an_own_controller(module, text, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        schedule(f"{module}:{text}")
    assert "\n" not in str(caught.value)


def test_a_module_that_is_not_there_is_said_in_one_sentence():
    with pytest.raises(InputError, match="could not be imported"):
        schedule("no_such_module:Controller()")


@pytest.mark.parametrize(
    ("controller", "sentence"),
    [
        (NoPytree(), "The controller NoPytree is not a pytree; decorate its class with @jax.tree_util.register_datac"),
        (NoDataclass(), "The controller NoDataclass has no init and no update; see"),
        (NoUpdate(), "The controller NoUpdate has no update; see lehr.schedules.controllers."),
    ],
)
def test_an_own_controller_that_is_not_whole_is_refused(controller, sentence):
    with pytest.raises(InputError, match=sentence):
        schedule(controller, total_steps=100)


def test_own_controllers_stack(module):
    both = stack([Proportional(goal=2.0, maximum=9.0), Proportional(goal=4.0, maximum=9.0)])
    states = jax.vmap(lambda one: one.update(one.init(), {"episode/return": 1.0}))(both)
    np.testing.assert_allclose(states.value, [0.1, 0.3], rtol=1e-6)


@dataclass(frozen=True)
class Config:
    entropy_coef: Coef = 0.01


def test_a_config_keeps_an_own_controller_as_its_text_or_as_itself(module):
    named = Proportional(goal=2.0)
    (config,) = build([Config], {"entropy_coef": named})
    assert config.entropy_coef == to_mapping(config)["entropy_coef"] == f"{module}:Proportional(goal=2.0)"
    assert coefficients(config, 100)["entropy_coef"] == named

    @jax.tree_util.register_dataclass
    @dataclass(frozen=True)
    class Local(Proportional):
        pass

    local = Local(goal=2.0)
    (config,) = build([Config], {"entropy_coef": local})
    assert config.entropy_coef is local
    text = to_mapping(config)["entropy_coef"]
    assert text.startswith("<object ")
    assert coefficients(config, 100)["entropy_coef"] is local
    with pytest.raises(
        InputError, match=r"entropy_coef was an object, <object .*, which cannot be saved in a file; pass the"
    ):
        build([Config], {"entropy_coef": text})


def test_a_controller_without_limits_must_be_allowed_to_go_anywhere(module):
    (config,) = build([Config], {"entropy_coef": Proportional(goal=2.0, minimum=-math.inf)})
    with pytest.raises(InputError, match="reaches -inf; it must stay in"):
        coefficients(config, 100)
