"""What an environment is: two pure functions, two spaces and a number of agents."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol

from lehr.spaces import Space
from lehr.types import Key, PyTree, Timestep

NEVER = 2**31 - 1
"""The `truncation_gap` of an environment that does not truncate."""


class Environment(Protocol):
    """One environment, without a batch axis: batching is `vmap`.

    An environment is an immutable and hashable description (a frozen dataclass with its parameters as fields); all
    that changes lives in the state, a pytree of arrays whose structure, shapes and dtypes never change. `step` neither
    resets a finished episode nor cuts a long one: `AutoReset` and `TimeLimit` do.

    With `A = num_agents > 1`, every leaf of the observation, and the action, reward, terminated and truncated, have a
    leading axis `A`; the spaces describe one agent. An agent that is done stays done, and the episode is over when all
    are.

    Inherit from this class for the defaults, or write the same members without it.
    """

    if TYPE_CHECKING:  # read-only for the type checker, so that a field, a class attribute and a property all fit

        @property
        def observation_space(self) -> Space:
            """The space of one agent's observation."""

        @property
        def action_space(self) -> Space:
            """The space of one agent's action."""

        @property
        def num_agents(self) -> int:
            """How many agents act at every step."""
            return 1

        @property
        def env_steps_per_step(self) -> int:
            """How many steps of the task one call of `step` makes; more than 1 under `ActionRepeat`."""
            return 1

        @property
        def truncation_gap(self) -> int:
            """How many steps at least lie between two truncations, so that a rollout knows how many to expect.

            1 promises nothing; `NEVER` says that `step` itself never truncates. `TimeLimit` takes its own into account.
            """
            return 1

        @property
        def environments_per_reset(self) -> int:
            """How many environments of a batch share the computation of one reset at every step.

            1 computes a reset for each. Where a reset is costly a larger number computes fewer: as long as no more
            episodes end in one step than resets are computed, each begins anew by itself; those beyond begin alike.
            """
            return 1

    else:
        observation_space: Space
        action_space: Space
        num_agents: int = 1
        env_steps_per_step: int = 1
        truncation_gap: int = 1
        environments_per_reset: int = 1

    @abstractmethod
    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Begin an episode: `(state, observation)`."""

    @abstractmethod
    def step(self, key: Key, state: PyTree, action: PyTree) -> tuple[PyTree, Timestep]:
        """Act once: `(next state, timestep)`, where the timestep holds the observation of the next state."""
