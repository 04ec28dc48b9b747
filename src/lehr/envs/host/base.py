"""Environments that live on the host, in Python or C++: what Gymnasium, EnvPool and PettingZoo have in common.

A `HostEnvironment` is a description, like an `Environment`; `start` makes a `HostBatch` of it, `E` live environments
that step together in NumPy. Agents are folded into the batch axis, `N = E · num_agents`.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np

from lehr.envs.base import Environment
from lehr.errors import InputError
from lehr.spaces import Space
from lehr.types import PyTree

Answer = TypeVar("Answer")


class HostStep(NamedTuple):
    """What `E` environments answer to their actions; leaves `[N, ...]`, which the next step may overwrite."""

    obs: PyTree
    """What is acted on next: after an end, the first observation of the next episode."""
    final_obs: PyTree
    """The observation before any reset."""
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray | None = None
    """bool: the step was really taken. A step that was not is terminated, with a reward of 0. `None` where the
    environment does not mask."""


class HostBatch(ABC):
    """`E` live environments."""

    restores: bool = False
    """Whether `state` and `restore` bring the environments back to where they were."""

    @abstractmethod
    def reset(self, seeds: np.ndarray) -> PyTree:
        """Begin an episode in each environment, with these seeds, uint32 `[E]`: observations `[N, ...]`."""

    @abstractmethod
    def step(self, action: np.ndarray) -> HostStep:
        """Act once in each environment, with actions `[N, ...]`."""

    def state(self) -> PyTree:
        """Arrays of constant shapes from which `restore` brings the environments back."""
        return ()

    def restore(self, state: PyTree) -> PyTree:
        """Bring the environments to where they were: observations `[N, ...]`. Asked only of a batch that `restores`."""
        raise InputError("these environments cannot be brought back")

    def render(self) -> np.ndarray:
        """A picture of the first environment, uint8 `[H, W, 3]`."""
        raise InputError("This environment draws no pictures.")

    @abstractmethod
    def close(self) -> None:
        """Let go of processes, threads and windows."""


class HostEnvironment(ABC):
    """A description of an environment on the host: immutable and hashable, with the attributes of `Environment`."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As the user wrote it, for messages."""

    @property
    def num_agents(self) -> int:
        """How many agents act at every step."""
        return 1

    @property
    def env_steps_per_step(self) -> int:
        """How many steps of the task one step makes."""
        return 1

    @property
    def masks(self) -> bool:
        """Whether steps may be invalid; then `HostStep.valid` is always given."""
        return False

    @property
    def fixed_size(self) -> int | None:
        """How many environments there are, where they exist already: they are trained in, and no more can be made."""
        return None

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
        """Make `num_envs` live environments; `render` if pictures will be asked for."""

    def initial_state(self, seeds: np.ndarray) -> PyTree:
        """The `HostBatch.state` before the first step of episodes with these seeds; `()` for one that restores not."""
        return ()

    def with_wrappers(self, action_repeat: int, frame_stack: int) -> "HostEnvironment":
        """The same with each action held for some steps, and the newest observations stacked."""
        raise InputError(
            f"{self.name} takes neither action_repeat nor frame_stack: give them to its suite with env_parameters."
        )


AnyEnvironment: TypeAlias = Environment | HostEnvironment
"""An environment on the device or on the host."""


def check_size(env: HostEnvironment, num_envs: int, evaluates: bool = False) -> None:
    """Refuse another number of environments than there are, and evaluations, which would disturb their episodes."""
    if env.fixed_size is None:
        return
    if num_envs != env.fixed_size:
        raise InputError(
            f"{env.name} has {env.fixed_size} environments, but {num_envs} are asked for: set "
            f"num_envs={env.fixed_size}, or give the environment by its name."
        )
    if evaluates:
        raise InputError(
            f"The environments of {env.name} that you made are trained in, so there is none to evaluate in: set "
            "evaluate_episodes=0, or give the environment by its name."
        )


class EnvironmentFailed(RuntimeError):
    """An environment raised an error, or answered with something that cannot be learned from."""


def ask(name: str, method: str, call: Callable[[], Answer]) -> Answer:
    """Call a method of an environment; what it raises becomes a sentence that names the environment."""
    try:
        return call()
    except Exception as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise EnvironmentFailed(f"The environment {name} failed in {method} ({text}).") from error


def check_step(env: HostEnvironment, step: HostStep, size: int) -> None:
    """Refuse a step with a wrong shape, a wrong dtype or a number that is not finite."""
    check_obs(env, step.obs, size)
    if step.final_obs is not step.obs:
        check_obs(env, step.final_obs, size)
    for field, kinds in (("reward", "fiub"), ("terminated", "b"), ("truncated", "b")):
        array = getattr(step, field)
        if not isinstance(array, np.ndarray) or array.shape != (size,) or array.dtype.kind not in kinds:
            kind = "numbers" if field == "reward" else "bools"
            raise EnvironmentFailed(
                f"The environment {env.name} gave {_say(array)} as {field}, but {size} {kind} are due."
            )
    if not np.isfinite(step.reward).all():
        bad = step.reward[~np.isfinite(step.reward)][0]
        raise EnvironmentFailed(f"The environment {env.name} gave {bad} as reward; a reward is a finite number.")


def check_obs(env: HostEnvironment, obs: PyTree, size: int) -> None:
    """Refuse an observation that is not what the space says."""
    wanted = env.layout
    if not same_structure(obs, wanted):
        raise EnvironmentFailed(
            f"The environment {env.name} gave an observation of another structure than its observation_space, "
            f"{env.observation_space}."
        )
    pairs = zip(jax.tree_util.tree_leaves_with_path(obs), jax.tree.leaves(wanted), strict=True)
    for (path, array), like in pairs:
        field = "obs" + jax.tree_util.keystr(path)
        if not isinstance(array, np.ndarray) or array.shape != (size, *like.shape):
            raise EnvironmentFailed(
                f"The environment {env.name} gave {_say(array)} as {field}, but its space says "
                f"{like.dtype}{[size, *like.shape]}."
            )
        if not np.can_cast(array.dtype, like.dtype, "same_kind"):
            raise EnvironmentFailed(
                f"The environment {env.name} gave {field} in {array.dtype}, but its space says {like.dtype}."
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = array[~np.isfinite(array)][0]
            raise EnvironmentFailed(f"The environment {env.name} gave {bad} in {field}; an observation is finite.")


def layout(space: Space) -> PyTree:
    """The shape and dtype of each leaf of a space's members."""
    return jax.eval_shape(space.sample, jax.random.key(0))


def own(env: HostEnvironment, obs: PyTree) -> PyTree:
    """Observations in the dtypes of their space, in memory of their own."""
    return jax.tree.map(lambda x, like: np.array(x, like.dtype), obs, env.layout)


def late_reset(over: np.ndarray, obs: PyTree, reward: Any, terminated: Any, truncated: Any) -> HostStep:
    """The step of environments that spend one on their reset, which those that were `over` before it did."""
    valid = ~over
    reward, terminated = np.where(valid, reward, 0.0), np.where(valid, terminated, True)
    return HostStep(obs, obs, reward, terminated, np.where(valid, truncated, False), valid)


def same_structure(one: PyTree, other: PyTree) -> bool:
    """Whether two pytrees differ in their leaves alone."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (one, other)]
    return structures[0] == structures[1]


class Journal:
    """The episodes under way: their seeds, and their actions so far.

    An environment that does the same twice is brought back by living through them again, whatever it is written in.
    """

    def __init__(self, state: dict[str, np.ndarray]) -> None:
        self.seeds, self.elapsed, self.actions = (state[name].copy() for name in ("seeds", "elapsed", "actions"))
        self.index = np.arange(self.actions.shape[1])

    @staticmethod
    def blank(seeds: np.ndarray, action_space: Space, limit: int, num_agents: int = 1) -> dict[str, np.ndarray]:
        """The state before the first step of episodes with these seeds `[E]`, with room for `limit` actions of each."""
        action = layout(action_space)
        actions = np.zeros((limit, len(seeds) * num_agents, *action.shape), action.dtype)
        return {"seeds": seeds, "elapsed": np.zeros(len(seeds), np.int32), "actions": actions}

    def begin(self, seeds: np.ndarray) -> None:
        """Begin an episode in each environment."""
        self.seeds, self.elapsed = seeds.astype(np.uint32), np.zeros(len(seeds), np.int32)

    def write(self, action: np.ndarray, done: np.ndarray) -> None:
        """Keep the actions `[N, ...]` of a step; where it was the last one, bool `[E]`, the next episode begins."""
        agents = len(self.index) // len(self.elapsed)
        line = np.minimum(self.elapsed, len(self.actions) - 1)
        self.actions[line if agents == 1 else np.repeat(line, agents), self.index] = action
        self.elapsed += 1
        if done.any():
            self.elapsed[done] = 0
            self.seeds = np.where(done, next_seeds(self.seeds), self.seeds)

    def state(self) -> dict[str, np.ndarray]:
        """What `read` goes on from."""
        return {"seeds": self.seeds.copy(), "elapsed": self.elapsed.copy(), "actions": self.actions.copy()}

    def read(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """Go on from a state: the actions `[L, N, ...]` to live through, of which each environment takes its first."""
        if state["elapsed"].max() > len(state["actions"]):
            raise InputError(f"an episode is longer than the {len(state['actions'])} actions that are kept")
        self.seeds, self.elapsed, self.actions = (state[name].copy() for name in ("seeds", "elapsed", "actions"))
        return self.actions[: max(1, self.elapsed.max())].copy()


def next_seeds(seeds: np.ndarray) -> np.ndarray:
    """The seeds of the episodes after those with these seeds, uint32.

    >>> next_seeds(np.array([1, 2], np.uint32)).tolist() != [1, 2]
    True
    """
    mixed = seeds.astype(np.uint32) * np.uint32(0x9E3779B1) + np.uint32(0x7F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    return mixed ^ (mixed >> np.uint32(13))


def _say(array: Any) -> str:
    if not isinstance(array, np.ndarray):
        return f"a {type(array).__name__}"
    return f"{array.dtype}{list(array.shape)}"
