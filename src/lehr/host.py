"""Environments on the host: one compiled call acts for the whole batch, another learns from what was lived through.

With `overlap` the environments step while the device learns. A rollout is then made with the parameters from before
the update that is being learned, so that every rollout but the first lags by one update, exactly.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from lehr.coefficients import Coefficients
from lehr.envs.host import (
    EnvironmentFailed,
    HostBatch,
    HostEnvironment,
    HostStep,
    ask,
    check_obs,
    check_step,
    own,
    same_structure,
)
from lehr.errors import InputError
from lehr.iteration import Program, derive, learn
from lehr.normalise import RewardScaling, RunningStatistics, normalise
from lehr.policy import clip_to
from lehr.rollout import Collected, Lived, assemble, values
from lehr.types import Actor, Key, PyTree, TrainState


class Interrupted(Exception):
    """An environment failed. `state` and `rows` are those of the updates that were made before."""

    def __init__(self, error: EnvironmentFailed, state: TrainState, rows: np.ndarray) -> None:
        super().__init__(str(error))
        self.state, self.rows = state, rows


def complete(program: Program, state: TrainState, overlap: bool) -> TrainState:
    """The first state of a run on the host with room for all that it will hold."""
    env = program.env
    assert isinstance(env, HostEnvironment)
    env_state = env.initial_state(np.asarray(state.actor.env_state))
    pending: PyTree = ()
    if overlap:
        shapes = _collected_shapes(program, state)
        pending = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return state._replace(actor=state.actor._replace(env_state=env_state), pending=pending)


class HostRunner:
    """The updates of a run around live environments."""

    def __init__(
        self,
        program: Program,
        coefficients: Coefficients,
        state: TrainState,
        overlap: bool,
        warn: Callable[[str], object],
    ) -> None:
        assert isinstance(program.env, HostEnvironment)
        self.program, self.env, self.coefficients = program, program.env, coefficients
        self.overlap, self.warn = overlap, warn
        config = program.algorithm.config
        self.horizon, self.size = config.horizon, config.num_envs * self.env.num_agents
        self._shapes = _collected_shapes(program, state)
        _, metrics = jax.eval_shape(partial(learn, program), coefficients, _without_actor(state), self._shapes)
        self.names = tuple(sorted({*metrics, "rollout/lag"}))
        self.batch: HostBatch | None = None
        self._thread = ThreadPoolExecutor(max_workers=1)
        # One vector is handed over faster than many arrays, and it is handed over at every step.
        unpack = ravel_pytree(state.learner.params)[1]
        self._pack = jax.jit(lambda params: ravel_pytree(params)[0])
        self._act = jax.jit(lambda packed, *arguments: _act(program, unpack(packed), *arguments))
        self._value = jax.jit(partial(_value, program))
        self._keys = jax.jit(partial(_keys, self.horizon))
        self._collected = jax.jit(partial(_collected, program))

    def compile(self, state: TrainState) -> None:
        """Compile acting and learning."""
        params, statistics = state.learner.params, state.observation_statistics
        update = jax.jit(self._update).lower(self.coefficients, _without_actor(state), self._shapes, jnp.float32(0))
        self._learn = update.compile()
        actor, keys = state.actor, np.asarray(self._keys(state.key, np.uint32(0)))
        self._act(self._pack(params), statistics, actor.carry, actor.obs, actor.reset, keys[0])
        self._value(params, statistics, actor.carry, actor.obs)

    def _update(
        self, coefficients: Coefficients, state: TrainState, collected: Collected, lag: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        state, metrics = learn(self.program, coefficients, state, collected)
        metrics["rollout/lag"] = lag  # which an overlap makes larger than the algorithm knows
        return _without_actor(state), jnp.stack([metrics[name].astype(jnp.float32) for name in self.names])

    def begin(self, state: TrainState) -> TrainState:
        """Start the environments and bring them to where the state says they are."""
        config = self.program.algorithm.config
        self.batch = batch = ask(self.env.name, "its constructor", partial(self.env.start, config.num_envs))
        actor, updates = state.actor, int(state.updates)
        if batch.restores:
            saved = jax.tree.map(np.asarray, actor.env_state)
            try:
                obs = ask(self.env.name, "reset", partial(batch.restore, saved))
                if updates == 0 or _same(obs, actor.obs):
                    check_obs(self.env, obs, self.size)
                    return state._replace(actor=actor._replace(obs=own(self.env, obs)))
                reason = "it does not do the same twice"
            except EnvironmentFailed as error:
                if not isinstance(error.__cause__, InputError):
                    raise
                reason = str(error.__cause__)
            self.warn(f"The environments of {self.env.name} restart, since one cannot be brought back: {reason}.")
        elif updates:
            self.warn(f"The environments of {self.env.name} cannot be brought back to where they were: they restart.")
        seeds = np.asarray(jax.random.bits(derive(state.key, "environments", updates), (config.num_envs,), jnp.uint32))
        obs = ask(self.env.name, "reset", partial(batch.reset, seeds))
        check_obs(self.env, obs, self.size)
        fresh = jax.tree.map(jnp.zeros_like, actor.episodes)
        scaling = state.reward_scaling
        if isinstance(scaling, RewardScaling):
            scaling = replace(scaling, returns=jnp.zeros_like(scaling.returns))
        begun = Actor(actor.env_state, own(self.env, obs), jnp.ones(self.size, bool), actor.carry, fresh)
        return state._replace(actor=begun, reward_scaling=scaling)

    def advance(self, state: TrainState, count: int) -> tuple[TrainState, np.ndarray]:
        """Make `count` updates. An environment that fails leaves the state of the last whole one."""
        assert self.batch is not None
        rows: list[jax.Array] = []
        learned, actor, pending, updates = _without_actor(state), state.actor, state.pending, int(state.updates)
        whole = state
        try:
            if self.overlap and updates == 0:
                pending = self._collect(learned, actor, 0)
                actor = pending.actor
            for number in range(updates, updates + count):
                lag = np.float32(min(number, self.program.lag + self.overlap))
                if self.overlap:
                    learning = self._thread.submit(self._learn, self.coefficients, learned, pending, lag)
                    pending = self._collect(learned, actor, number + 1)
                    learned, row = learning.result()
                    actor = pending.actor
                else:
                    collected = self._collect(learned, actor, number)
                    learned, row = self._learn(self.coefficients, learned, collected, lag)
                    actor = collected.actor
                rows.append(row)
                whole = learned._replace(actor=actor._replace(env_state=self.batch.state()), pending=pending)
        except EnvironmentFailed as error:
            raise Interrupted(error, whole, self._table(rows)) from error
        return whole, self._table(rows)

    def close(self) -> None:
        """End the environments."""
        self._thread.shutdown()
        if self.batch is not None:
            self.batch.close()

    def _table(self, rows: list[jax.Array]) -> np.ndarray:
        return np.stack(jax.device_get(rows)) if rows else np.zeros((0, len(self.names)), np.float32)

    def _collect(self, state: TrainState, actor: Actor, number: int) -> Collected:
        """Rollout `number`, from where the actor stands, with the parameters that a state acts with."""
        assert self.batch is not None
        params, statistics = state.acting, state.observation_statistics
        shape = (self.horizon, self.size)
        # The arrays are new for every rollout: on a CPU the device may look at them without a copy.
        obs = jax.tree.map(lambda like: np.empty((*shape, *like.shape), like.dtype), self.env.layout)
        reward, final_value = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        terminated, done, valid = (np.zeros(shape, bool) for _ in range(3))
        packed, keys = self._pack(params), np.asarray(self._keys(state.key, np.uint32(number)))
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
                final_value[t] = np.asarray(self._value(params, statistics, carry, last))
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
        return self._collected(params, statistics, before, lived, carry, own(self.env, current))


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


def _collected_shapes(program: Program, state: TrainState) -> Collected:
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


def _without_actor(state: TrainState) -> TrainState:
    """The part of a state that learning changes."""
    return state._replace(actor=(), pending=())  # type: ignore[arg-type]


def _same(one: PyTree, other: PyTree) -> bool:
    def equal(x: Any, y: Any) -> bool:
        return np.shape(x) == np.shape(y) and np.array_equal(np.asarray(x, np.asarray(y).dtype), np.asarray(y))

    return same_structure(one, other) and all(jax.tree.leaves(jax.tree.map(equal, one, other)))
