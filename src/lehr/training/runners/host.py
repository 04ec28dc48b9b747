"""The runner for environments on the host: a `Collector` makes the rollouts, and updates run one at a time.

With `overlap`, the environments step while the device learns. A rollout is then collected with the parameters from
before the current update, so every rollout except the first lags by exactly one update.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.acting.collector import Collector, pack
from lehr.acting.rollout import Collected
from lehr.envs.host.base import EnvironmentFailed, HostEnvironment, ask, check_obs, own, same_structure
from lehr.errors import InputError
from lehr.maths.normalise import RewardScaling
from lehr.training.program import Program
from lehr.training.runners.base import MOST_UPDATES, Interrupted, is_unmeasured, measured
from lehr.training.runners.update import Update, without_actor
from lehr.types import Actor, PyTree, TrainState, derive


def complete(program: Program, state: TrainState, overlap: bool) -> TrainState:
    """Fill in the parts of the initial state that only host environments use."""
    env = program.env
    assert isinstance(env, HostEnvironment)
    env_state = env.initial_state(np.asarray(state.actor.env_state))
    pending: PyTree = ()
    if overlap:
        shapes = program.collected_shapes(state.learner.params, state.observation_statistics, state.actor)
        pending = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return state._replace(actor=state.actor._replace(env_state=env_state), pending=pending)


class HostRunner:
    """Make updates with live environments on the host."""

    def __init__(self, program: Program, state: TrainState, overlap: bool, warn: Callable[[str], object]) -> None:
        assert isinstance(program.env, HostEnvironment)
        self.program, self.overlap, self.warn = program, overlap, warn
        config = program.algorithm.config
        sizes, params = (config.num_envs, config.horizon), state.learner.params
        self.collector = Collector(program.env, program.algorithm, *sizes, params, program.needs, config.noise_steps)
        self.update = Update(program, state, watched=("rollout/lag",))
        self.names, self.most = self.update.names, MOST_UPDATES
        self.since: float | None = None
        self._thread = ThreadPoolExecutor(max_workers=1)

    def prepare(self, state: TrainState) -> None:
        """Do nothing: everything is compiled in `compile`."""

    def compile(self, state: TrainState) -> None:
        """Compile acting and learning."""
        self.update.compile(state, keeps=self.overlap)  # an environment may fail while it learns: keep the old state
        packed = pack(state.learner.params)
        self.collector.compile(packed, state.observation_statistics, state.actor, state.key)

    def begin(self, state: TrainState) -> TrainState:
        """Start the environments and restore them to their saved state.

        If the run normalises observations, a first rollout measures them, and then the environments start again.
        """
        self.collector.start()
        begun = self._placed(state)
        if is_unmeasured(begun):
            begun = self._placed(measured(state, self._collect(begun, begun.actor, 0)))
        return begun

    def _placed(self, state: TrainState) -> TrainState:
        """Restore the environments to their saved state, or start new episodes."""
        batch, env, size = self.collector.batch, self.collector.env, self.collector.size
        assert batch is not None
        actor, updates = state.actor, int(state.updates)
        if batch.restores:
            saved = jax.tree.map(np.asarray, actor.env_state)
            try:
                obs = ask(env.name, "reset", partial(batch.restore, saved))
                if updates == 0 or _same(obs, actor.obs):
                    check_obs(env, obs, size)
                    return state._replace(actor=actor._replace(obs=own(env, obs)))
                kept = any(np.any(leaf) for leaf in jax.tree.leaves(actor.obs))
                reason = "it is not deterministic" if kept else "the run used asynchronous actors before"
            except EnvironmentFailed as error:
                if not isinstance(error.__cause__, InputError):
                    raise
                reason = str(error.__cause__)
            self.warn(f"The environments of {env.name} restart, because their state cannot be restored: {reason}.")
        elif updates:
            self.warn(f"The environments of {env.name} restart, because their state cannot be restored.")
        begun = self.collector.reset(derive(state.key, "environments", updates))
        scaling = state.reward_scaling
        if isinstance(scaling, RewardScaling):
            scaling = replace(scaling, returns=jnp.zeros_like(scaling.returns))
        return state._replace(actor=begun._replace(env_state=actor.env_state), reward_scaling=scaling)

    def advance(self, state: TrainState, count: int) -> tuple[TrainState, np.ndarray]:
        """Make `count` updates. On a failure, `Interrupted` carries the state of the last complete update."""
        batch = self.collector.batch
        assert batch is not None
        rows: list[jax.Array] = []
        learned, actor, pending, updates = without_actor(state), state.actor, state.pending, int(state.updates)
        whole = state
        try:
            if self.overlap and updates == 0:
                pending = self._collect(learned, actor, 0)
                actor = pending.actor
            for number in range(updates, updates + count):
                watched = {"rollout/lag": min(number, self.program.lag + self.overlap)}
                if self.overlap:
                    learning = self._thread.submit(self.update, learned, pending, watched)
                    pending = self._collect(learned, actor, number + 1)
                    learned, row = learning.result()
                    actor = pending.actor
                else:
                    collected = self._collect(learned, actor, number)
                    learned, row = self.update(learned, collected, watched)
                    actor = collected.actor
                rows.append(row)
                whole = learned._replace(actor=actor._replace(env_state=batch.state()), pending=pending)
        except EnvironmentFailed as error:
            raise Interrupted(error, whole, self.update.table(rows)) from error
        return whole, self.update.table(rows)

    def close(self) -> None:
        """Close the environments."""
        self._thread.shutdown()
        self.collector.close()

    def _collect(self, state: TrainState, actor: Actor, number: int) -> Collected:
        """Collect rollout `number` from the actor's current state, with the state's acting parameters."""
        packed = pack(state.acting)
        return self.collector.collect(packed, state.observation_statistics, actor, state.key, number)


def _same(one: PyTree, other: PyTree) -> bool:
    def equal(x: Any, y: Any) -> bool:
        return np.shape(x) == np.shape(y) and np.array_equal(np.asarray(x, np.asarray(y).dtype), np.asarray(y))

    return same_structure(one, other) and all(jax.tree.leaves(jax.tree.map(equal, one, other)))
