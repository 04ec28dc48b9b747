"""`lehr play`: record one episode as a GIF, a video or a page."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr.acting.agent import observed
from lehr.acting.policy import Policy
from lehr.cli import output
from lehr.cli.loading import add_run, check_seed, load_environment, load_run
from lehr.envs import Environment, HostEnvironment
from lehr.envs.host.base import ask, own
from lehr.errors import InputError
from lehr.report import film, render
from lehr.report.loggers.display import waiting
from lehr.types import Key, PyTree


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the run, which episode to record, and where to save it."""
    add_run(parser)
    parser.add_argument(
        "--out",
        "--gif",
        metavar="FILE",
        help="output file: .gif, .mp4, or .html for Brax and Playground (default: play.gif in the run directory, or "
        "play.html where pictures cannot be drawn)",
    )
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
    parser.add_argument(
        "--imagine",
        type=int,
        metavar="INTEGER",
        help="show each observation beside what the model expects after this many of them; for dreamer, with images",
    )


class Episode(NamedTuple):
    """What happened in an episode of `T` steps."""

    states: list[Any]
    """States of the environment, `T + 1` of them; frames where it runs on the host."""
    observations: list[PyTree]
    """`T + 1` of them, leaves `[agents, ...]`."""
    carries: list[PyTree]
    """What the policy remembered after each of the first `T` observations, leaves `[agents, ...]`."""
    total: float
    """The return, the mean over agents."""


def run(arguments: argparse.Namespace) -> None:
    """Record an episode with the most likely actions."""
    for name in ("max_steps", "imagine"):
        given = getattr(arguments, name)
        if given is not None and given < 1:
            raise InputError(f"--{name.replace('_', '-')} is {given}; it must be 1 or more.")
    check_seed(arguments)
    wanted = None if arguments.out is None else Path(arguments.out)
    if wanted is not None:
        film.check_file(wanted)
        if arguments.imagine and wanted.suffix not in film.PICTURES:
            raise InputError(f"What is imagined is shown in pictures, not in '{wanted}'; give a .gif or .mp4 file.")
    if not arguments.imagine:
        check_drawable(arguments, None if wanted is None else wanted.suffix)
    with waiting(f"loading {arguments.run_name}"):
        result = load_run(arguments)
    is_gif = arguments.imagine or isinstance(result.env, HostEnvironment)
    suffix = ".gif" if is_gif else (*film.formats(result.env), ".gif")[0]
    path, options = wanted or result.run_dir / f"play{suffix}", (result.policy, arguments.seed, arguments.max_steps)
    with waiting("playing an episode"):
        if isinstance(result.env, HostEnvironment):
            played = host_episode(result.env, *options)
        else:
            played = episode(result.env, *options)
    with waiting(f"drawing {len(played.states)} frames"):
        if arguments.imagine:
            film.save_frames(imagined(result.policy, played, arguments.imagine), path, fps=10)
        elif isinstance(result.env, HostEnvironment):
            film.save_frames(played.states, path)
        else:
            film.save(result.env, played.states, [_first_agent(obs) for obs in played.observations], path)
    console = output.console()
    words = f"Saved an episode of {len(played.carries)} steps with return {played.total:g} to {path}."
    if path.suffix == ".html":
        words += " The page loads its viewer from the network when you open it."
    console.print(output.show(console, words), soft_wrap=True)


def check_drawable(arguments: argparse.Namespace, suffix: str | None) -> None:
    """Refuse what cannot be shown, before the policy is loaded and anything is compiled."""
    if (found := load_environment(arguments)) is not None:
        film.check_environment(*found, suffix)


def imagined(policy: Policy, played: Episode, seen: int) -> list[np.ndarray]:
    """Return the first agent's observations, each beside what its model expects after so many of them."""
    imagine = getattr(policy.program.agent, "imagine", None)
    if imagine is None:
        raise InputError(
            "The algorithm of this run has no model of the environment, so it imagines nothing; leave out --imagine, "
            "or play a run of dreamer."
        )
    learned, seen = policy.learned, min(seen, len(played.carries))
    obs, carries = (_of_first_agent(steps) for steps in (played.observations, played.carries))
    happened, expected = imagine(learned.params, observed(learned.observation_statistics, obs), carries, seen)
    return render.side_by_side(np.asarray(happened), np.asarray(expected), seen)


def episode(env: Environment, policy: Policy, seed: int, max_steps: int) -> Episode:
    """Play one episode with the most likely actions.

    With the same seed, this is the first episode of `lehr.evaluate`: the keys are derived in the same way.
    """
    agents = env.num_agents
    reset_key, key = jax.random.split(jax.random.key(seed))
    step = jax.jit(env.step)
    state, obs = jax.jit(env.reset)(_first(reset_key))
    carry, carries = policy.initial_carry(agents), list[PyTree]()
    states, observations = [state], [_batch(env, obs)]
    returns, done = np.zeros(agents), np.zeros(agents, bool)
    while len(carries) < max_steps and not np.all(done):
        carry, action = policy.step_on_device(carry, observations[-1], np.full(agents, not carries))
        action = action if agents > 1 else jax.tree.map(lambda x: x[0], action)
        _, step_key = jax.random.split(jax.random.fold_in(key, len(carries)))
        state, timestep = step(_first(step_key), state, action)
        returns += np.where(done, 0.0, np.reshape(timestep.reward, agents))
        done |= np.reshape(timestep.terminated | timestep.truncated, agents)
        states.append(state)
        observations.append(_batch(env, timestep.obs))
        carries.append(carry)
    return Episode(states, observations, carries, float(np.mean(returns)))


def host_episode(env: HostEnvironment, policy: Policy, seed: int, max_steps: int) -> Episode:
    """Play one episode on the host with the most likely actions."""
    agents = env.num_agents
    batch = ask(env.name, "its constructor", partial(env.start, 1, render=True))
    try:
        obs = ask(env.name, "reset", partial(batch.reset, np.array([seed % 2**32], np.uint32)))
        carry, carries = policy.initial_carry(agents), list[PyTree]()
        frames, observations = [batch.render()], [own(env, obs)]
        returns, done = np.zeros(agents), np.zeros(agents, bool)
        while len(carries) < max_steps and not np.all(done):
            carry, action = policy.step_on_device(carry, observations[-1], np.full(agents, not carries))
            answer = ask(env.name, "step", partial(batch.step, np.array(action)))
            returns += np.where(done, 0.0, answer.reward)
            done |= answer.terminated | answer.truncated
            ended = done.all()  # then both would be the next episode's
            frames.append(frames[-1] if ended else batch.render())
            observations.append(own(env, answer.final_obs if ended else answer.obs))
            carries.append(carry)
        return Episode(frames, observations, carries, float(np.mean(returns)))
    finally:
        batch.close()


def _first_agent(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: np.asarray(leaf[0]), tree)


def _of_first_agent(steps: list[PyTree]) -> PyTree:
    """Stack what one agent had in each step, leaves `[agents, ...]`, to leaves `[T, ...]`."""
    return jax.tree.map(lambda *leaves: jnp.stack([leaf[0] for leaf in leaves]), *steps)


def _batch(env: Environment, obs: PyTree) -> PyTree:
    """Give an observation of a single agent the axis of the agents."""
    return obs if env.num_agents > 1 else jax.tree.map(lambda x: x[None], obs)


def _first(key: Key) -> Key:
    """The key of the first environment in a batch."""
    return jax.random.split(key, 1)[0]
