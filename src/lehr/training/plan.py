"""The plan of a run: its settings, its program and its initial state."""

import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
from lehr.schedules.phases import MOST_STEPS
from lehr.spaces import Box
from lehr.training.program import Program, assemble, build_reward_model, check_reward_model
from lehr.training.runners.host import complete
from lehr.types import Loaded, TrainState

ACTORS = ("none", "threads", "processes", "ray")


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run that do not depend on the algorithm."""

    env: str = "CartPole-v1"
    """Name of the environment."""
    env_parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of the environment, by the names its class or suite uses."""
    reward_model: Plugin = "environment"
    """Reward model, which adds to the environment's reward or replaces it."""
    total_steps: int = 500_000
    """Budget in env steps."""
    seed: int = 0
    """Random seed."""
    action_repeat: int = 1
    """Env steps that each action is repeated for; all of them count toward the budget."""
    frame_stack: int = 1
    """Number of recent observations stacked into one."""
    overlap: bool = False
    """Step host environments while the device learns; the acting policy is then one update behind."""
    actors: str = "none"
    """Asynchronous actors for host environments: threads, processes, ray, or none; only for algorithms that correct for
    the policy's lag."""
    num_actors: int = 2
    """Number of actors, each with num_envs environments."""
    queue_size: int = 2
    """Maximum number of rollouts that wait for the learner; actors wait while the queue is full."""
    step_timeout: float | None = None
    """Stop the run if a step or a reset of its host environments takes longer than this many seconds; none waits."""
    evaluate_every: int | None = None
    """Env steps between evaluations; none evaluates only at the end, or at every checkpoint if target_return is set."""
    evaluate_episodes: int = 100
    """Episodes per evaluation; 0 turns evaluation off."""
    target_return: float | None = None
    """Stop the run when the mean return of an evaluation reaches this value."""
    checkpoint_every: int | None = None
    """Env steps between checkpoints; none saves ten per run."""
    keep_checkpoints: int = 3
    """Number of latest checkpoints to keep, besides the best one."""
    checkpoint_replay: Literal["on", "off"] = "on"
    """Save the replay and stored rollouts in checkpoints; off saves space, but a resumed run then starts with none."""
    max_rejected: int = 10
    """Stop the run after this many non-finite updates."""
    log_every: int | None = None
    """Env steps between rows of the logs; none logs each of the first 10,000 updates, then ever fewer."""
    tensorboard: bool = True
    """Log to TensorBoard."""
    wandb: bool = False
    """Log to Weights & Biases."""
    wandb_project: str = "lehr"
    """Project of Weights & Biases."""
    loggers: tuple[Plugin, ...] = ()
    """Your own loggers: classes or 'module:Name'."""
    progress: bool = True
    """Show progress."""

    def __post_init__(self) -> None:
        config.check_counts(self, "action_repeat", "num_actors", "queue_size", "keep_checkpoints")
        config.check_counts(self, "frame_stack", most=1024)
        config.check_counts(self, "evaluate_episodes", "max_rejected", least=0)
        config.check_counts(self, "total_steps", most=MOST_STEPS)
        config.check_counts(self, "evaluate_every", "checkpoint_every", "log_every", most=2**63 - 1)
        config.check_counts(self, "seed", least=-(2**63), most=2**63 - 1)  # 64 bits
        if self.step_timeout is not None and not self.step_timeout > 0:
            raise InputError(f"step_timeout is {self.step_timeout:g}; it must be positive, or none.")
        if self.actors not in ACTORS:
            raise InputError(f"actors is {self.actors!r}; {closest(self.actors, ACTORS)}")
        if self.overlap and self.actors != "none":
            raise InputError(
                f"overlap is true, but actors is {self.actors!r}, which already overlap with learning; drop overlap."
            )
        if self.target_return is not None and self.evaluate_episodes == 0:
            raise InputError(
                f"target_return is {self.target_return:g}, but evaluate_episodes is 0, which turns evaluation off; "
                "drop one of them."
            )


@dataclass(frozen=True)
class Plan:
    """Everything about a run except its directory."""

    algorithm: str
    """Its name, or `module:Name`."""
    run: RunConfig
    settings: Any
    network: Any
    reward_settings: Any
    env: AnyEnvironment
    program: Program
    state: Any
    """The initial state: a `TrainState`, or in a population that of all members."""
    loaded: Loaded
    """The data of the reward model."""

    @property
    def mapping(self) -> dict[str, Any]:
        """Every setting by name, including the algorithm."""
        configs = self.run, self.settings, self.network, self.reward_settings
        return {"algorithm": self.algorithm, **config.to_mapping(*configs)}

    @property
    def coefficient_texts(self) -> dict[str, str]:
        """The setting of each coefficient, as text."""
        fields = [*config.describe(type(self.settings)), *config.describe(type(self.reward_settings))]
        return {field.name: str(self.mapping[field.name]) for field in fields if field.is_coefficient}

    @property
    def updates(self) -> int:
        """Number of updates of the whole run: the budget divided by the env steps per update, rounded up."""
        return -(-self.run.total_steps // self.program.steps_per_update)

    def check_clock(self, updates: int, env_steps: int) -> None:
        """Check that a checkpoint's updates have as many env steps with these settings as when it was saved."""
        now = self.program.steps_per_update
        if updates * now != env_steps:
            raise InputError(
                f"An update has {now} env steps with these settings, but the run's {updates} updates so far had "
                f"{env_steps // max(updates, 1)} each, so its clock would jump; do not change horizon or action_repeat."
            )

    def every(self, env_steps: int) -> int:
        """Convert an interval in env steps to updates, at least 1."""
        return max(1, round(env_steps / self.program.steps_per_update))

    def policy(self, state: TrainState) -> Policy:
        """Return the policy of a state."""
        program = PolicyProgram(self.program.algorithm, self.env.observation_space, self.env.action_space)
        return Policy(program, PolicyParameters(state.learner.params, state.observation_statistics))


def settings_classes(algorithm: Any, settings: Mapping[str, Any] | None = None) -> list[type]:
    """Return the classes whose fields are the settings of a run, in one namespace.

    Args:
        algorithm: its name, `module:Name`, or its class.
        settings: the user's settings by name, some of which choose others: the reward model, a variant.
    """
    given = {config.underscored(name): value for name, value in (settings or {}).items()}
    found, model = algorithms.find(algorithm, given), rewards.find(given.get("reward_model", "environment"))
    check_reward_model(found, model)
    return [RunConfig, found.Config, found.NetworkConfig, model.Config]


def make_plan(
    algorithm: Any, settings: Mapping[str, Any], env: AnyEnvironment | str | None = None, loads: bool = True
) -> Plan:
    """Parse the settings and assemble the run.

    Args:
        algorithm: its name, `module:Name`, or its class.
        settings: by name, as the user gave them.
        env: the environment, if it is not given by name.
        loads: whether to load the data of the reward model, which training needs.
    """
    use_compilation_cache()
    classes = settings_classes(algorithm, settings)
    run, algorithm_config, network, reward_config = config.build(classes, settings)
    made = make(run.env if env is None else env, **run.env_parameters)
    name = algorithms.name_of(algorithm)
    if run.actors != "none":
        _check_actors(run, name, algorithm_config, made)
    if run.overlap and not algorithm_config.allows_overlap:
        raise InputError(
            f"overlap is true, but {name} would learn from rollouts of the policy before the last update as if they "
            "were its own; drop overlap, or train impala, which corrects for that."
        )
    if isinstance(made, HostEnvironment):
        check_size(made, algorithm_config.num_envs, evaluates=run.evaluate_episodes > 0)
        if run.action_repeat > 1 or run.frame_stack > 1:
            made = made.with_wrappers(run.action_repeat, run.frame_stack)
        if run.step_timeout is not None:
            made = made.with_step_timeout(run.step_timeout)
    else:
        if run.step_timeout is not None:
            raise InputError(
                f"step_timeout is {run.step_timeout:g}, but {run.env} is compiled and runs on the device; step_timeout "
                "is for host environments, such as gym:CartPole-v1."
            )
        if run.overlap:
            raise InputError(
                f"overlap is true, but {run.env} is compiled and runs on the device; overlap is for host environments, "
                "such as gym:CartPole-v1."
            )
        if not _is_our_own(made) and (problems := structure(made)):
            raise InputError(f"Cannot train on the environment {run.env}. {problems[0]}")
        if run.action_repeat > 1:
            made = ActionRepeat(made, run.action_repeat)
        if run.frame_stack > 1:
            made = _stacked(made, run.frame_stack)
    found = algorithms.find(algorithm, {config.underscored(key): value for key, value in settings.items()})
    reward_model = rewards.find(run.reward_model)
    loaded = Loaded()
    if loads:
        loaded = build_reward_model(found, algorithm_config, made, reward_model, reward_config).load()
    program, state = assemble(
        found, made, algorithm_config, network, run.total_steps, run.seed, reward_model, reward_config, loaded
    )
    if isinstance(made, HostEnvironment):
        state = complete(program, state, run.overlap)
    return Plan(name, run, algorithm_config, network, reward_config, made, program, state, loaded)


def _stacked(env: Environment, count: int) -> Environment:
    """The environment with the last observations stacked: images along their channels, all else as one vector."""
    space = env.observation_space
    if isinstance(space, Box) and len(space.shape) in (2, 3):
        return StackChannels(env, count)
    return FlattenObservation(FrameStack(env, count))


def _check_actors(run: RunConfig, algorithm: str, settings: Any, env: AnyEnvironment) -> None:
    """Refuse actors if the environment or the algorithm does not support them."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InputError(
            "An actor process started training, because it imported your script; call train under "
            "if __name__ == '__main__'."
        )
    if not isinstance(env, HostEnvironment):
        raise InputError(
            f"actors is {run.actors!r}, but {run.env} is compiled and runs on the device; actors are for host "
            "environments, such as gym:CartPole-v1. To simulate a policy lag on the device, set lag."
        )
    if env.fixed_size is not None:
        raise InputError(
            f"actors is {run.actors!r}, but the environments of {env.name} already exist, so actors cannot create "
            "their own; give the environment by name."
        )
    if not settings.corrects_lag:
        able = [name for name in algorithms.names() if algorithms.find(name).Config.corrects_lag]
        raise InputError(
            f"actors is {run.actors!r}, but {algorithm} does not correct for the lag of asynchronous actors; train "
            f"{' or '.join(able)}."
        )


def _is_our_own(env: Environment) -> bool:
    """Whether the environment is part of Lehr, and so is checked by Lehr's tests."""
    while isinstance(env, Wrapper):
        env = env.env
    return type(env).__module__.startswith("lehr.")


def use_compilation_cache() -> None:
    """Cache compiled programs on disk, unless JAX's own cache is set; `LEHR_CACHE=off` turns this off."""
    place = os.environ.get("LEHR_CACHE") or str(Path.home() / ".cache" / "lehr" / "compiled")
    if place == "off" or getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
