"""PettingZoo's environments, `pettingzoo:MODULE`, through its parallel API.

A module without one, whose agents act in turn, is converted: see `lehr.envs.host.turn_taking`.

All agents of an environment share one policy, so their spaces must be the same. They are folded into the batch: agent
`a` of environment `e` is at `e · A + a`. The steps of an agent that has left are invalid until no agent is left and the
next episode begins. Episodes start from seeds derived from the run's seed, so that a resumed run can restore the
environments by replaying the current episodes.
"""

import copy
import functools
import importlib.util
import pkgutil
import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from lehr import spaces
from lehr.envs.host.answers import checked
from lehr.envs.host.base import HostBatch, HostEnvironment, HostStep, Journal, says_it_renders
from lehr.envs.host.gym import LONGEST_LOG
from lehr.envs.host.gym_spaces import actions_of, as_32_bit, first_action
from lehr.errors import InputError, closest
from lehr.plugins import require
from lehr.types import PyTree

SUITES = ("pettingzoo", "mpe2")
"""Packages whose environments are listed."""
FAMILIES = ("atari", "butterfly", "classic", "sisl")
"""Folders of PettingZoo that are its extras too."""


def names() -> list[str]:
    """Return the environments of the installed suites; some need additional packages."""
    require("pettingzoo", extra="pettingzoo")
    found = []
    for suite in SUITES:
        for folder in _folders(suite):
            for file in sorted(folder.glob("*_v[0-9]*.py")):
                # Read the files instead of importing them, which would need the packages of all environments.
                if re.search(r"\b(parallel_)?env\b", file.read_text(encoding="utf-8")):
                    found.append(f"{folder.name}.{file.stem}")
    return sorted(found)


def make(name: str, **parameters: Any) -> "PettingZoo":
    """Create a PettingZoo environment, or any environment with its parallel API.

    Args:
        name: a module with a function `parallel_env`, or `env` if agents act in turn, such as `mypackage.my_env`; the
            prefix `pettingzoo.` may be omitted, as in `butterfly.pistonball_v6`.
        parameters: arguments of that function.
    """
    env = PettingZoo(name, tuple(sorted(parameters.items())))
    _ = env.observation_space, env.action_space  # raises an error now if it cannot be created
    return env


def adapt(env: Any, **parameters: Any) -> "GivenParallel":
    """Adapt a parallel environment, which is copied as often as needed."""
    if parameters:
        raise InputError(
            f"Got an existing environment together with the parameters {', '.join(parameters)}: set them when creating "
            "it."
        )
    given = GivenParallel(env)
    _ = given.observation_space, given.action_space
    return given


class Parallel(HostEnvironment):
    """Base class of environments created by name and of existing environments."""

    masks = True

    @functools.cached_property
    def one(self) -> Any:
        """A single environment, to inspect its agents and their spaces."""
        from lehr.envs.host import turn_taking  # which imports Gymnasium

        env = _in_parallel(self.build())
        shape = _quietly(turn_taking.mask_shape, env) if getattr(env, "possible_agents", ()) else None
        return env if shape is None else turn_taking.InfoMasks(env, shape)

    @abstractmethod
    def build(self, render: bool = False) -> Any:
        """Create one environment; set `render` if it will be rendered."""

    @property
    def renders(self) -> bool:
        """Whether the environment lists pixels among what it renders."""
        return says_it_renders(self.one)

    @functools.cached_property
    def agents(self) -> tuple[Any, ...]:
        """All possible agents, in their order in the batch."""
        found = tuple(getattr(self.one, "possible_agents", ()))
        if not found:
            raise InputError(
                f"{self.name} has no possible_agents: list all agents there, since their number must be known in "
                "advance."
            )
        return found

    @property
    def num_agents(self) -> int:
        """The number of possible agents."""
        return len(self.agents)

    @functools.cached_property
    def observation_space(self) -> spaces.Space:
        """The space shared by all agents, with 64-bit numbers in 32 bits."""
        return self._shared("observation_space", as_32_bit)

    @functools.cached_property
    def action_space(self) -> spaces.Space:
        """The space shared by all agents."""
        return self._shared("action_space", actions_of)

    def _shared(self, kind: str, convert: Callable[[Any], spaces.Space]) -> spaces.Space:
        """Return the space of all agents, or raise an error if they differ."""
        first, *others = self.agents
        space = convert(_quietly(getattr(self.one, kind), first))
        different = [agent for agent in others if convert(_quietly(getattr(self.one, kind), agent)) != space]
        if different:
            raise InputError(
                f"All agents of {self.name} share one policy, but the {kind} of {', '.join(map(str, different))} "
                f"differs from that of {first}, {space}: make them the same, for example by padding."
            )
        return space

    def start(self, num_envs: int, render: bool = False) -> "Worlds":
        """Create the environments."""
        worlds = [World(self._like_one(self.build(render)), self.agents) for _ in range(num_envs)]
        blank = self.initial_state(np.zeros(num_envs, np.uint32))
        return Worlds(worlds, self.observation_space, blank, first_action(self.action_space))

    def _like_one(self, env: Any) -> Any:
        """Convert an environment as `one` was."""
        from lehr.envs.host import turn_taking

        env = _in_parallel(env)
        return turn_taking.InfoMasks(env, self.one.mask_shape) if isinstance(self.one, turn_taking.InfoMasks) else env

    def initial_state(self, seeds: np.ndarray) -> PyTree:
        """Return the seeds and room for the actions of an episode."""
        limit = getattr(self.one, "max_cycles", None) or getattr(self.one.unwrapped, "max_cycles", None)
        room = limit + 1 if isinstance(limit, int) else LONGEST_LOG
        return Journal.blank(seeds, self.action_space, room, self.num_agents)


@dataclass(frozen=True)
class PettingZoo(Parallel):
    """An environment created from its module."""

    module: str
    parameters: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """`pettingzoo:` and the module."""
        return f"pettingzoo:{self.module}"

    def build(self, render: bool = False) -> Any:
        """Call the module's `parallel_env`, or its `env` if it has no other."""
        parameters = dict(self.parameters) | ({"render_mode": "rgb_array"} if render else {})
        make_env = _entry(self.module)
        try:
            return _quietly(make_env, **parameters)
        except TypeError as error:
            raise InputError(f"{self.name} cannot be created with these parameters: {error}.") from None
        except ImportError as error:
            raise _needs_package(self.module, error) from None


@dataclass(frozen=True, eq=False)
class GivenParallel(Parallel):
    """An environment that the user created. Only copies of it are stepped."""

    env: Any

    @property
    def name(self) -> str:
        """The environment's own name."""
        return str(self.env)

    def build(self, render: bool = False) -> Any:
        """Copy the environment."""
        try:
            return copy.deepcopy(self.env)
        except Exception as error:
            raise InputError(
                f"{self.name} cannot be copied ({error}), but several copies are needed: give it by name as "
                "'pettingzoo:MODULE', where MODULE has a function parallel_env that creates it."
            ) from None


class Moment(NamedTuple):
    """The result of stepping one environment with `A` agents."""

    obs: list[Any]
    """The observation each agent acts on next; `None` for agents that have left."""
    final_obs: list[Any]
    """The observation after the step of each agent that acted; `None` for agents that had left before."""
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    """bool: whether the agent acted."""


class World:
    """One environment, and which of its agents are active."""

    def __init__(self, env: Any, agents: tuple[Any, ...]) -> None:
        self.env, self.agents = env, agents
        self.spaces = [_quietly(env.action_space, agent) for agent in agents]
        self.alive = np.zeros(len(agents), bool)

    def begin(self, seed: int) -> list[Any]:
        """Start an episode and return each agent's observation, `None` for agents that are not in it."""
        obs, _ = self.env.reset(seed=seed)
        self.alive = self._present()
        if not self.alive.any():
            raise ValueError("an episode started without agents")
        return self._seen(obs, self.alive)

    def act(self, actions: np.ndarray) -> Moment:
        """Take one step with actions `[A, ...]`; those of agents that have left are ignored."""
        valid = self.alive
        taken = {self.agents[i]: _action(self.spaces[i], actions[i]) for i in np.flatnonzero(valid)}
        obs, rewards, terminations, truncations, _ = self.env.step(taken)
        present, size = self._present(), len(self.agents)
        reward, terminated, truncated = np.zeros(size), ~valid, np.zeros(size, bool)
        for i in np.flatnonzero(valid):
            agent = self.agents[i]
            reward[i] = checked("reward", rewards[agent])
            truncated[i] = checked("truncated", truncations.get(agent, False))
            # An agent that disappears without a flag is terminated.
            flag = checked("terminated", terminations.get(agent, False))
            terminated[i] = flag or not (present[i] or truncated[i])
        self.alive = present & ~(valid & (terminated | truncated))
        # The final observation of a terminated agent is not used, so it may be missing.
        final_obs = self._seen(obs, valid, may_miss=terminated)
        return Moment(self._seen(obs, self.alive), final_obs, reward, terminated, truncated, valid)

    def _present(self) -> np.ndarray:
        here = set(self.env.agents)
        if not here.issubset(self.agents):
            unknown = ", ".join(sorted(map(str, here.difference(self.agents))))
            raise ValueError(f"these agents are not in possible_agents: {unknown}")
        return np.array([agent in here for agent in self.agents])

    def _seen(self, obs: dict[Any, Any], by: np.ndarray, may_miss: np.ndarray | None = None) -> list[Any]:
        for i in np.flatnonzero(by):
            if self.agents[i] not in obs and (may_miss is None or not may_miss[i]):
                raise KeyError(f"no observation of {self.agents[i]}")
        return [obs.get(agent) if there else None for agent, there in zip(self.agents, by, strict=True)]


class Worlds(HostBatch):
    """Environments that are reset with our seeds, and restored by replaying their actions."""

    restores = True

    def __init__(
        self, worlds: list[World], space: spaces.Space, state: dict[str, np.ndarray], first_action: int
    ) -> None:
        self.worlds, self.space, self.journal = worlds, space, Journal(state, first_action)
        self.num_agents = len(worlds[0].agents)

    def reset(self, seeds: np.ndarray) -> PyTree:
        """Start an episode in each environment."""
        self.journal.begin(seeds)
        observations = [world.begin(int(seed)) for world, seed in zip(self.worlds, seeds, strict=True)]
        return self._folded(observations)

    def step(self, action: np.ndarray) -> HostStep:
        """Take one step, record the actions, and start the next episode where no agent is left."""
        moments = [world.act(action[self._of(e)]) for e, world in enumerate(self.worlds)]
        done = np.array([not world.alive.any() for world in self.worlds])
        self.journal.write(action, done)
        following = [moment.obs for moment in moments]
        for e in np.flatnonzero(done):
            following[e] = self.worlds[e].begin(int(self.journal.seeds[e]))
        final_obs, obs = self._folded([moment.final_obs for moment in moments]), self._folded(following)
        reward, terminated, truncated, valid = (
            np.concatenate([getattr(moment, field) for moment in moments])
            for field in ("reward", "terminated", "truncated", "valid")
        )
        return HostStep(obs, final_obs, reward, terminated, truncated, valid)

    def state(self) -> PyTree:
        """Return the seeds of the current episodes, and their actions so far."""
        return self.journal.state()

    def restore(self, state: PyTree) -> PyTree:
        """Replay the episodes."""
        actions = self.journal.read(state)
        seen = []
        for e, world in enumerate(self.worlds):
            rows = world.begin(int(self.journal.seeds[e]))
            for step in range(self.journal.elapsed[e]):
                rows = world.act(actions[step, self._of(e)]).obs
            seen.append(rows)
        return self._folded(seen)

    def render(self) -> np.ndarray:
        """Render the first environment."""
        frame = self.worlds[0].env.render()
        if not isinstance(frame, np.ndarray):
            raise InputError("This environment cannot be rendered: create it with render_mode='rgb_array'.")
        return frame

    def close(self) -> None:
        """Close the environments."""
        for world in self.worlds:
            world.env.close()

    def _of(self, e: int) -> slice:
        """Return the indices of environment `e`'s agents in the batch."""
        return slice(e * self.num_agents, (e + 1) * self.num_agents)

    def _folded(self, rows: Sequence[Sequence[Any]]) -> PyTree:
        return _stacked(self.space, [row for of_one in rows for row in of_one])


def _stacked(space: spaces.Space, rows: list[Any]) -> PyTree:
    """Stack the observations of single agents into a batch, with zeros for `None`."""
    if isinstance(space, spaces.Dict):
        parts = space.spaces.items()
        return {name: _stacked(part, [None if row is None else row[name] for row in rows]) for name, part in parts}
    return np.stack([np.zeros(space.shape, space.dtype) if row is None else np.asarray(row) for row in rows])


def _action(space: Any, action: np.ndarray) -> Any:
    """Convert an agent's action to the type its space expects."""
    if not action.shape:
        return int(action)
    return np.array(action, space.dtype)  # a copy, since the environment may write into it


def _in_parallel(env: Any) -> Any:
    """Convert an environment whose agents act in turn."""
    from lehr.envs.host import turn_taking

    return _quietly(turn_taking.Turns, env) if hasattr(env, "agent_iter") else env


def _needs_package(module: str, error: ImportError) -> InputError:
    """Return the error about a package that a family of environments needs."""
    family = module.removeprefix("pettingzoo.").partition(".")[0]
    cure = f"; pip install 'pettingzoo[{family}]'" if family in FAMILIES else ""
    return InputError(f"pettingzoo:{module} needs a package that is not installed: {str(error).rstrip('.')}{cure}.")


def _entry(name: str) -> Callable[..., Any]:
    """Import the function `parallel_env`, or else `env`, from a module of PettingZoo or any other module."""
    for path in (f"pettingzoo.{name}", name):
        try:
            module: ModuleType = _quietly(importlib.import_module, path)
        except ModuleNotFoundError as error:
            if error.name and f"{path}.".startswith(f"{error.name}."):
                continue
            raise _needs_package(name, error) from None
        except ImportError as error:  # pettingzoo.mpe, for example, raises one that says where it moved
            raise InputError(f"pettingzoo:{name} cannot be imported: {str(error).rstrip('.')}.") from None
        if callable(made := getattr(module, "parallel_env", None) or getattr(module, "env", None)):
            return made
        raise InputError(
            f"The module {path} has neither a function parallel_env nor env: give a module with PettingZoo's API."
        )
    raise InputError(f"There is no module {name!r} or pettingzoo.{name}; {closest(name, names(), 'pettingzoo:')}")


def _folders(suite: str) -> list[Path]:
    """Return the folders that may contain a package's environments: its own folder and its subpackages."""
    found = importlib.util.find_spec(suite)
    if found is None:
        return []
    roots = list(found.submodule_search_locations or ())
    return [Path(root) for root in roots] + [
        Path(root, inner.name) for root in roots for inner in pkgutil.iter_modules([root]) if inner.ispkg
    ]


def _quietly(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function without showing its warnings, for example about deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*arguments, **named)
