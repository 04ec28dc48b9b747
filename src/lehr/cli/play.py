"""`lehr play`: record one episode as a GIF."""

import argparse
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from lehr.acting.policy import Policy
from lehr.cli import output
from lehr.cli.loading import add_run, load_run
from lehr.envs import Environment, HostEnvironment
from lehr.envs.host.base import ask, own
from lehr.errors import InputError
from lehr.report import render
from lehr.types import Key, PyTree


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the run, which episode to record, and where to save it."""
    add_run(parser)
    parser.add_argument("--gif", metavar="FILE", help="output file (default: play.gif in the run directory)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="INTEGER", help="random seed of the episode (default: 0)"
    )
    parser.add_argument(
        "--max-steps",
        type=int,
        default=1000,
        metavar="INTEGER",
        help="stop the episode after this many steps (default: 1000)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Record an episode with the most likely actions."""
    if arguments.max_steps < 1:
        raise InputError(f"--max-steps is {arguments.max_steps}; it must be 1 or more.")
    result = load_run(arguments)
    path = arguments.gif or result.run_dir / "play.gif"
    if isinstance(result.env, HostEnvironment):
        frames, total = host_episode(result.env, result.policy, arguments.seed, arguments.max_steps)
    else:
        states, total = episode(result.env, result.policy, arguments.seed, arguments.max_steps)
        frames = [render.frame(result.env, state) for state in states]
    render.save_gif(frames, path)
    console = output.console()
    words = f"Saved an episode of {len(frames) - 1} steps with return {total:g} to {path}."
    console.print(output.show(console, words), soft_wrap=True)


def episode(env: Environment, policy: Policy, seed: int, max_steps: int) -> tuple[list[PyTree], float]:
    """The states of one episode with the most likely actions, and its return (the mean over agents).

    With the same seed, this is the first episode of `lehr.evaluate`: the keys are derived in the same way.
    """
    agents = env.num_agents
    reset_key, key = jax.random.split(jax.random.key(seed))
    step = jax.jit(env.step)
    state, obs = jax.jit(env.reset)(_first(reset_key))
    carry, states = policy.initial_carry(agents), [state]
    returns, done = np.zeros(agents), np.zeros(agents, bool)
    while len(states) <= max_steps and not np.all(done):
        begins = np.full(agents, len(states) == 1)
        carry, action = policy.step(carry, obs if agents > 1 else jax.tree.map(lambda x: x[None], obs), begins)
        action = action if agents > 1 else jax.tree.map(lambda x: x[0], action)
        _, step_key = jax.random.split(jax.random.fold_in(key, len(states) - 1))
        state, timestep = step(_first(step_key), state, action)
        obs, reward = timestep.obs, np.reshape(timestep.reward, agents)
        returns += np.where(done, 0.0, reward)
        done |= np.reshape(timestep.terminated | timestep.truncated, agents)
        states.append(state)
    return states, float(np.mean(returns))


def host_episode(env: HostEnvironment, policy: Policy, seed: int, max_steps: int) -> tuple[list[np.ndarray], float]:
    """The frames of one episode on the host, and its return (the mean over agents)."""
    agents = env.num_agents
    batch = ask(env.name, "its constructor", partial(env.start, 1, render=True))
    try:
        obs = ask(env.name, "reset", partial(batch.reset, np.array([seed % 2**32], np.uint32)))
        carry, frames = policy.initial_carry(agents), [batch.render()]
        returns, done = np.zeros(agents), np.zeros(agents, bool)
        while len(frames) <= max_steps and not np.all(done):
            carry, action = policy.step(carry, own(env, obs), np.full(agents, len(frames) == 1))
            answer = ask(env.name, "step", partial(batch.step, np.array(action)))
            returns += np.where(done, 0.0, answer.reward)
            done |= answer.terminated | answer.truncated
            obs = answer.obs
            frames.append(frames[-1] if done.all() else batch.render())  # once done, render would show the next episode
        return frames, float(np.mean(returns))
    finally:
        batch.close()


def _first(key: Key) -> Key:
    """The key of the first environment in a batch."""
    return jax.random.split(key, 1)[0]
