"""A run before it begins: its settings, its compiled program, its coefficients and its first state."""

import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from lehr import algorithms, config, rewards
from lehr.acting.policy import Policy, PolicyParameters, PolicyProgram
from lehr.config import Plugin
from lehr.envs import (
    ActionRepeat,
    AnyEnvironment,
    Environment,
    FlattenObservation,
    FrameStack,
    HostEnvironment,
    StackChannels,
    Wrapper,
    make,
)
from lehr.envs.check import structure
from lehr.envs.host.base import check_size
from lehr.errors import InputError, closest
from lehr.spaces import Box
from lehr.training.program import Program, assemble
from lehr.training.runners.host import complete
from lehr.types import TrainState

_LEAST = {
    "total_steps": 1,
    "action_repeat": 1,
    "frame_stack": 1,
    "num_actors": 1,
    "queue_size": 1,
    "evaluate_episodes": 0,
    "keep_checkpoints": 1,
    "max_rejected": 0,
}


ACTORS = ("none", "threads", "processes", "ray")


@dataclass(frozen=True)
class RunConfig:
    """What a run does, whatever the algorithm."""

    env: str = "CartPole-v1"
    """Name of the environment."""
    env_parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of the environment, named as its class or suite names them."""
    reward_model: Plugin = "environment"
    """Reward model: what is added to the environment's reward, or replaces it."""
    total_steps: int = 500_000
    """Budget in env steps."""
    seed: int = 0
    """Random seed."""
    action_repeat: int = 1
    """Env steps for which each action is repeated; they count toward the budget."""
    frame_stack: int = 1
    """Number of most recent observations that the agent sees."""
    overlap: bool = False
    """Step environments on the host while the device learns; the acting policy is then one update behind."""
    actors: str = "none"
    """Who acts in environments on the host while the learner learns: threads, processes, or ray for a cluster; only for
    algorithms that correct for the lag. With none the learner acts itself."""
    num_actors: int = 2
    """Number of actors, each with num_envs environments."""
    queue_size: int = 2
    """Maximum number of rollouts waiting for the learner; when the queue is full, actors wait."""
    evaluate_every: int | None = None
    """Env steps between evaluations; none evaluates at the end, and with a target_return at every checkpoint."""
    evaluate_episodes: int = 100
    """Episodes per evaluation; 0 turns evaluation off."""
    target_return: float | None = None
    """Stop when the mean return of an evaluation reaches this."""
    checkpoint_every: int | None = None
    """Env steps between checkpoints; none makes ten in a run."""
    keep_checkpoints: int = 3
    """Checkpoints to keep, besides the best one."""
    max_rejected: int = 10
    """Stop the run after this many non-finite updates."""
    tensorboard: bool = True
    """Write metrics to TensorBoard files too."""
    wandb: bool = False
    """Send metrics to Weights & Biases too."""
    loggers: tuple[Plugin, ...] = ()
    """Loggers of your own: classes or 'module:Name'."""
    progress: bool = True
    """Show the progress."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be {least} or more.")
        for name in ("evaluate_every", "checkpoint_every"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise InputError(f"{name} is {given}; it must be 1 or more, or none.")
        if self.actors not in ACTORS:
            raise InputError(f"actors is {self.actors!r}; {closest(self.actors, ACTORS)}")
        if self.overlap and self.actors != "none":
            raise InputError(
                f"overlap is true, but actors is {self.actors!r}, which overlap by themselves; leave overlap out."
            )
        if self.target_return is not None and self.evaluate_episodes == 0:
            raise InputError(
                f"target_return is {self.target_return:g}, but evaluate_episodes is 0, so nothing is evaluated; remove "
                "one of them."
            )


@dataclass(frozen=True)
class Plan:
    """All of a run but its directory."""

    algorithm: str
    """Its name, or `module:Name`."""
    run: RunConfig
    settings: Any
    network: Any
    reward_settings: Any
    env: AnyEnvironment
    program: Program
    state: TrainState

    @property
    def mapping(self) -> dict[str, Any]:
        """All settings by name, the algorithm's included."""
        configs = self.run, self.settings, self.network, self.reward_settings
        return {"algorithm": self.algorithm, **config.to_mapping(*configs)}

    @property
    def coefficient_texts(self) -> dict[str, str]:
        """What each coefficient was set to, as text."""
        fields = [*config.describe(type(self.settings)), *config.describe(type(self.reward_settings))]
        return {field.name: str(self.mapping[field.name]) for field in fields if field.is_coefficient}

    @property
    def updates(self) -> int:
        """Updates of the whole run: as many as the budget needs."""
        return -(-self.run.total_steps // self.program.steps_per_update)

    def check_clock(self, updates: int, env_steps: int) -> None:
        """Make sure that the updates of a checkpoint are as many env steps here as they were."""
        now = self.program.steps_per_update
        if updates * now != env_steps:
            raise InputError(
                f"An update has {now} env steps with these settings, but the {updates} updates of the run had "
                f"{env_steps // updates} each, so its clock would jump; keep horizon and action_repeat as they were."
            )

    def every(self, env_steps: int) -> int:
        """Updates between two events that are to be this many env steps apart."""
        return max(1, round(env_steps / self.program.steps_per_update))

    def policy(self, state: TrainState) -> Policy:
        """The policy of a state."""
        program = PolicyProgram(self.program.algorithm, self.env.observation_space, self.env.action_space)
        return Policy(program, PolicyParameters(state.learner.params, state.observation_statistics))


def settings_classes(algorithm: Any, reward_model: Any = "environment") -> list[type]:
    """The classes of all settings of a run, as one namespace for users."""
    return [RunConfig, *algorithms.settings_of(algorithm), rewards.find(reward_model).Config]


def make_plan(algorithm: Any, settings: Mapping[str, Any], env: AnyEnvironment | str | None = None) -> Plan:
    """Read the settings and assemble the run.

    Args:
        algorithm: its name, `module:Name`, or its class.
        settings: by name, as the user gave them.
        env: the environment, where it is not given by name.
    """
    use_compilation_cache()
    given = {str(name).replace("-", "_"): value for name, value in settings.items()}
    reward_model = rewards.find(given.get("reward_model", "environment"))
    classes = [RunConfig, *algorithms.settings_of(algorithm), reward_model.Config]
    run, algorithm_config, network, reward_config = config.build(classes, settings)
    made = make(run.env if env is None else env, **run.env_parameters)
    name = algorithms.name_of(algorithm)
    if run.actors != "none":
        _check_actors(run, name, algorithm_config, made)
    if isinstance(made, HostEnvironment):
        check_size(made, algorithm_config.num_envs, evaluates=run.evaluate_episodes > 0)
        if run.action_repeat > 1 or run.frame_stack > 1:
            made = made.with_wrappers(run.action_repeat, run.frame_stack)
    else:
        if run.overlap:
            raise InputError(
                f"overlap is true, but {run.env} is compiled together with the learning; it is for environments on the "
                "host, such as gym:CartPole-v1."
            )
        if not _is_our_own(made) and (problems := structure(made)):
            raise InputError(f"The environment {run.env} cannot be trained on. {problems[0]}")
        if run.action_repeat > 1:
            made = ActionRepeat(made, run.action_repeat)
        if run.frame_stack > 1:
            made = _stacked(made, run.frame_stack)
    program, state = assemble(
        algorithm, made, algorithm_config, network, run.total_steps, run.seed, reward_model, reward_config
    )
    if isinstance(made, HostEnvironment):
        state = complete(program, state, run.overlap)
    return Plan(name, run, algorithm_config, network, reward_config, made, program, state)


def _stacked(env: Environment, count: int) -> Environment:
    """The environment with the last observations stacked: images along their channels, all else as one vector."""
    space = env.observation_space
    if isinstance(space, Box) and len(space.shape) in (2, 3):
        return StackChannels(env, count)
    return FlattenObservation(FrameStack(env, count))


def _check_actors(run: RunConfig, algorithm: str, settings: Any, env: AnyEnvironment) -> None:
    """Refuse actors where they cannot be, or where what they do could not be learned from."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InputError(
            "A process that was started for an actor trains itself, for it runs your script again; train under "
            "if __name__ == '__main__'."
        )
    if not isinstance(env, HostEnvironment):
        raise InputError(
            f"actors is {run.actors!r}, but {run.env} is compiled together with the learning; they are for "
            "environments on the host, such as gym:CartPole-v1. Here lag says how far the policy that acts is behind."
        )
    if env.fixed_size is not None:
        raise InputError(
            f"actors is {run.actors!r}, but the environments of {env.name} exist already, so no actor can have its "
            "own; give the environment by its name."
        )
    if not settings.corrects_lag:
        able = [name for name in algorithms.names() if algorithms.find(name).Config.corrects_lag]
        raise InputError(
            f"actors is {run.actors!r}, but {algorithm} takes what they did for what it would do itself now; train "
            f"{' or '.join(able)}."
        )


def _is_our_own(env: Environment) -> bool:
    """Whether it came with Lehr, so that its tests have looked at it already."""
    while isinstance(env, Wrapper):
        env = env.env
    return type(env).__module__.startswith("lehr.")


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, unless JAX was told otherwise; `LEHR_CACHE=off` turns it off."""
    place = os.environ.get("LEHR_CACHE") or str(Path.home() / ".cache" / "lehr" / "compiled")
    if place == "off" or getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
