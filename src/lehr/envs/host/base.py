"""Base classes of environments that run on the host, in Python or C++: Gymnasium, EnvPool and PettingZoo.

A `HostEnvironment` is a description, like an `Environment`. Its method `start` creates a `HostBatch` of `E` running
environments that step together in NumPy. Agents are folded into the batch axis, `N = E · num_agents`.
"""

import copy
import functools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np

from lehr.envs.base import Described, Environment
from lehr.envs.host.answers import WrongAnswer, beyond, described, fits, wanted
from lehr.errors import InputError
from lehr.masks import without_action
from lehr.spaces import Space
from lehr.types import PyTree

Answer = TypeVar("Answer")


class HostStep(NamedTuple):
    """The result of stepping `E` environments; leaves `[N, ...]`, which the next step may overwrite."""

    obs: PyTree
    """The observation to act on next; after an episode has ended, the first one of the next episode."""
    final_obs: PyTree
    """The observation before any reset."""
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray | None = None
    """bool: whether the step was actually taken. Invalid steps are terminated, with a reward of 0. `None` if the
    environment does not mask steps."""


class HostBatch(ABC):
    """A batch of `E` running environments."""

    restores: bool = False
    """Whether `state` and `restore` can save and restore the environments."""

    keeps_time: bool = False
    """Whether it raises `EnvironmentFailed` itself when a step takes longer than `HostEnvironment.step_timeout`."""

    @abstractmethod
    def reset(self, seeds: np.ndarray) -> PyTree:
        """Start an episode in each environment with these seeds, uint32 `[E]`, and return observations `[N, ...]`."""

    @abstractmethod
    def step(self, action: np.ndarray) -> HostStep:
        """Step each environment with actions `[N, ...]`."""

    def state(self) -> PyTree:
        """Return the arrays, of constant shapes, that `restore` needs."""
        return ()

    def restore(self, state: PyTree) -> PyTree:
        """Restore the environments and return observations `[N, ...]`. Only called if `restores` is true."""
        raise InputError("these environments cannot be restored")

    def render(self) -> np.ndarray:
        """Render the first environment, uint8 `[H, W, 3]`."""
        raise InputError("This environment cannot be rendered.")

    @abstractmethod
    def close(self) -> None:
        """Release processes, threads and windows."""


def says_it_renders(env: Any) -> bool:
    """Whether an environment of Gymnasium or PettingZoo lists pixels among what it renders."""
    modes = (getattr(env, "metadata", None) or {}).get("render_modes")
    return "rgb_array" in (modes or ())


class HostEnvironment(Described, ABC):
    """The description of a host environment: immutable and hashable, with the attributes of `Environment`."""

    step_timeout: float | None = None
    """Seconds that a step or a reset of the whole batch may take; `None` for no limit."""

    def with_step_timeout(self, seconds: float) -> "HostEnvironment":
        """Return the environment with a time limit for a step; it is equal to the one without, since it acts alike."""
        limited = copy.copy(self)
        object.__setattr__(limited, "step_timeout", seconds)
        return limited

    @property
    @abstractmethod
    def name(self) -> str:
        """The name as the user wrote it, for messages."""

    @property
    def masks(self) -> bool:
        """Whether steps can be invalid; if so, `HostStep.valid` is always set."""
        return False

    @property
    def fixed_size(self) -> int | None:
        """The number of environments if the user created them, so that no more can be created; otherwise `None`."""
        return None

    @property
    def renders(self) -> bool:
        """Whether the environment says that it can be rendered."""
        return False

    @property
    def reference(self) -> tuple[str, dict[str, Any]] | None:
        """The name and parameters with which `lehr.envs.make` creates it; `None` if it is an object of the user's."""
        return None

    @property
    def is_found_elsewhere(self) -> bool:
        """Whether another process can create it from its reference."""
        return self.reference is not None

    @property
    def saved_options(self) -> dict[str, Any]:
        """Parameters that an environment in its place needs, so that the state of its run fits."""
        return {}

    def for_evaluation(self) -> "HostEnvironment | None":
        """Return the environment to evaluate in; `None` if the only ones are those that are trained in."""
        return self if self.fixed_size is None else None

    def limited(self, max_steps: int) -> "HostEnvironment":
        """Return the environment with a time limit."""
        raise InputError(
            f"{self.name} is registered with max_steps, but it is a host environment: set the time limit in its own "
            "suite."
        )

    @property
    @abstractmethod
    def observation_space(self) -> Space:
        """The space of one agent's observation."""

    @property
    @abstractmethod
    def action_space(self) -> Space:
        """The space of one agent's action."""

    @functools.cached_property
    def layout(self) -> PyTree:
        """The shape and dtype of each leaf of an observation."""
        return layout(self.observation_space)

    @abstractmethod
    def start(self, num_envs: int, render: bool = False) -> HostBatch:
        """Create `num_envs` running environments; set `render` if they will be rendered."""

    def initial_state(self, seeds: np.ndarray) -> PyTree:
        """Return the `HostBatch.state` at the start of episodes with these seeds; `()` if it cannot be restored."""
        return ()

    def with_wrappers(self, action_repeat: int, frame_stack: int) -> "HostEnvironment":
        """Return the environment with repeated actions and stacked observations."""
        raise InputError(
            f"{self.name} does not support action_repeat or frame_stack: set them in its own suite with env_parameters."
        )


AnyEnvironment: TypeAlias = Environment | HostEnvironment
"""A device or host environment."""


def check_size(env: HostEnvironment, num_envs: int) -> None:
    """Check that `num_envs` is the number of existing environments."""
    if env.fixed_size is not None and num_envs != env.fixed_size:
        raise InputError(
            f"{env.name} has {env.fixed_size} environments, but num_envs is {num_envs}: set "
            f"num_envs={env.fixed_size}, or give the environment by name."
        )


class EnvironmentFailed(RuntimeError):
    """An environment raised an error or returned an invalid value."""


def ask(name: str, method: str, call: Callable[[], Answer]) -> Answer:
    """Call a method of an environment; turn any exception into an error that names the environment.

    `sys.exit` in an environment is a failure like any other. So is `KeyboardInterrupt`, except in the main thread,
    where it is the user's.
    """
    try:
        return call()
    except EnvironmentFailed:
        raise
    except WrongAnswer as error:
        raise EnvironmentFailed(
            f"The environment {name} gave {error.given} as {error.field}, but must give {error.wanted}."
        ) from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise EnvironmentFailed(f"The environment {name} failed in {method} ({text}).") from error


def begin(env: HostEnvironment, num_envs: int) -> HostBatch:
    """Create running environments, with their time limit for a step."""
    batch = ask(env.name, "its constructor", functools.partial(env.start, num_envs))
    if env.step_timeout is None or batch.keeps_time:
        return batch
    return Timed(batch, env.name, env.step_timeout)


class Timed(HostBatch):
    """A batch in this process whose steps and resets have a time limit: they run in a thread, which can be left."""

    keeps_time = True

    def __init__(self, batch: HostBatch, name: str, seconds: float) -> None:
        self.batch, self.name, self.seconds, self.restores = batch, name, seconds, batch.restores
        self.calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stuck = False
        # A daemon, so that a process can end although an environment hangs.
        threading.Thread(target=self._serve, name="lehr-environments", daemon=True).start()

    def reset(self, seeds: np.ndarray) -> PyTree:
        """Start an episode in each environment."""
        return self._within("reset", functools.partial(self.batch.reset, seeds))

    def step(self, action: np.ndarray) -> HostStep:
        """Step each environment."""
        return self._within("step", functools.partial(self.batch.step, action))

    def state(self) -> PyTree:
        """Return the arrays that `restore` needs."""
        return self.batch.state()

    def restore(self, state: PyTree) -> PyTree:
        """Restore the environments, which takes as many steps as were made, and has no limit."""
        return self.batch.restore(state)

    def close(self) -> None:
        """Close the environments, unless one of them hangs."""
        self.calls.put(None)
        if not self.stuck:
            self.batch.close()

    def _within(self, method: str, call: Callable[[], Answer]) -> Answer:
        self.calls.put(functools.partial(ask, self.name, method, call))
        try:
            answer = self.answers.get(timeout=self.seconds)
        except queue.Empty:
            self.stuck = True
            raise EnvironmentFailed(
                f"The environment {self.name} did not answer {method} within step_timeout={self.seconds:g} seconds."
            ) from None
        if isinstance(answer, EnvironmentFailed):
            raise answer
        return answer

    def _serve(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                self.answers.put(call())
            except EnvironmentFailed as error:
                self.answers.put(error)


def check_step(env: HostEnvironment, step: HostStep, size: int) -> None:
    """Raise an error for a wrong shape, a wrong dtype or a non-finite number."""
    check_obs(env, step.obs, size)
    if step.final_obs is not step.obs:
        check_obs(env, step.final_obs, size)
    for field in ("reward", "terminated", "truncated"):
        if not fits(field, array := getattr(step, field), size):
            raise EnvironmentFailed(
                f"The environment {env.name} gave {described(array)} as {field}, but must give {wanted(field, size)}."
            )
    _check_masks(env, step.obs, step.terminated | step.truncated)
    if not np.isfinite(step.reward).all():
        bad = step.reward[~np.isfinite(step.reward)][0]
        raise EnvironmentFailed(f"The environment {env.name} gave {bad} as reward; rewards must be finite.")


def _check_masks(env: HostEnvironment, obs: PyTree, over: np.ndarray) -> None:
    """Raise an error if an agent whose episode goes on has no possible action."""
    stuck = without_action(env.observation_space, env.action_space, obs)
    if stuck is not None and (stuck & ~over).any():
        index = int(np.flatnonzero(stuck & ~over)[0])
        raise EnvironmentFailed(
            f"The environment {env.name} gave an action_mask without any action (agent {index} of the batch), but must "
            "allow at least one while an episode goes on."
        )


def check_obs(env: HostEnvironment, obs: PyTree, size: int) -> None:
    """Raise an error for an observation that does not match its space."""
    wanted = env.layout
    if not same_structure(obs, wanted):
        raise EnvironmentFailed(
            f"The environment {env.name} gave an observation whose structure differs from its observation_space, "
            f"{env.observation_space}."
        )
    pairs = zip(jax.tree_util.tree_leaves_with_path(obs), jax.tree.leaves(wanted), strict=True)
    for (path, array), like in pairs:
        field = "obs" + jax.tree_util.keystr(path)
        if not isinstance(array, np.ndarray) or array.shape != (size, *like.shape):
            raise EnvironmentFailed(
                f"The environment {env.name} gave {described(array)} as {field}, but its space requires "
                f"{like.dtype}{[size, *like.shape]}."
            )
        if not np.can_cast(array.dtype, like.dtype, "same_kind"):
            raise EnvironmentFailed(
                f"The environment {env.name} gave {field} in {array.dtype}, but its space requires {like.dtype}."
            )
        if (bad := beyond(array, like.dtype)) is not None:
            limits = np.iinfo(like.dtype)
            raise EnvironmentFailed(
                f"The environment {env.name} gave {bad} in {field}, which does not fit into {like.dtype}: wrap it so "
                f"that its integers are from {limits.min} to {limits.max}, or floats."
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = array[~np.isfinite(array)][0]
            raise EnvironmentFailed(f"The environment {env.name} gave {bad} in {field}; observations must be finite.")


def layout(space: Space) -> PyTree:
    """Return the shape and dtype of each leaf of a sample of the space."""
    return jax.eval_shape(space.sample, jax.random.key(0))


def own(env: HostEnvironment, obs: PyTree) -> PyTree:
    """Copy observations, in the dtypes of their space."""
    return jax.tree.map(lambda x, like: np.array(x, like.dtype), obs, env.layout)


def late_reset(over: np.ndarray, obs: PyTree, reward: Any, terminated: Any, truncated: Any) -> HostStep:
    """Build the step of environments that reset in the step after an episode; `over` marks those that just did."""
    valid = ~over
    reward, terminated = np.where(valid, reward, 0.0), np.where(valid, terminated, True)
    return HostStep(obs, obs, reward, terminated, np.where(valid, truncated, False), valid)


def same_structure(one: PyTree, other: PyTree) -> bool:
    """Whether two pytrees have the same structure."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (one, other)]
    return structures[0] == structures[1]


class Journal:
    """The seeds of the current episodes, and their actions so far.

    Replaying them restores any deterministic environment, whatever language it is written in.
    """

    def __init__(self, state: dict[str, np.ndarray], first_action: int = 0) -> None:
        self.first_action = first_action  # stored actions count from it, also those of earlier versions
        self.seeds, self.elapsed, self.actions = (state[name].copy() for name in ("seeds", "elapsed", "actions"))
        self.index = np.arange(self.actions.shape[1])

    @staticmethod
    def blank(seeds: np.ndarray, action_space: Space, limit: int, num_agents: int = 1) -> dict[str, np.ndarray]:
        """Return the state at the start of episodes with these seeds `[E]`, with room for `limit` actions each."""
        action = layout(action_space)
        actions = np.zeros((limit, len(seeds) * num_agents, *action.shape), action.dtype)
        return {"seeds": seeds, "elapsed": np.zeros(len(seeds), np.int32), "actions": actions}

    def begin(self, seeds: np.ndarray) -> None:
        """Start an episode in each environment."""
        self.seeds, self.elapsed = seeds.astype(np.uint32), np.zeros(len(seeds), np.int32)

    def write(self, action: np.ndarray, done: np.ndarray) -> None:
        """Record the actions `[N, ...]` of a step; where `done`, bool `[E]`, the next episode begins."""
        agents = len(self.index) // len(self.elapsed)
        line = np.minimum(self.elapsed, len(self.actions) - 1)
        self.actions[line if agents == 1 else np.repeat(line, agents), self.index] = (
            action - self.first_action if self.first_action else action
        )
        self.elapsed += 1
        if done.any():
            self.elapsed[done] = 0
            self.seeds = np.where(done, next_seeds(self.seeds), self.seeds)

    def state(self) -> dict[str, np.ndarray]:
        """Return the state that `read` accepts."""
        return {"seeds": self.seeds.copy(), "elapsed": self.elapsed.copy(), "actions": self.actions.copy()}

    def read(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """Load a state and return the actions `[L, N, ...]` to replay; each environment replays its first `elapsed`."""
        if state["elapsed"].max() > len(state["actions"]):
            raise InputError(f"an episode is longer than the {len(state['actions'])} actions that are stored")
        self.seeds, self.elapsed, self.actions = (state[name].copy() for name in ("seeds", "elapsed", "actions"))
        actions = self.actions[: max(1, self.elapsed.max())].copy()
        return actions + self.first_action if self.first_action else actions


def next_seeds(seeds: np.ndarray) -> np.ndarray:
    """Derive the seeds of the next episodes, uint32.

    >>> next_seeds(np.array([1, 2], np.uint32)).tolist() != [1, 2]
    True
    """
    mixed = seeds.astype(np.uint32) * np.uint32(0x9E3779B1) + np.uint32(0x7F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    return mixed ^ (mixed >> np.uint32(13))
