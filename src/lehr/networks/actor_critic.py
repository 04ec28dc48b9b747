"""The network of the on-policy algorithms: policy and value, built from two spaces and a `NetworkConfig`.

>>> from lehr.spaces import Box, Discrete
>>> network, params = actor_critic(Box(-1, 1, (4,)), Discrete(2), NetworkConfig(), jax.random.key(0))
>>> carry, policy, value = network.step(params, network.initial_carry((8,)), jnp.ones((8, 4)), jnp.zeros(8, bool))
>>> policy.logits.shape, value.shape
((8, 2), (8,))
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lehr import kernels, masks, plugins
from lehr.errors import InputError, shortened
from lehr.maths.distributions import Distribution
from lehr.networks.build import Network, Params, build, filled
from lehr.networks.custom import CustomTorso
from lehr.networks.heads import CategoricalHead, NormalHead, linear
from lehr.networks.memory import MEMORIES, reset_carry
from lehr.networks.network_config import NetworkConfig, is_own
from lehr.networks.observations import View, make_view, some_at_a_time
from lehr.networks.torsos import ACTIVATIONS, CNN, MLP, is_small
from lehr.networks.trunks import AnyTorso, Carry, Separate, Shared, Torso, Twin, weights
from lehr.spaces import Box, Dict, Discrete, MultiDiscrete, Space, check_actions
from lehr.types import Key, PyTree


class ActorCritic(nnx.Module):
    """A trunk that computes features, with one head for the policy and one for the value.

    If observations have an action mask, the torsos do not see it. Instead the actor's features end with it: ones where
    an action is possible and zeros elsewhere, so that the policy follows from the features alone.
    """

    def __init__(self, observation_space: Space, action_space: Space, config: NetworkConfig, rngs: nnx.Rngs) -> None:
        self.observation_space = observation_space
        self.masked_space: Discrete | MultiDiscrete | None = None
        keys = None
        if config.action_mask and masks.has_mask(observation_space, action_space):
            assert isinstance(action_space, Discrete | MultiDiscrete)
            self.masked_space, keys = action_space, _unmasked(observation_space)
        self.trunk = _trunk(observation_space, config, keys, rngs)
        actor_features, critic_features = self.trunk.out_features
        self.policy_head = _policy_head(actor_features, action_space, config, rngs)
        self.value_head = linear(critic_features, 1, gain=1.0, rngs=rngs)

    @property
    def feature_sizes(self) -> tuple[int, int]:
        """Number of features of the policy, with the mask, and of the value."""
        actor, critic = self.trunk.out_features
        return actor + self._mask_size, critic

    def act(self, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, Distribution]:
        """Return the policy only."""
        if outputs := self._by_kernel(obs, "policy"):
            return carry, self.policy_head.distribution(outputs[0], self._possible(obs))
        carry, features = self.actor_features(carry, obs, reset)
        return carry, self.policy(features)

    def actor_features(self, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, jax.Array]:
        """Return the input of the policy head at one step, computed in plain JAX."""
        carry, features = self.trunk.actor(reset_carry(carry, reset), obs)
        return carry, self._with_mask(features, obs)

    def value(self, carry: Carry, obs: PyTree) -> jax.Array:
        """Return the value only."""
        if outputs := self._by_kernel(obs, "value"):
            return outputs[0][..., 0]

        def evaluate(obs: PyTree) -> jax.Array:
            return self.value_head(self.trunk.critic(carry, obs))[..., 0]

        if self.trunk.critic_is_recurrent:
            return evaluate(obs)
        return some_at_a_time(evaluate, self.observation_space, obs)

    def step(self, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, Distribution, jax.Array]:
        """Return policy and value."""
        if outputs := self._by_kernel(obs, "policy", "value"):
            return carry, self.policy_head.distribution(outputs[0], self._possible(obs)), outputs[1][..., 0]
        carry, actor, critic = self.trunk.step(reset_carry(carry, reset), obs)
        return carry, self.policy(self._with_mask(actor, obs)), self.head_value(critic)

    def unroll(self, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, Distribution, jax.Array]:
        """Return policy and value over `T` steps."""
        if outputs := self._by_kernel(obs, "policy", "value"):
            return carry, self.policy_head.distribution(outputs[0], self._possible(obs)), outputs[1][..., 0]
        carry, actor, critic = self._features(carry, obs, reset)
        return carry, self.policy(actor), self.head_value(critic)

    def unroll_with(
        self, head: Params, carry: Carry, obs: PyTree, reset: jax.Array
    ) -> tuple[Carry, Distribution, jax.Array, jax.Array]:
        """Return policy, value, and the output of another head on the actor's features, over `T` steps."""
        kernel, bias = head["kernel"], head["bias"]
        if outputs := self._by_kernel(obs, "policy", "value", beside=(kernel[: self.trunk.out_features[0]], bias)):
            own, other, possible = outputs[0][..., :-1], outputs[0][..., -1], self._possible(obs)
            if possible is not None:
                other += possible.astype(kernel.dtype) @ kernel[-self._mask_size :]
            return carry, self.policy_head.distribution(own, possible), outputs[1][..., 0], other
        carry, actor, critic = self.features(carry, obs, reset)
        return carry, self.policy(actor), self.head_value(critic), actor @ kernel + bias

    def features(self, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, jax.Array, jax.Array]:
        """Return the inputs of both heads over `T` steps, computed in plain JAX."""
        with kernels.plain():
            return self._features(carry, obs, reset)

    def _features(self, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, jax.Array, jax.Array]:
        """Return the inputs of both heads over `T` steps."""
        carry, actor, critic = self.trunk.unroll(carry, obs, reset)
        return carry, self._with_mask(actor.astype(jnp.float32), obs), critic.astype(jnp.float32)

    def policy(self, features: jax.Array) -> Distribution:
        """Return the policy for the actor's features."""
        if self.masked_space is None:
            return self.policy_head(features)
        features, mask = features[..., : -self._mask_size], features[..., -self._mask_size :]
        return self.policy_head.distribution(self.policy_head.layer(features), mask > 0)

    def head_value(self, features: jax.Array) -> jax.Array:
        """Return the value for the critic's features."""
        return self.value_head(features)[..., 0]

    @property
    def _mask_size(self) -> int:
        return 0 if self.masked_space is None else masks.size(self.masked_space)

    def _possible(self, obs: PyTree) -> Any:
        """Return which actions are possible, bool `[..., n]`; `None` without a mask."""
        return None if self.masked_space is None else masks.possible(self.masked_space, obs[masks.MASK])

    def _with_mask(self, features: jax.Array, obs: PyTree) -> jax.Array:
        """Append the mask, if there is one, to the actor's features."""
        if self.masked_space is None:
            return features
        return jnp.concatenate([features, self._possible(obs).astype(features.dtype)], -1)

    def _by_kernel(
        self, obs: PyTree, *names: str, beside: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[jax.Array, ...] | None:
        """Compute the outputs of the policy layer, the value layer, or both with one kernel; `None` without a kernel.

        A `Twin` is not recurrent, so the carry does not change.

        Args:
            obs: leaves `[..., *shape]`.
            names: policy, value or both.
            beside: kernel `[F]` and bias `[]` of one more output, after those of the policy layer.
        """
        if not isinstance(self.trunk, Twin):
            return None
        layers = {"policy": (0, self.policy_head.layer), "value": (1, self.value_head)}
        heads = {index: weights(layer) for index, layer in (layers[name] for name in names)}
        if beside is not None:
            kernel, bias = heads[0]
            heads[0] = jnp.concatenate([kernel, beside[0][:, None]], 1), jnp.concatenate([bias, beside[1][None]])
        return self.trunk.outputs(obs, heads)


class ActorCriticNetwork(Network[ActorCritic]):
    """The methods of an `ActorCritic` as pure functions of its parameters, for use by algorithms.

    Observations are batched, `[N, ...]`, or `[T, N, ...]` in `unroll`. `reset` is true where an observation is the
    first of its episode: the recurrent state is reset before it. A feed-forward network accepts any leading axes
    everywhere, and ignores the carry and `reset`.
    """

    @property
    def is_recurrent(self) -> bool:
        """Whether the actor or the critic is recurrent."""
        return self.module.trunk.is_recurrent

    @property
    def critic_is_recurrent(self) -> bool:
        """Whether the value depends on the carry."""
        return self.module.trunk.critic_is_recurrent

    @property
    def is_shared(self) -> bool:
        """Whether actor and critic share one torso."""
        return isinstance(self.module.trunk, Shared)

    @property
    def observation_space(self) -> Space:
        """The observation space that the network was built for."""
        return self.module.observation_space

    @property
    def feature_sizes(self) -> tuple[int, int]:
        """Number of features of the policy and of the value; those of the policy end with the action mask, if any."""
        return self.module.feature_sizes

    def initial_carry(self, batch_shape: tuple[int, ...]) -> Carry:
        """Return zeros, `{"actor": ..., "critic": ...}`; a feed-forward part is `()`."""
        return self.module.trunk.initial_carry(batch_shape)

    def act(self, params: Params, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, Distribution]:
        """Return the next carry and the policy `[N]`. The critic is not evaluated; its own carry does not change."""
        return self.bind(params).act(carry, obs, reset)

    def actor_features(self, params: Params, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, jax.Array]:
        """Return the next carry, and the input of the policy head, `[N, F]`; `act` is `policy(params, actor_features)`.

        Computed in plain JAX, like `features`, but for one step and for the actor only.
        """
        return self.bind(params).actor_features(carry, obs, reset)

    def value(self, params: Params, carry: Carry, obs: PyTree) -> jax.Array:
        """Return the value `[N]` of observations that follow the carry in their episode. The actor is not evaluated.

        A feed-forward critic accepts a whole rollout, `[T, N, ...]` to `[T, N]`, and evaluates a few steps at a time.
        The parameters may be those of `critic_alone`.
        """
        return self.bind(params if "policy_head" in params else filled(params, self.module)).value(carry, obs)

    def step(
        self, params: Params, carry: Carry, obs: PyTree, reset: jax.Array
    ) -> tuple[Carry, Distribution, jax.Array]:
        """Return the next carry, the policy `[N]` and the value `[N]`."""
        return self.bind(params).step(carry, obs, reset)

    def unroll(
        self, params: Params, carry: Carry, obs: PyTree, reset: jax.Array
    ) -> tuple[Carry, Distribution, jax.Array]:
        """Return the last carry, the policy `[T, N]` and the value `[T, N]`, given the carry before the first step."""
        return self.bind(params).unroll(carry, obs, reset)

    def unroll_with(
        self, params: Params, head: Params, carry: Carry, obs: PyTree, reset: jax.Array
    ) -> tuple[Carry, Distribution, jax.Array, jax.Array]:
        """As `unroll`, and also return the output `[T, N]` of another head on the actor's features, `[F]` to a number.

        `head` is `{"kernel": [F], "bias": []}`, with F the first of `feature_sizes`.
        """
        return self.bind(params).unroll_with(head, carry, obs, reset)

    def features(
        self, params: Params, carry: Carry, obs: PyTree, reset: jax.Array
    ) -> tuple[Carry, jax.Array, jax.Array]:
        """Return the last carry, and the inputs of both heads, float32 `[T, N, F]` for each of `feature_sizes`.

        Always computed in plain JAX, which supports forward-mode and higher derivatives. `unroll` returns
        `policy(params, actor_features)` and `head_value(params, critic_features)`, up to rounding.
        """
        return self.bind(params).features(carry, obs, reset)

    def policy(self, params: Params, actor_features: jax.Array) -> Distribution:
        """Return the policy `[...]` for the actor's features `[..., F]`."""
        return self.bind(params).policy(actor_features)

    def head_value(self, params: Params, critic_features: jax.Array) -> jax.Array:
        """Return the value `[...]` for the critic's features `[..., F]`."""
        return self.bind(params).head_value(critic_features)

    def split(self, params: Params) -> tuple[Params, Params]:
        """Return the parameters of the policy and those of the value; an error if they share a torso."""
        actor, critic = self.module.trunk.split(params.get("trunk", {}))
        return (
            {"trunk": actor, "policy_head": params["policy_head"]},
            {"trunk": critic, "value_head": params["value_head"]},
        )

    def merge(self, actor: Params, critic: Params) -> Params:
        """Merge the parameters from `split`."""
        trunk = self.module.trunk.merge(actor["trunk"], critic["trunk"])
        heads = {"policy_head": actor["policy_head"], "value_head": critic["value_head"]}
        return {**heads, "trunk": trunk} if trunk else heads

    def critic_alone(self, critic: Params) -> Params:
        """Return the parameters of the value from `split`, in the form in which `value` takes them without the others.

        The order of the leaves is the same, and so is each leaf but for an axis of length 1.
        """
        return {"trunk": self.module.trunk.critic_alone(critic["trunk"]), "value_head": critic["value_head"]}


def actor_critic(
    observation_space: Space, action_space: Space, config: NetworkConfig, key: Key
) -> tuple[ActorCriticNetwork, Params]:
    """Build the network for an environment's spaces."""
    network, params = build(_maker(observation_space, action_space, config), key)
    return ActorCriticNetwork(network.graphdef, network.module), params


@functools.cache
def _maker(observation_space: Space, action_space: Space, config: NetworkConfig) -> Callable[[nnx.Rngs], ActorCritic]:
    """Return the same function for equal arguments, so that `build` compiles once for them."""
    return lambda rngs: ActorCritic(observation_space, action_space, config, rngs)


def _unmasked(space: Space) -> tuple[str, ...] | None:
    """The keys of an observation without the action mask; `None` if it is the only one, as a torso needs some input."""
    assert isinstance(space, Dict)
    return tuple(key for key in space.spaces if key != masks.MASK) or None


def _trunk(
    space: Space, config: NetworkConfig, keys: tuple[str, ...] | None, rngs: nnx.Rngs
) -> Shared | Separate | Twin:
    """Build the trunk: one shared torso, two separate ones, or two MLPs on the same vector, evaluated together.

    Both see the entries `keys` of an observation, or all with `None`, unless the settings name others.
    """
    actor_keys = keys if config.actor_obs is None else config.actor_obs
    critic_keys = keys if config.critic_obs is None else config.critic_obs
    actor = _torso(space, actor_keys, config.torso, config.hidden_sizes, config, rngs)
    if config.shared:
        return Shared(actor)
    sizes = config.hidden_sizes if config.critic_hidden_sizes is None else config.critic_hidden_sizes
    critic = _torso(space, critic_keys, config.critic_torso or config.torso, sizes, config, rngs)
    if isinstance(actor, CustomTorso) or isinstance(critic, CustomTorso):
        return Separate(actor, critic)
    feed_forward = not actor.is_recurrent and not critic.is_recurrent
    alike = feed_forward and actor.view == critic.view and sizes == config.hidden_sizes
    if alike and actor.view.image is None and sizes != ():
        return Twin(actor, critic)
    return Separate(actor, critic)


def _torso(
    space: Space,
    keys: tuple[str, ...] | None,
    kind: str,
    hidden_sizes: tuple[int, ...] | None,
    config: NetworkConfig,
    rngs: nnx.Rngs,
) -> AnyTorso:
    """Build a torso: an encoder of the selected observations, with a recurrent layer if needed; or the user's own."""
    if is_own(kind):
        make = plugins.import_object(kind, "torso") if isinstance(kind, str) else kind
        return CustomTorso(space, keys, make, rngs)
    view = make_view(space, keys, kind)
    memory_type = MEMORIES.get(kind)
    activation, dtype = config.activation, jnp.dtype(config.precision)
    if activation == "auto":
        activation = "tanh" if view.image is None else "relu"
    elif activation not in ACTIVATIONS and isinstance(activation, str):
        activation = _imported_activation(activation)
    if hidden_sizes is None:
        hidden_sizes = (config.recurrent_size,) if memory_type else _default_hidden_sizes(view)
    options: dict[str, Any] = {"activation": activation, "layer_norm": config.layer_norm, "dtype": dtype, "rngs": rngs}
    encoder: MLP | CNN
    if view.image is None:
        encoder = MLP(view.vector_size, hidden_sizes, **options)
    else:
        encoder = CNN(view.image[1].shape, hidden_sizes, vector_size=view.vector_size, **options)
    if memory_type is None:
        return Torso(view, encoder)
    return Torso(view, encoder, memory_type(encoder.out_features, config.recurrent_size, dtype=dtype, rngs=rngs))


def _imported_activation(reference: str) -> Any:
    found = plugins.import_object(reference, "activation")
    if not callable(found) or isinstance(found, type):
        raise InputError(
            f"activation is {reference!r}, which is {shortened(repr(found))}; name a function of an array."
        )
    return found


def _default_hidden_sizes(view: View) -> tuple[int, ...]:
    if view.image is None:
        return (64, 64)
    return (128,) if is_small(view.image[1].shape) else (512,)


MOST_DEVIATION = 1e6
"""The largest σ that a Box starts with; wider ones only state the limits of a type."""


def _initial_log_std(space: Box, config: NetworkConfig) -> tuple[float, ...]:
    """Return the initial log σ of each action: log ½ (high − low), if the settings leave it open and it is moderate."""
    entries = int(np.prod(space.shape))
    if config.initial_log_std is not None:
        return (config.initial_log_std,) * entries
    if config.distribution == "tanh_normal" or config.state_dependent_std:
        return (0.0,) * entries  # the first is squashed into the Box, the second has limits of its own
    half = (space.high.astype(np.float64) - space.low) / 2
    return tuple(np.log(half, out=np.zeros(half.shape), where=(half > 0) & (half < MOST_DEVIATION)).ravel().tolist())


def _policy_head(in_features: int, space: Space, config: NetworkConfig, rngs: nnx.Rngs) -> CategoricalHead | NormalHead:
    match space:
        case Discrete() | MultiDiscrete():
            return CategoricalHead(in_features, space, rngs)
        case Box():
            check_actions(space)
            return NormalHead(
                in_features,
                space,
                squash=config.distribution == "tanh_normal",
                state_dependent_std=config.state_dependent_std,
                initial_log_std=_initial_log_std(space, config),
                rngs=rngs,
            )
    raise InputError(f"The action space is {space}, but a policy needs Discrete, MultiDiscrete or Box: convert it.")
