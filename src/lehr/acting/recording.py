"""Record whole episodes of a policy as demonstrations."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr.acting.demonstrations import Demonstrations, joined
from lehr.acting.evaluation import MOST_STEPS, TOGETHER, check_episodes, checked_env
from lehr.acting.policy import Policy, PolicyParameters, PolicyProgram
from lehr.envs import AnyEnvironment, Environment, HostEnvironment
from lehr.envs.host.base import ask, check_obs, check_step, own
from lehr.types import Key, PyTree

CHUNK = 128
"""Steps of one compiled call on the device."""


class Steps(NamedTuple):
    """Steps of `N` environments times agents; leaves `[L, N, ...]`."""

    obs: PyTree
    action: PyTree
    reward: Any
    terminated: Any
    truncated: Any
    final_obs: PyTree
    """The observation after the step, before any reset."""
    valid: Any


def record(
    policy: Policy,
    env: str | AnyEnvironment,
    episodes: int = 10,
    seed: int = 0,
    greedy: bool = True,
    out: str | Path | None = None,
) -> Demonstrations:
    """Record whole episodes of a policy; with the same arguments, these are the episodes of `lehr.evaluate`.

    Args:
        policy: from `lehr.train` or `lehr.load`.
        env: the environment with its time limit, or its name.
        episodes: number of episodes; with several agents, each agent's is one.
        seed: random seed of the environments and of sampled actions.
        greedy: take the most likely action instead of sampling.
        out: a file `.npz` to write; see `lehr.acting.demonstrations` for its layout.
    """
    check_episodes(episodes, seed)
    key, made = jax.random.key(seed), checked_env(policy, env)
    if isinstance(made, HostEnvironment):
        steps, quota = _on_host(made, policy, episodes, key, greedy)
    else:
        steps, quota = _on_device(made, policy, episodes, key, greedy)
    found = _cut(steps, quota)
    if out is not None:
        found.save(out)
    return found


def _cut(steps: Steps, quota: np.ndarray) -> Demonstrations:
    """The first episodes of each column, `quota` `[N]` of them; one that did not end counts as truncated."""
    over = (steps.terminated | steps.truncated) & steps.valid
    episodes = []
    for column, wanted in enumerate(quota):
        begin = 0
        for end in [*np.flatnonzero(over[:, column]), len(over) - 1][:wanted]:
            rows = np.flatnonzero(steps.valid[begin : end + 1, column]) + begin
            begin = end + 1
            if not len(rows):
                continue
            part = jax.tree.map(lambda x, rows=rows, column=column: x[rows, column], steps)
            part.truncated[-1] |= not part.terminated[-1]
            final = jax.tree.map(lambda x: x[-1:], part.final_obs)
            lengths = np.array([len(rows)])
            flags = part.terminated, part.truncated
            episodes.append(Demonstrations(part.obs, part.action, part.reward, *flags, final, lengths))
    return joined(episodes)


# On the device -------------------------------------------------------------------------------------------------------


def _on_device(env: Environment, policy: Policy, episodes: int, key: Key, greedy: bool) -> tuple[Steps, np.ndarray]:
    """Run one episode in each of so many environments."""
    size = episodes * env.num_agents
    reset_key, key = jax.random.split(key)
    env_state, obs = jax.jit(jax.vmap(env.reset))(jax.random.split(reset_key, episodes))
    carried = jnp.int32(0), env_state, obs, policy.initial_carry(size), jnp.zeros(size, bool)
    chunks: list[Steps] = []
    while len(chunks) * CHUNK < MOST_STEPS and not np.all(carried[-1]):
        carried, steps = _chunk(env, policy.program, episodes, policy.learned, key, jnp.bool(greedy), carried)
        chunks.append(jax.device_get(steps))
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *chunks)
    return whole, np.ones(size, int)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _chunk(
    env: Environment,
    program: PolicyProgram,
    episodes: int,
    learned: PolicyParameters,
    key: Key,
    greedy: jax.Array,
    carried: Any,
) -> tuple[Any, Steps]:
    agents = env.num_agents
    size = episodes * agents

    def fold(tree: PyTree) -> PyTree:
        return tree if agents == 1 else jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), tree)

    def unfold(tree: PyTree) -> PyTree:
        return tree if agents == 1 else jax.tree.map(lambda x: x.reshape(episodes, agents, *x.shape[1:]), tree)

    def step(carried: Any, _: None) -> tuple[Any, Steps]:
        count, env_state, obs, carry, done = carried
        action_key, env_key = jax.random.split(jax.random.fold_in(key, count))
        reset = jnp.broadcast_to(count == 0, (size,))
        carry, action = program.act(learned, carry, fold(obs), reset, action_key, greedy)
        env_state, timestep = jax.vmap(env.step)(jax.random.split(env_key, episodes), env_state, unfold(action))
        reward, terminated, truncated = fold((timestep.reward, timestep.terminated, timestep.truncated))
        kept = Steps(fold(obs), action, reward, terminated, truncated, fold(timestep.obs), ~done)
        return (count + 1, env_state, timestep.obs, carry, done | terminated | truncated), kept

    return jax.lax.scan(step, carried, length=CHUNK)


# On the host ---------------------------------------------------------------------------------------------------------


def _on_host(env: HostEnvironment, policy: Policy, episodes: int, key: Key, greedy: bool) -> tuple[Steps, np.ndarray]:
    """Run a few environments together, each as many episodes as its share."""
    count = min(episodes, TOGETHER)
    size = count * env.num_agents
    quota = np.repeat(np.diff(np.linspace(0, episodes, count + 1).astype(int)), env.num_agents)
    seeds = np.asarray(jax.random.bits(jax.random.fold_in(key, 0), (count,), jnp.uint32))
    left = quota.copy()
    rows: list[Steps] = []
    batch = ask(env.name, "its constructor", partial(env.start, count))
    try:
        obs = ask(env.name, "reset", partial(batch.reset, seeds))
        check_obs(env, obs, size)
        carry, reset = policy.initial_carry(size), np.ones(size, bool)
        while left.any() and len(rows) < MOST_STEPS:
            drawn = None if greedy else jax.random.fold_in(key, len(rows) + 1)
            seen = own(env, obs)
            carry, taken = policy.step_on_device(carry, seen, reset, drawn)
            action = np.array(taken)
            answer = ask(env.name, "step", partial(batch.step, action.copy()))
            check_step(env, answer, size)
            valid = np.ones(size, bool) if answer.valid is None else answer.valid.copy()
            ends = answer.terminated.copy(), answer.truncated.copy()
            reward = np.array(answer.reward, np.float32)
            rows.append(Steps(seen, action, reward, *ends, own(env, answer.final_obs), valid))
            reset = answer.terminated | answer.truncated
            left -= reset & valid & (left > 0)
            obs = answer.obs
    finally:
        batch.close()
    return jax.tree.map(lambda *steps: np.stack(steps), *rows), quota
