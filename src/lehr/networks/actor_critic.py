"""The network of the on-policy algorithms: a policy and a value, built from two spaces and a `NetworkConfig`.

>>> from lehr.spaces import Box, Discrete
>>> network, params = actor_critic(Box(-1, 1, (4,)), Discrete(2), NetworkConfig(), jax.random.key(0))
>>> carry, policy, value = network.step(params, network.initial_carry((8,)), jnp.ones((8, 4)), jnp.zeros(8, bool))
>>> policy.logits.shape, value.shape
((8, 2), (8,))
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lehr import plugins
from lehr.config import Plugin
from lehr.errors import InputError, closest, shortened
from lehr.maths.distributions import Distribution
from lehr.networks.build import Network, Params, build
from lehr.networks.custom import CustomTorso
from lehr.networks.heads import CategoricalHead, NormalHead, linear
from lehr.networks.memory import GRU, LSTM, MinGRU, reset_carry
from lehr.networks.observations import View, make_view, some_at_a_time
from lehr.networks.torsos import ACTIVATIONS, CNN, MLP, is_small
from lehr.networks.trunks import AnyTorso, Carry, Separate, Shared, Torso, Twin
from lehr.spaces import Box, Discrete, MultiDiscrete, Space
from lehr.types import Key, PyTree

MEMORIES: dict[str, type[LSTM] | type[GRU] | type[MinGRU]] = {"lstm": LSTM, "gru": GRU, "mingru": MinGRU}
TORSOS = ("auto", "mlp", "cnn", *MEMORIES)


@dataclass(frozen=True)
class NetworkConfig:
    """The architecture of an actor and a critic."""

    torso: Plugin = "auto"
    """mlp, cnn, lstm, gru or mingru; auto is cnn where there is one image and mlp elsewhere. Your own is given by name,
    module:Name, or in Python as a class or function; see lehr.networks.custom."""
    critic_torso: Plugin | None = None
    """The critic's torso where it is another: mlp beside a recurrent actor gives a critic without memory."""
    shared: bool = False
    """Whether actor and critic share one torso."""
    hidden_sizes: tuple[int, ...] | None = None
    """Dense layers. By default 64, 64; after convolutions one of 128 (small images) or 512; before a memory one of its
    size. With a memory these layers, or the convolutions and these, encode its input; () leaves them out."""
    critic_hidden_sizes: tuple[int, ...] | None = None
    """The critic's dense layers where they are others; by default those of hidden_sizes."""
    recurrent_size: int = 128
    """Size of the memory of lstm, gru and mingru."""
    activation: Plugin = "auto"
    """tanh, relu, gelu, silu or elu; auto is relu with convolutions and tanh elsewhere. Your own is any function of an
    array, given by name, module:Name, or in Python as the function."""
    layer_norm: bool = False
    """Whether each dense layer is normalised before its activation."""
    actor_obs: tuple[str, ...] | None = None
    """The keys of a Dict observation that the actor sees; by default all."""
    critic_obs: tuple[str, ...] | None = None
    """The keys of a Dict observation that the critic sees; by default all."""
    distribution: str = "normal"
    """For actions in a Box: normal (to be clipped by the environment) or tanh_normal (squashed onto the Box)."""
    state_dependent_std: bool = False
    """Whether log σ is an output of the network instead of a parameter."""
    initial_log_std: float = 0.0
    """log σ at the start."""
    dtype: str = "float32"
    """Computation in float32 or bfloat16; parameters, carry, heads and outputs stay float32."""

    def __post_init__(self) -> None:
        for name in ("hidden_sizes", "critic_hidden_sizes", "actor_obs", "critic_obs"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        choices = {
            "torso": TORSOS,
            "critic_torso": (*TORSOS, None),
            "activation": ("auto", *ACTIVATIONS),
            "distribution": ("normal", "tanh_normal"),
            "dtype": ("float32", "bfloat16"),
        }
        for name, known in choices.items():
            given = getattr(self, name)
            if name in _OWN and callable(given):
                if not isinstance(given, Hashable):
                    raise InputError(f"{name} is {given!r}, which has no hash: give a function or a class instead.")
            elif given not in known and not (name in _OWN and plugins.is_reference(given)):
                raise InputError(f"{name} is {given!r}; {closest(str(given), filter(None, known))}")
        for name, sizes in (("hidden_sizes", self.hidden_sizes), ("critic_hidden_sizes", self.critic_hidden_sizes)):
            if min((self.recurrent_size, *(sizes or ()))) < 1:
                raise InputError(
                    f"{name} is {sizes} and recurrent_size is {self.recurrent_size}: every size must be at least 1; "
                    f"give {name}=() for no dense layers."
                )
        same_sizes = self.critic_hidden_sizes in (None, self.hidden_sizes)
        same_torso = self.critic_torso in (None, self.torso) and same_sizes
        if self.shared and not (same_torso and self.actor_obs == self.critic_obs):
            raise InputError(
                "shared=True gives actor and critic one torso, but critic_torso, critic_hidden_sizes, actor_obs or "
                "critic_obs makes them differ: remove these, or set shared=False."
            )
        if all(map(_is_own, (self.torso, self.critic_torso or self.torso))):
            unused = ("hidden_sizes", "critic_hidden_sizes", "activation", "layer_norm", "dtype")
            for field in fields(self):
                if field.name in unused and getattr(self, field.name) != field.default:
                    raise InputError(
                        f"{field.name} is {getattr(self, field.name)}, but the torso {_name(self.torso)} is not one of "
                        f"Lehr's, and makes its layers by itself: remove {field.name}."
                    )


_OWN = "torso", "critic_torso", "activation"
"""The fields that take something of the user's own."""


def _is_own(torso: Any) -> bool:
    """Whether a torso is the user's own, given itself or as `module:Name`."""
    return torso not in TORSOS


def _name(given: Any) -> str:
    return given if isinstance(given, str) else getattr(given, "__name__", repr(given))


class ActorCritic(nnx.Module):
    """A trunk that gives features to two heads, one for the policy and one for the value."""

    def __init__(self, observation_space: Space, action_space: Space, config: NetworkConfig, rngs: nnx.Rngs) -> None:
        self.observation_space = observation_space
        self.trunk = _trunk(observation_space, config, rngs)
        actor_features, critic_features = self.trunk.out_features
        self.policy_head = _policy_head(actor_features, action_space, config, rngs)
        self.value_head = linear(critic_features, 1, gain=1.0, rngs=rngs)

    def act(self, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, Distribution]:
        """The policy alone."""
        if outputs := self._by_kernel(obs, "policy"):
            return carry, self.policy_head.distribution(outputs[0])
        carry, features = self.actor_features(carry, obs, reset)
        return carry, self.policy(features)

    def actor_features(self, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, jax.Array]:
        """What the policy's head sees at one step, never by a kernel."""
        return self.trunk.actor(reset_carry(carry, reset), obs)

    def value(self, carry: Carry, obs: PyTree) -> jax.Array:
        """The value alone."""
        if outputs := self._by_kernel(obs, "value"):
            return outputs[0][..., 0]

        def evaluate(obs: PyTree) -> jax.Array:
            return self.value_head(self.trunk.critic(carry, obs))[..., 0]

        if self.trunk.critic_is_recurrent:
            return evaluate(obs)
        return some_at_a_time(evaluate, self.observation_space, obs)

    def step(self, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, Distribution, jax.Array]:
        """Policy and value."""
        if outputs := self._by_kernel(obs, "policy", "value"):
            return carry, self.policy_head.distribution(outputs[0]), outputs[1][..., 0]
        carry, actor, critic = self.trunk.step(reset_carry(carry, reset), obs)
        return carry, self.policy(actor), self.head_value(critic)

    def unroll(self, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, Distribution, jax.Array]:
        """Policy and value over `T` steps."""
        if outputs := self._by_kernel(obs, "policy", "value"):
            return carry, self.policy_head.distribution(outputs[0]), outputs[1][..., 0]
        carry, actor, critic = self.features(carry, obs, reset)
        return carry, self.policy(actor), self.head_value(critic)

    def features(self, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, jax.Array, jax.Array]:
        """What the two heads see over `T` steps, never by a kernel."""
        carry, actor, critic = self.trunk.unroll(carry, obs, reset)
        return carry, actor.astype(jnp.float32), critic.astype(jnp.float32)

    def policy(self, features: jax.Array) -> Distribution:
        """The policy of an actor's features."""
        return self.policy_head(features)

    def head_value(self, features: jax.Array) -> jax.Array:
        """The value of a critic's features."""
        return self.value_head(features)[..., 0]

    def _by_kernel(self, obs: PyTree, *names: str) -> tuple[jax.Array, ...] | None:
        """The outputs of the policy's layer, the value's, or both, by one kernel; `None` where plain JAX is to do it.

        With a `Twin` nothing is remembered, so that the carry stays as it is.
        """
        if not isinstance(self.trunk, Twin):
            return None
        heads = {"policy": (0, self.policy_head.layer), "value": (1, self.value_head)}
        return self.trunk.outputs(obs, dict(heads[name] for name in names))


class ActorCriticNetwork(Network[ActorCritic]):
    """What an algorithm holds: the methods of an `ActorCritic` as functions of its parameters.

    Observations are batched, `[N, ...]`, or `[T, N, ...]` in `unroll`. `reset` is true where an observation is the
    first of its episode: the memory is cleared before it is looked at. A feed-forward network takes any leading axes
    everywhere, and looks neither at the carry nor at `reset`.
    """

    @property
    def is_recurrent(self) -> bool:
        """Whether anything is remembered, by the actor or the critic."""
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
        """What the network was built for."""
        return self.module.observation_space

    @property
    def feature_sizes(self) -> tuple[int, int]:
        """How many features the policy and the value are made of."""
        return self.module.trunk.out_features

    def initial_carry(self, batch_shape: tuple[int, ...]) -> Carry:
        """Zeros, `{"actor": ..., "critic": ...}`, each part `()` where nothing is remembered."""
        return self.module.trunk.initial_carry(batch_shape)

    def act(self, params: Params, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, Distribution]:
        """The next carry and the policy `[N]`. The critic is not evaluated; a memory of its own stays as it is."""
        return self.bind(params).act(carry, obs, reset)

    def actor_features(self, params: Params, carry: Carry, obs: PyTree, reset: jax.Array) -> tuple[Carry, jax.Array]:
        """The next carry, and what the policy's head sees, `[N, F]`; `act` gives `policy(params, actor_features)`.

        In plain JAX, as `features`, but of one step and of the actor alone.
        """
        return self.bind(params).actor_features(carry, obs, reset)

    def value(self, params: Params, carry: Carry, obs: PyTree) -> jax.Array:
        """The value `[N]` of observations that follow the carry in their episode. The actor is not evaluated.

        A critic without memory takes a whole rollout, `[T, N, ...]` to `[T, N]`, and looks at some steps at a time.
        """
        return self.bind(params).value(carry, obs)

    def step(
        self, params: Params, carry: Carry, obs: PyTree, reset: jax.Array
    ) -> tuple[Carry, Distribution, jax.Array]:
        """The next carry, the policy `[N]` and the value `[N]`."""
        return self.bind(params).step(carry, obs, reset)

    def unroll(
        self, params: Params, carry: Carry, obs: PyTree, reset: jax.Array
    ) -> tuple[Carry, Distribution, jax.Array]:
        """The last carry, the policy `[T, N]` and the value `[T, N]`, from the carry before the first step."""
        return self.bind(params).unroll(carry, obs, reset)

    def features(
        self, params: Params, carry: Carry, obs: PyTree, reset: jax.Array
    ) -> tuple[Carry, jax.Array, jax.Array]:
        """The last carry, and what the heads of actor and critic see, float32 `[T, N, F]` for each of `feature_sizes`.

        Always in plain JAX, which can be differentiated forward and more than once. `unroll` gives
        `policy(params, actor_features)` and `head_value(params, critic_features)`, up to rounding.
        """
        return self.bind(params).features(carry, obs, reset)

    def policy(self, params: Params, actor_features: jax.Array) -> Distribution:
        """The policy `[...]` of the actor's features `[..., F]`."""
        return self.bind(params).policy(actor_features)

    def head_value(self, params: Params, critic_features: jax.Array) -> jax.Array:
        """The value `[...]` of the critic's features `[..., F]`."""
        return self.bind(params).head_value(critic_features)

    def split(self, params: Params) -> tuple[Params, Params]:
        """The parameters that the policy depends on and those that the value does; refused where they share a torso."""
        actor, critic = self.module.trunk.split(params.get("trunk", {}))
        return (
            {"trunk": actor, "policy_head": params["policy_head"]},
            {"trunk": critic, "value_head": params["value_head"]},
        )

    def merge(self, actor: Params, critic: Params) -> Params:
        """The parameters that were split."""
        trunk = self.module.trunk.merge(actor["trunk"], critic["trunk"])
        heads = {"policy_head": actor["policy_head"], "value_head": critic["value_head"]}
        return {**heads, "trunk": trunk} if trunk else heads


def actor_critic(
    observation_space: Space, action_space: Space, config: NetworkConfig, key: Key
) -> tuple[ActorCriticNetwork, Params]:
    """Build the network for an environment's spaces."""
    network, params = build(_maker(observation_space, action_space, config), key)
    return ActorCriticNetwork(network.graphdef, network.module), params


@functools.cache
def _maker(observation_space: Space, action_space: Space, config: NetworkConfig) -> Callable[[nnx.Rngs], ActorCritic]:
    """One function for equal arguments, so that `build` compiles once for them."""
    return lambda rngs: ActorCritic(observation_space, action_space, config, rngs)


def _trunk(space: Space, config: NetworkConfig, rngs: nnx.Rngs) -> Shared | Separate | Twin:
    """One torso where it is shared; where both are MLPs on the same vector, both evaluated together."""
    actor = _torso(space, config.actor_obs, config.torso, config.hidden_sizes, config, rngs)
    if config.shared:
        return Shared(actor)
    sizes = config.hidden_sizes if config.critic_hidden_sizes is None else config.critic_hidden_sizes
    critic = _torso(space, config.critic_obs, config.critic_torso or config.torso, sizes, config, rngs)
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
    """An encoder for the selected part of an observation, and a memory if the kind has one; or the user's own."""
    if _is_own(kind):
        make = plugins.import_object(kind, "torso") if isinstance(kind, str) else kind
        return CustomTorso(space, keys, make, rngs)
    view = make_view(space, keys, kind)
    memory_type = MEMORIES.get(kind)
    activation, dtype = config.activation, jnp.dtype(config.dtype)
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


def _policy_head(in_features: int, space: Space, config: NetworkConfig, rngs: nnx.Rngs) -> CategoricalHead | NormalHead:
    match space:
        case Discrete() | MultiDiscrete():
            return CategoricalHead(in_features, space, rngs)
        case Box():
            return NormalHead(
                in_features,
                space,
                squash=config.distribution == "tanh_normal",
                state_dependent_std=config.state_dependent_std,
                initial_log_std=config.initial_log_std,
                rngs=rngs,
            )
    raise InputError(f"Actions are in {space}, but a policy needs a Discrete, MultiDiscrete or Box: convert the space.")
