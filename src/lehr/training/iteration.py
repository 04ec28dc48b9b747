"""One update of a run as a pure function, and many of them as one compiled program.

config ─► coefficients(clock) ──────────────┐
                                            ▼
env ─► rollout ─► advantages ─► minibatches ─► loss ─► update ─► metrics
 ▲                                                       │
 └───────────────────────── policy ◄─────────────────────┘
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from lehr import algorithms
from lehr.acting.rollout import Collected, Finished, collect, initial_actor, prepare, waiting_actor
from lehr.config import coefficients as coefficients_of
from lehr.envs import AnyEnvironment, AutoReset, HostEnvironment, make
from lehr.maths.normalise import initial_scaling, initial_statistics, scale_rewards
from lehr.maths.normalise import update as update_statistics
from lehr.maths.randomness import derive
from lehr.networks import ActorCriticNetwork, NetworkConfig, actor_critic
from lehr.schedules import env_steps
from lehr.schedules.bundle import Coefficients, bundle
from lehr.types import Key, Learner, Metrics, PyTree, Rollout, TrainState


class AlgorithmConfig(Protocol):
    """The settings that every algorithm has."""

    num_envs: int
    horizon: int
    normalise_observations: bool
    normalise_rewards: bool

    @property
    def unused(self) -> frozenset[str]:
        """Coefficients that these settings do not use."""


class Algorithm(Protocol):
    """What an algorithm is: settings, a network, and how a learner begins and learns."""

    @property
    def config(self) -> Any:
        """Its settings, with at least those of `AlgorithmConfig`."""

    @property
    def network(self) -> ActorCriticNetwork:
        """The policy and the value."""

    def init(self, params: PyTree) -> Learner:
        """A learner with these parameters."""

    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """The learner after one rollout, and what there is to watch."""


@runtime_checkable
class KeepsRollouts(Protocol):
    """An algorithm that remembers rollouts, so that it must know how large they are."""

    def make_room(self, learner: Learner, obs: PyTree) -> Learner:
        """The learner with room for rollouts of observations like these, leaves `[N, ...]`."""


@dataclass(frozen=True)
class Program:
    """All of a run that is fixed when it is compiled: a static, hashable value."""

    env: AutoReset | HostEnvironment
    """Prepared by `lehr.acting.rollout.prepare`, or one on the host, see `lehr.training.runners.host`."""
    algorithm: Algorithm

    @property
    def steps_per_update(self) -> int:
        """Env steps of one update: every agent's, action repeats included."""
        config = self.algorithm.config
        return config.num_envs * self.env.num_agents * config.horizon * self.env.env_steps_per_step

    @property
    def lag(self) -> int:
        """By how many updates the policy that acts is behind the one that learns."""
        return getattr(self.algorithm.config, "lag", 0)


def initial_state(program: Program, coefficients: Coefficients, params: PyTree, key: Key) -> TrainState:
    """A run before its first update. Environments on the host have not begun yet: their observations are zeros."""
    config, env = program.algorithm.config, program.env
    arguments = program.algorithm.network, config.num_envs, derive(key, "environments")
    actor = waiting_actor(env, *arguments) if isinstance(env, HostEnvironment) else initial_actor(env, *arguments)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), actor.obs)
    learner = program.algorithm.init(params)
    if isinstance(program.algorithm, KeepsRollouts):
        learner = program.algorithm.make_room(learner, actor.obs)
    return TrainState(
        learner=learner,
        actor=actor,
        observation_statistics=initial_statistics(one) if config.normalise_observations else (),
        reward_scaling=initial_scaling(config.num_envs * env.num_agents) if config.normalise_rewards else (),
        controllers=coefficients.init(),
        key=key,
        updates=jnp.uint32(0),
        rejected=jnp.uint32(0),
        pending=(),
        behind=jax.tree.map(lambda x: jnp.stack([x] * program.lag), params) if program.lag else (),
    )


def iteration(program: Program, coefficients: Coefficients, state: TrainState) -> tuple[TrainState, Metrics]:
    """One rollout and the learning on it."""
    assert isinstance(program.env, AutoReset)
    collected = collect(
        program.env,
        program.algorithm.network,
        state.acting,
        state.actor,
        state.observation_statistics,
        program.algorithm.config.horizon,
        derive(state.key, "rollout", state.updates),
    )
    return learn(program, coefficients, state, collected)


def learn(
    program: Program, coefficients: Coefficients, state: TrainState, collected: Collected
) -> tuple[TrainState, Metrics]:
    """All of an update but its rollout."""
    algorithm, config = program.algorithm, program.algorithm.config
    rollout, statistics, scaling = collected.rollout, state.observation_statistics, state.reward_scaling

    # --- coefficients: of the env steps before this rollout, the same for all gradient steps on it
    coef = coefficients.values(state.controllers, env_steps(state.updates, program.steps_per_update))

    # --- normalisation
    if config.normalise_observations:
        statistics = update_statistics(statistics, collected.raw_obs, rollout.valid)
    if config.normalise_rewards:
        scaling, reward = scale_rewards(scaling, rollout.reward, rollout.done, coef["discount"], rollout.valid)
        rollout = rollout._replace(reward=reward)
    if "reward_scale" in coef:
        rollout = rollout._replace(reward=coef["reward_scale"] * rollout.reward)

    # --- advantages, minibatches, loss, update
    learner, metrics = algorithm.learn(state.learner, rollout, coef, derive(state.key, "learn", state.updates))

    # --- metrics
    metrics |= _episode_metrics(collected.finished)
    metrics |= _broken(rollout)
    metrics |= {f"coef/{name}": value for name, value in coef.items()}
    controllers = coefficients.update(state.controllers, metrics)

    # --- the next state, in which an update that is not finite is not applied
    learned = learner, statistics, scaling, controllers
    before = state.learner, state.observation_statistics, state.reward_scaling, state.controllers
    sound = is_finite(learner) & jnp.isfinite(metrics["loss/total"])
    learner, statistics, scaling, controllers = jax.tree.map(
        lambda new, old: jnp.where(sound, new, old), learned, before
    )
    rejected = state.rejected + ~sound
    metrics["update/rejected"] = rejected.astype(jnp.float32)
    behind = state.behind
    if program.lag:
        metrics["rollout/lag"] = jnp.minimum(state.updates, program.lag).astype(jnp.float32)
        behind = jax.tree.map(lambda kept, now: jnp.concatenate([kept[1:], now[None]]), behind, state.learner.params)
    state = TrainState(
        learner, collected.actor, statistics, scaling, controllers, state.key, state.updates + 1, rejected, (), behind
    )
    return state, metrics


def chunk(
    program: Program, most: int, coefficients: Coefficients, state: TrainState, count: jax.Array
) -> tuple[TrainState, jax.Array]:
    """`count` updates, `most` at the most, and their metrics `[most, M]`, a column for each of `metric_names`.

    `count` is traced: one program serves every length, so a run is compiled once.
    """
    names = metric_names(program, coefficients, state)

    def update(index: jax.Array, carried: tuple[TrainState, jax.Array]) -> tuple[TrainState, jax.Array]:
        state, rows = carried
        state, metrics = _traced_once(program, coefficients, state)
        row = jnp.stack([metrics[name].astype(jnp.float32) for name in names])
        return state, rows.at[index].set(row)

    rows = jnp.zeros((most, len(names)))
    return jax.lax.fori_loop(0, count, update, (state, rows))


def metric_names(program: Program, coefficients: Coefficients, state: TrainState) -> tuple[str, ...]:
    """The metrics of an update, in the order of the columns."""
    _, metrics = _traced_once.eval_shape(program, coefficients, state)
    return tuple(sorted(metrics))


@partial(jax.jit, static_argnums=0)
def _traced_once(program: Program, coefficients: Coefficients, state: TrainState) -> tuple[TrainState, Metrics]:
    """An iteration whose trace is remembered: to look at its metrics costs no second one."""
    return iteration(program, coefficients, state)


def is_finite(tree: PyTree) -> jax.Array:
    """Whether every number of a tree is finite, bool `[]`."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))


def _episode_metrics(finished: Finished) -> Metrics:
    """Means over the episodes that ended in this rollout; NaN where none did."""
    some = jnp.where(finished.number > 0, finished.number, jnp.nan)
    return {
        "episode/count": finished.number,
        "episode/return": finished.returns / some,
        "episode/length": finished.lengths / some,
    }


def _broken(rollout: Rollout) -> Metrics:
    """How many rewards and entries of observations are not finite: then it is the environment that is broken."""

    def count(tree: PyTree) -> jax.Array:
        leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum((jnp.sum(~jnp.isfinite(leaf), dtype=jnp.float32) for leaf in leaves), jnp.float32(0))

    return {"environment/broken_rewards": count(rollout.reward), "environment/broken_obs": count(rollout.obs)}


def make_program(
    algorithm: str, env: AnyEnvironment, config: Any, network_config: NetworkConfig, key: Key
) -> tuple[Program, PyTree]:
    """The program of a run, and the first parameters of its network."""
    prepared = env if isinstance(env, HostEnvironment) else prepare(env)
    network, params = actor_critic(prepared.observation_space, prepared.action_space, network_config, key)
    return Program(prepared, algorithms.find(algorithm).Algorithm(config, network)), params


def assemble(
    algorithm: str,
    env: str | AnyEnvironment,
    config: Any,
    network_config: NetworkConfig,
    total_steps: int,
    seed: int = 0,
) -> tuple[Program, Coefficients, TrainState]:
    """Everything a run needs before its first update: the program, its coefficients, and the first state.

    Args:
        algorithm: its name.
        env: an environment or its name.
        config: the algorithm's `Config`.
        network_config: the architecture.
        total_steps: the budget that schedules are bound to.
        seed: of all randomness.
    """
    key = jax.random.key(seed)
    program, params = make_program(algorithm, make(env), config, network_config, derive(key, "network"))
    found = coefficients_of(config, total_steps)
    coefficients = bundle({name: one for name, one in found.items() if name not in config.unused})
    state = jax.jit(partial(initial_state, program))(coefficients, params, key)
    return program, coefficients, state
