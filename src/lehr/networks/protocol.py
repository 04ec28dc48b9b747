"""The network protocol that algorithms use, for writing your own network from scratch.

Writing only a torso is less work: see `lehr.networks.custom`.
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
    """Policy and value as pure functions of their parameters; `ActorCriticNetwork` is Lehr's implementation.

    The object itself is static: it has no arrays, is hashable, and equals any other of the same architecture, so that a
    program is traced once for both. Parameters are a nested dict of arrays with string keys.

    For `T` steps of `N` environments, observations have leaves `[N, ...]`, or `[T, N, ...]` in `unroll` and `features`.
    A carry is a pytree with leaves `[N, size]`, or without leaves if the network is not recurrent. `reset`, bool `[N]`
    or `[T, N]`, is true where an observation is the first of its episode: the carry is set to zero before it.
    """

    @property
    def is_recurrent(self) -> bool:
        """Whether the actor or the critic is recurrent. If not, all methods accept any leading axes."""

    @property
    def critic_is_recurrent(self) -> bool:
        """Whether the value depends on the carry."""

    @property
    def is_shared(self) -> bool:
        """Whether policy and value share parameters. If so, `split` and `merge` raise an InputError."""

    @property
    def feature_sizes(self) -> tuple[int, int]:
        """Number of features of the policy and of the value."""

    def initial_carry(self, batch_shape: tuple[int, ...]) -> Any:
        """Return the initial recurrent state: zeros `[*batch_shape, size]`."""

    def act(self, params: Params, carry: Any, obs: PyTree, reset: jax.Array) -> tuple[Any, Distribution]:
        """Return the next carry and the policy `[N]`, without the value; the critic's own carry may stay as it was."""

    def actor_features(self, params: Params, carry: Any, obs: PyTree, reset: jax.Array) -> tuple[Any, jax.Array]:
        """Return the next carry, and the input of the policy head; always computed in plain JAX."""

    def value(self, params: Params, carry: Any, obs: PyTree) -> jax.Array:
        """Return the value `[N]` of observations that follow the carry; also `[T, N]` if the critic is feed-forward."""

    def step(self, params: Params, carry: Any, obs: PyTree, reset: jax.Array) -> tuple[Any, Distribution, jax.Array]:
        """Return the next carry, the policy `[N]` and the value `[N]`."""

    def unroll(self, params: Params, carry: Any, obs: PyTree, reset: jax.Array) -> tuple[Any, Distribution, jax.Array]:
        """Return the last carry, the policy `[T, N]` and the value `[T, N]`, given the carry before the first step."""

    def features(self, params: Params, carry: Any, obs: PyTree, reset: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        """Return the last carry, and the inputs of `policy` and `head_value`, float32 `[T, N, F]` each.

        It must support forward-mode differentiation (`jax.jvp`), and with both heads it must match `unroll`.
        """

    def policy(self, params: Params, actor_features: jax.Array) -> Distribution:
        """Return the policy `[...]` for the actor's features `[..., F]`."""

    def head_value(self, params: Params, critic_features: jax.Array) -> jax.Array:
        """Return the value `[...]` for the critic's features `[..., F]`."""

    def split(self, params: Params) -> tuple[Params, Params]:
        """Return the parameters of the policy, and those of the value."""

    def merge(self, actor: Params, critic: Params) -> Params:
        """Merge the two parts into all parameters."""


ActorCriticBuilder: TypeAlias = Callable[[Space, Space, Any, Key], tuple[ActorCriticLike, Params]]
"""Maps `(observation_space, action_space, config, key)` to a network and its parameters, like `actor_critic`."""
