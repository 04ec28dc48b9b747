"""The static part of a run, which is fixed at compile time, and its initial state."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr import algorithms, config, kernels
from lehr.acting.collector import collected_shapes
from lehr.acting.rollout import Collected, collect, initial_actor
from lehr.algorithms.base import Algorithm
from lehr.envs import AnyEnvironment, AutoReset, HostEnvironment, make
from lehr.envs.check import allow_own_changes, refuse_changed
from lehr.errors import InputError
from lehr.maths import across
from lehr.maths.normalise import initial_scaling, initial_statistics
from lehr.networks import NetworkConfig
from lehr.rewards import EnvironmentReward, RewardModel
from lehr.schedules.bundle import Coefficients, bundle
from lehr.spaces import Spaces
from lehr.training import background, compile_options
from lehr.types import NOTHING, Actor, Key, Loaded, PyTree, TrainState, TreeShapes, check_fits, derive, shared_between

MOST_PER_UPDATE = 2**32
"""Env steps per update stay below this, so that the clock is exact."""
MOST_CONSTANTS = 1 << 20
"""Maximum size in bytes of the arrays that are a part of the program that makes the initial state."""


@dataclass(frozen=True)
class Program:
    """The part of a run that is fixed at compile time: a static, hashable value."""

    env: AutoReset | HostEnvironment
    """Environments on the device reset automatically."""
    algorithm: Algorithm
    reward_model: RewardModel
    most_rejected: int | None = None
    """Non-finite updates after which a member of a population is frozen; `None` for a run, which stops instead."""

    @functools.cached_property
    def steps_per_update(self) -> int:
        """Env steps per update, over all agents and including action repeats."""
        config = self.algorithm.config
        return config.num_envs * self.env.num_agents * config.horizon * self.env.env_steps_per_step

    @functools.cached_property
    def lag(self) -> int:
        """Number of updates that the acting policy is behind the learner."""
        return self.algorithm.config.acting_lag

    @functools.cached_property
    def needs(self) -> frozenset[str]:
        """The optional parts of a rollout that the algorithm or the reward model uses."""
        needs, behind = self.algorithm.needs, self.algorithm.needs_behind
        # On the host, a policy may also be behind because of `overlap` or asynchronous actors.
        if behind is not None and (self.lag or isinstance(self.env, HostEnvironment)):
            needs = behind
        return needs | self.reward_model.needs

    def collected_shapes(self, params: PyTree, statistics: Any, actor: Actor) -> Collected:
        """Return the shapes of what acting passes to learning."""
        horizon = self.algorithm.config.horizon
        if isinstance(self.env, HostEnvironment):
            return collected_shapes(self.env, self.algorithm, horizon, self.needs, params, statistics, actor)
        return _collected_shapes(self, TreeShapes.of((params, actor, statistics)))


@functools.lru_cache(maxsize=16)  # the initial state of a run is traced several times
def _collected_shapes(program: Program, shapes: TreeShapes) -> Collected:
    assert not isinstance(program.env, HostEnvironment)
    horizon, key = program.algorithm.config.horizon, jax.random.key(0)
    one = partial(collect, program.env, program.algorithm, horizon=horizon, key=key, needs=program.needs)
    with kernels.plain():  # shapes are the same, and plain JAX is traced sooner
        return jax.eval_shape(one, *shapes.tree)


def builder(algorithm: Any, env: AnyEnvironment, settings: Any, network_config: Any) -> Callable[[Key], Any]:
    """Return a picklable function that builds the algorithm and its initial parameters."""
    spaces = Spaces(env.observation_space, env.action_space)
    return partial(algorithms.find(algorithm).build, spaces, settings.for_spaces(spaces), network_config)


def initial_state(
    program: Program, coefficients: Coefficients, params: PyTree, key: Key, data: PyTree = ()
) -> TrainState:
    """Return the state of a run before its first update; `data` is what its reward model loaded."""
    settings, env, algorithm = program.algorithm.config, program.env, program.algorithm
    num_envs = across.share(settings.num_envs, "num_envs")
    actor = initial_actor(env, algorithm, num_envs, derive(key, "environments"))
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), actor.obs)
    statistics = initial_statistics(one) if settings.normalise_observations else ()
    example = program.collected_shapes(params, statistics, actor).rollout
    return TrainState(
        learner=algorithm.init(derive(key, "learner"), params, example),
        actor=actor,
        observation_statistics=statistics,
        reward_scaling=initial_scaling(num_envs * env.num_agents) if settings.normalise_rewards else (),
        reward_model=program.reward_model.init(derive(key, "reward model"), example)._replace(data=data),
        coefficients=coefficients,
        controllers=coefficients.init(),
        key=key,
        updates=jnp.uint32(0),
        rejected=jnp.uint32(0),
        pending=(),
        behind=jax.tree.map(lambda x: jnp.broadcast_to(x, (program.lag, *x.shape)), params) if program.lag else (),
    )


def assemble(
    algorithm: Any,
    env: str | AnyEnvironment,
    settings: Any,
    network_config: NetworkConfig,
    total_steps: int,
    seed: int = 0,
    reward_model: type[RewardModel] = EnvironmentReward,
    reward_settings: Any = None,
    loaded: Loaded | None = None,
    abstract: bool = False,
    devices: int = 1,
    first: Callable[[Program, TrainState], object] = lambda program, shapes: None,
) -> tuple[Program, TrainState]:
    """Build the program of a run and its initial state.

    Args:
        algorithm: its name or its class.
        env: an environment or its name.
        settings: the algorithm's `Config`.
        network_config: the network architecture.
        total_steps: the budget in env steps, which schedules are bound to.
        seed: random seed.
        reward_model: class of the reward model.
        reward_settings: the reward model's `Config`; all defaults if omitted.
        loaded: what the reward model loads; it loads it here if omitted.
        abstract: return only the shapes of the state, which is all that a population needs.
        devices: how many may share the run. Its `memory` may then be too large for one of them, so only its shapes are
            returned, from which `RunSharding.with_memory` makes it.
        first: called with the program and the shapes of the state, before the state is made, which takes a while.
    """
    made = make(env)
    if not isinstance(made, HostEnvironment):
        refuse_changed(made)
    prepared = made if isinstance(made, HostEnvironment) else AutoReset(made)
    settings = settings.for_spaces(Spaces(prepared.observation_space, prepared.action_space))
    build = builder(algorithm, prepared, settings, network_config)
    if reward_settings is None and reward_model is not EnvironmentReward:
        reward_settings = reward_model.Config()
    model = build_reward_model(algorithms.find(algorithm), settings, prepared, reward_model, reward_settings)
    found = config.coefficients(settings, total_steps)
    if reward_settings is not None:
        found |= config.coefficients(reward_settings, total_steps)
    coefficients = bundle({name: one for name, one in found.items() if name not in settings.unused})
    loaded = model.load() if loaded is None else loaded
    params, given = None, (coefficients, np.int64(seed), loaded.data)
    alike = algorithms.find(algorithm), prepared, settings, network_config, model, devices, TreeShapes.of(given)
    with shared_between(devices):
        begun = _latest.get((background.trace_options(), alike), lambda: _traced(prepared, model, build, *given))
        if begun is None:
            built, params = build(derive(jax.random.key(seed), "network"))
            begun = _beginning(prepared, model, build, built, params, *given)
        program, shapes, state = begun.program, begun.shapes, begun.state
        if not isinstance(made, HostEnvironment):
            allow_own_changes(made)
        if abstract:
            return program, shapes
        if devices > 1:
            most = jax.jit(lambda *given: state(*given).with_memories(NOTHING, NOTHING))(params, *given)
            return program, most.with_memories(*shapes.memories)
    first(program, shapes)
    return program, begun.compiled(params, *given)


@dataclass(frozen=True)
class _Beginning:
    """What makes the initial state of a run: a traced program, which is compiled when it is needed."""

    program: Program
    state: Callable[..., TrainState]
    """A function of the parameters (none if it builds them), the coefficients, the seed and the reward model's data."""
    traced: Any

    @property
    def shapes(self) -> TrainState:
        """The shapes of the state."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.traced.out_info)

    @functools.cached_property
    def compiled(self) -> Callable[..., TrainState]:
        """The same as `state`, compiled."""
        return compile_options.compiled(self.traced.lower(), compile_options.ONCE)


_latest: background.Latest[_Beginning | None] = background.Latest()
"""Those of the latest runs: others like them, also with other seeds, begin at once."""


def _beginning(
    env: Any, model: RewardModel, build: Callable[[Key], Any], built: Algorithm | None, *arguments: Any
) -> _Beginning:
    """Trace what makes the state, with arguments as for `_Beginning.state`; the network is `built` there or before."""
    programs: list[Program] = []

    def begin(params: Any, coefficients: Coefficients, seed: Any, data: PyTree) -> TrainState:
        algorithm, key = built, jax.random.key(seed)
        if algorithm is None:
            algorithm, params = build(derive(key, "network"))
        programs.append(Program(env, algorithm, model))
        _check_sizes(programs[-1], params)
        return initial_state(programs[-1], coefficients, params, key, data)

    traced = jax.jit(begin).trace(*arguments)
    return _Beginning(programs[-1], begin, traced)


def _traced(env: Any, model: RewardModel, build: Callable[[Key], Any], *arguments: Any) -> _Beginning | None:
    """Trace what builds the network and makes the state; `None` if the user's own algorithm has to build it before.

    It may need to see numbers, not tracers, or bring weights from a file, which would be constants in the program.
    """
    try:
        made = _beginning(env, model, build, None, None, *arguments)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        return None
    return None if sum(x.nbytes for x in made.traced.jaxpr.consts) > MOST_CONSTANTS else made


def build_reward_model(
    algorithm: type[Algorithm],
    settings: Any,
    env: AnyEnvironment,
    reward_model: type[RewardModel] = EnvironmentReward,
    reward_settings: Any = None,
) -> RewardModel:
    """Build the reward model of a run: the one that its algorithm brings, with the algorithm's settings, or the given.

    Args:
        algorithm: its class.
        settings: the algorithm's `Config`.
        env: the environment.
        reward_model: class of the reward model that the user chose.
        reward_settings: its `Config`; all defaults if omitted.
    """
    spaces = Spaces(env.observation_space, env.action_space)
    check_reward_model(algorithm, reward_model)
    if algorithm.reward_model is not EnvironmentReward:
        return algorithm.reward_model.build(spaces, settings)
    return reward_model.build(spaces, reward_model.Config() if reward_settings is None else reward_settings)


def check_reward_model(algorithm: type[Algorithm], reward_model: type[RewardModel]) -> None:
    """Refuse a reward model for an algorithm that brings its own."""
    own = algorithm.reward_model
    if own is not EnvironmentReward and reward_model is not EnvironmentReward:
        raise InputError(
            f"reward_model is {reward_model.__name__}, but this algorithm has its own, {own.__name__}; drop the option."
        )


def _check_sizes(program: Program, params: PyTree) -> None:
    """Refuse a run whose parameters or observations do not fit into memory, or whose updates are too long."""
    steps, settings = program.steps_per_update, program.algorithm.config
    if steps >= MOST_PER_UPDATE:
        raise InputError(
            f"An update has {steps} env steps, num_envs · horizon · action_repeat for each agent; it must be below "
            "2^32: reduce one of them."
        )
    agents = settings.horizon * settings.num_envs * program.env.num_agents
    one = jax.eval_shape(program.env.observation_space.sample, jax.random.key(0))
    check_fits(
        "The run",
        "reduce num_envs, horizon, frame_stack, lag or the sizes of layers",
        obs=jax.tree.map(lambda x: jax.ShapeDtypeStruct((agents, *x.shape), x.dtype), one),
        params=jax.tree.map(lambda x: jax.ShapeDtypeStruct((1 + program.lag, *x.shape), x.dtype), params),
    )
