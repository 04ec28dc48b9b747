"""PettingZoo's environments, `pettingzoo:MODULE`, through its parallel API.

All agents of an environment share one policy, so their spaces must be the same; they are folded into the batch, agent
`a` of environment `e` at `e · A + a`. An agent that has left waits, and its steps are not valid, until no agent is left
and the next episode begins. Episodes begin with seeds that are derived from the run's, so an environment is brought
back after a stop by living through its episode again.
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
from lehr.envs.host.base import HostBatch, HostEnvironment, HostStep, Journal
from lehr.envs.host.gym import LONGEST_LOG, actions_of, lean
from lehr.errors import InputError, closest
from lehr.plugins import require
from lehr.types import PyTree

SUITES = ("pettingzoo", "mpe2")
"""Packages whose environments are listed."""


def names() -> list[str]:
    """The environments with a parallel API of the suites that are installed; some need further packages."""
    require("pettingzoo", extra="pettingzoo")
    found = []
    for suite in SUITES:
        for folder in _folders(suite):
            for file in sorted(folder.glob("*_v[0-9]*.py")):
                # The modules are not imported: that would need the packages of all of them.
                if re.search(r"\bparallel_env\b", file.read_text(encoding="utf-8")):
                    found.append(f"{folder.name}.{file.stem}")
    return sorted(found)


def make(name: str, **parameters: Any) -> "PettingZoo":
    """An environment of PettingZoo's, or another one with its parallel API.

    Args:
        name: a module with a function `parallel_env`, such as `mypackage.my_env`, or `butterfly.pistonball_v6`, where
            `pettingzoo.` is left out.
        parameters: of `parallel_env`.
    """
    env = PettingZoo(name, tuple(sorted(parameters.items())))
    _ = env.observation_space, env.action_space  # to know now whether it can be made
    return env


def adapt(env: Any, **parameters: Any) -> "GivenParallel":
    """A parallel environment, of which copies are made."""
    if parameters:
        raise InputError(
            f"The parameters {', '.join(parameters)} came with an environment that exists already: give them where it "
            "is made."
        )
    if isinstance(env, require("pettingzoo", extra="pettingzoo").AECEnv):
        raise InputError(
            f"{type(env).__name__} lets its agents act in turn: give its parallel_env, or convert it with "
            "pettingzoo.utils.aec_to_parallel."
        )
    given = GivenParallel(env)
    _ = given.observation_space, given.action_space
    return given


class Parallel(HostEnvironment):
    """What an environment that is made by name and one that is given have in common."""

    masks = True

    @functools.cached_property
    def one(self) -> Any:
        """One environment, to look at its agents and their spaces."""
        return self.build()

    @abstractmethod
    def build(self, render: bool = False) -> Any:
        """Make one environment; `render` if it will be asked for pictures."""

    @functools.cached_property
    def agents(self) -> tuple[Any, ...]:
        """All that may be in an episode, in their order in the batch."""
        found = tuple(getattr(self.one, "possible_agents", ()))
        if not found:
            raise InputError(f"{self.name} names no possible_agents, but the number of agents must be known before.")
        return found

    @property
    def num_agents(self) -> int:
        """How many agents there may be."""
        return len(self.agents)

    @functools.cached_property
    def observation_space(self) -> spaces.Space:
        """That of all agents, in 32 bits."""
        return self._shared("observation_space", lean)

    @functools.cached_property
    def action_space(self) -> spaces.Space:
        """That of all agents."""
        return self._shared("action_space", actions_of)

    def _shared(self, kind: str, convert: Callable[[Any], spaces.Space]) -> spaces.Space:
        """The space that all agents have."""
        first, *others = self.agents
        space = convert(_quietly(getattr(self.one, kind), first))
        apart = [agent for agent in others if convert(_quietly(getattr(self.one, kind), agent)) != space]
        if apart:
            raise InputError(
                f"All agents of {self.name} share one policy, but {kind} of {', '.join(map(str, apart))} is not that "
                f"of {first}, {space}: make them the same, by padding for example."
            )
        return space

    def start(self, num_envs: int, render: bool = False) -> "Worlds":
        """Make the environments."""
        worlds = [World(self.build(render), self.agents) for _ in range(num_envs)]
        return Worlds(worlds, self.observation_space, self.initial_state(np.zeros(num_envs, np.uint32)))

    def initial_state(self, seeds: np.ndarray) -> PyTree:
        """The seeds, and room for the actions of an episode."""
        limit = getattr(self.one, "max_cycles", None) or getattr(self.one.unwrapped, "max_cycles", None)
        room = limit + 1 if isinstance(limit, int) else LONGEST_LOG
        return Journal.blank(seeds, self.action_space, room, self.num_agents)


@dataclass(frozen=True)
class PettingZoo(Parallel):
    """An environment by its module."""

    module: str
    parameters: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """`pettingzoo:` and the module."""
        return f"pettingzoo:{self.module}"

    def build(self, render: bool = False) -> Any:
        """Call the module's `parallel_env`."""
        parameters = dict(self.parameters) | ({"render_mode": "rgb_array"} if render else {})
        make_env = _entry(self.module)
        try:
            return _quietly(make_env, **parameters)
        except TypeError as error:
            raise InputError(f"{self.name} cannot be made like this: {error}.") from None
        except ImportError as error:
            raise InputError(f"{self.name} needs a package that is not installed: {error}.") from None


@dataclass(frozen=True, eq=False)
class GivenParallel(Parallel):
    """An environment that the user made. It is never stepped itself."""

    env: Any

    @property
    def name(self) -> str:
        """What the environment calls itself."""
        return str(self.env)

    def build(self, render: bool = False) -> Any:
        """A copy."""
        try:
            return copy.deepcopy(self.env)
        except Exception as error:
            raise InputError(
                f"{self.name} cannot be copied ({error}), but several are needed: give it by its name as "
                "'pettingzoo:MODULE', where MODULE has a function parallel_env that makes one."
            ) from None


class Moment(NamedTuple):
    """What one environment answers to its `A` agents."""

    obs: list[Any]
    """What each agent acts on next; `None` for one that has left."""
    final_obs: list[Any]
    """What each agent that acted saw then; `None` for one that has left before."""
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    """bool: the agent was there to act."""


class World:
    """One environment, and who is in it."""

    def __init__(self, env: Any, agents: tuple[Any, ...]) -> None:
        self.env, self.agents = env, agents
        self.spaces = [_quietly(env.action_space, agent) for agent in agents]
        self.alive = np.zeros(len(agents), bool)

    def begin(self, seed: int) -> list[Any]:
        """Begin an episode: what each agent sees, `None` for one that is not in it."""
        obs, _ = self.env.reset(seed=seed)
        self.alive = self._present()
        if not self.alive.any():
            raise ValueError("an episode began without agents")
        return self._seen(obs, self.alive)

    def act(self, actions: np.ndarray) -> Moment:
        """Act once, with actions `[A, ...]`, of which those of agents that have left are not looked at."""
        valid = self.alive
        taken = {self.agents[i]: _action(self.spaces[i], actions[i]) for i in np.flatnonzero(valid)}
        obs, rewards, terminations, truncations, _ = self.env.step(taken)
        present, size = self._present(), len(self.agents)
        reward, terminated, truncated = np.zeros(size), ~valid, np.zeros(size, bool)
        for i in np.flatnonzero(valid):
            agent = self.agents[i]
            reward[i] = rewards[agent]
            truncated[i] = truncations.get(agent, False)
            # Who is gone without a word has come to an end.
            terminated[i] = terminations.get(agent, False) or not (present[i] or truncated[i])
        self.alive = present & ~(valid & (terminated | truncated))
        # Nothing follows for one that was terminated, so what it saw at last may be missing.
        final_obs = self._seen(obs, valid, may_miss=terminated)
        return Moment(self._seen(obs, self.alive), final_obs, reward, terminated, truncated, valid)

    def _present(self) -> np.ndarray:
        here = set(self.env.agents)
        if not here.issubset(self.agents):
            strangers = ", ".join(sorted(map(str, here.difference(self.agents))))
            raise ValueError(f"agents that are not among possible_agents: {strangers}")
        return np.array([agent in here for agent in self.agents])

    def _seen(self, obs: dict[Any, Any], by: np.ndarray, may_miss: np.ndarray | None = None) -> list[Any]:
        for i in np.flatnonzero(by):
            if self.agents[i] not in obs and (may_miss is None or not may_miss[i]):
                raise KeyError(f"no observation of {self.agents[i]}")
        return [obs.get(agent) if there else None for agent, there in zip(self.agents, by, strict=True)]


class Worlds(HostBatch):
    """Environments whose episodes begin with seeds of ours, and which are brought back by their actions."""

    restores = True

    def __init__(self, worlds: list[World], space: spaces.Space, state: dict[str, np.ndarray]) -> None:
        self.worlds, self.space, self.journal = worlds, space, Journal(state)
        self.num_agents = len(worlds[0].agents)

    def reset(self, seeds: np.ndarray) -> PyTree:
        """Begin an episode in each environment."""
        self.journal.begin(seeds)
        begun = [world.begin(int(seed)) for world, seed in zip(self.worlds, seeds, strict=True)]
        return self._folded(begun)

    def step(self, action: np.ndarray) -> HostStep:
        """Act, keep the actions, and begin the next episode where no agent is left."""
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
        """The seeds of the episodes under way, and their actions so far."""
        return self.journal.state()

    def restore(self, state: PyTree) -> PyTree:
        """Live through the episodes again."""
        actions = self.journal.read(state)
        seen = []
        for e, world in enumerate(self.worlds):
            rows = world.begin(int(self.journal.seeds[e]))
            for step in range(self.journal.elapsed[e]):
                rows = world.act(actions[step, self._of(e)]).obs
            seen.append(rows)
        return self._folded(seen)

    def render(self) -> np.ndarray:
        """A picture of the first environment."""
        frame = self.worlds[0].env.render()
        if not isinstance(frame, np.ndarray):
            raise InputError("This environment draws no pictures: make it with render_mode='rgb_array'.")
        return frame

    def close(self) -> None:
        """Close the environments."""
        for world in self.worlds:
            world.env.close()

    def _of(self, e: int) -> slice:
        """The agents of environment `e` in the batch."""
        return slice(e * self.num_agents, (e + 1) * self.num_agents)

    def _folded(self, rows: Sequence[Sequence[Any]]) -> PyTree:
        return _stacked(self.space, [row for of_one in rows for row in of_one])


def _stacked(space: spaces.Space, rows: list[Any]) -> PyTree:
    """Observations of single agents as one batch, with zeros for `None`."""
    if isinstance(space, spaces.Dict):
        parts = space.spaces.items()
        return {name: _stacked(part, [None if row is None else row[name] for row in rows]) for name, part in parts}
    return np.stack([np.zeros(space.shape, space.dtype) if row is None else np.asarray(row) for row in rows])


def _action(space: Any, action: np.ndarray) -> Any:
    """An agent's action as its space has it."""
    if not action.shape:
        return int(action) + int(getattr(space, "start", 0))
    return np.array(action, space.dtype)  # a copy, into which the environment may write


def _entry(name: str) -> Callable[..., Any]:
    """The function that makes an environment, from a module of PettingZoo's or from another."""
    for path in (f"pettingzoo.{name}", name):
        try:
            module: ModuleType = _quietly(importlib.import_module, path)
        except ModuleNotFoundError as error:
            if error.name and f"{path}.".startswith(f"{error.name}."):
                continue
            raise InputError(f"pettingzoo:{name} needs a package that is not installed: {error}.") from None
        except ImportError as error:  # pettingzoo.mpe, for example, only says where it is now
            raise InputError(f"pettingzoo:{name} does not import: {str(error).rstrip('.')}.") from None
        if callable(made := getattr(module, "parallel_env", None)):
            return made
        raise InputError(f"The module {path} has no function parallel_env: it offers no parallel API.")
    raise InputError(f"There is no module {name!r}, neither in PettingZoo nor elsewhere; {closest(name, names())}")


def _folders(suite: str) -> list[Path]:
    """Where a package has its environments: its folder and the folders in it."""
    found = importlib.util.find_spec(suite)
    if found is None:
        return []
    roots = list(found.submodule_search_locations or ())
    return [Path(root) for root in roots] + [
        Path(root, inner.name) for root in roots for inner in pkgutil.iter_modules([root]) if inner.ispkg
    ]


def _quietly(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The answer of a call whose warnings, of what is deprecated for example, are not the user's affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*arguments, **named)
