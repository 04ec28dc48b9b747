"""What an algorithm is, and how to add one.

An algorithm is a class with two classes of settings and five pure functions:

    Config          a frozen dataclass of settings; see `lehr.algorithms.settings`
    NetworkConfig   the settings of its networks
    build           its networks and their first parameters
    init            a `Learner`: parameters, optimiser, and whatever else it remembers
    act             from observations to actions, and what a rollout keeps of it
    value           the value of observations, if it needs values
    learn           the learner after one rollout, and metrics

To add one, write a class that inherits from `ActorCriticAlgorithm` (or from `Algorithm`, to have networks of another
kind) and give it to `lehr.train`, as an object or as `module:Name`; see docs/extend.md for a complete example. Its
flags, schedules, logs, checkpoints and evaluation come by themselves. A file in this folder with a class `Algorithm` is
found by its name.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lehr import networks
from lehr.algorithms.settings import Settings
from lehr.maths.distributions import Distribution
from lehr.maths.optimise import Optimiser
from lehr.spaces import Spaces
from lehr.types import Key, Learner, Metrics, PyTree, Rollout


class Algorithm(ABC):
    """The protocol. An algorithm is a static, hashable value; everything that changes is in its arguments."""

    Config: ClassVar[type[Settings]]
    """Its settings. The trainer reads what `Settings` has, `acting_lag`, `corrects_lag` and `unused` included."""
    NetworkConfig: ClassVar[type] = networks.NetworkConfig
    """The settings of its networks."""
    needs: ClassVar[frozenset[str]] = frozenset({"value"})
    """The optional parts of a rollout that it looks at: `value` (and `next_value`), `final_obs`. No other is kept."""

    config: Any
    """An instance of its `Config`."""

    @classmethod
    @abstractmethod
    def build(cls, spaces: Spaces, config: Any, network_config: Any, key: Key) -> tuple["Algorithm", PyTree]:
        """The algorithm for these spaces, and its first parameters."""

    @abstractmethod
    def init(self, key: Key, params: PyTree, example: Rollout) -> Learner:
        """A learner with these parameters.

        Args:
            key: randomness of its own.
            params: from `build`.
            example: the shapes and dtypes of a rollout, as `jax.ShapeDtypeStruct`, to make room for some.
        """

    @abstractmethod
    def initial_carry(self, batch_shape: tuple[int, ...]) -> PyTree:
        """What `act` remembers before the first step of an episode; a pytree without leaves where that is nothing."""

    @abstractmethod
    def act(
        self, params: PyTree, carry: PyTree, obs: PyTree, reset: jax.Array, key: Key, greedy: Any = False
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        """One step of acting, for rollouts on the device and on the host, for evaluation and for policies to call.

        Args:
            params: the learner's.
            carry: leaves `[N, ...]`, from the last step.
            obs: leaves `[N, ...]`, normalised if the run normalises.
            reset: bool `[N]`: the observation is the first of an episode, so the carry is to be cleared before it.
            key: the randomness of the actions.
            greedy: whether to take the best actions instead: `False` in a rollout, else a traced bool.

        Returns:
            The next carry, the actions for the environment, which are clipped to its space, and by name what the
            rollout keeps of the step: `action`, as learning wants to see it again, where that is not the environment's;
            `log_prob` `[N]`; `value` `[N]` where that depends on the carry; anything else goes to `extras`.
        """

    def value(self, params: PyTree, carry: PyTree, obs: PyTree) -> jax.Array:
        """The values `[...]` of observations `[..., *shape]` that follow the carry; asked for where `needs` says so."""
        raise NotImplementedError(f"{type(self).__name__} needs values, so it must have a method value.")

    @abstractmethod
    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """The learner after one rollout, and metrics.

        Args:
            learner: from `init` or the last update.
            rollout: `T` steps of `N` environments; rewards come from the reward model and are scaled.
            coef: by name, the value of each coefficient at this update, float32 `[]`; those set to none are missing.
            key: randomness of this update's own.

        Returns:
            The learner, and metrics, float32 `[]` each, the same at every update. `loss/total` must be among them: an
            update whose total loss is not finite is not applied.
        """


@dataclass(frozen=True)
class ActorCriticAlgorithm(Algorithm):
    """The parent of those with an actor-critic network: how they are built, how they begin and how they act.

    The `Config` of a child is at least `OnPolicySettings`, which names an optimiser, or it writes `init` itself.
    """

    config: Any
    network: networks.ActorCriticNetwork

    @classmethod
    def build(
        cls, spaces: Spaces, config: Any, network_config: networks.NetworkConfig, key: Key
    ) -> tuple["ActorCriticAlgorithm", PyTree]:
        """The actor-critic network for these spaces, with its first parameters."""
        network, params = networks.actor_critic(spaces.observation, spaces.action, network_config, key)
        return cls(config, network), params

    @property
    def optimiser(self) -> Optimiser:
        """The optimiser that the settings name, without a learning rate."""
        return Optimiser(self.config.optimiser)

    def init(self, key: Key, params: PyTree, example: Rollout) -> Learner:
        """A learner with these parameters, and the first state of the optimiser."""
        return Learner(params, self.optimiser.init(params))

    def initial_carry(self, batch_shape: tuple[int, ...]) -> PyTree:
        """The network's."""
        return self.network.initial_carry(batch_shape)

    def act(
        self, params: PyTree, carry: PyTree, obs: PyTree, reset: jax.Array, key: Key, greedy: Any = False
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        """Sample from the policy, or take its mode. A value is kept only where it depends on the carry."""
        kept: dict[str, Any] = {}
        policy: Distribution
        if self.network.critic_is_recurrent:
            carry, policy, kept["value"] = self.network.step(params, carry, obs, reset)
        else:
            carry, policy = self.network.act(params, carry, obs, reset)
        if greedy is False:
            kept["action"], kept["log_prob"] = policy.sample_and_log_prob(key)
        else:
            kept["action"] = jax.tree.map(partial(jnp.where, greedy), policy.mode(), policy.sample(key))
        return carry, policy.environment_action(kept["action"]), kept

    def value(self, params: PyTree, carry: PyTree, obs: PyTree) -> jax.Array:
        """The critic's."""
        return self.network.value(params, carry, obs)
