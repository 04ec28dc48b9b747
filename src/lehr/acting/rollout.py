"""Rollouts on the device: `T` steps of all environments in one scan."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lehr import kernels
from lehr.acting.agent import Agent, act, action_keys, observed
from lehr.envs import AutoReset, Environment, HostEnvironment
from lehr.envs.host.base import layout
from lehr.masks import without_action
from lehr.maths import across
from lehr.maths.normalise import RunningStatistics
from lehr.types import Actor, Key, Metrics, PyTree, Rollout

UNROLL = 4
"""Steps per iteration of the compiled loop on an accelerator, so that copies between iterations are rarer."""


class RunningEpisodes(NamedTuple):
    """Episodes in progress, `[N]` each."""

    returns: jax.Array
    """float32: sum of rewards so far."""
    lengths: jax.Array
    """float32: steps so far."""
    over: jax.Array
    """bool: the agent is done and waits for the other agents of its environment."""

    @classmethod
    def begin(cls, size: int) -> "RunningEpisodes":
        """Return episodes that are all at their first step."""
        return cls(jnp.zeros(size), jnp.zeros(size), jnp.zeros(size, bool))


class Finished(NamedTuple):
    """Sums over the episodes that ended in a rollout, float32 `[]` each."""

    number: jax.Array
    returns: jax.Array
    lengths: jax.Array

    def metrics(self) -> Metrics:
        """Return means over these episodes; NaN if none ended."""
        some = jnp.where(self.number > 0, self.number, jnp.nan)
        return {
            "episode/count": self.number,
            "episode/return": self.returns / some,
            "episode/length": self.lengths / some,
        }


class Collected(NamedTuple):
    """A rollout, and what else acting returns."""

    actor: Actor
    rollout: Rollout
    raw_obs: PyTree
    """Leaves `[T, N, ...]`: observations before normalisation."""
    finished: Finished


def initial_actor(env: AutoReset | HostEnvironment, agent: Agent, num_envs: int, key: Key) -> Actor:
    """Return an actor at the start of its episodes; host environments start later, so their observations are zeros."""
    size = num_envs * env.num_agents
    resets: PyTree = ()
    if isinstance(env, HostEnvironment):
        env_state: PyTree = jax.random.bits(key, (num_envs,), jnp.uint32)
        obs = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), layout(env.observation_space))
    else:
        env_state, obs, resets = env.reset_batch(key, num_envs)
        obs = _fold(env, obs)
    carry, episodes = agent.initial_carry((size,)), RunningEpisodes.begin(size)
    return Actor(env_state, obs, jnp.ones(size, bool), carry, episodes, resets)


def collect(
    env: AutoReset,
    agent: Agent,
    params: PyTree,
    actor: Actor,
    statistics: RunningStatistics | tuple[()],
    horizon: int,
    key: Key,
    needs: frozenset[str],
    noise_steps: int = 1,
) -> Collected:
    """Act for `horizon` steps.

    Args:
        env: an environment that resets automatically.
        agent: the agent that acts.
        params: the agent's parameters.
        actor: the state at the end of the last rollout.
        statistics: normalise the observations; `()` for no normalisation.
        horizon: number of steps, T.
        key: for actions and environments.
        needs: the optional parts of a rollout to keep: `value`, `final_obs`, `taken`.
        noise_steps: steps for which the noise of continuous actions is kept.
    """
    remembers = bool(jax.tree.leaves(actor.carry))
    # Values that depend on the carry are computed in each step, except final ones of which each environment has at most
    # one; all others at once, after the scan.
    act_once = partial(act, agent, env.action_space, params, statistics)
    values_in_step = "value" in jax.eval_shape(act_once, actor.carry, actor.obs, actor.reset, key)[2].kept
    needs_value, needs_final_obs = "value" in needs, "final_obs" in needs
    # With at most one truncation per environment, keep one final observation, and the carry before it, instead of those
    # of all steps. On a GPU, most of a scan's cost is what it stacks, so stack as little as possible.
    keeps_one = needs_value and not needs_final_obs and env.truncation_gap >= horizon
    keeps_all = needs_final_obs or (needs_value and not values_in_step and not keeps_one)

    def step(carried: tuple[PyTree, ...], keys: tuple[Key, Key]) -> tuple[tuple[PyTree, ...], dict[str, Any]]:
        env_state, resets, raw_obs, reset, carry, cut = carried
        action_key, env_keys = keys
        carry, taken, acted = act_once(carry, raw_obs, reset, action_key)
        out: dict[str, Any] = {"obs": acted.obs, "action": acted.action, "kept": acted.kept}
        if isinstance(statistics, RunningStatistics):
            out["raw_obs"] = raw_obs
        if "taken" in needs:
            out["taken"] = taken
        env_state, timestep, resets = env.step_batch(env_keys, env_state, _unfold(env, taken), resets)
        final_obs, next_obs = _fold(env, timestep.info["final_obs"]), _fold(env, timestep.obs)
        out["reward"], terminated, truncated = _fold(env, (timestep.reward, timestep.terminated, timestep.truncated))
        out["ending"] = terminated.astype(jnp.uint8) + 2 * truncated.astype(jnp.uint8)
        if values_in_step and needs_value and not keeps_one:
            out["final_value"] = agent.value(params, carry, observed(statistics, final_obs))
        if keeps_one:
            cut = jax.tree.map(partial(_where, truncated), (final_obs, carry if values_in_step else ()), cut)
        if keeps_all:
            out["final_obs"] = final_obs
        reset = (terminated | truncated) if remembers else reset
        return (env_state, resets, next_obs, reset, carry, cut), out

    num_envs = actor.reset.shape[0] // env.num_agents
    action_key, env_key = jax.random.split(key)
    # Split all keys before the scan: one large kernel instead of T small ones.
    drawn = action_keys(action_key, horizon, env.action_space, noise_steps)
    keys = drawn, jax.random.split(env_key, (horizon, num_envs))
    first_cut = (actor.obs, actor.carry if values_in_step else ()) if keeps_one else ()
    start = actor.env_state, actor.resets, actor.obs, actor.reset, actor.carry, first_cut
    (env_state, resets, last_obs, _, carry, cut), out = kernels.scan(step, start, keys, scan_unroll())

    done = out["ending"] != 0
    final_obs = observed(statistics, out["final_obs"]) if keeps_all else ()
    final_value: Any = out.get("final_value", ())
    if keeps_one:
        final_value = agent.value(params, cut[1] if values_in_step else carry, observed(statistics, cut[0]))[None]
    elif needs_value and not values_in_step:
        final_value = agent.value(params, carry, final_obs)
    trajectory = Trajectory(
        obs=out["obs"],
        action=out["action"],
        kept=out["kept"],
        reward=out["reward"],
        terminated=out["ending"] % 2 == 1,
        done=done,
        valid=~waiting(actor.episodes.over, done, env.num_agents) if env.num_agents > 1 else (),
        final_value=final_value,
        final_obs=final_obs if needs_final_obs else (),
        taken=out.get("taken", ()),
    )
    resets = resets and resets.agreed()
    last = actor._replace(env_state=env_state, resets=resets, obs=last_obs, reset=done[-1], carry=carry)
    raw_obs = out.get("raw_obs", out["obs"])
    return collected(agent, params, statistics, actor, trajectory, last, raw_obs, env.num_agents, needs)


def scan_unroll(divisor_of: int | None = None) -> int:
    """The `unroll` of a rollout's scan: 1 on a CPU, `UNROLL` on an accelerator.

    Args:
        divisor_of: the length of the scan, if the result must divide it. Otherwise the steps that remain are compiled
            as a second copy of the step, which takes long for a large one.
    """
    if jax.default_backend() == "cpu":
        return 1
    if divisor_of is None:
        return UNROLL
    return max(steps for steps in range(1, UNROLL + 1) if divisor_of % steps == 0)


class Trajectory(NamedTuple):
    """The raw material of a rollout; leaves `[T, N, ...]`, as in `Rollout`."""

    obs: PyTree
    action: PyTree
    kept: dict[str, Any]
    """What `act` stored."""
    reward: jax.Array
    terminated: jax.Array
    done: jax.Array
    valid: Any
    final_value: Any
    """float32 `[T, N]` or `[1, N]`: value of the observation before a reset; used only where an episode is done."""
    final_obs: Any
    taken: Any = ()


def collected(
    agent: Agent,
    params: PyTree,
    statistics: Any,
    before: Actor,
    trajectory: Trajectory,
    last: Actor,
    raw_obs: PyTree,
    num_agents: int,
    needs: frozenset[str],
) -> Collected:
    """Build the rollout of a trajectory from the actor `before` to `last`, with values and episode statistics."""
    done, extras = trajectory.done, dict(trajectory.kept)
    log_prob, value = extras.pop("log_prob", ()), extras.pop("value", None)
    next_value: Any = ()
    if "value" in needs:
        if value is None:
            value = agent.value(params, before.carry, trajectory.obs)
        last_value = agent.value(params, last.carry, observed(statistics, last.obs))
        # After the last step of an episode, the next observation is the final one, not the one after the reset, so
        # that a truncated episode bootstraps from its own value.
        following = jnp.concatenate([value[1:], last_value[None]])
        next_value = jnp.where(done, jnp.broadcast_to(trajectory.final_value, done.shape), following)
    valid, reward = trajectory.valid, trajectory.reward
    rollout = Rollout(
        obs=trajectory.obs,
        action=trajectory.action,
        log_prob=log_prob,
        reward=reward if isinstance(valid, tuple) else jnp.where(valid, reward, 0.0),
        value=() if value is None else value,
        next_value=next_value,
        terminated=trajectory.terminated,
        done=done,
        reset=jnp.concatenate([before.reset[None], done[:-1]]),
        valid=valid,
        carry=before.carry,
        final_obs=trajectory.final_obs,
        taken=trajectory.taken,
        extras=extras or (),
    )
    episodes, finished = follow_episodes(before.episodes, reward, done, valid, num_agents)
    return Collected(last._replace(episodes=episodes), rollout, raw_obs, finished)


def broken(env: AutoReset | HostEnvironment, rollout: Rollout) -> Metrics:
    """Count non-finite rewards and observation entries, and masks without an action: signs of a broken environment."""

    def count(tree: PyTree) -> jax.Array:
        leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum((jnp.sum(~jnp.isfinite(leaf), dtype=jnp.float32) for leaf in leaves), jnp.float32(0))

    found = {"environment/broken_rewards": count(rollout.reward), "environment/broken_obs": count(rollout.obs)}
    stuck = without_action(env.observation_space, env.action_space, rollout.obs)
    if stuck is not None:
        found["environment/broken_masks"] = jnp.sum(_counts(rollout.valid, stuck.shape) * stuck)
    return found


def mean_reward(rollout: Rollout) -> jax.Array:
    """Return the environment's mean reward per step, over the steps of all devices that count."""
    counts = _counts(rollout.valid, rollout.reward.shape)
    total, number = across.sum((jnp.sum(counts * rollout.reward), jnp.sum(counts)))
    return total / jnp.maximum(number, 1.0)


def waiting(over: jax.Array, done: jax.Array, num_agents: int) -> jax.Array:
    """Return where an agent was already done and waits for the other agents of its environment, bool `[T, N]`.

    Args:
        over: bool `[N]`: which agents wait before the first step.
        done: bool `[T, N]`.
        num_agents: number of consecutive entries on axis `N` that share an environment.

    >>> done = jnp.array([[True, False], [True, True], [False, False]])
    >>> waiting(jnp.zeros(2, bool), done, 2).tolist()
    [[False, False], [True, False], [False, False]]
    """
    marks = done.astype(jnp.float32)
    return kernels.linear_recurrence(_goes_on(done, num_agents), marks.at[0].add(over), reverse=False) - marks > 0


def _goes_on(done: jax.Array, num_agents: int) -> jax.Array:
    """Return 1 where a step belongs to the same episode as the step before, else 0; `[T, N]`."""
    everyone = _everyone(done, num_agents)
    return jnp.concatenate([jnp.ones((1, done.shape[1])), 1.0 - everyone[:-1]])


def _everyone(done: jax.Array, num_agents: int) -> jax.Array:
    """Return where all agents of the environment are done, bool `[T, N]`."""
    return jnp.repeat(done.reshape(len(done), -1, num_agents).all(-1), num_agents, axis=1)


def follow_episodes(
    episodes: RunningEpisodes, reward: jax.Array, done: jax.Array, valid: Any = (), num_agents: int = 1
) -> tuple[RunningEpisodes, Finished]:
    """Sum the rewards and steps of episodes after the rollout; inside it, they would add arrays to every step.

    With e the last step of an environment's rollout at which an episode ended (−1 if none did), the episodes that ended
    hold the steps up to e and what was there before, and the episode in progress holds the steps after e. So these are
    sums over time without a recurrence, which would take XLA long to compile.

    Args:
        episodes: the episodes in progress before the first step.
        reward: `[T, N]`, before any scaling.
        done: bool `[T, N]`.
        valid: bool `[T, N]`: the steps that count; `()` for all.
        num_agents: number of consecutive entries on axis `N` that share an environment.

    >>> start = RunningEpisodes(jnp.array([5.0]), jnp.array([2.0]), jnp.array([False]))
    >>> rest, finished = follow_episodes(start, jnp.ones((3, 1)), jnp.array([[False], [True], [False]]))
    >>> [float(part) for part in finished], rest.returns.tolist(), rest.lengths.tolist()
    ([1.0, 7.0, 4.0], [1.0], [1.0])
    """
    counts = _counts(valid, done.shape)
    ended = done & (counts > 0)
    # Exclude non-finite rewards from the sum: a NaN would leak into the next episode, since 0 · NaN is NaN.
    rewards = jnp.where(jnp.isfinite(reward), reward * counts, 0.0)
    steps = jnp.arange(len(done))[:, None]
    past = steps <= jnp.max(jnp.where(ended, steps, -1), axis=0, keepdims=True)
    none_ended = ~past[0]

    def split(before: jax.Array, amounts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the sums of the episodes in progress, `[N]`, and the sum over those that ended."""
        now = jnp.where(none_ended, before, 0.0) + jnp.sum(jnp.where(past, 0.0, amounts), axis=0)
        then = jnp.where(none_ended, 0.0, before) + jnp.sum(jnp.where(past, amounts, 0.0), axis=0)
        return now, jnp.sum(then)

    returns, finished_returns = split(episodes.returns, rewards)
    lengths, finished_lengths = split(episodes.lengths, counts)
    over = done[-1] & ~_everyone(done[-1:], num_agents)[0]
    finished = Finished(jnp.sum(ended, dtype=jnp.float32), finished_returns, finished_lengths)
    return RunningEpisodes(returns, lengths, over), finished


def _counts(valid: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return 1 for each step that counts, else 0, float32 `[T, N]`; all count if `valid` is `()`."""
    return jnp.ones(shape) if isinstance(valid, tuple) else valid.astype(jnp.float32)


def _where(condition: jax.Array, chosen: jax.Array, other: jax.Array) -> jax.Array:
    """Apply `jnp.where` with a condition `[N]` to arrays `[N, ...]`."""
    return jnp.where(condition.reshape(condition.shape + (1,) * (chosen.ndim - 1)), chosen, other)


def _fold(env: Environment, tree: PyTree) -> PyTree:
    """Merge agents into the batch axis: `[E, A, ...]` to `[E·A, ...]`."""
    if env.num_agents == 1:
        return tree
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def _unfold(env: Environment, tree: PyTree) -> PyTree:
    """Split agents from the batch axis: `[E·A, ...]` to `[E, A, ...]`."""
    if env.num_agents == 1:
        return tree
    return jax.tree.map(lambda x: x.reshape(-1, env.num_agents, *x.shape[1:]), tree)
