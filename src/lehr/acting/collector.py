"""Acting in live environments: one compiled call for all of them at every step, and one that makes a rollout of it."""

from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from lehr.acting.policy import clip_to
from lehr.acting.rollout import Collected, Episodes, Lived, assemble, values
from lehr.envs.host.base import HostBatch, HostEnvironment, HostStep, ask, check_obs, check_step, own
from lehr.maths.normalise import RunningStatistics, normalise
from lehr.maths.randomness import derive
from lehr.schedules.bundle import Coefficients
from lehr.training.iteration import Program, learn
from lehr.types import NOTHING, Actor, Key, PyTree, TrainState


class Collector:
    """Live environments, and the compiled functions that act in them."""

    def __init__(self, program: Program, params: PyTree) -> None:
        """The parameters are an example of those that will act."""
        assert isinstance(program.env, HostEnvironment)
        config = program.algorithm.config
        self.program, self.env = program, program.env
        self.horizon, self.size = config.horizon, config.num_envs * self.env.num_agents
        self.batch: HostBatch | None = None
        # One vector is handed over faster than many arrays, and it is handed over at every step.
        unpack = ravel_pytree(params)[1]
        self.pack = jax.jit(lambda params: ravel_pytree(params)[0])
        self._act = jax.jit(lambda packed, *arguments: _act(program, unpack(packed), *arguments))
        self._value = jax.jit(lambda packed, *arguments: _value(program, unpack(packed), *arguments))
        self._collected = jax.jit(lambda packed, *arguments: _collected(program, unpack(packed), *arguments))
        self._keys = jax.jit(partial(_keys, self.horizon))

    def compile(self, packed: jax.Array, statistics: Any, actor: Actor, key: Key) -> None:
        """Compile what acts."""
        keys = np.asarray(self._keys(key, np.uint32(0)))
        self._act(packed, statistics, actor.carry, actor.obs, actor.reset, keys[0])
        self._value(packed, statistics, actor.carry, actor.obs)

    def start(self) -> HostBatch:
        """Make the environments."""
        num_envs = self.program.algorithm.config.num_envs
        self.batch = ask(self.env.name, "its constructor", partial(self.env.start, num_envs))
        return self.batch

    def reset(self, key: Key) -> Actor:
        """Begin an episode in each environment."""
        assert self.batch is not None
        config, network = self.program.algorithm.config, self.program.algorithm.network
        seeds = np.asarray(jax.random.bits(key, (config.num_envs,), jnp.uint32))
        obs = ask(self.env.name, "reset", partial(self.batch.reset, seeds))
        check_obs(self.env, obs, self.size)
        zeros = jnp.zeros(self.size)
        episodes = Episodes(zeros, zeros, jnp.zeros(self.size, bool))
        return Actor((), own(self.env, obs), jnp.ones(self.size, bool), network.initial_carry((self.size,)), episodes)

    def collect(self, packed: jax.Array, statistics: Any, actor: Actor, key: Key, number: int) -> Collected:
        """Rollout `number`, from where the actor stands, with these packed parameters."""
        assert self.batch is not None
        shape = (self.horizon, self.size)
        # The arrays are new for every rollout: on a CPU the device may look at them without a copy.
        obs = jax.tree.map(lambda like: np.empty((*shape, *like.shape), like.dtype), self.env.layout)
        reward, final_value = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        terminated, done, valid = (np.zeros(shape, bool) for _ in range(3))
        keys = np.asarray(self._keys(key, np.uint32(number)))
        acted = []
        current, reset, carry = actor.obs, np.asarray(actor.reset), actor.carry
        for t in range(self.horizon):
            here = jax.tree.map(itemgetter(t), obs)
            jax.tree.map(np.copyto, here, current)
            carry, taken, kept = self._act(packed, statistics, carry, here, reset, keys[t])
            action = np.array(taken)  # its own, which an environment may write into
            acted.append(kept)
            answer: HostStep = ask(self.env.name, "step", partial(self.batch.step, action))
            check_step(self.env, answer, self.size)
            reward[t], terminated[t], done[t] = answer.reward, answer.terminated, answer.terminated | answer.truncated
            if answer.valid is not None:
                valid[t] = answer.valid
            if answer.truncated.any():
                last = own(self.env, answer.final_obs)
                final_value[t] = np.asarray(self._value(packed, statistics, carry, last))
            current, reset = answer.obs, done[t]
        lived = {
            "obs": obs,
            "acted": jax.tree.map(lambda *steps: np.stack([np.asarray(x) for x in steps]), *acted),
            "reward": reward,
            "terminated": terminated,
            "done": done,
            "valid": valid if self.env.masks else (),
            "final_value": final_value,
        }
        before = actor._replace(env_state=())
        return self._collected(packed, statistics, before, lived, carry, own(self.env, current))

    def close(self) -> None:
        """End the environments."""
        if self.batch is not None:
            self.batch.close()


class Update:
    """The learning of one update, compiled, with its metrics as one row."""

    def __init__(
        self, program: Program, coefficients: Coefficients, state: TrainState, watched: tuple[str, ...]
    ) -> None:
        """The metrics of `watched` are measured by the one who calls."""
        self.program, self.coefficients = program, coefficients
        self.shapes = collected_shapes(program, state)._replace(actor=NOTHING)
        _, metrics = jax.eval_shape(partial(learn, program), coefficients, without_actor(state), self.shapes)
        self.names = tuple(sorted({*metrics, *watched}))
        self.watched = watched

    def compile(self, state: TrainState) -> None:
        """Compile it for states like this one."""
        watched = {name: jnp.float32(0) for name in self.watched}
        lowered = jax.jit(self._update).lower(self.coefficients, without_actor(state), self.shapes, watched)
        self._compiled = lowered.compile()

    def __call__(
        self, state: TrainState, collected: Collected, watched: Mapping[str, float]
    ) -> tuple[TrainState, jax.Array]:
        """The state after the update, without its actor, and the row of metrics."""
        given = {name: np.float32(value) for name, value in watched.items()}
        return self._compiled(self.coefficients, without_actor(state), collected._replace(actor=NOTHING), given)

    def table(self, rows: list[jax.Array]) -> np.ndarray:
        """Rows as one array, `[U, M]`."""
        return np.stack(jax.device_get(rows)) if rows else np.zeros((0, len(self.names)), np.float32)

    def _update(
        self, coefficients: Coefficients, state: TrainState, collected: Collected, watched: dict[str, jax.Array]
    ) -> tuple[TrainState, jax.Array]:
        state, metrics = learn(self.program, coefficients, state, collected)
        metrics |= watched
        return without_actor(state), jnp.stack([metrics[name].astype(jnp.float32) for name in self.names])


# What is compiled ----------------------------------------------------------------------------------------------------


def _act(
    program: Program,
    params: PyTree,
    statistics: Any,
    carry: PyTree,
    obs: PyTree,
    reset: jax.Array,
    key: jax.Array,
) -> tuple[PyTree, jax.Array, dict[str, Any]]:
    """One step of acting: the memory, the actions for the environments, and what the rollout keeps."""
    network = program.algorithm.network
    obs = _prepared(statistics, obs)
    kept: dict[str, Any] = {}
    if network.critic_is_recurrent:
        carry, policy, kept["value"] = network.step(params, carry, obs, reset)
    else:
        carry, policy = network.act(params, carry, obs, reset)
    kept["action"], kept["log_prob"] = policy.sample_and_log_prob(jax.random.wrap_key_data(key))
    return carry, clip_to(program.env.action_space, kept["action"]), kept


def _keys(steps: int, key: Key, number: jax.Array) -> jax.Array:
    """The data of the keys of one rollout, a row for each step: made at once, they cost the single steps nothing."""
    return jax.random.key_data(jax.random.split(derive(key, "rollout", number), steps))


def _value(program: Program, params: PyTree, statistics: Any, carry: PyTree, obs: PyTree) -> jax.Array:
    return program.algorithm.network.value(params, carry, _prepared(statistics, obs))


def _collected(
    program: Program,
    params: PyTree,
    statistics: Any,
    actor: Actor,
    lived: dict[str, Any],
    carry: PyTree,
    last_obs: PyTree,
) -> Collected:
    """What was lived through as a rollout, with its values."""
    network, env, acted = program.algorithm.network, program.env, lived["acted"]
    obs = _prepared(statistics, lived["obs"])
    value = acted["value"] if network.critic_is_recurrent else values(network, params, obs)
    whole = Lived(
        obs=obs,
        action=acted["action"],
        log_prob=acted["log_prob"],
        reward=lived["reward"],
        terminated=lived["terminated"],
        done=lived["done"],
        valid=lived["valid"],
        value=value,
        final_value=lived["final_value"],
        last_value=network.value(params, carry, _prepared(statistics, last_obs)),
    )
    rollout, episodes, finished = assemble(whole, actor, env.num_agents)
    last = Actor((), last_obs, lived["done"][-1], carry, episodes)
    raw_obs = lived["obs"] if isinstance(statistics, RunningStatistics) else ()
    return Collected(last, rollout, raw_obs, finished)


def _prepared(statistics: Any, obs: PyTree) -> PyTree:
    return normalise(statistics, obs) if isinstance(statistics, RunningStatistics) else obs


def collected_shapes(program: Program, state: TrainState) -> Collected:
    """What `_collected` gives, as shapes."""
    env, actor = program.env, state.actor._replace(env_state=())
    assert isinstance(env, HostEnvironment)
    steps, size = program.algorithm.config.horizon, actor.reset.shape[0]
    params, statistics = state.learner.params, state.observation_statistics
    key = jax.random.key_data(jax.random.key(0))
    _, _, kept = jax.eval_shape(partial(_act, program), params, statistics, actor.carry, actor.obs, actor.reset, key)

    def stacked(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((steps, *x.shape), x.dtype)

    number_of, flag = (jax.ShapeDtypeStruct((steps, size), kind) for kind in (jnp.float32, jnp.bool))
    lived = {
        "obs": jax.tree.map(stacked, actor.obs),
        "acted": jax.tree.map(stacked, kept),
        "reward": number_of,
        "terminated": flag,
        "done": flag,
        "valid": flag if env.masks else (),
        "final_value": number_of,
    }
    return jax.eval_shape(partial(_collected, program), params, statistics, actor, lived, actor.carry, actor.obs)


def without_actor(state: TrainState) -> TrainState:
    """The part of a state that learning changes."""
    return state._replace(actor=NOTHING, pending=())
