"""The environment protocol: two pure functions, two spaces and a number of agents."""

from abc import abstractmethod
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from lehr.spaces import Space
from lehr.types import Key, PyTree, Timestep

NEVER = 2**31 - 1
"""The `truncation_gap` of an environment that does not truncate."""


class Described(Protocol):
    """What every description of an environment has, whether it runs on the device or on the host."""

    # Read-only for the type checker, so that fields, class attributes and properties are all accepted.
    if TYPE_CHECKING:

        @property
        def num_agents(self) -> int:
            """The number of agents that act at every step."""
            return 1

        @property
        def env_steps_per_step(self) -> int:
            """The number of steps of the task per call of `step`; more than 1 with `ActionRepeat`."""
            return 1

        @property
        def observation_space(self) -> Space:
            """The space of one agent's observation."""

        @property
        def action_space(self) -> Space:
            """The space of one agent's action."""

    else:
        num_agents: int = 1
        env_steps_per_step: int = 1
        observation_space: Space
        action_space: Space


class Environment(Described, Protocol):
    """A single environment without a batch axis; use `vmap` for batches.

    An environment is an immutable, hashable description (a frozen dataclass with its parameters as fields). Everything
    that changes is in the state, a pytree of arrays whose structure, shapes and dtypes never change. `step` neither
    resets finished episodes nor truncates long ones: `AutoReset` and `TimeLimit` do.

    With `A = num_agents > 1`, the action, reward, terminated, truncated and every leaf of the observation have a
    leading axis `A`; the spaces describe one agent. An agent that is done stays done, and the episode ends when all
    agents are done.

    Inherit from this class to get the defaults, or define the same members without it.
    """

    if TYPE_CHECKING:  # read-only, as above

        @property
        def truncation_gap(self) -> int:
            """A lower bound on the number of steps between two truncations, which bounds their number in a rollout.

            1 is always correct; `NEVER` means that `step` itself never truncates. `TimeLimit` accounts for its limit.
            """
            return 1

        @property
        def environments_per_reset(self) -> int:
            """How many environments of a batch share one reset computation per step.

            With 1, every environment computes its own reset at every step. If resets are expensive, a larger number
            computes fewer of them, and keeps them in a pool with a state for every environment. Episodes start from
            the same state only if more of them end than resets are computed, over as many steps as this number.
            """
            return 1

    else:
        truncation_gap: int = 1
        environments_per_reset: int = 1

    @abstractmethod
    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Start an episode and return `(state, observation)`."""

    @abstractmethod
    def step(self, key: Key, state: PyTree, action: PyTree) -> tuple[PyTree, Timestep]:
        """Take one step and return `(next state, timestep)`; the timestep holds the next state's observation."""


def forwarded(path: str) -> property:
    """A read-only attribute that is another object's, found by a path such as `env.num_agents`."""
    return property(attrgetter(path))
