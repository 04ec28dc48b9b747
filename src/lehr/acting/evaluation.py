"""Evaluate a policy over whole episodes, in parallel environments."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr.acting.policy import Policy, PolicyParameters, PolicyProgram
from lehr.envs import AnyEnvironment, Environment, EpisodeStatistics, HostEnvironment, make
from lehr.envs.host.base import HostBatch, ask, begin, check_obs, check_step, own
from lehr.errors import InputError, quoted
from lehr.spaces import Box, Dict, Space
from lehr.types import Key

MOST_STEPS = 100_000
"""Maximum steps of an evaluation; episodes that are still running count with their return so far."""
TOGETHER = 16
"""Maximum number of parallel environments of an evaluation on the host; each runs its share of the episodes."""


_NOISE = 1e-6
"""Rounding of float32 returns, as a share of them."""


def without_noise(mean: float, spread: float) -> tuple[float, float]:
    """Return a mean and its spread to show: 0 for one that is only the other's rounding in float32.

    >>> without_noise(-1.3, 5.96e-8), without_noise(2e-8, 1.0), without_noise(1e-8, 2e-8)
    ((-1.3, 0.0), (0.0, 1.0), (1e-08, 2e-08))
    """
    return (0.0 if abs(mean) < _NOISE * spread else mean), (0.0 if spread < _NOISE * abs(mean) else spread)


class EpisodeResults(NamedTuple):
    """One entry per episode and agent."""

    returns: np.ndarray
    """float32: undiscounted sums of rewards."""
    lengths: np.ndarray
    """int32: numbers of steps."""

    @classmethod
    def of(cls, found: tuple[jax.Array, jax.Array]) -> "EpisodeResults":
        """The results from arrays of any shape."""
        return cls(*(np.asarray(x).ravel() for x in found))

    def __repr__(self) -> str:
        if not self.returns.size:
            return "EpisodeResults(no episodes)"
        mean, std = without_noise(float(self.returns.mean()), float(self.returns.std()))
        length = float(self.lengths.mean())
        words = f"{self.returns.size} episodes, return {mean:.6g} ± {std:.6g} (std), length {length:.6g}"
        return f"EpisodeResults({words})"


def evaluation_metrics(greedy: EpisodeResults, sampled: EpisodeResults) -> dict[str, np.ndarray]:
    """Return the metrics of an evaluation by name, over the last axis of the results of its episodes."""
    return {
        "evaluate/return": greedy.returns.mean(-1),
        "evaluate/return_std": greedy.returns.std(-1),
        "evaluate/length": greedy.lengths.mean(-1),
        "evaluate/return_sampled": sampled.returns.mean(-1),
    }


@dataclass(frozen=True)
class Evaluator:
    """A compiled program that runs `episodes` environments until the first episode of each ends."""

    env: Environment
    policy: PolicyProgram
    episodes: int

    def __call__(self, learned: PolicyParameters, key: Key, greedy: bool) -> EpisodeResults:
        """Run the episodes, with the most likely actions or with sampled ones."""
        return EpisodeResults.of(self.run(learned, key, np.bool_(greedy)))

    def run(self, learned: PolicyParameters, key: Key, greedy: Any) -> tuple[jax.Array, jax.Array]:
        """Return the returns and the lengths; may be a part of a compiled program."""
        return _run(self, learned, key, greedy)


MOST_TOGETHER = 1 << 17
"""Maximum number of parallel environments when many policies are evaluated; the policies then come in batches."""


def run_many(
    evaluator: Evaluator, learned: PolicyParameters, keys: Key, greedy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Evaluate the policies of a population, leaves `[P, ...]`, with one key each; a part of a compiled program.

    Returns:
        the returns and the lengths, `[P, episodes, ...]`, with an axis for the agents if there are several.
    """
    batch = max(1, MOST_TOGETHER // (evaluator.episodes * evaluator.env.num_agents))

    def one(given: tuple[PolicyParameters, Key]) -> tuple[jax.Array, jax.Array]:
        return _run(evaluator, *given, greedy)

    return jax.lax.map(one, (learned, keys), batch_size=batch)


@partial(jax.jit, static_argnums=0)
def _run(evaluator: Evaluator, learned: PolicyParameters, key: Key, greedy: jax.Array) -> tuple[jax.Array, jax.Array]:
    env, agents = EpisodeStatistics(evaluator.env), evaluator.env.num_agents
    size = evaluator.episodes * agents
    shape = (evaluator.episodes,) if agents == 1 else (evaluator.episodes, agents)
    reset_key, key = jax.random.split(key)
    env_state, obs = jax.vmap(env.reset)(jax.random.split(reset_key, evaluator.episodes))
    carry = evaluator.policy.agent.initial_carry((size,))

    def fold(x: jax.Array) -> jax.Array:
        return x if agents == 1 else x.reshape(size, *x.shape[2:])

    def unfold(x: jax.Array) -> jax.Array:
        return x if agents == 1 else x.reshape(evaluator.episodes, agents, *x.shape[1:])

    def goes_on(carried: tuple) -> jax.Array:
        step, _, _, _, _, _, done = carried
        return (step < MOST_STEPS) & ~jnp.all(done)

    def act(carried: tuple) -> tuple:
        step, env_state, obs, carry, returns, lengths, done = carried
        action_key, env_key = jax.random.split(jax.random.fold_in(key, step))
        reset = jnp.broadcast_to(step == 0, (size,))
        carry, action = evaluator.policy.act(learned, carry, jax.tree.map(fold, obs), reset, action_key, greedy)
        keys = jax.random.split(env_key, evaluator.episodes)
        env_state, timestep = jax.vmap(env.step)(keys, env_state, jax.tree.map(unfold, action))
        info = timestep.info
        # A finished episode keeps its numbers; its environment keeps stepping, but the results are ignored.
        returns = jnp.where(done, returns, info["episode_return"])
        lengths = jnp.where(done, lengths, info["episode_length"])
        done = done | timestep.terminated | timestep.truncated
        return step + 1, env_state, timestep.obs, carry, returns, lengths, done

    start = (jnp.int32(0), env_state, obs, carry, jnp.zeros(shape), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool))
    _, _, _, _, returns, lengths, _ = jax.lax.while_loop(goes_on, act, start)
    return returns, lengths


class EvaluationStopped(Exception):
    """Somebody asked an evaluation to stop."""


class HostEvaluator:
    """Runs whole episodes on the host, in a few parallel environments."""

    def __init__(self, env: HostEnvironment, policy: PolicyProgram, episodes: int) -> None:
        self.env, self.policy, self.episodes = env, policy, episodes
        self.stops: Callable[[], bool] = lambda: False
        """Asked before every step; the evaluation then raises `EvaluationStopped`."""

    def __call__(self, learned: PolicyParameters, key: Key, greedy: bool) -> EpisodeResults:
        """Run the episodes, with the most likely actions or with sampled ones."""
        count = self.env.fixed_size or min(self.episodes, TOGETHER)
        batch = begin(self.env, count)
        try:
            return self._run(batch, count, Policy(self.policy, learned), key, greedy)
        finally:
            batch.close()

    def _run(self, batch: HostBatch, count: int, policy: Policy, key: Key, greedy: bool) -> EpisodeResults:
        agents = self.env.num_agents
        size = count * agents
        # Every environment runs the same number of episodes; otherwise short episodes would count more than long ones.
        left = np.repeat(np.diff(np.linspace(0, self.episodes, count + 1).astype(int)), agents)
        seeds = np.asarray(jax.random.bits(jax.random.fold_in(key, 0), (count,), jnp.uint32))
        obs = ask(self.env.name, "reset", partial(batch.reset, seeds))
        check_obs(self.env, obs, size)
        carry, reset = policy.initial_carry(size), np.ones(size, bool)
        returns, lengths = np.zeros(size), np.zeros(size, int)
        found: list[tuple[float, int]] = []
        step = 0
        while left.any() and step < MOST_STEPS:
            if self.stops():
                raise EvaluationStopped
            step += 1
            drawn = None if greedy else jax.random.fold_in(key, step)
            carry, action = policy.step_on_device(carry, own(self.env, obs), reset, drawn)
            answer = ask(self.env.name, "step", partial(batch.step, np.array(action)))
            check_step(self.env, answer, size)
            valid = np.ones(size, bool) if answer.valid is None else answer.valid
            returns += np.where(valid, answer.reward, 0.0)
            lengths += valid
            over = answer.terminated | answer.truncated
            for index in np.flatnonzero(over & valid & (left > 0)):
                found.append((returns[index], lengths[index]))
                left[index] -= 1
            returns[over], lengths[over] = 0.0, 0
            obs, reset = answer.obs, over
        found += [(returns[index], lengths[index]) for index in np.flatnonzero((left > 0) & (lengths > 0))]
        totals, steps = zip(*found, strict=True) if found else ((), ())
        return EpisodeResults(np.array(totals, np.float32), np.array(steps, np.int32))


def make_evaluator(env: AnyEnvironment, policy: PolicyProgram, episodes: int) -> Evaluator | HostEvaluator:
    """Create the evaluator for an environment on the device or on the host."""
    if isinstance(env, HostEnvironment):
        return HostEvaluator(env, policy, episodes)
    return Evaluator(env, policy, episodes)


def evaluate(
    policy: Policy, env: str | AnyEnvironment, episodes: int = 100, seed: int = 0, greedy: bool = True
) -> EpisodeResults:
    """Evaluate a policy over whole episodes, in parallel.

    Args:
        policy: from `lehr.train` or `lehr.load`.
        env: the environment with its time limit, or its name; `result.env` is the one the policy was trained on.
        episodes: number of episodes.
        seed: random seed of the environments and of sampled actions.
        greedy: take the most likely action instead of sampling.
    """
    check_episodes(episodes, seed)
    made = checked_env(policy, env)
    return make_evaluator(made, policy.program, episodes)(policy.learned, jax.random.key(seed), greedy)


def check_episodes(episodes: Any, seed: Any) -> None:
    """Refuse a number of episodes or a seed that is none."""
    for name, given, least, most in (("episodes", episodes, 1, 2**31 - 1), ("seed", seed, -(2**63), 2**63 - 1)):
        if isinstance(given, bool) or not isinstance(given, int | np.integer) or not least <= given <= most:
            limits = f"{least} or more" if least > 0 else "of at most 64 bits"
            raise InputError(f"{name} is {quoted(given)}; give a whole number, {limits}.")


def checked_env(policy: Policy, env: str | AnyEnvironment) -> AnyEnvironment:
    """Return the environment, or the one of this name, with the spaces that the policy was trained for."""
    made, program = make(env), policy.program
    for name, given, wanted in (
        ("observations", made.observation_space, program.observation_space),
        ("actions", made.action_space, program.action_space),
    ):
        if _form(given) != _form(wanted):
            raise InputError(
                f"The {name} of this environment are in {given}, but the policy was trained for {wanted}; evaluate "
                "it on an environment with the same spaces, and with the wrappers of its run: result.env."
            )
    return made


def _form(space: Space) -> Any:
    """What a network depends on: shapes, whether numbers are floats, and the number of choices; not the bounds."""
    match space:
        case Dict():
            return {name: _form(inner) for name, inner in space.spaces.items()}
        case Box():
            return space.shape, space.dtype.kind
    return space
