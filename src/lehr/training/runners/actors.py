"""The runner for asynchronous actors."""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from lehr.acting.actors.actor import ActorLost, Weights
from lehr.acting.actors.pool import Pool
from lehr.acting.collector import pack
from lehr.envs.host.base import EnvironmentFailed
from lehr.maths.normalise import RewardScaling
from lehr.training.program import Program
from lehr.training.runners.base import MOST_UPDATES, Interrupted, is_unmeasured, measured
from lehr.training.runners.update import Update, without_actor
from lehr.types import TrainState

WATCHED = ("rollout/lag", "actors/queue", "actors/lost", "actors/steps_per_second", "learner/waited")
"""Metrics measured here at every update: the lag of its rollout in updates, rollouts waiting in the queue, actors lost
so far, env steps per second of all actors while they act, and how long the learner waited, in seconds."""


UNMEASURED = -1
"""`Weights.updates` of rollouts from before the observations' statistics are known; nothing is learned from them."""


class ActorRunner:
    """Learn from rollouts that asynchronous actors collect.

    On resume, everything learned is restored bit for bit; environments restart, and unfinished rollouts are lost.
    """

    def __init__(self, program: Program, state: TrainState, pool: Pool, warn: Callable[[str], object]) -> None:
        self.program, self.pool, self.warn = program, pool, warn
        self.update = Update(program, state, WATCHED)
        self.names, self.most = self.update.names, MOST_UPDATES
        self._returns: dict[tuple[int, int], jax.Array] = {}
        """By actor and life: the discounted returns of running episodes, which scale the rewards."""
        self._speeds: dict[int, float] = {}
        self.since: float | None = None

    def prepare(self, state: TrainState) -> None:
        """Do nothing: everything is compiled in `compile`."""

    def compile(self, state: TrainState) -> None:
        """Compile learning; each actor compiles acting itself."""
        self.update.compile(state)

    def begin(self, state: TrainState) -> TrainState:
        """Start the actors, and wait for the first rollout: by then an actor has compiled."""
        if updates := int(state.updates):
            env = self.pool.blueprint.env
            self.warn(f"The environments of {env.name} restart: with actors, their state is not saved.")
        self.pool.blueprint = dataclasses.replace(self.pool.blueprint, updates=updates)
        if is_unmeasured(state):
            self.pool.start(self._weights(state, UNMEASURED))
            state = measured(state, self.pool.take()[1].collected)
            self.pool.publish(self._weights(state, updates))
        else:
            self.pool.start(self._weights(state, updates))
        self.pool.wait()
        return state

    def advance(self, state: TrainState, count: int) -> tuple[TrainState, np.ndarray]:
        """Make `count` updates. On a failure, `Interrupted` carries the state of the last complete update."""
        rows: list[jax.Array] = []
        learned, updates = state, int(state.updates)
        try:
            for number in range(updates, updates + count):
                begin = time.perf_counter()
                index, arrival = self.pool.take()
                while arrival.updates == UNMEASURED:  # collected before observations were measured
                    index, arrival = self.pool.take()
                self._speeds[index] = self.program.steps_per_update / arrival.seconds
                watched = {
                    "rollout/lag": number - arrival.updates,
                    "actors/queue": self.pool.queue.qsize(),
                    "actors/lost": self.pool.lost,
                    "actors/steps_per_second": sum(self._speeds.values()),
                    "learner/waited": time.perf_counter() - begin,
                }
                whose = index, arrival.life
                before = self._swapped(learned, whose)
                after, row = self.update(before, arrival.collected, watched)
                self.pool.publish(self._weights(after, number + 1))
                if isinstance(after.reward_scaling, RewardScaling):
                    self._returns[whose] = after.reward_scaling.returns
                learned = after._replace(actor=state.actor)
                rows.append(row)
        except (EnvironmentFailed, ActorLost) as error:
            raise Interrupted(error, learned, self.update.table(rows)) from error
        return learned, self.update.table(rows)

    def close(self) -> None:
        """Stop the actors."""
        self.pool.close()

    def _weights(self, state: TrainState, updates: int) -> Weights:
        packed, statistics = jax.device_get((pack(state.learner.params), state.observation_statistics))
        return Weights(updates, packed, statistics)

    def _swapped(self, state: TrainState, whose: tuple[int, int]) -> TrainState:
        """Return the state with the running returns of this actor's environments."""
        state = without_actor(state)
        if not isinstance(state.reward_scaling, RewardScaling):
            return state
        returns = self._returns.get(whose, jnp.zeros_like(state.reward_scaling.returns))
        return state._replace(reward_scaling=dataclasses.replace(state.reward_scaling, returns=returns))
