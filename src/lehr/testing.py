"""`check_algorithm`: check that an algorithm keeps what Lehr promises of every algorithm, and explain what to fix.

Lehr's own algorithms are held to the same checks. For environments there is `lehr.envs.check_env`.
"""

import contextlib
import inspect
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr import algorithms, config
from lehr.algorithms.base import Algorithm
from lehr.algorithms.settings import Settings
from lehr.config.fields import MISSING
from lehr.envs import AutoReset, Environment, TimeLimit
from lehr.envs.builtin.probes import TIME_LIMIT, PolicyReward
from lehr.errors import InputError
from lehr.schedules import coefficient_schedule, env_steps, schedule
from lehr.schedules.bundle import Coefficients, bundle, population
from lehr.spaces import Box, Discrete, MultiDiscrete, Space, Spaces
from lehr.training import checkpoint
from lehr.training.guard import checked
from lehr.training.iteration import iteration
from lehr.training.program import Program, build_reward_model, builder, initial_state
from lehr.training.runners.device import chunk, metric_names
from lehr.types import Key, Learner, Metrics, PyTree, Timestep, TrainState, derive

SMALL: dict[str, Any] = {
    "num_envs": 8,
    "horizon": 8,
    "epochs": 2,
    "minibatches": 2,
    "hidden_sizes": (16,),
    "recurrent_size": 8,
    "batch_size": 8,
    "batch_length": 8,
    "train_ratio": 1.0,
    "replay_size": 1024,
    "prefill": 64,
}
"""Sizes to check with, for algorithms that have such settings: compiling takes most of the time."""

UPDATES = 6
LEARNING_UPDATES = 200
GOOD_RETURN, VALUE_TOLERANCE = 0.8, 0.1


def check_algorithm(algorithm: Any, *, learns: bool = False, **settings: Any) -> list[str]:
    """Return the problems found, one sentence each; an empty list means that the algorithm keeps Lehr's promises.

    Checks its settings, then traces `learn` for every kind of action that it takes, then trains a few updates of a tiny
    task: one trace for all of them, exact resume from a checkpoint, coefficients that are logged and have an effect, a
    NaN reward that is not learned from, and a population that learns as its members do. Stops at the first stage with a
    problem, since later stages depend on earlier ones.

    Args:
        algorithm: its class, its name, or `module:Name`.
        learns: whether to train it on a task of one step too, and check its return and its value; takes longer.
        settings: of the algorithm and its network, where the defaults do not use all of its coefficients.

    A test of an algorithm is one line, `assert check_algorithm(MyAlgorithm) == []`.
    """
    try:
        found = algorithms.find(algorithm, settings)
    except InputError as error:
        return [str(error)]
    if problems := _declaration(found):
        return problems
    _settings(found, settings, SMALL)  # a mistake in what was given is no problem of the algorithm: it raises
    cases, problems = _cases(found, settings)
    if problems:
        return problems
    first = next(iter(cases.values()))
    if problems := _pure(first) or _trained(first):
        return problems
    return _learned(found, cases, settings) if learns else []


# The task ------------------------------------------------------------------------------------------------------------

ACTIONS: dict[str, Space] = {
    "discrete": Discrete(2),
    "multi-discrete": MultiDiscrete((2, 3)),
    "box": Box(-1, 1, (1,)),
}
"""The kinds of actions to try."""


class TaskState(NamedTuple):
    """What the task remembers."""

    sign: jax.Array
    steps: jax.Array
    poisoned: jax.Array
    """bool `[]`: the next reward is a NaN."""


@dataclass(frozen=True)
class Task(Environment):
    """Four steps whose reward is the mean of the action times a sign that is observed; half of them are truncated."""

    actions: str = "discrete"
    observation_space: ClassVar[Space] = Box(-1, 1, (2,))

    @property
    def action_space(self) -> Space:
        """Of the kind that was asked for."""
        return ACTIONS[self.actions]

    def reset(self, key: Key) -> tuple[TaskState, jax.Array]:
        """Draw the sign."""
        state = TaskState(jax.random.rademacher(key, (), jnp.float32), jnp.int32(0), jnp.bool_(False))
        return state, self._observation(state)

    def step(self, key: Key, state: TaskState, action: jax.Array) -> tuple[TaskState, Timestep]:
        """Reward the action, with a NaN if the state is poisoned."""
        reward = jnp.where(state.poisoned, jnp.nan, state.sign * jnp.mean(action.astype(jnp.float32)))
        state = TaskState(state.sign, state.steps + 1, jnp.bool_(False))
        done = state.steps >= 4
        terminated, truncated = done & (state.sign > 0), done & (state.sign < 0)
        return state, Timestep(self._observation(state), reward, terminated, truncated, {})

    def _observation(self, state: TaskState) -> jax.Array:
        return jnp.stack([state.sign, state.steps / 4])


class Case(NamedTuple):
    """A program of the algorithm, and what its states are made of."""

    name: str
    """The algorithm's."""
    program: Program
    settings: Any
    varied: dict[str, tuple[float, float, float]]
    """By coefficient: its start, its end, and the least that it may be."""
    build: Callable[[Key], Any]
    data: PyTree
    """What its reward model loads."""

    @property
    def total_steps(self) -> int:
        """The budget that schedules are bound to."""
        return 2 * UPDATES * self.program.steps_per_update

    def schedules(self, scaled: str | None = None, backwards: bool = False) -> dict[str, Any]:
        """All coefficients as lines from start to end, one of them close to the least that it may be."""
        found = {}
        for name, (start, end, least) in self.varied.items():
            ends = [least + (x - least) * (1e-6 if name == scaled else 1.0) for x in (start, end)]
            first, last = reversed(ends) if backwards else ends
            found[name] = schedule(f"{first!r} -> {last!r}", self.total_steps)
        return found

    def state(self, coefficients: Coefficients, seed: int = 0) -> TrainState:
        """A first state."""
        key = jax.random.key(seed)
        params = self.build(derive(key, "network"))[1]
        begin = jax.jit(partial(initial_state, self.program), compiler_options=_quickly())
        return begin(coefficients, params, key, self.data)


# The settings --------------------------------------------------------------------------------------------------------


def _declaration(found: type[Algorithm]) -> list[str]:
    """Check the class of the settings."""
    cls, name = found.Config, f"{found.__name__}.Config"
    if not (is_dataclass(cls) and issubclass(cls, Settings) and "__dataclass_fields__" in vars(cls)):
        return [
            f"{name} must be a dataclass(frozen=True) that inherits from lehr.algorithms.settings.Settings, or from "
            "one of the groups of settings there."
        ]
    try:
        described = config.describe(cls)
    except TypeError as error:
        return [f"{error}"]
    try:
        inspect.getsource(cls)
        unexplained = [field.name for field in described if not field.help]
    except (OSError, TypeError):  # typed at a prompt: there is no source to read docstrings from
        unexplained = []
    problems = [
        f"The setting {field} has no docstring: write one under it in {name}; it is the help of its flag."
        for field in unexplained
    ]
    try:
        hash(config.build([cls], {})[0])
    except InputError:  # a setting without a default
        pass
    except TypeError as error:
        problems.append(
            f"{name} is not hashable ({error}), so jit cannot take it as a static argument: use numbers, texts and "
            "tuples as settings."
        )
        return problems
    for field in described:
        if field.coefficient is not None:
            problems += _ranges(cls, field)
    return problems


def _ranges(cls: type, field: config.FieldDescription) -> list[str]:
    """Check that the default of a coefficient is in its range, and that what is out of range is refused."""
    assert field.coefficient is not None
    entry = field.coefficient

    def refusal(value: Any) -> str | None:
        try:
            (made,) = config.build([cls], {field.name: value})
            coefficient_schedule(entry, {field.name: getattr(made, field.name)}, 1000)
        except InputError as error:
            return str(error)
        return None

    problems = []
    if field.default is not None and field.default is not MISSING and (sentence := refusal(field.default)):
        problems.append(f"The default of {field.name} is refused: {sentence}")
    for outside in (entry.minimum - 1, entry.maximum + 1):
        if math.isfinite(outside) and refusal(outside) is None:
            problems.append(
                f"{field.name} = {outside:g} is accepted, but its range is {entry.range_text}: do not "
                "change coefficients in the config."
            )
    return problems


def _varied(field: config.FieldDescription, given: Any) -> tuple[float, float, float]:
    """A start and an end for a coefficient, within its range and of its size, and the least that it may be."""
    assert field.coefficient is not None
    low, high = field.coefficient.minimum, field.coefficient.maximum
    low = low if math.isfinite(low) else 0.0
    size = 1.0 if given is None else max(abs(bound) for bound in schedule(given, 1000).bounds())
    span = min(size if math.isfinite(size) else low + 1.0, high) - low
    if span <= 0:
        span = min(1.0, high - low)
    return low + 0.95 * span, low + 0.5 * span, low


def _settings(found: type[Algorithm], given: dict[str, Any], more: dict[str, Any]) -> tuple[Any, Any]:
    """The configs of the algorithm and its network: the user's settings above `more`, as far as they have its names."""
    classes = algorithms.settings_of(found)
    known = {field.name for cls in classes for field in config.describe(cls)}
    below = {name: value for name, value in more.items() if name in known}
    made = config.build(classes, config.merge(classes, below, given))
    return made[0], made[1]


def _settings_on(
    env: AutoReset, found: type[Algorithm], given: dict[str, Any], more: dict[str, Any]
) -> tuple[Any, Any]:
    """The same, with what they leave to the spaces of an environment."""
    settings, network = _settings(found, given, more)
    return settings.for_spaces(Spaces(env.observation_space, env.action_space)), network


# Actions, and what `learn` gives -------------------------------------------------------------------------------------


def _cases(found: type[Algorithm], given: dict[str, Any]) -> tuple[dict[str, Case], list[str]]:
    """A program for each kind of actions that the algorithm takes, and the problems of building and tracing them."""
    cases, refusals = {}, []
    for kind in ACTIONS:
        try:
            case = _case(found, Task(kind), given)
        except InputError as error:
            refusals.append(str(error))
            continue
        except Exception as error:
            return {}, [f"With {kind} actions, {_raised('building it', error)}"]
        if problems := _traced(case):
            return {}, [f"With {kind} actions, {problem}" for problem in problems]
        cases[kind] = case
    if not cases:
        return {}, [f"It takes no kind of actions: {refusals[0]}"]
    return cases, []


def _case(found: type[Algorithm], env: Environment, given: dict[str, Any]) -> Case:
    prepared = AutoReset(env)
    with _trial(found, prepared) as trial:
        return _case_with(found, prepared, given, {**SMALL, **trial})


@contextlib.contextmanager
def _trial(found: type[Algorithm], env: AutoReset) -> Iterator[dict[str, Any]]:
    """The settings without which the algorithm cannot be trained, while the files that they name exist."""
    with tempfile.TemporaryDirectory() as folder:
        yield found.trial_settings(Spaces(env.observation_space, env.action_space), Path(folder))


def _case_with(found: type[Algorithm], prepared: AutoReset, given: dict[str, Any], below: dict[str, Any]) -> Case:
    settings, network = _settings_on(prepared, found, given, below)
    described = [field for field in config.describe(found.Config) if field.is_coefficient]
    chosen = {field.name: _varied(field, getattr(settings, field.name)) for field in described}
    # Coefficients that are none are switched on, if the algorithm allows all of them at once.
    on = {name: start for name, (start, _, _) in chosen.items() if getattr(settings, name) is None}
    try:
        settings = _settings_on(prepared, found, {**given, **on}, below)[0]
    except InputError:
        chosen = {name: ends for name, ends in chosen.items() if name not in on}
    varied = {name: ends for name, ends in chosen.items() if name not in settings.unused}
    build = builder(found, prepared, settings, network)
    built, again = (build(jax.random.key(seed))[0] for seed in range(2))
    if hash(built) != hash(again) or built != again:
        raise TypeError(
            "two algorithms with the same settings differ, so each would be compiled: make it a dataclass(frozen=True) "
            "without arrays"
        )
    program = Program(prepared, built, build_reward_model(found, settings, prepared))
    return Case(found.__name__, program, settings, varied, build, program.reward_model.load().data)


def _traced(case: Case) -> list[str]:
    """Trace `init` and `learn`, and check what `learn` gives: structures, shapes, names."""
    program, algorithm, key = case.program, case.program.algorithm, jax.random.key(0)
    coefficients = bundle(case.schedules())

    def begin(key: Key) -> TrainState:
        return initial_state(program, coefficients, case.build(key)[1], key, case.data)

    def learn(state: TrainState) -> Metrics:
        rollout = program.collected_shapes(state.learner.params, state.observation_statistics, state.actor).rollout
        coef = jax.eval_shape(lambda: coefficients.values(coefficients.init(), env_steps(jnp.uint32(0), 64)))

        def metrics(learner: Learner, *others: Any) -> Metrics:
            return checked(algorithm, learner, algorithm.learn(learner, *others))[1]

        return jax.eval_shape(metrics, state.learner, rollout, coef, key)

    try:
        state = jax.eval_shape(begin, key)
    except Exception as error:
        return [_raised("init", error)]
    try:
        metrics, again = learn(state), learn(state)
    except InputError as error:
        return [str(error)]
    except Exception as error:
        return [_raised("learn", error)]
    if differing := sorted(set(metrics) ^ set(again)):
        return [
            f"the metrics of one update differ from those of another ({', '.join(differing)}): always give the same."
        ]
    return []


def _pure(case: Case) -> list[str]:
    """Check that tracing an update twice gives the same program, so that nothing is hidden in Python objects."""
    state = case.state(bundle(case.schedules()))
    try:
        first, second = (jax.jit(lambda state: iteration(case.program, state)).lower(state) for _ in range(2))
        if first.as_text() == second.as_text():
            return []
        same = _identical(*(lowered.compile()(state) for lowered in (first, second)))
    except Exception as error:
        return [_raised("An update", error)]
    if same:
        return []
    return [
        "Tracing an update twice gave different results for the same state: keep everything that changes in the "
        "learner, and draw random numbers from the key alone."
    ]


# A few updates -------------------------------------------------------------------------------------------------------


def _trained(case: Case) -> list[str]:
    """Train a few updates with one compiled program, and look at what happened."""
    traces = 0

    def counted(state: TrainState, count: jax.Array) -> tuple[TrainState, jax.Array]:
        nonlocal traces
        traces += 1
        return chunk(case.program, UPDATES, state, count)

    compiled = jax.jit(counted, compiler_options=_quickly())

    def advance(state: TrainState, count: int) -> tuple[TrainState, np.ndarray]:
        state, rows = compiled(state, jnp.int32(count))
        return state, np.asarray(rows)[:count]

    base = case.schedules()
    try:
        state = case.state(bundle(base))
        names = metric_names(case.program, state)
        after, rows = advance(state, UPDATES)
    except Exception as error:
        return [_raised("A chunk of updates", error)]
    if traces > 1 or not _identical(jax.eval_shape(lambda: state), jax.eval_shape(lambda: after)):
        return [_RETRACED]
    problems = _resumed(advance, state, after, rows)
    problems += _coefficients(case, advance, state, after, dict(zip(names, rows.T, strict=True)))
    problems += _poisoned(advance, state)
    problems += _population(case, advance, state)
    return problems or ([_RETRACED] if traces > 1 else [])


_RETRACED = (
    "The program was traced more than once in a run: return the learner with the dtypes that init gave it, and keep "
    "Python numbers out of it."
)


def _resumed(advance: Callable, state: TrainState, after: TrainState, rows: np.ndarray) -> list[str]:
    """Six updates are two, one and three, with a checkpoint after each."""
    resumed, pieces = state, []
    with tempfile.TemporaryDirectory() as place:
        for count in (2, 1, 3):
            resumed, more = advance(resumed, count)
            pieces.append(more)
            try:
                checkpoint.save(Path(place), resumed.saved, int(resumed.updates), {})
                saved, _, _ = checkpoint.newest(Path(place), state.saved)
            except Exception as error:
                return [_raised("Saving the state to a checkpoint and loading it", error)]
            resumed = saved.completed(state)
    if _identical(resumed.saved, after.saved) and np.concatenate(pieces).tobytes() == rows.tobytes():
        return []
    return [
        "A run that is stopped and resumed differs from one that is not: keep all that learning remembers in the "
        "learner."
    ]


def _coefficients(
    case: Case, advance: Callable, state: TrainState, after: TrainState, metrics: dict[str, np.ndarray]
) -> list[str]:
    """Each coefficient is logged as it was scheduled, and changes what is learned."""
    problems = []
    steps = case.program.steps_per_update * np.arange(UPDATES)
    for name, one in case.schedules().items():
        logged = metrics.get(f"coef/{name}")
        if logged is None or not np.allclose(logged, one(steps), rtol=1e-5):
            problems.append(f"The coefficient {name} is not logged as it was scheduled: give no metric that name.")
            continue
        changed, _ = advance(state._replace(coefficients=bundle(case.schedules(scaled=name))), UPDATES)
        if _identical(changed.learner, after.learner):
            problems.append(
                f"The coefficient {name} changes nothing that is learned: use coef[{name!r}] in learn, or name it in "
                "the config's property unused; if it has an effect only with other settings, check with these."
            )
    return problems


def _poisoned(advance: Callable, state: TrainState) -> list[str]:
    """A NaN reward is not learned from, and forgotten afterwards."""
    sound, _ = advance(state, 1)
    env_state = sound.actor.env_state
    marked = env_state._replace(poisoned=env_state.poisoned.at[0].set(True))
    hurt, _ = advance(sound._replace(actor=sound.actor._replace(env_state=marked)), 1)
    if int(hurt.rejected) != 1:
        return [
            "An update on a NaN reward was applied: let the NaN reach loss/total, so that the update is seen to be "
            "broken and not applied."
        ]
    if not _identical(hurt.learner._replace(memory=()), sound.learner._replace(memory=())):
        return ["An update on a NaN reward changed the learner."]
    healed, _ = advance(hurt, UPDATES)
    if int(healed.rejected) != 1:
        return [
            "After a NaN reward, later updates were not finite either: data in the learner's memory must be "
            "overwritten, and the counter of what is valid in it belongs in auxiliary."
        ]
    return []


def _population(case: Case, advance: Callable, state: TrainState) -> list[str]:
    """Two members with seeds and schedules of their own, in one program, learn as they do alone."""
    schedules = case.schedules(), case.schedules(backwards=True)
    members = [case.state(bundle(one), seed) for seed, one in enumerate(schedules)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(member._replace(coefficients=()) for member in members))
    together = stacked._replace(coefficients=population(schedules))
    try:
        update = jax.jit(jax.vmap(partial(iteration, case.program)), compiler_options=_quickly())
        for _ in range(2):
            together, _ = update(together)
    except Exception as error:
        return [_raised("An update of a population, under vmap,", error)]
    for index, member in enumerate(members):
        alone, _ = advance(member, 2)
        found = jax.tree.map(lambda x, index=index: x[index], together.learner)
        if not jax.tree.all(jax.tree.map(_close, found, alone.learner)):
            return [
                "A member of a population learns something else than the same run alone: let nothing depend on values "
                "outside of the arguments, and do not use the batch axis of vmap."
            ]
    return []


# Learning ------------------------------------------------------------------------------------------------------------


def _learned(found: type[Algorithm], cases: dict[str, Case], given: dict[str, Any]) -> list[str]:
    """Train on a task of one step, whose best return is about 1, and compare the return and the value with that."""
    if "discrete" not in cases and "box" not in cases:
        return []
    rates = {field.name: "0.02 -> 0" for field in config.describe(found.Config) if "learning_rate" in field.name}
    probe = {"num_envs": 16, "entropy_coef": 0.0, "discount": 0.7, "initial_log_std": -1.0, **rates}
    probe["normalise_rewards"] = False  # so that values are in the units of returns
    env = AutoReset(TimeLimit(PolicyReward(continuous="discrete" not in cases), TIME_LIMIT))
    key = jax.random.key(0)
    with _trial(found, env) as trial:
        settings, network = _settings_on(env, found, given, {**SMALL, **probe, **trial})
        built, params = builder(found, env, settings, network)(derive(key, "network"))
        program = Program(env, built, build_reward_model(found, settings, env))
        data = program.reward_model.load().data
    coefficients = config.coefficients(settings, LEARNING_UPDATES * program.steps_per_update)
    used = bundle({name: one for name, one in coefficients.items() if name not in settings.unused})
    try:
        state = jax.jit(partial(initial_state, program))(used, params, key, data)
        names = metric_names(program, state)
        train = jax.jit(partial(chunk, program, LEARNING_UPDATES), compiler_options=_quickly())
        state, rows = train(state, jnp.int32(LEARNING_UPDATES))
    except Exception as error:
        return [_raised("Training on a task of one step", error)]
    reached = float(np.asarray(rows)[-20:, names.index("episode/return")].mean())
    if not reached > GOOD_RETURN:
        return [
            f"On a task of one step its return is {reached:.2f} after {LEARNING_UPDATES} updates, but a policy that "
            f"learns gets more than {GOOD_RETURN}: check the sign of the policy loss, and the learning rate."
        ]
    if "value" not in built.needs or settings.normalise_rewards:
        return []
    value = float(built.value(state.learner.params, built.initial_carry((1,)), jnp.zeros((1, 1)))[0])
    if abs(value - reached) > VALUE_TOLERANCE:
        return [
            f"On a task of one step its return is {reached:.2f}, but its value is {value:.2f}: check the value loss "
            "and its targets."
        ]
    return []


# Help ----------------------------------------------------------------------------------------------------------------


def _quickly() -> dict[str, Any]:
    """Options with which XLA compiles in half the time; machine code that is not optimised is good enough here."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


def _bits(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.weak_type
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.shape, array.dtype, array.tobytes()


def _identical(one: PyTree, other: PyTree) -> bool:
    """Whether two pytrees hold the same bits, or the same shapes and dtypes."""
    structures: list[Any] = [jax.tree.structure(one), jax.tree.structure(other)]
    if structures[0] != structures[1]:
        return False
    return jax.tree.all(jax.tree.map(lambda x, y: _bits(x) == _bits(y), one, other))


def _close(one: jax.Array, other: jax.Array) -> bool:
    """Whether two arrays are equal up to rounding."""
    if jnp.issubdtype(one.dtype, jnp.floating):
        return bool(np.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True))
    return _bits(one) == _bits(other)


def _raised(what: str, error: Exception) -> str:
    """An exception in one sentence."""
    lines = str(error).strip().splitlines() or [""]
    return f"{what} raised {type(error).__name__}: {lines[0]}"
