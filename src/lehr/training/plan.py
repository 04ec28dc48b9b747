"""The plan of a run: its settings, its program and its initial state."""

import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import jax

from lehr import algorithms, config, garbage, rewards
from lehr.acting.agent import has_memory
from lehr.acting.policy import Policy, PolicyParameters, PolicyProgram
from lehr.config import CountOrAll, Names, Plugin
from lehr.envs import (
    ActionRepeat,
    AnyEnvironment,
    Environment,
    FlattenObservation,
    FrameStack,
    HostEnvironment,
    StackChannels,
)
from lehr.envs.check import is_our_own, structure
from lehr.envs.host.base import check_size
from lehr.envs.naming import Adopted, adopt
from lehr.errors import InputError, closest
from lehr.masks import has_mask
from lehr.schedules.notes import surprises
from lehr.schedules.phases import MOST_STEPS
from lehr.schedules.spec import schedule
from lehr.spaces import Box, Spaces
from lehr.training.compilation_cache import use_compilation_cache
from lehr.training.elsewhere import known_elsewhere
from lehr.training.foreign_settings import EVALUATIONS, OTHERS, UPDATES
from lehr.training.hosts import ALONE, Hosts
from lehr.training.program import Program, assemble, build_reward_model, check_reward_model
from lehr.training.runners.device import DeviceRunner, metric_names
from lehr.training.runners.host import complete
from lehr.training.sharding import ONE_DEVICE, RunSharding, first_copy, share
from lehr.types import Loaded, TrainState

ACTORS = ("none", "threads", "processes", "ray")


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run that do not depend on the algorithm."""

    OTHERS: ClassVar[dict[str, str]] = OTHERS
    elsewhere: ClassVar[Callable[[str], str]] = staticmethod(known_elsewhere)

    env: Annotated[str, Names(("env_id", "env_name"))] = "CartPole-v1"
    """Environment: a built-in name, one from another suite such as gym:NAME, or your own as file.py:Class; 'lehr list
    envs' and 'lehr list suites' show the names."""
    env_parameters: Annotated[dict[str, Any], Names(("env_kwargs", "env_config"))] = field(default_factory=dict)
    """Parameters of the environment, by the names its class or suite uses."""
    reward_model: Plugin = "environment"
    """Reward model, which adds to the environment's reward or replaces it."""
    total_steps: Annotated[
        int,
        Names(
            ("total_timesteps", "num_timesteps", "total_env_steps"),
            conversions=UPDATES,
        ),
    ] = 500_000
    """Budget in env steps."""
    seed: int = 0
    """Random seed, of which the lowest 32 bits count."""
    action_repeat: int = 1
    """Env steps that each action is repeated for; all of them count toward the budget."""
    frame_stack: Annotated[int, Names(("n_stack", "framestack", "num_stack"))] = 1
    """Number of recent observations stacked into one."""
    devices: CountOrAll = "all"
    """Number of devices that share the environments, over all processes; all uses as many as can share them equally."""
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
    evaluate_every: Annotated[int, Names(others=EVALUATIONS)] | None = None
    """Env steps between evaluations; none evaluates only at the end, or at every checkpoint if target_return is set."""
    evaluate_episodes: Annotated[int, Names(("n_eval_episodes", "num_eval_episodes", "num_eval_envs"))] = 100
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
    """Number of non-finite updates that are left out; one more stops the run."""
    log_every: int | None = None
    """Env steps between rows of the logs; none logs each of the first 10,000 updates, then ever fewer."""
    tensorboard: bool = True
    """Log to TensorBoard."""
    wandb: Annotated[bool, Names(("track", "use_wandb"))] = False
    """Log to Weights & Biases."""
    wandb_project: Annotated[str, Names(("wandb_project_name",))] = "lehr"
    """Project of Weights & Biases."""
    loggers: tuple[Plugin, ...] = ()
    """Your own loggers: classes or 'module:Name'."""
    progress: Annotated[bool, Names(("progress_bar",))] = True
    """Show progress."""

    def __post_init__(self) -> None:
        if self.devices != "all":
            config.check_counts(self, "devices")
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
    notes: tuple[str, ...] = ()
    """What the user should know when the run starts."""
    sharding: RunSharding = ONE_DEVICE
    """How the state is placed on devices."""
    runner: DeviceRunner | None = field(default=None, repr=False, compare=False)
    """The runner, if it was made along with the plan and compiles in the background."""

    @property
    def evaluation_env(self) -> AnyEnvironment:
        """The environment to evaluate in: the same, unless the user created the only ones, which are trained in."""
        if not isinstance(self.env, HostEnvironment):
            return self.env
        found = self.env.for_evaluation() or self.env
        return found if self.run.step_timeout is None else found.with_step_timeout(self.run.step_timeout)

    @property
    def mapping(self) -> dict[str, Any]:
        """Every setting by name, including the algorithm."""
        configs = self.run, self.settings, self.network, self.reward_settings
        return {"algorithm": self.algorithm, **config.to_mapping(*configs)}

    @property
    def coefficient_texts(self) -> dict[str, str]:
        """The setting of each coefficient, as text."""
        fields = [*config.describe(type(self.settings)), *config.describe(type(self.reward_settings))]
        mapping = self.mapping
        return {field.name: str(mapping[field.name]) for field in fields if field.is_coefficient}

    @property
    def schedule_notes(self) -> list[str]:
        """What the user may not have meant with the schedules of a run."""
        total = self.run.total_steps
        given = {
            name: schedule(getattr(settings, name))
            for settings in (self.settings, self.reward_settings)
            for name in config.coefficients(settings, total)
            if name not in self.settings.unused
        }
        return [note for name, one in given.items() for note in surprises(name, one, total)]

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

    def on_devices(self, hosts: Hosts = ALONE) -> "Plan":
        """Return the plan with its state shared between the devices that the settings name, of all processes."""

        def trace(sharding: RunSharding) -> None:
            metric_names(self.program, self.state, sharding=sharding)

        sharding, notes = share(self.program, self.state, self.run.devices, trace, hosts)
        runner = self.runner if sharding.mesh is None else None
        state, notes = sharding.place(sharding.with_memory(self.program, self.state)), (*self.notes, *notes)
        return replace(self, state=state, sharding=sharding, notes=notes, runner=runner)

    def policy(self, state: TrainState) -> Policy:
        """Return the policy of a state."""
        program = PolicyProgram(self.program.algorithm, self.env.observation_space, self.env.action_space)
        return Policy(program, first_copy(PolicyParameters(state.learner.params, state.observation_statistics)))


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


@garbage.paused()
def make_plan(
    algorithm: Any,
    settings: Mapping[str, Any],
    env: Any = None,
    loads: bool = True,
    abstract: bool = False,
    spreads: bool = False,
    begins: bool = False,
) -> Plan:
    """Parse the settings and assemble the run.

    Args:
        algorithm: its name, `module:Name`, or its class.
        settings: by name, as the user gave them.
        env: the environment, or a class or function that creates it, if it is not given by name.
        loads: whether to load the data of the reward model, which training needs.
        abstract: whether it is that of a member of a population, which needs only the shapes of its state, and is
            trained on one device, however many share the members.
        spreads: whether `on_devices` comes next: the state then has no `memory` that only several devices can hold.
        begins: whether to compile its updates in the background, if they run on one device, while its state is made.
    """
    use_compilation_cache()
    classes = settings_classes(algorithm, settings)
    run, algorithm_config, network, reward_config = config.build(classes, settings)
    adopted = adopt(run.env if env is None else env, run.env_parameters)
    made = adopted.env
    run = replace(run, env=adopted.name, env_parameters=adopted.parameters)
    notes: tuple[str, ...] = ()
    if loads:
        run, notes = _with_evaluations(run, adopted, config.merge(classes, {}, settings))
    if loads and isinstance(made, HostEnvironment) and made.fixed_size is not None:
        sized = {"num_envs": made.fixed_size, **config.merge(classes, {}, settings)}
        _, algorithm_config, network, reward_config = config.build(classes, sized)
    name = algorithms.name_of(algorithm)
    if run.action_repeat > 1 and getattr(network, "action_mask", False):
        _check_repeats(run, made)
    if run.actors != "none":
        _check_actors(run, name, algorithm_config, made)
    if run.overlap and not algorithm_config.allows_overlap:
        raise InputError(
            f"overlap is true, but {name} would learn from rollouts of the policy before the last update as if they "
            "were its own; drop overlap, or train impala, which corrects for that."
        )
    if isinstance(made, HostEnvironment):
        if loads:
            check_size(made, algorithm_config.num_envs)
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
        if not is_our_own(made) and (problems := structure(made)):
            raise InputError(f"Cannot train on the environment {run.env}. {problems[0]}")
        if run.action_repeat > 1:
            made = ActionRepeat(made, run.action_repeat)
        if run.frame_stack > 1:
            made = _stacked(made, run.frame_stack)
    algorithm_config = algorithm_config.for_spaces(Spaces(made.observation_space, made.action_space))
    algorithm_config = algorithm_config.for_devices(1 if abstract else _fewest_devices(run.devices))
    found = algorithms.find(algorithm, {config.underscored(key): value for key, value in settings.items()})
    reward_model = rewards.find(run.reward_model)
    loaded = Loaded()
    if loads:
        loaded = build_reward_model(found, algorithm_config, made, reward_model, reward_config).load()
    runner: DeviceRunner | None = None

    def prepare(program: Program, shapes: TrainState) -> None:
        nonlocal runner
        if begins and _most_devices(run.devices) == 1 and not isinstance(made, HostEnvironment):
            runner = DeviceRunner(program, shapes)
            runner.prepare(shapes)

    program, state = assemble(
        *(found, made, algorithm_config, network, run.total_steps, run.seed, reward_model, reward_config, loaded),
        abstract=abstract,
        devices=_most_devices(run.devices) if spreads and not isinstance(made, HostEnvironment) else 1,
        first=prepare,
    )
    if isinstance(made, HostEnvironment) and not abstract:
        state = complete(program, state, run.overlap)
    parsed = run, algorithm_config.for_network(has_memory(program.algorithm)), network, reward_config
    return Plan(name, *parsed, made, program, state, loaded, notes, runner=runner)


def _most_devices(wanted: int | Literal["all"]) -> int:
    """How many devices may share a run."""
    return jax.device_count() if wanted == "all" else wanted


def _fewest_devices(wanted: int | Literal["all"]) -> int:
    """How many devices share a run at least: one of each process, if `all` does not say how many."""
    if wanted != "all":
        return wanted
    return jax.process_count() if jax.distributed.is_initialized() else 1


def _with_evaluations(run: RunConfig, adopted: Adopted, given: Mapping[str, Any]) -> tuple[RunConfig, tuple[str, ...]]:
    """The settings, without evaluations if there is nothing to evaluate in, and notes about the environment.

    Args:
        run: the settings.
        adopted: the environment.
        given: the settings that the user gave, by name.
    """
    env, notes = adopted.env, []
    if not adopted.is_found_elsewhere:
        notes.append(
            f"The files of this run cannot say how to create {run.env.strip('<>')}, so resume, load and evaluate will "
            "need env=, and the command line --env module:Class; to avoid that, pass a class from a module, or a "
            "function from a module whose annotation says that it returns an environment."
        )
    if isinstance(env, HostEnvironment) and run.evaluate_episodes and env.for_evaluation() is None:
        for name in ("evaluate_episodes", "evaluate_every", "target_return"):
            if given.get(name) is not None:
                raise InputError(
                    f"{name} is {given[name]}, but the environments of {env.name} are existing objects and are used "
                    f"for training, so there are none for evaluation; remove {name}, or give a class or function "
                    "that creates the environment."
                )
        run = replace(run, evaluate_episodes=0)
        notes.append(
            f"This run is not evaluated, since it trains in all environments that there are of {env.name}; evaluate "
            "its policy later with lehr.evaluate(result.policy, env)."
        )
    return run, tuple(notes)


def _stacked(env: Environment, count: int) -> Environment:
    """The environment with the last observations stacked: images along their channels, all else as one vector."""
    space = env.observation_space
    if isinstance(space, Box) and len(space.shape) in (2, 3):
        return StackChannels(env, count)
    return FlattenObservation(FrameStack(env, count))


def _check_repeats(run: RunConfig, env: AnyEnvironment) -> None:
    """Refuse to repeat actions that can be forbidden."""
    if has_mask(env.observation_space, env.action_space):
        raise InputError(
            f"action_repeat is {run.action_repeat}, but {run.env} has an action mask, which may forbid an action when "
            "it is repeated; drop action_repeat, or set action_mask=False."
        )


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
