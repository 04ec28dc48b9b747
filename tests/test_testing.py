"""`check_algorithm`: Lehr's own algorithms pass, and each promise that is broken is named."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr import algorithms
from lehr.algorithms import a2c
from lehr.config import Coef
from lehr.errors import InputError
from lehr.schedules import Coefficient
from lehr.testing import check_algorithm
from lehr.training.iteration import iteration
from lehr.training.plan import make_plan
from lehr.training.runners.device import metric_names
from tests.small import BACKTRACKING

SETTINGS: dict[str, dict[str, Any]] = {
    "ppg": {
        "policy_updates": 2,
        "auxiliary_epochs": 2,
        "auxiliary_minibatches": 2,
        "auxiliary_learning_rate": "0.005 -> 0",
    },
}
"""With an auxiliary phase within the updates of the check."""


def timed(quick: tuple[str, ...] = ()):
    """All algorithms as parameters: `make test` runs the quick ones, and CI leaves out those that learn a model."""
    modelled = [
        name for name in algorithms.names() if "train_ratio" in algorithms.find(name).Config.__dataclass_fields__
    ]
    marks = {name: pytest.mark.long if name in modelled else pytest.mark.slow for name in algorithms.names()}
    return [name if name in quick else pytest.param(name, marks=marks[name]) for name in algorithms.names()]


@pytest.mark.parametrize("algorithm", timed(("ppo",)))
def test_lehrs_own_algorithms_pass(algorithm):
    settings = SETTINGS.get(algorithm, {})
    assert check_algorithm(algorithm, **settings, **BACKTRACKING.get(algorithm, {})) == []


@pytest.mark.parametrize("algorithm", timed())
def test_lehrs_own_algorithms_learn(algorithm):
    assert (
        check_algorithm(algorithm, learns=True, **SETTINGS.get(algorithm, {}), **BACKTRACKING.get(algorithm, {})) == []
    )


@pytest.mark.slow
def test_values_of_normalised_rewards_are_not_compared_with_returns():
    assert check_algorithm("a2c", learns=True, normalise_rewards=True) == []


# What learn returns --------------------------------------------------------------------------------------------------


class NoMetrics(a2c.Algorithm):
    def learn(self, learner, rollout, coef, key):
        return super().learn(learner, rollout, coef, key)[0]


class AMetricOfManyNumbers(a2c.Algorithm):
    def learn(self, learner, rollout, coef, key):
        after, metrics = super().learn(learner, rollout, coef, key)
        return after, metrics | {"mine/advantage": rollout.reward}


def learned(name, change):
    """An algorithm whose learner and metrics are changed after each update."""

    def learn(self, learner, rollout, coef, key):
        return change(*a2c.Algorithm.learn(self, learner, rollout, coef, key))

    return type(name, (a2c.Algorithm,), {"learn": learn})


def with_metric(name, value):
    return learned("Own", lambda learner, metrics: (learner, metrics | {name: value}))


def with_auxiliary(value):
    return learned("Own", lambda learner, metrics: (learner._replace(auxiliary=value), metrics))


def half(learner):
    return learner._replace(params=jax.tree.map(lambda x: x.astype(jnp.float16), learner.params))


class NoTotal(a2c.Algorithm):
    def learn(self, learner, rollout, coef, key):
        after, metrics = super().learn(learner, rollout, coef, key)
        return after, {"loss/totel": metrics["loss/total"]}


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        (
            NoMetrics,
            "learn of NoMetrics must return two things, the learner and a dict of metrics; it returned Learner.",
        ),
        (AMetricOfManyNumbers, r"Numbers returned the metric 'mine/advantage' as float32\[16, 2\]; metrics are single"),
        (NoTotal, "learn of NoTotal returned no metric 'loss/total'.*; its metrics are loss/totel."),
        (with_metric("mine/name", "text"), "returned the metric 'mine/name' as str; metrics are single numbers, such"),
        (with_metric("mine/none", None), "returned the metric 'mine/none' as NoneType; metrics are single numbers"),
        (with_metric("mine/all", {"mean": 1.0}), "returned the metric 'mine/all' as dict; metrics are single numbers"),
        (with_metric(3, 1.0), r"returned the metric 3 as float32\[\]; .*, and their names are texts"),
        (learned("Own", lambda learner, metrics: (learner.params, metrics)), "of metrics; it returned dict, dict"),
        (learned("Own", lambda learner, metrics: (None, metrics)), "of metrics; it returned NoneType, dict"),
        (learned("Own", lambda learner, metrics: (learner, metrics, 1)), "of metrics; it returned Learner, dict, int"),
        (
            with_auxiliary({"target": 1.0}),
            r"returned learner.auxiliary as dict, but got it as tuple; structure, shapes",
        ),
        (with_auxiliary(None), r"returned learner.auxiliary as NoneType, but got it as tuple; structure, shapes"),
        (
            learned("Own", lambda learner, metrics: (half(learner), metrics)),
            r"returned learner.params\[.*\] as float16\[.*\], but got it as float32\[.*\]; structure, shapes and dtypes",
        ),
    ],
)
def test_an_algorithm_is_told_what_learn_must_return(algorithm, sentence):
    settings = {"env": "CartPole-v1", "num_envs": 2, "horizon": 16, "hidden_sizes": (4,)}
    plan = make_plan(algorithm, settings, abstract=True)
    with pytest.raises(InputError, match=sentence):
        metric_names(plan.program, plan.state)


def test_metrics_may_be_any_numbers():
    """They are converted, since devices sum them as arrays of one type."""
    more = {
        "mine/float": 1.0,
        "mine/int": 2,
        "mine/bool": True,
        "mine/numpy": np.float64(3),
        "mine/array": jnp.int32(4),
    }
    algorithm = learned("Own", lambda learner, metrics: (learner, metrics | more))
    plan = make_plan(algorithm, {"num_envs": 2, "horizon": 16, "hidden_sizes": (4,)}, abstract=True)
    _, metrics = jax.eval_shape(lambda state: iteration(plan.program, state), plan.state)
    assert {metrics[name].dtype for name in more} == {np.dtype(np.float32)}


# Settings --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unhashable(a2c.Config):
    options: dict[str, Any] = field(default_factory=dict)
    """More."""


@dataclass(frozen=True)
class Unexplained(a2c.Config):
    second_coef: Coef = 0.1


@dataclass(frozen=True)
class OutOfRange(a2c.Config):
    share: Annotated[Coef, Coefficient(maximum=1.0)] = 2.0
    """A share."""


@dataclass(frozen=True)
class Correcting(a2c.Config):
    share: Annotated[Coef, Coefficient(maximum=1.0)] = 0.5
    """A share."""

    def __post_init__(self):
        object.__setattr__(self, "share", 0.5)


@dataclass(frozen=True)
class Unreadable(a2c.Config):
    when: complex = 1j
    """A time."""


@dataclass(frozen=True)
class Alone:
    num_envs: int = 8
    """Environments."""


def with_config(cls):
    """A2C with other settings."""

    @dataclass(frozen=True)
    class Changed(a2c.Algorithm):
        Config: ClassVar[type] = cls

    return Changed


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (Unhashable, "Changed.Config is not hashable (unhashable type: 'dict'), so jit cannot take it"),
        (Unexplained, "The setting second_coef has no docstring: write one under it in Changed.Config"),
        (OutOfRange, "The default of share is refused: share is '2', which reaches 2; it must stay in [0, 1]"),
        (Correcting, "share = -1 is accepted, but its range is [0, 1]: do not change coefficients in the config."),
        (Unreadable, "Unreadable.when is annotated with <class 'complex'>; a config accepts Coef, Plugin, bool"),
        (Alone, "Changed.Config must be a dataclass(frozen=True) that inherits from lehr.algorithms.settings.Settings"),
    ],
)
def test_mistakes_in_the_settings_are_named(cls, sentence):
    problems = check_algorithm(with_config(cls))
    assert problems[0].startswith(sentence)
    assert len(problems) == (2 if cls is Correcting else 1)


def test_what_is_no_algorithm_is_a_problem_and_a_wrong_setting_an_error():
    (problem,) = check_algorithm(int)
    assert "is not an algorithm; give a class that inherits from lehr.algorithms.base.Algorithm" in problem
    with pytest.raises(InputError, match="There is no setting 'entrpy_coef'; did you mean 'entropy_coef'"):
        check_algorithm("a2c", entrpy_coef=0.1)


# Learning --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forgetful(a2c.Algorithm):
    """No total loss."""

    def learn(self, learner, rollout, coef, key):
        learner, metrics = super().learn(learner, rollout, coef, key)
        del metrics["loss/total"]
        return learner, metrics


@dataclass(frozen=True)
class Numbering(a2c.Algorithm):
    """Metrics with other names at each update."""

    calls: ClassVar[list[int]] = []

    def learn(self, learner, rollout, coef, key):
        learner, metrics = super().learn(learner, rollout, coef, key)
        self.calls.append(0)
        return learner, {**metrics, f"loss/number_{len(self.calls)}": metrics["loss/total"]}


@dataclass(frozen=True)
class Vector(a2c.Algorithm):
    """A metric that is no number."""

    def learn(self, learner, rollout, coef, key):
        learner, metrics = super().learn(learner, rollout, coef, key)
        return learner, {**metrics, "policy/rewards": rollout.reward[0]}


@dataclass(frozen=True)
class Growing(a2c.Algorithm):
    """A learner that changes its shape."""

    def learn(self, learner, rollout, coef, key):
        learner, metrics = super().learn(learner, rollout, coef, key)
        return learner._replace(auxiliary={"rewards": rollout.reward}), metrics


@dataclass(frozen=True)
class Broken(a2c.Algorithm):
    """What raises."""

    def learn(self, learner, rollout, coef, key):
        raise RuntimeError("no idea\nwhat to do")


@dataclass(frozen=True, eq=False)
class Unequal(a2c.Algorithm):
    """Two of them with the same settings differ."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclass(frozen=True)
class Refusing(a2c.Algorithm):
    """No actions at all."""

    @classmethod
    def build(cls, spaces, config, network_config, key):
        raise InputError(f"Actions are in {spaces.action}, which are none of ours.")


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        (Forgetful, "With discrete actions, learn of Forgetful returned no metric 'loss/total', which says whether"),
        (Numbering, "With discrete actions, the metrics of one update differ from those of another (loss/number_1, "),
        (Vector, "With discrete actions, learn of Vector returned the metric 'policy/rewards' as float32[8]; metrics"),
        (Growing, "With discrete actions, learn of Growing returned learner.auxiliary as dict, but got it as tuple; "),
        (Broken, "With discrete actions, learn raised RuntimeError: no idea"),
        (Unequal, "With discrete actions, building it raised TypeError: two algorithms with the same settings differ"),
        (Refusing, "It takes no kind of actions: Actions are in Discrete(n=2), which are none of ours."),
    ],
)
def test_mistakes_that_tracing_shows_are_named(algorithm, sentence):
    (problem,) = check_algorithm(algorithm)
    assert problem.startswith(sentence)


@dataclass(frozen=True)
class Counting(a2c.Algorithm):
    """Python state that changes with every trace."""

    calls: ClassVar[list[int]] = []

    def learn(self, learner, rollout, coef, key):
        self.calls.append(0)
        return super().learn(learner, rollout._replace(reward=rollout.reward * len(self.calls)), coef, key)


def test_state_that_is_hidden_in_python_is_named():
    (problem,) = check_algorithm(Counting)
    assert problem.startswith("Tracing an update twice gave different results for the same state: keep everything")


@dataclass(frozen=True)
class WeakAlgorithm(a2c.Algorithm):
    """A learner whose number is a Python number at first, and an array later."""

    def init(self, key, params, example):
        return super().init(key, params, example)._replace(auxiliary=0.0)

    def learn(self, learner, rollout, coef, key):
        after, metrics = super().learn(learner._replace(auxiliary=()), rollout, coef, key)
        return after._replace(auxiliary=learner.auxiliary + metrics["loss/total"]), metrics


def test_a_second_trace_is_named():
    (problem,) = check_algorithm(WeakAlgorithm)
    assert problem.startswith("The program was traced more than once in a run: return the learner with the dtypes")


@dataclass(frozen=True)
class Idle(a2c.Config):
    idle_coef: Annotated[Coef, Coefficient(("lazy_coef",))] = 0.3
    """Nobody looks at it."""


@dataclass(frozen=True)
class Careless(a2c.Algorithm):
    """Ignores a coefficient, and hides NaNs; and it takes no boxes, which is its right."""

    Config: ClassVar[type] = Idle

    @classmethod
    def build(cls, spaces, config, network_config, key):
        if spaces.action.shape == (1,):
            raise InputError("Boxes are too hard.")
        return super().build(spaces, config, network_config, key)

    def learn(self, learner, rollout, coef, key):
        return super().learn(learner, rollout._replace(reward=jnp.nan_to_num(rollout.reward)), coef, key)


def test_a_coefficient_that_is_ignored_and_a_nan_that_is_hidden_are_named():
    ignored, hidden = check_algorithm(Careless)
    assert ignored.startswith(
        "The coefficient idle_coef changes nothing that is learned: use coef['idle_coef'] in learn"
    )
    assert hidden.startswith("An update on a NaN reward was applied: let the NaN reach loss/total")


@dataclass(frozen=True)
class Replaying(a2c.Algorithm):
    """Keeps the rewards of all time, and learns from their mean: a NaN stays."""

    def init(self, key, params, example):
        return super().init(key, params, example)._replace(memory=jnp.float32(0))

    def learn(self, learner, rollout, coef, key):
        seen = learner.memory + jnp.sum(rollout.reward)
        rollout = rollout._replace(reward=rollout.reward - 1e-3 * seen)
        after, metrics = super().learn(learner._replace(memory=()), rollout, coef, key)
        return after._replace(memory=seen), metrics


@pytest.mark.slow
def test_a_nan_that_is_remembered_is_named():
    (problem,) = check_algorithm(Replaying)
    assert problem.startswith("After a NaN reward, later updates were not finite either: data in the learner's memory")


@dataclass(frozen=True)
class Contrary(a2c.Algorithm):
    """Learns what not to do."""

    def learn(self, learner, rollout, coef, key):
        return super().learn(learner, rollout._replace(reward=-rollout.reward), coef, key)


@pytest.mark.slow
def test_what_does_not_learn_is_named():
    assert check_algorithm(Contrary) == []
    (problem,) = check_algorithm(Contrary, learns=True)
    assert problem.startswith("On a task of one step its return is -")
