"""Acting: `T` steps of all environments in one scan, on the device."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lehr.acting.policy import clip_to
from lehr.envs import AutoReset, Environment, HostEnvironment
from lehr.envs.host.base import layout
from lehr.maths.distributions import Distribution
from lehr.maths.normalise import RunningStatistics, normalise
from lehr.maths.recurrence import linear_recurrence
from lehr.networks import ActorCriticNetwork
from lehr.types import Actor, Key, PyTree, Rollout

UNROLL = 4
"""Steps in one turn of the compiled loop on an accelerator: the copies between two turns are made less often."""


class Episodes(NamedTuple):
    """The episodes that are under way, `[N]` each."""

    returns: jax.Array
    """float32: the sum of rewards so far."""
    lengths: jax.Array
    """float32: the steps so far."""
    over: jax.Array
    """bool: this agent is done and waits for the others of its environment."""


class Finished(NamedTuple):
    """Sums over the episodes that ended in a rollout, float32 `[]` each."""

    number: jax.Array
    returns: jax.Array
    lengths: jax.Array


class Collected(NamedTuple):
    """A rollout and what else came of it."""

    actor: Actor
    rollout: Rollout
    raw_obs: PyTree
    """Leaves `[T, N, ...]`: observations before normalisation."""
    finished: Finished


def prepare(env: Environment) -> AutoReset:
    """The environment as it is rolled out: it begins the next episode by itself."""
    return AutoReset(env)


def initial_actor(env: Environment, network: ActorCriticNetwork, num_envs: int, key: Key) -> Actor:
    """All environments at the begin of an episode. `env` is a prepared one."""
    env_state, obs = jax.vmap(env.reset)(jax.random.split(key, num_envs))
    size = num_envs * env.num_agents
    episodes = Episodes(jnp.zeros(size), jnp.zeros(size), jnp.zeros(size, bool))
    return Actor(env_state, _fold(env, obs), jnp.ones(size, bool), network.initial_carry((size,)), episodes)


def waiting_actor(env: HostEnvironment, network: ActorCriticNetwork, num_envs: int, key: Key) -> Actor:
    """All environments on the host before they begin: with zeros where their first observations will be."""
    size = num_envs * env.num_agents
    obs = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), layout(env.observation_space))
    episodes = Episodes(jnp.zeros(size), jnp.zeros(size), jnp.zeros(size, bool))
    seeds = jax.random.bits(key, (num_envs,), jnp.uint32)
    return Actor(seeds, obs, jnp.ones(size, bool), network.initial_carry((size,)), episodes)


def collect(
    env: AutoReset,
    network: ActorCriticNetwork,
    params: PyTree,
    actor: Actor,
    statistics: RunningStatistics | tuple[()],
    horizon: int,
    key: Key,
) -> Collected:
    """Act for `horizon` steps.

    Args:
        env: a prepared environment.
        network: the policy and the value.
        params: the network's parameters.
        actor: where the last rollout ended.
        statistics: by which observations are normalised, `()` for not at all.
        horizon: T.
        key: the randomness of actions and environments.
    """

    def prepare_obs(obs: PyTree) -> PyTree:
        return normalise(statistics, obs) if isinstance(statistics, RunningStatistics) else obs

    # At most one truncation per environment: its final observation is kept instead of the final ones of all steps.
    # What a scan stacks is most of its cost on a GPU, so it stacks as little as possible.
    keeps_one = env.truncation_gap >= horizon and not network.critic_is_recurrent
    normalises = isinstance(statistics, RunningStatistics)

    def step(carried: tuple[PyTree, ...], keys: tuple[Key, Key]) -> tuple[tuple[PyTree, ...], dict[str, Any]]:
        env_state, raw_obs, reset, carry, cut_obs = carried
        action_key, env_keys = keys
        obs = prepare_obs(raw_obs)
        out: dict[str, Any] = {"obs": obs}
        if normalises:
            out["raw_obs"] = raw_obs
        policy: Distribution
        if network.critic_is_recurrent:
            carry, policy, out["value"] = network.step(params, carry, obs, reset)
        else:
            carry, policy = network.act(params, carry, obs, reset)
        out["action"], out["log_prob"] = policy.sample_and_log_prob(action_key)
        taken = _unfold(env, clip_to(env.action_space, out["action"]))
        env_state, timestep = env.step_batch(env_keys, env_state, taken)
        final_obs, next_obs = _fold(env, timestep.info["final_obs"]), _fold(env, timestep.obs)
        out["reward"], terminated, truncated = _fold(env, (timestep.reward, timestep.terminated, timestep.truncated))
        out["ending"] = terminated.astype(jnp.uint8) + 2 * truncated.astype(jnp.uint8)
        if network.critic_is_recurrent:
            out["final_value"] = network.value(params, carry, prepare_obs(final_obs))
        elif keeps_one:
            cut_obs = jax.tree.map(partial(_where, truncated), final_obs, cut_obs)
        else:
            out["final_obs"] = final_obs
        reset = (terminated | truncated) if network.is_recurrent else reset
        return (env_state, next_obs, reset, carry, cut_obs), out

    num_envs = actor.reset.shape[0] // env.num_agents
    action_key, env_key = jax.random.split(key)
    # All keys are made at once, before the scan: one large kernel instead of T small ones.
    keys = jax.random.split(action_key, horizon), jax.random.split(env_key, (horizon, num_envs))
    start = actor.env_state, actor.obs, actor.reset, actor.carry, actor.obs if keeps_one else ()
    unroll = 1 if jax.default_backend() == "cpu" else UNROLL
    (env_state, last_obs, _, carry, cut_obs), out = jax.lax.scan(step, start, keys, unroll=unroll)

    done = out["ending"] != 0
    if network.critic_is_recurrent:
        value, final_value = out["value"], out["final_value"]
    else:
        final_obs = jax.tree.map(lambda x: x[None], cut_obs) if keeps_one else out["final_obs"]
        value, final_value = values(network, params, out["obs"]), values(network, params, prepare_obs(final_obs))
    lived = Lived(
        obs=out["obs"],
        action=out["action"],
        log_prob=out["log_prob"],
        reward=out["reward"],
        terminated=out["ending"] % 2 == 1,
        done=done,
        valid=~waiting(actor.episodes.over, done, env.num_agents) if env.num_agents > 1 else (),
        value=value,
        final_value=final_value,
        last_value=network.value(params, carry, prepare_obs(last_obs)),
    )
    rollout, episodes, finished = assemble(lived, actor, env.num_agents)
    last = Actor(env_state, last_obs, done[-1], carry, episodes)
    return Collected(last, rollout, out.get("raw_obs", out["obs"]), finished)


class Lived(NamedTuple):
    """What a rollout is assembled from; leaves `[T, N, ...]`, as in `Rollout`."""

    obs: PyTree
    action: PyTree
    log_prob: jax.Array
    reward: jax.Array
    terminated: jax.Array
    done: jax.Array
    valid: Any
    value: jax.Array
    final_value: jax.Array
    """float32 `[T, N]` or `[1, N]`: of the observation before a reset; looked at where an episode is done."""
    last_value: jax.Array
    """float32 `[N]`: of the observation after the last step."""


def assemble(lived: Lived, actor: Actor, num_agents: int) -> tuple[Rollout, Episodes, Finished]:
    """The rollout of what was lived through since `actor`, and its episodes."""
    done = lived.done
    # After an end the observation that followed is the final one, not the one after the reset, so that a truncated
    # episode is worth what it would have been.
    following = jnp.concatenate([lived.value[1:], lived.last_value[None]])
    rollout = Rollout(
        obs=lived.obs,
        action=lived.action,
        log_prob=lived.log_prob,
        reward=lived.reward if isinstance(lived.valid, tuple) else jnp.where(lived.valid, lived.reward, 0.0),
        value=lived.value,
        next_value=jnp.where(done, jnp.broadcast_to(lived.final_value, done.shape), following),
        terminated=lived.terminated,
        done=done,
        reset=jnp.concatenate([actor.reset[None], done[:-1]]),
        valid=lived.valid,
        carry=actor.carry,
    )
    episodes, finished = follow_episodes(actor.episodes, lived.reward, done, lived.valid, num_agents)
    return rollout, episodes, finished


def waiting(over: jax.Array, done: jax.Array, num_agents: int) -> jax.Array:
    """Where an agent was done before the step and waits for the others of its environment, bool `[T, N]`.

    Args:
        over: bool `[N]`: who waits before the first step.
        done: bool `[T, N]`.
        num_agents: how many neighbours on the axis `N` share an environment.

    >>> done = jnp.array([[True, False], [True, True], [False, False]])
    >>> waiting(jnp.zeros(2, bool), done, 2).tolist()
    [[False, False], [True, False], [False, False]]
    """
    marks = done.astype(jnp.float32)
    return linear_recurrence(_goes_on(done, num_agents), marks.at[0].add(over), reverse=False) - marks > 0


def _goes_on(done: jax.Array, num_agents: int) -> jax.Array:
    """1 where a step belongs to the same episode of its environment as the step before, else 0; `[T, N]`."""
    everyone = _everyone(done, num_agents)
    return jnp.concatenate([jnp.ones((1, done.shape[1])), 1.0 - everyone[:-1]])


def _everyone(done: jax.Array, num_agents: int) -> jax.Array:
    """Where all agents of the environment are done, bool `[T, N]`."""
    return jnp.repeat(done.reshape(len(done), -1, num_agents).all(-1), num_agents, axis=1)


def follow_episodes(
    episodes: Episodes, reward: jax.Array, done: jax.Array, valid: Any = (), num_agents: int = 1
) -> tuple[Episodes, Finished]:
    """Returns and lengths of episodes, found after the rollout: inside it they would be more arrays at every step.

        R_t = r_t + (1 − done_{t−1}) R_{t−1}

    Args:
        episodes: those under way before the first step.
        reward: `[T, N]`, before any scaling.
        done: bool `[T, N]`.
        valid: bool `[T, N]`: the steps that count; `()` for all.
        num_agents: how many neighbours on the axis `N` share an environment.

    >>> start = Episodes(jnp.array([5.0]), jnp.array([2.0]), jnp.array([False]))
    >>> rest, finished = follow_episodes(start, jnp.ones((3, 1)), jnp.array([[False], [True], [False]]))
    >>> [float(part) for part in finished], rest.returns.tolist(), rest.lengths.tolist()
    ([1.0, 7.0, 4.0], [1.0], [1.0])
    """
    goes_on, everyone = _goes_on(done, num_agents), _everyone(done, num_agents)
    counts, ended = jnp.ones(done.shape), done
    if not isinstance(valid, tuple):
        counts, ended = valid.astype(jnp.float32), done & valid
    # A NaN would outlive its episode, since 0 · NaN is NaN: a reward that is not finite is left out of the sum.
    rewards = jnp.where(jnp.isfinite(reward), reward * counts, 0.0)
    returns = linear_recurrence(goes_on, rewards.at[0].add(episodes.returns), reverse=False)
    lengths = linear_recurrence(goes_on, counts.at[0].add(episodes.lengths), reverse=False)
    # Without the barrier a GPU would run through the recurrences again inside the sums.
    returns, lengths = jax.lax.optimization_barrier((returns, lengths))
    finished = Finished(*(jnp.sum(jnp.where(ended, x, 0.0)) for x in (jnp.ones(done.shape), returns, lengths)))
    running = 1.0 - everyone[-1]
    return Episodes(returns[-1] * running, lengths[-1] * running, done[-1] & ~everyone[-1]), finished


VALUE_ROWS = 131_072
"""So many observations are valued at once: their activations, 64 wide, still fit into the cache of a large GPU."""


def values(network: ActorCriticNetwork, params: PyTree, obs: PyTree) -> jax.Array:
    """The values `[T, N]` of a critic without memory, some steps at a time."""
    carry = network.initial_carry((0,))
    steps, size = jax.tree.leaves(obs)[0].shape[:2]
    together = max(d for d in range(1, steps + 1) if steps % d == 0 and (d == 1 or d * size <= VALUE_ROWS))
    if together == steps or network.is_fused(obs):
        return network.value(params, carry, obs)
    pieces = jax.tree.map(lambda x: x.reshape(steps // together, together, *x.shape[1:]), obs)
    return jax.lax.map(lambda piece: network.value(params, carry, piece), pieces).reshape(steps, size)


def _where(condition: jax.Array, chosen: jax.Array, other: jax.Array) -> jax.Array:
    """`jnp.where` with a condition `[N]` for arrays `[N, ...]`."""
    return jnp.where(condition.reshape(condition.shape + (1,) * (chosen.ndim - 1)), chosen, other)


def _fold(env: Environment, tree: PyTree) -> PyTree:
    """Agents into the batch: `[E, A, ...]` to `[E·A, ...]`."""
    if env.num_agents == 1:
        return tree
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def _unfold(env: Environment, tree: PyTree) -> PyTree:
    """Agents out of the batch: `[E·A, ...]` to `[E, A, ...]`."""
    if env.num_agents == 1:
        return tree
    return jax.tree.map(lambda x: x.reshape(-1, env.num_agents, *x.shape[1:]), tree)
