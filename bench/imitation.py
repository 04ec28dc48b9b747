"""What several benchmarks share: train all seeds of a setting as one population, and evaluate them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr import algorithms, rewards
from lehr.acting.evaluation import make_evaluator
from lehr.acting.policy import Policy, PolicyParameters, PolicyProgram
from lehr.algorithms import gail
from lehr.config import build
from lehr.envs import AnyEnvironment
from lehr.rewards.discriminator import Discriminator, Rows
from lehr.training.iteration import iteration
from lehr.training.program import assemble, builder, initial_state
from lehr.types import derive


class Trained(NamedTuple):
    """Policies of several seeds."""

    policies: list[Policy]
    returns: np.ndarray
    """`[seeds]`: mean return of 100 episodes with the most likely actions."""
    sampled: np.ndarray
    """The same with sampled actions."""
    curves: dict[str, np.ndarray]
    """By name, `[seeds, updates]`: metrics of each update, of which `METRICS` are kept, as far as there are any."""


METRICS = ("episode/return", "model/unexplained")
"""Metrics that are kept; a return is NaN where no episode ended."""


def train(
    algorithm: Any,
    env: AnyEnvironment,
    total_steps: int,
    seeds: Sequence[int],
    settings: dict[str, Any],
    report: Callable[[int, dict[str, np.ndarray]], None] | None = None,
) -> Trained:
    """Train a policy for each seed, all in one compiled program.

    Args:
        algorithm: its name or class.
        env: the environment.
        total_steps: env steps of each policy.
        seeds: the seeds.
        settings: of the algorithm, its network, and the reward model that `reward_model` names.
        report: called ten times, with the env steps so far and the metrics `[seeds, updates]` since the last time.
    """
    given = dict(settings)
    model = rewards.find(given.pop("reward_model", "environment"))
    found = algorithms.find(algorithm, given)
    own, network, reward = build([found.Config, found.NetworkConfig, model.Config], given)
    program, first = assemble(found, env, own, network, total_steps, 0, model, reward)
    parts = 1 if report is None else 10
    updates = total_steps // program.steps_per_update // parts

    def begin(seed: jax.Array) -> Any:
        key = jax.random.key(seed)
        _, params = builder(found, program.env, own, network)(derive(key, "network"))
        return initial_state(program, first.coefficients, params, key)

    def run(state: Any, data: Any) -> Any:
        state = state._replace(reward_model=state.reward_model._replace(data=data))

        def update(state: Any, _: None) -> tuple[Any, dict[str, jax.Array]]:
            state, metrics = iteration(program, state)
            return state, {name: metrics[name] for name in METRICS if name in metrics}

        return jax.lax.scan(update, state, None, length=updates)

    states = jax.jit(jax.vmap(begin))(jnp.array(seeds))
    advance = jax.jit(jax.vmap(run, in_axes=(0, None)), donate_argnums=0)
    pieces: list[dict[str, np.ndarray]] = []
    for part in range(parts):
        states, rows = advance(states, first.reward_model.data)
        pieces.append(jax.tree.map(np.asarray, rows))
        if report is not None:
            report((part + 1) * updates * program.steps_per_update, pieces[-1])
    curves = {name: np.concatenate([piece[name] for piece in pieces], 1) for name in pieces[0]}
    learned = PolicyParameters(states.learner.params, states.observation_statistics)
    runner = PolicyProgram(program.algorithm, env.observation_space, env.action_space)
    policies = [Policy(runner, jax.tree.map(lambda x, i=i: x[i], learned)) for i in range(len(seeds))]
    evaluator = make_evaluator(env, runner, 100)
    greedy, sampled = (
        np.array([evaluator(policy.learned, jax.random.key(1), mode).returns.mean() for policy in policies])
        for mode in (True, False)
    )
    return Trained(policies, greedy, sampled, curves)


def random_return(env: AnyEnvironment) -> float:
    """Mean return of 100 episodes with actions drawn from the space."""
    policy = policy_of(env, partial(_drawn, env.action_space))
    return float(make_evaluator(env, policy.program, 100)(policy.learned, jax.random.key(2), False).returns.mean())


@dataclass(frozen=True)
class ByFunction:
    """An agent without parameters or memory that acts by a function, with the arguments of `Algorithm.act`."""

    act: Any

    def initial_carry(self, batch_shape: tuple[int, ...]) -> tuple[()]:
        """Return nothing to remember."""
        return ()


def policy_of(env: AnyEnvironment, act: Any) -> Policy:
    """Return the policy of a function."""
    agent: Any = ByFunction(act)  # no learner asks for values
    return Policy(PolicyProgram(agent, env.observation_space, env.action_space), PolicyParameters((), ()))


def _drawn(space: Any, params: Any, carry: Any, obs: Any, reset: Any, key: Any, greedy: Any) -> Any:
    return carry, jax.vmap(space.sample)(jax.random.split(key, len(reset))), {}


@dataclass(frozen=True)
class Shuffled(Discriminator):
    """A discriminator whose labels mean nothing: each step of a batch is the expert's or the policy's by a coin."""

    def batches(self, learner: Any, steps: Any, key: Any) -> tuple[Rows, Rows]:
        """Swap half of the steps."""
        batch_key, coin_key = jax.random.split(key)
        expert, policy = super().batches(learner, steps, batch_key)
        coin = jax.random.bernoulli(coin_key, 0.5, expert.weight.shape)

        def swap(one: jax.Array, other: jax.Array) -> jax.Array:
            return jnp.where(coin.reshape(-1, *(1,) * (one.ndim - 1)), one, other)

        return jax.tree.map(swap, expert, policy), jax.tree.map(swap, policy, expert)


@dataclass(frozen=True)
class ShuffledGAIL(gail.Algorithm):
    """GAIL with shuffled labels."""

    reward_model: ClassVar[type] = Shuffled
