"""The algorithm protocol, and how to add an algorithm.

An algorithm is a class with two settings classes and five pure functions:

    Config          a frozen dataclass of settings; see `lehr.algorithms.settings`
    NetworkConfig   the settings of its networks
    build           creates its networks and their initial parameters
    init            creates a `Learner`: parameters, optimiser state, and any other state
    act             maps observations to actions, and returns what the rollout stores
    value           returns the value of observations, if the algorithm needs values
    learn           updates the learner from one rollout, and returns metrics

To add one, write a class that inherits from `ActorCriticAlgorithm` (or from `Algorithm`, for other kinds of networks)
and pass it to `lehr.train`, as an object or as `module:Name`; see docs/extend.md for a complete example. Flags,
schedules, logs, checkpoints and evaluation then work without further code. A file in this folder with a class
`Algorithm` is found by its name.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lehr import networks, rewards
from lehr.acting.agent import ActorCriticAgent
from lehr.algorithms.settings import Settings
from lehr.maths.distributions import Distribution
from lehr.maths.optimise import Optimiser, optimiser
from lehr.spaces import Spaces
from lehr.types import Key, Learner, Metrics, PyTree, Rollout


class Algorithm(ABC):
    """The protocol. An algorithm is a static, hashable value; everything that changes is passed as an argument."""

    Config: ClassVar[type[Settings]]
    """Its settings. The trainer reads all of `Settings`, including `acting_lag`, `corrects_lag` and `unused`."""
    NetworkConfig: ClassVar[type] = networks.NetworkConfig
    """The settings of its networks."""
    needs: ClassVar[frozenset[str]] = frozenset({"value"})
    """The optional parts of a rollout that it uses: `value` (with `next_value`), `final_obs`, `taken`. Others are not
    stored."""
    needs_behind: ClassVar[frozenset[str] | None] = None
    """The same for rollouts whose policy may be behind the learner's, where that differs."""
    reward_model: ClassVar[type[rewards.RewardModel]] = rewards.EnvironmentReward
    """The reward model that it brings. Its `Config` then inherits from the reward model's, so that the settings of both
    are one class. By default the user chooses one with the setting `reward_model`."""

    config: Any
    """An instance of its `Config`."""

    decided_by: ClassVar[tuple[str, ...]] = ()
    """Names of the settings that `variant` reads."""

    @classmethod
    def variant(cls, settings: Mapping[str, Any]) -> type["Algorithm"]:
        """Return the class for these settings, by name and perhaps as texts: itself, unless one of them chooses it."""
        return cls

    @classmethod
    def trial_settings(cls, spaces: Spaces, folder: Path) -> dict[str, Any]:
        """Return settings without which it cannot be trained on an environment with these spaces; for tests.

        Files that they name are written to the folder. The rewards must be the environment's.
        """
        return {}

    @classmethod
    @abstractmethod
    def build(cls, spaces: Spaces, config: Any, network_config: Any, key: Key) -> tuple["Algorithm", PyTree]:
        """Return the algorithm for these spaces, and its initial parameters.

        It is traced, unless it needs to see numbers, so the algorithm must not keep arrays that are made here.
        """

    @abstractmethod
    def init(self, key: Key, params: PyTree, example: Rollout) -> Learner:
        """Return a learner with these parameters.

        Args:
            key: random key for this call.
            params: from `build`.
            example: the shapes and dtypes of a rollout, as `jax.ShapeDtypeStruct`, to allocate memory for rollouts.
        """

    @abstractmethod
    def initial_carry(self, batch_shape: tuple[int, ...]) -> PyTree:
        """Return the recurrent state before the first step of an episode; without leaves if `act` has no memory."""

    @abstractmethod
    def act(
        self, params: PyTree, carry: PyTree, obs: PyTree, reset: jax.Array, key: Key, greedy: Any = False
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        """Act for one step, in rollouts on the device and on the host, in evaluation and in policies.

        Args:
            params: the learner's parameters.
            carry: leaves `[N, ...]`, from the previous step.
            obs: leaves `[N, ...]`, normalised if the run normalises observations.
            reset: bool `[N]`: the observation is the first of an episode, so reset the carry first.
            key: random key for the actions.
            greedy: take the most likely actions instead of sampling: `False` in a rollout, otherwise a traced bool.

        Returns:
            The next carry, the actions for the environment, which are clipped to its space, and by name what the
            rollout stores of the step: `action`, as `learn` needs it, if it differs from the environment's; `log_prob`
            `[N]`; `value` `[N]` if it depends on the carry; anything else goes to `extras`.
        """

    def value(self, params: PyTree, carry: PyTree, obs: PyTree) -> jax.Array:
        """Return the values `[...]` of observations `[..., *shape]` after the carry; required if `needs` has it."""
        raise NotImplementedError(f"{type(self).__name__} needs values but has no method value; define it.")

    @abstractmethod
    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Update the learner from one rollout, and return metrics.

        Args:
            learner: from `init` or the last update.
            rollout: `T` steps of `N` environments; its rewards come from the reward model and are scaled.
            coef: value of each coefficient at this update by name, float32 `[]`; coefficients set to none are missing.
            key: random key for this update.

        Returns:
            The learner, and metrics, float32 `[]` each, with the same names at every update. `loss/total` is required:
            an update with a non-finite total loss is not applied.
        """

    def forget(self, learner: Learner) -> Learner:
        """Return the learner of a run that is resumed without its `memory`.

        Its `memory` is the one that `init` gave. Reset what counts the entries of `memory`, if anything does.
        """
        return learner


@dataclass(frozen=True)
class HalfBoxNetworkConfig(networks.NetworkConfig):
    """Architecture of an actor and a critic, with an initial σ of half the width of the Box."""

    initial_log_std: float | None = None


@dataclass(frozen=True)
class ActorCriticAlgorithm(ActorCriticAgent, Algorithm):
    """Base class of algorithms with an actor-critic network: builds the network, and acts with it as its agent does.

    The `Config` of a subclass inherits from `OnPolicySettings`, which has an optimiser, or the subclass defines `init`.
    """

    @classmethod
    def build(
        cls, spaces: Spaces, config: Any, network_config: networks.NetworkConfig, key: Key
    ) -> tuple["ActorCriticAlgorithm", PyTree]:
        """Build the actor-critic network for these spaces, with its initial parameters."""
        network, params = networks.actor_critic(spaces.observation, spaces.action, network_config, key)
        return cls(config, network), params

    @cached_property
    def optimiser(self) -> Optimiser:
        """The optimiser in the settings, without its learning rate."""
        return optimiser(self.config.optimiser, getattr(self.config, "optimiser_options", None))

    def init(self, key: Key, params: PyTree, example: Rollout) -> Learner:
        """Return a learner with these parameters and a new state of the optimiser."""
        return Learner(params, self.optimiser.init(params))

    def policies(self, params: PyTree, rollout: Rollout) -> Distribution:
        """Return the policy of a rollout's steps with these parameters, `[T, N]`, without a feed-forward critic."""
        seen = rollout.carry, rollout.obs, rollout.reset
        return (self.network.unroll if self.network.is_recurrent else self.network.act)(params, *seen)[1]

    def values(self, params: PyTree, rollout: Rollout) -> tuple[PyTree, jax.Array]:
        """Return the carry after a rollout, and the values `[T, N]` of its steps, without a feed-forward actor."""
        if not self.network.is_recurrent:
            return rollout.carry, self.network.value(params, rollout.carry, rollout.obs)
        carry, _, values = self.network.unroll(params, rollout.carry, rollout.obs, rollout.reset)
        return carry, values

    def next_values(self, params: PyTree, rollout: Rollout, carry: PyTree, values: jax.Array) -> jax.Array:
        """Return the values of the observations that follow each step, with these parameters, `[T, N]`.

        After the last step of an episode, that is its final observation. Without `final_obs`, the policy that acted is
        the learner's, so its values of these observations are used.

        Args:
            params: the learner's parameters.
            rollout: collected with the same or with older parameters.
            carry: leaves `[N, ...]`, the recurrent state after the last step, with these parameters.
            values: `[T, N]`, the values of `rollout.obs`, with these parameters.
        """
        if not jax.tree.leaves(rollout.final_obs):
            final, last = rollout.next_value, rollout.next_value[-1]
        elif self.network.critic_is_recurrent:
            final = self._final_values(params, rollout)
            last = self.network.value(params, carry, jax.tree.map(lambda x: x[-1], rollout.final_obs))
        else:
            final = self.network.value(params, carry, rollout.final_obs)
            last = final[-1]
        following = jnp.concatenate([values[1:], last[None]])
        return jnp.where(rollout.done, final, following)

    def _final_values(self, params: PyTree, rollout: Rollout) -> jax.Array:
        """Return the values `[T, N]` of final observations with a recurrent critic, step by step; 0 if none is needed.

        Only truncated episodes need them, so most rollouts skip this pass.
        """

        def step(carry: PyTree, seen: tuple[PyTree, jax.Array, PyTree]) -> tuple[PyTree, jax.Array]:
            obs, reset, final_obs = seen
            carry, _, _ = self.network.step(params, carry, obs, reset)
            return carry, self.network.value(params, carry, final_obs)

        return jax.lax.cond(
            jnp.any(rollout.done & ~rollout.terminated),
            lambda: jax.lax.scan(step, rollout.carry, (rollout.obs, rollout.reset, rollout.final_obs))[1],
            lambda: jnp.zeros(rollout.done.shape),
        )
