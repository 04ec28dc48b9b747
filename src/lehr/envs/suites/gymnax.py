"""Gymnax's environments, `gymnax:NAME`: classic control, MinAtar, bsuite and others, for Gymnax 0.0.9 and 1.

A time limit is a truncation, even where Gymnax 0.0.9 ends the episode; see `FIXED_LENGTH` for tasks whose length is
part of the task. Lehr resets the environments; Gymnax's automatic resets are not used.
"""

import functools
import inspect
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr.envs.base import NEVER, Environment
from lehr.envs.builtin import classic
from lehr.envs.suites.foreign import FromSource, by_their_rules, settle
from lehr.errors import InputError, closest
from lehr.plugins import require
from lehr.spaces import Box, Dict, Discrete, Space
from lehr.types import Key, PyTree, Timestep

FIXED_LENGTH = frozenset(
    {
        "BernoulliBandit",
        "DeepSea",
        "DiscountingChain",
        "GaussianBandit",
        "MetaMaze",
        "MNISTBandit",
        "PointRobot",
        "SimpleBandit",
    }
)
"""Gymnax classes whose length is part of the task: the observation contains the time, or the end is predictable.
Their last step terminates the episode."""

LOOSE_BOUNDS = frozenset({"GaussianBandit", "MemoryChain", "MetaMaze", "MNISTBandit", "UmbrellaChain"})
"""Gymnax classes whose observations leave the declared bounds; their spaces are unbounded here."""

_ENDLESS = 2**31 - 1


def names() -> list[str]:
    """Return the names that can follow the prefix `gymnax:`."""
    return sorted(_gymnax().registered_envs)


def make(name: str, **parameters: Any) -> "Gymnax":
    """Create a Gymnax environment by name; parameters are arguments of its class or fields of its `EnvParams`."""
    known = names()
    if name not in known:
        raise InputError(f"There is no environment named 'gymnax:{name}'; {closest(name, known, 'gymnax:')}")
    return _checked(name, parameters)


def adapt(env: Any, **parameters: Any) -> "Gymnax":
    """Adapt a Gymnax environment object; parameters are fields of its `EnvParams`."""
    if not isinstance(env, _gymnax().environments.environment.Environment):
        raise InputError(
            f"Gymnax's wrapper {type(env).__name__} is not supported: give the environment that it wraps, and use the "
            "wrappers of lehr.envs."
        )
    return _checked(env, parameters)


@dataclass(frozen=True)
class Gymnax(FromSource):
    """A Gymnax environment. The state is Gymnax's; `info` is empty.

    Images are masks of zeros and ones. They are int8 instead of float32: a rollout takes a quarter of the memory, and
    the network sees the same numbers.
    """

    @property
    def task(self) -> "_Task":
        """Gymnax's environment and spaces, with the actual dtype of the observations."""
        return _task(self.source, self.parameters)

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Start an episode."""
        task = self.task
        with by_their_rules():
            obs, state = task.env.reset_env(key, task.params)
        return jax.tree.map(settle, state, task.dtypes), _observation(task.observation_space, obs)

    def step(self, key: Key, state: PyTree, action: PyTree) -> tuple[PyTree, Timestep]:
        """Take one step."""
        task = self.task
        with by_their_rules():
            obs, state, reward, done, _ = task.env.step_env(key, state, action, task.step_params)
            done, late = jnp.asarray(done, bool), task.is_late(state)
        if task.fixed_length:
            terminated, truncated = done | late, jnp.asarray(False)
        else:
            terminated, truncated = (done if task.tells_apart else done & ~late), late
        timestep = Timestep(
            _observation(task.observation_space, obs), jnp.asarray(reward, jnp.float32), terminated, truncated, {}
        )
        return jax.tree.map(settle, state, task.dtypes), timestep

    @property
    def can_show(self) -> bool:
        """Whether `twin` or `figure` shows a state."""
        return self.task.env.name in _TWINS or hasattr(self.task.env, "render")

    def twin(self, state: PyTree) -> tuple[Environment, PyTree] | None:
        """The same task and state as one of Lehr's own, if there is one."""
        return make_twin(state, self.task.params) if (make_twin := _TWINS.get(self.task.env.name)) else None

    def figure(self, state: PyTree) -> Any:
        """Gymnax's own drawing of a state, a Matplotlib figure."""
        with by_their_rules():
            return self.task.env.render(state, self.task.params)[0]


_TWINS: dict[str, Any] = {
    "CartPole-v1": lambda state, params: (
        classic.CartPole(half_length=float(params.length), position_limit=float(params.x_threshold)),
        classic.CartPoleState(state.x, state.x_dot, state.theta, state.theta_dot),
    ),
    "Pendulum-v1": lambda state, params: (
        classic.Pendulum(length=float(params.l)),
        classic.PendulumState(state.theta, state.theta_dot),
    ),
    "Acrobot-v1": lambda state, params: (
        classic.Acrobot(),
        classic.AcrobotState(state.joint_angle1, state.joint_angle2, state.velocity_1, state.velocity_2),
    ),
    "MountainCar-v0": lambda state, params: (
        classic.MountainCar(goal_position=float(params.goal_position)),
        classic.MountainCarState(state.position, state.velocity),
    ),
    "MountainCarContinuous-v0": lambda state, params: (
        classic.MountainCarContinuous(goal_position=float(params.goal_position)),
        classic.MountainCarState(state.position, state.velocity),
    ),
}
"""By Gymnax's name: a state as that of Lehr's own task of the same name, of a state and the params."""


class _Task(NamedTuple):
    """Everything that is created once per source and parameters."""

    env: Any
    params: Any
    step_params: Any
    """The params for `step`, without the time limit if Gymnax would treat it as a termination."""
    tells_apart: bool
    """Whether `done` of a step excludes the time limit."""
    fixed_length: bool
    observation_space: Space
    action_space: Space
    truncation_gap: int
    dtypes: PyTree
    """The dtypes of the state's leaves."""

    def is_late(self, state: PyTree) -> jax.Array:
        """Whether the time limit is reached."""
        if hasattr(self.env, "is_truncated"):
            return jnp.asarray(self.env.is_truncated(state, self.params), bool)
        if not hasattr(state, "time"):
            return jnp.asarray(False)
        return jnp.asarray(state.time >= self.params.max_steps_in_episode, bool)


@functools.cache
def _task(source: Any, parameters: tuple[tuple[str, Any], ...]) -> _Task:
    with by_their_rules():
        env, params = _build(source, dict(parameters))
        own = type(env).__module__.startswith("gymnax.")
        kind = type(env).__name__ if own else ""
        fixed_length, separates = kind in FIXED_LENGTH, hasattr(env, "is_truncated")
        # In Gymnax 0.0.9, without a time limit, `done` is a termination. A third-party class might also use the limit
        # for something else, as the tasks of fixed length do, so it keeps its limit.
        removes_limit = own and not separates and not fixed_length
        step_params = params.replace(max_steps_in_episode=_ENDLESS) if removes_limit else params
        dtypes, observed = _outputs(env, params, step_params)
        return _Task(
            env=env,
            params=params,
            step_params=step_params,
            tells_apart=removes_limit or separates,
            fixed_length=fixed_length,
            observation_space=_observation_space(
                env.observation_space(params), observed, kind in LOOSE_BOUNDS, masks=own
            ),
            action_space=_space(env.action_space(params)),
            truncation_gap=NEVER if fixed_length else _truncation_gap(env, params),
            dtypes=dtypes,
        )


def _truncation_gap(env: Any, params: Any) -> int:
    base = _gymnax().environments.environment.Environment
    if getattr(type(env), "is_truncated", None) is not getattr(base, "is_truncated", None):
        return 1
    return max(1, int(params.max_steps_in_episode))


def _outputs(env: Any, params: Any, step_params: Any) -> tuple[PyTree, PyTree]:
    """Return the dtypes of the state, and the shape and dtype of the observation."""
    key, actions = jax.random.key(0), _space(env.action_space(params))
    observed, begun = jax.eval_shape(lambda key: env.reset_env(key, params), key)
    try:
        step = jax.eval_shape(lambda key, state: env.step_env(key, state, actions.sample(key), step_params), key, begun)
        jax.tree.map(lambda before, after: jnp.broadcast_shapes(before.shape, after.shape), begun, step[1])
    except Exception as error:
        raise InputError(
            f"{type(env).__name__} does not work in the installed version of gymnax: its first step fails "
            f"({type(error).__name__}: {error}); install another version."
        ) from error
    return jax.tree.map(lambda x: x.dtype, step[1]), observed


def _checked(source: Any, parameters: dict[str, Any]) -> Gymnax:
    """Check the parameters and create the environment."""
    described = f"gymnax:{source}" if isinstance(source, str) else type(source).__name__
    with by_their_rules():
        defaults = _defaults(*_build(source, {}), with_class=isinstance(source, str))
    for name, value in parameters.items():
        if name not in defaults:
            raise InputError(f"{described} has no parameter {name!r}; {closest(name, defaults) if defaults else ''}")
        parameters[name] = _frozen(described, name, value, defaults[name])
    made = Gymnax(source, tuple(sorted(parameters.items())))
    _ = made.task
    return made


def _defaults(env: Any, params: Any, with_class: bool) -> dict[str, Any]:
    """Return all parameters with their defaults: fields of the params and, for a name, arguments of the class."""
    arguments = inspect.signature(type(env)).parameters.values() if with_class else ()
    of_class = {p.name: p.default for p in arguments if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return of_class | {field.name: getattr(params, field.name) for field in fields(params)}


def _frozen(described: str, name: str, value: Any, default: Any) -> Any:
    """Convert to a hashable value of the default's type, so that equal environments compare equal."""
    if isinstance(value, (np.ndarray, jax.Array)):
        value = value.tolist()
    if isinstance(value, list):
        value = tuple(tuple(row) if isinstance(row, list) else row for row in value)
    if isinstance(default, (bool, int, float)):
        if not isinstance(value, (bool, int, float)) or type(default)(value) != value:
            raise InputError(
                f"{described} got {name}={value!r}; it must be {'a bool' if isinstance(default, bool) else 'a number'} "
                f"such as {default!r}."
            )
        value = type(default)(value)
    try:
        hash(value)
    except TypeError:
        raise InputError(
            f"{described} got {name}={value!r}; it must be a number, a string or a list of these."
        ) from None
    return value


def _build(source: Any, parameters: dict[str, Any]) -> tuple[Any, Any]:
    """Create the Gymnax environment and its params."""
    # The first call may come from a traced function, but the arrays of the environment must not be tracers.
    with jax.ensure_compile_time_eval():
        if not isinstance(source, str):
            return source, _replaced(source.default_params, parameters)
        try:
            env, params = _gymnax().make(source)
            of_params = {field.name for field in fields(params)}
            of_class = {name: value for name, value in parameters.items() if name not in of_params}
            if of_class:
                env, params = _gymnax().make(source, **of_class)
        except Exception as error:
            raise InputError(f"gymnax:{source} could not be created ({type(error).__name__}: {error}).") from error
        return env, _replaced(params, {name: value for name, value in parameters.items() if name in of_params})


def _replaced(params: Any, changes: dict[str, Any]) -> Any:
    arrays = {name for name in changes if isinstance(getattr(params, name), (np.ndarray, jax.Array))}
    return params.replace(**{name: jnp.asarray(v) if name in arrays else v for name, v in changes.items()})


def _space(space: Any) -> Space:
    """Convert a Gymnax space."""
    spaces = _gymnax().environments.spaces
    match space:
        case spaces.Discrete():
            return Discrete(int(space.n))
        case spaces.Box():
            dtype = np.float32 if jnp.issubdtype(space.dtype, jnp.floating) else np.int32
            return _box(space, space.shape, dtype)
        case spaces.Dict():
            return Dict({name: _space(inner) for name, inner in space.spaces.items()})
    raise InputError(
        f"Gymnax's space {type(space).__name__} is not supported: give an environment with a Box, a Discrete or a Dict "
        "of these."
    )


def _observation_space(space: Any, observed: PyTree, loose: bool, masks: bool) -> Space:
    """Build the space of the actual observations, since Gymnax's declared spaces are not always right."""
    spaces = _gymnax().environments.spaces
    if isinstance(space, spaces.Dict):
        inner = space.spaces.items()
        return Dict({name: _observation_space(part, observed[name], loose, masks) for name, part in inner})
    if not isinstance(space, spaces.Box):
        return _space(space)
    if masks and len(observed.shape) == 3:
        return Box(0, 1, observed.shape, np.int8)
    whole = not any(jnp.issubdtype(dtype, jnp.floating) for dtype in (space.dtype, observed.dtype))
    if loose:
        return Box(-np.inf, np.inf, observed.shape)
    return _box(space, observed.shape, np.int32 if whole else np.float32)


def _box(space: Any, shape: tuple[int, ...], dtype: Any) -> Box:
    """Convert a Gymnax box, which uses the largest float32 for missing bounds."""
    largest = np.finfo(np.float32).max
    low, high = np.asarray(space.low), np.asarray(space.high)
    return Box(np.where(low <= -largest, -np.inf, low), np.where(high >= largest, np.inf, high), shape, dtype)


def _observation(space: Space, obs: PyTree) -> PyTree:
    """Convert an observation to the dtypes of its space."""
    if isinstance(space, Dict):
        return {name: _observation(inner, obs[name]) for name, inner in space.spaces.items()}
    return jnp.asarray(obs, space.dtype)


def _gymnax() -> ModuleType:
    return require("gymnax", extra="gymnax")
