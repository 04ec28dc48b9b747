"""What an algorithm asks of its network, for a user who writes one from scratch.

A torso of your own is less work, see `lehr.networks.custom`: the rest of `ActorCriticNetwork` comes with it.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax

from lehr.maths.distributions import Distribution
from lehr.networks.build import Params
from lehr.spaces import Space
from lehr.types import Key, PyTree


@runtime_checkable
class ActorCriticLike(Protocol):
    """A policy and a value as pure functions of their parameters; `ActorCriticNetwork` is the one that Lehr builds.

    The object itself is static: without arrays, hashable, and equal to another of the same architecture, so that a
    program is traced once for both. Parameters are a nested dict of arrays with text keys.

    `T` steps of `N` environments: observations are leaves `[N, ...]`, or `[T, N, ...]` in `unroll` and `features`. A
    carry is a pytree with leaves `[N, size]`, or without leaves where nothing is remembered. `reset`, bool `[N]` or
    `[T, N]`, is true where an observation is the first of its episode: the carry is zeroed before it is looked at.
    """

    @property
    def is_recurrent(self) -> bool:
        """Whether anything is remembered, by the actor or the critic. If not, any leading axes are taken everywhere."""

    @property
    def critic_is_recurrent(self) -> bool:
        """Whether the value depends on the carry."""

    @property
    def is_shared(self) -> bool:
        """Whether policy and value have parameters in common. Then `split` and `merge` raise an InputError."""

    @property
    def feature_sizes(self) -> tuple[int, int]:
        """How many features the policy and the value are made of."""

    def initial_carry(self, batch_shape: tuple[int, ...]) -> Any:
        """An empty memory: zeros `[*batch_shape, size]`."""

    def act(self, params: Params, carry: Any, obs: PyTree, reset: jax.Array) -> tuple[Any, Distribution]:
        """The next carry and the policy `[N]`, without the value; a memory of the critic's own may stay behind."""

    def actor_features(self, params: Params, carry: Any, obs: PyTree, reset: jax.Array) -> tuple[Any, jax.Array]:
        """The next carry, and what the policy's head sees; always in plain JAX."""

    def value(self, params: Params, carry: Any, obs: PyTree) -> jax.Array:
        """The value `[N]` of observations that follow the carry; also `[T, N]`, if the critic has no memory."""

    def step(self, params: Params, carry: Any, obs: PyTree, reset: jax.Array) -> tuple[Any, Distribution, jax.Array]:
        """The next carry, the policy `[N]` and the value `[N]`."""

    def unroll(self, params: Params, carry: Any, obs: PyTree, reset: jax.Array) -> tuple[Any, Distribution, jax.Array]:
        """The last carry, the policy `[T, N]` and the value `[T, N]`, from the carry before the first step."""

    def features(self, params: Params, carry: Any, obs: PyTree, reset: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        """The last carry, and what `policy` and `head_value` are functions of, float32 `[T, N, F]` each.

        It can be differentiated forward (`jax.jvp`), and with both heads it gives what `unroll` gives.
        """

    def policy(self, params: Params, actor_features: jax.Array) -> Distribution:
        """The policy `[...]` of the actor's features `[..., F]`."""

    def head_value(self, params: Params, critic_features: jax.Array) -> jax.Array:
        """The value `[...]` of the critic's features `[..., F]`."""

    def split(self, params: Params) -> tuple[Params, Params]:
        """The parameters that the policy depends on, and those that the value does."""

    def merge(self, actor: Params, critic: Params) -> Params:
        """All parameters, from the two parts."""


ActorCriticBuilder: TypeAlias = Callable[[Space, Space, Any, Key], tuple[ActorCriticLike, Params]]
"""`(observation_space, action_space, config, key)` to a network and its first parameters, as `actor_critic` is."""
