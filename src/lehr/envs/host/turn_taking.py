"""PettingZoo environments as the adapter needs them: agents that take turns, and action masks in `info`."""

from typing import Any

import numpy as np

from lehr.envs.host.info_masks import can_be_masked, find_mask, mask_in, masked_observation, masked_space
from lehr.errors import InputError
from lehr.masks import MASK
from lehr.plugins import require


class Delegating:
    """A parallel environment around another one, with the other's attributes."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # not set yet, in a copy
            raise AttributeError(name)
        return getattr(self.env, name)


class Turns(Delegating):
    """Agents that act in turn, as a parallel environment: all act at every step, those that wait can only do nothing.

    The mask of an agent that waits allows action 0 alone, which is ignored. So waiting has a probability of 1 and does
    not change the policy, while rewards that arrive in the meantime count.
    """

    def __init__(self, env: Any) -> None:
        if env.metadata.get("is_parallelizable"):
            raise InputError(
                f"The agents of {type(env).__name__} act in turn: give its parallel_env, or convert it with "
                "pettingzoo.utils.aec_to_parallel."
            )
        conversions = require("pettingzoo.utils.conversions", extra="pettingzoo")
        super().__init__(conversions.turn_based_aec_to_parallel(env))
        agent = env.possible_agents[0]
        if can_be_masked(env.observation_space(agent), env.action_space(agent)):
            raise InputError(
                f"The agents of {env} act in turn, but its observations have no action_mask, which tells them when to "
                "wait: add one to the observations."
            )

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        """Start an episode."""
        obs, infos = self.env.reset(seed, options)
        return self._waiting(obs), infos

    def step(self, actions: dict[Any, Any]) -> Any:
        """Let the agent whose turn it is act."""
        obs, *rest = self.env.step(actions)
        return self._waiting(obs), *rest

    def _waiting(self, obs: dict[Any, Any]) -> dict[Any, Any]:
        """Allow only action 0 to all agents but the one whose turn it is."""
        acting = self.env.aec_env.agent_selection if self.env.agents else None
        return {agent: seen if agent == acting else _without_choice(seen) for agent, seen in obs.items()}


def _without_choice(obs: dict[str, Any]) -> dict[str, Any]:
    mask = np.zeros_like(obs[MASK])
    mask[0] = 1
    return {**obs, MASK: mask}


class InfoMasks(Delegating):
    """A parallel environment whose observations have the masks of its `info`."""

    def __init__(self, env: Any, shape: tuple[int, ...]) -> None:
        super().__init__(env)
        self.mask_shape = shape

    def observation_space(self, agent: Any) -> Any:
        """The space of an agent's observation with its mask."""
        return masked_space(self.env.observation_space(agent), self.mask_shape)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        """Start an episode."""
        obs, infos = self.env.reset(seed=seed, options=options)
        return self._masked(obs, infos), infos

    def step(self, actions: dict[Any, Any]) -> Any:
        """Take one step."""
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        return self._masked(obs, infos), rewards, terminations, truncations, infos

    def _masked(self, obs: dict[Any, Any], infos: dict[Any, Any]) -> dict[Any, Any]:
        present = set(self.env.agents)
        return {
            agent: masked_observation(seen, mask_in(infos.get(agent), self.mask_shape, is_over=agent not in present))
            for agent, seen in obs.items()
        }


def mask_shape(env: Any) -> tuple[int, ...] | None:
    """Reset an environment and return the shape of the masks in its `info`; `None` if there are none."""
    agent = env.possible_agents[0]
    if not can_be_masked(env.observation_space(agent), env.action_space(agent)):
        return None
    try:
        _, infos = env.reset(seed=0)
        found = [mask for info in infos.values() if (mask := find_mask(info)) is not None]
    except KeyboardInterrupt:
        raise
    except BaseException:  # the run will fail in the same way, and say so
        return None
    return found[0].shape if found else None
