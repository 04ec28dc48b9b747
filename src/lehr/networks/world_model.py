"""Dreamer's networks: a recurrent state-space model of the environment, and an actor and a critic on its state.

The state has two parts: `deter`, the state of a recurrent layer, and `stoch`, some categorical latents. Given the
observation, the latents are drawn from the posterior; without one, from the prior, which is how the model imagines.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lehr.config import check_counts
from lehr.errors import InputError
from lehr.masks import has_mask
from lehr.maths.distributions import Categorical, Distribution, MultiCategorical, Normal, uniform
from lehr.maths.two_hot import symlog, two_hot_mean
from lehr.networks.block_gru import BlockGRU, Dense
from lehr.networks.build import Network, Params, build
from lehr.networks.images import ImageDecoder, ImageEncoder
from lehr.networks.memory import reset_carry
from lehr.networks.observations import View, make_view
from lehr.networks.torsos import to_float
from lehr.spaces import Box, Discrete, MultiDiscrete, Space, check_actions
from lehr.types import Key, PyTree

STD_RANGE = (0.1, 1.0)
"""Standard deviations of continuous actions, whose range is −1 to 1."""


@dataclass(frozen=True)
class WorldModelConfig:
    """Sizes of a world model, and of the actor and the critic on its state."""

    recurrent_size: int = 128
    """Size of the recurrent state."""
    blocks: int = 4
    """Blocks of the recurrent layer, a divisor of recurrent_size."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Sizes of the dense layers of the encoder, the decoder, the actor and the critic; the model itself, reward and
    continuation have layers of the last size."""
    latents: int = 8
    """Number of categorical latents."""
    classes: int = 8
    """Classes of each latent, at most 256."""
    bins: int = 63
    """Bins of the distributions over rewards and values."""
    image_depth: int = 8
    """Channels of the convolutions, times 2, 3, 4 and 4."""
    image_kernel: int = 5
    """Width of the convolutions, in pixels."""
    initial_log_std: float = -0.11
    """Initial log σ of Box actions, which are scaled to the range -1 to 1; σ stays between 0.1 and 1."""
    action_mask: bool = True
    """Refuse observations with an action_mask, which Dreamer cannot enforce; off makes it an entry like any other."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {},
        "1m": {
            "recurrent_size": 512,
            "blocks": 8,
            "hidden_sizes": (64, 64, 64),
            "latents": 32,
            "classes": 4,
            "bins": 255,
            "image_depth": 4,
        },
        "12m": {
            "recurrent_size": 2048,
            "blocks": 8,
            "hidden_sizes": (256, 256, 256),
            "latents": 32,
            "classes": 16,
            "bins": 255,
            "image_depth": 16,
        },
        "25m": {
            "recurrent_size": 3072,
            "blocks": 8,
            "hidden_sizes": (384, 384, 384),
            "latents": 32,
            "classes": 24,
            "bins": 255,
            "image_depth": 24,
        },
    }

    def __post_init__(self) -> None:
        if isinstance(self.hidden_sizes, list):
            object.__setattr__(self, "hidden_sizes", tuple(self.hidden_sizes))
        check_counts(self, "recurrent_size", "blocks", "latents", "image_depth", "image_kernel")
        check_counts(self, "classes", "bins", least=2)
        if not self.hidden_sizes or min(self.hidden_sizes) < 1:
            raise InputError(
                f"hidden_sizes is {self.hidden_sizes}; give at least one size, and every size must be 1 or more."
            )
        if self.recurrent_size % self.blocks:
            raise InputError(
                f"blocks is {self.blocks}, which does not divide recurrent_size={self.recurrent_size}; choose a "
                f"divisor of {self.recurrent_size}."
            )
        if self.classes > 256:
            raise InputError(
                f"classes is {self.classes}; it must be at most 256, because a replay stores them as bytes."
            )
        low, high = (math.log(bound) for bound in STD_RANGE)
        if not low < self.initial_log_std < high:
            raise InputError(f"initial_log_std is {self.initial_log_std}; it must be between {low:.1f} and {high:g}.")


class Latent(NamedTuple):
    """A state of the model."""

    deter: jax.Array
    """float32 `[..., D]`."""
    stoch: jax.Array
    """float32 `[..., S · K]`: the class of each latent, one-hot."""

    @property
    def features(self) -> jax.Array:
        """Both parts as one vector, `[..., D + S · K]`."""
        return jnp.concatenate(self, -1)


def mixed(logits: jax.Array, share: Any) -> jax.Array:
    """Return the log-probabilities of categoricals `[..., K]`, mixed with a share of the uniform distribution.

    >>> [round(float(p), 3) for p in jnp.exp(mixed(jnp.array([100.0, 0.0]), 0.01))]
    [0.995, 0.005]
    """
    probs = (1 - share) * jax.nn.softmax(logits) + share / logits.shape[-1]
    return jnp.log(jnp.maximum(probs, 1e-30))  # without a share, a probability may underflow to 0


def drawn(log_probs: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draw one class each, one-hot `[..., S · K]`; the gradient is that of the probabilities (straight-through).

    Args:
        log_probs: `[..., S, K]`.
        uniform: numbers in [0, 1), `[..., S]`.
    """
    probs = jnp.exp(log_probs)
    sums = jnp.cumsum(probs, -1)
    passed = (uniform * sums[..., -1])[..., None] >= sums[..., :-1]
    chosen = jax.nn.one_hot(jnp.sum(passed, -1), probs.shape[-1])
    chosen = jax.lax.stop_gradient(chosen - probs) + probs
    return chosen.reshape(*uniform.shape[:-1], -1)


def likeliest(log_probs: jax.Array) -> jax.Array:
    """Return the most likely classes, one-hot `[..., S · K]`, given log-probabilities `[..., S, K]`."""
    chosen = jax.nn.one_hot(jnp.argmax(log_probs, -1), log_probs.shape[-1])
    return chosen.reshape(*log_probs.shape[:-2], -1)


def rows(tree: PyTree) -> PyTree:
    """Return leaves `[T, B, ...]` as rows `[T · B, ...]`.

    XLA's CPU backend writes loops over short axes out, so that a program on rows compiles faster.
    """
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


class Layers(nnx.Module):
    """Dense layers, then a linear one whose initial weights are scaled."""

    def __init__(
        self, in_features: int, hidden_sizes: tuple[int, ...], out_features: int, scale: float, *, rngs: nnx.Rngs
    ) -> None:
        sizes = (in_features, *hidden_sizes)
        self.dense = nnx.List(Dense(n_in, n_out, rngs=rngs) for n_in, n_out in itertools.pairwise(sizes))
        init = (
            nnx.initializers.variance_scaling(scale, "fan_in", "truncated_normal") if scale else nnx.initializers.zeros
        )
        self.output = nnx.Linear(sizes[-1], out_features, kernel_init=init, rngs=rngs)

    def __call__(self, *inputs: jax.Array) -> jax.Array:
        """Map `[..., in_features]` to `[..., out_features]`; several inputs are put together along the first axis.

        They are put together after the first product, so that the gradient of each input is computed by itself.
        """
        batch = (-1, *inputs[0].shape[1:-1]) if inputs[0].ndim > 1 else ()
        x = self.dense[0](*(x.reshape(-1, x.shape[-1]) for x in inputs))
        for layer in self.dense[1:]:
            x = layer(x)
        x = self.output(x)
        return x.reshape(*batch, x.shape[-1])


class Encoder(nnx.Module):
    """From observations to tokens: dense layers on the vector, convolutions on the image."""

    def __init__(self, view: View, config: WorldModelConfig, *, rngs: nnx.Rngs) -> None:
        self.view = view
        sizes = (view.vector_size, *config.hidden_sizes)
        sizes = sizes if view.vector_size else ()
        self.dense = nnx.List(Dense(n_in, n_out, rngs=rngs) for n_in, n_out in itertools.pairwise(sizes))
        image = None
        if view.image is not None:
            space: Any = view.image[1]
            image = ImageEncoder(space.shape, config.image_depth, config.image_kernel, rngs=rngs)
        self.image = image
        self.out_features = (sizes[-1] if sizes else 0) + (0 if image is None else image.out_features)

    def __call__(self, obs: PyTree) -> jax.Array:
        """Map observations `[..., *shape]` to tokens `[..., out_features]`."""
        inputs = self.view.inputs(obs)
        tokens = []
        if self.image is not None:
            tokens.append(self.image(to_float(inputs[0])))
        if self.dense:
            x = symlog(inputs[-1])
            for layer in self.dense:
                x = layer(x)
            tokens.append(x)
        return jnp.concatenate(tokens, -1)


class Decoder(nnx.Module):
    """From states of the model to observations."""

    def __init__(self, in_features: int, view: View, config: WorldModelConfig, *, rngs: nnx.Rngs) -> None:
        self.view = view
        vector, image = None, None
        if view.vector_size:
            vector = Layers(in_features, config.hidden_sizes, view.vector_size, 1.0, rngs=rngs)
        if view.image is not None:
            space: Any = view.image[1]
            image = ImageDecoder(in_features, space.shape, config.image_depth, config.image_kernel, rngs=rngs)
            self.squash = space.dtype == jnp.uint8 or bool((space.low >= 0).all() and (space.high <= 1).all())
        self.vector, self.image = vector, image

    def __call__(self, features: jax.Array) -> tuple[jax.Array, ...]:
        """Return the image, if any, then the symlog of the vector, if any."""
        found = []
        if self.image is not None:
            image = self.image(features)
            found.append(jax.nn.sigmoid(image) if self.squash else image)
        if self.vector is not None:
            found.append(self.vector(features))
        return tuple(found)

    def targets(self, obs: PyTree) -> tuple[jax.Array, ...]:
        """Return what should be decoded: the image, if any, then the symlog of the vector, if any."""
        inputs = self.view.inputs(obs)
        image = () if self.image is None else (to_float(inputs[0]),)
        return (*image, symlog(inputs[-1])) if self.vector is not None else image


class Dynamics(nnx.Module):
    """The recurrent state-space model."""

    def __init__(self, token_size: int, action_size: int, config: WorldModelConfig, *, rngs: nnx.Rngs) -> None:
        size, hidden = config.recurrent_size, config.hidden_sizes[-1]
        self.shape = config.latents, config.classes
        logits = config.latents * config.classes
        self.from_deter = Dense(size, hidden, rngs=rngs)
        self.from_stoch = Dense(logits, hidden, rngs=rngs)
        self.from_action = Dense(action_size, hidden, rngs=rngs)
        self.gru = BlockGRU(3 * hidden, size, config.blocks, rngs=rngs)
        self.prior = Layers(size, (hidden, hidden), logits, 1.0, rngs=rngs)
        # The layer of the posterior sees the state and the tokens; its products with the tokens need no recurrence.
        self.tokens = nnx.Linear(token_size, hidden, use_bias=False, rngs=rngs)
        self.posterior = Layers(size, (hidden,), logits, 1.0, rngs=rngs)

    def advance(self, latent: Latent, acted: jax.Array) -> jax.Array:
        """Return the next `deter`, given `from_action` of the action."""
        parts = self.from_deter(latent.deter), self.from_stoch(latent.stoch), acted
        return self.gru(latent.deter, jnp.concatenate(parts, -1))

    def prior_log_probs(self, deter: jax.Array, share: Any) -> jax.Array:
        """Return the log-probabilities of the latents `[..., S, K]` without the observation."""
        return mixed(self._classes(self.prior(deter)), share)

    def posterior_log_probs(self, deter: jax.Array, seen: jax.Array, share: Any) -> jax.Array:
        """Return the log-probabilities of the latents `[..., S, K]` with the observation, given `tokens` of it."""
        layer = self.posterior.dense[0]
        x = layer.activated(layer.linear(deter) + seen)
        return mixed(self._classes(self.posterior.output(x)), share)

    def _classes(self, logits: jax.Array) -> jax.Array:
        return logits.reshape(*logits.shape[:-1], *self.shape)


class WorldModel(nnx.Module):
    """All of Dreamer's networks; its methods are those of `DreamerNetwork`."""

    def __init__(self, view: View, action_space: Space, config: WorldModelConfig, *, rngs: nnx.Rngs) -> None:
        sizes, features = config.hidden_sizes, config.recurrent_size + config.latents * config.classes
        self.encoder = Encoder(view, config, rngs=rngs)
        self.dynamics = Dynamics(self.encoder.out_features, action_size(action_space), config, rngs=rngs)
        self.decoder = Decoder(features, view, config, rngs=rngs)
        self.reward = Layers(features, sizes[-1:], config.bins, 0.0, rngs=rngs)
        self.going_on = Layers(features, sizes[-1:], 1, 1.0, rngs=rngs)
        outputs = action_size(action_space) * (2 if isinstance(action_space, Box) else 1)
        self.actor = Layers(features, sizes, outputs, 1e-4, rngs=rngs)  # a hundredth of the usual weights
        self.critic = Layers(features, sizes, config.bins, 0.0, rngs=rngs)


def action_size(space: Space) -> int:
    """Return the length of an action as the model sees it, or raise an error for actions that Dreamer cannot take."""
    check_actions(space)
    match space:
        case Discrete():
            return space.n
        case MultiDiscrete():
            return sum(space.nvec)
        case Box() if len(space.shape) == 1:
            return space.shape[0]
    raise InputError(
        f"Actions are in {space}, but dreamer takes Discrete, MultiDiscrete, or Box with one axis: flatten them."
    )


@dataclass(frozen=True)
class DreamerNetwork:
    """Dreamer's networks as pure functions of their parameters: a static, hashable value."""

    network: Network[WorldModel]
    config: WorldModelConfig
    action_space: Any
    parts: tuple[str, ...]
    """Names of the modules, the keys of the parameters."""

    def bind(self, params: Params) -> WorldModel:
        """Return the module with these parameters; entries that it does not have are ignored."""
        return self.network.bind({name: params[name] for name in self.parts})

    def initial_carry(self, batch_shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Return the state before an episode: zeros for the latent state and the last action."""
        sizes = {
            "deter": self.config.recurrent_size,
            "stoch": self.config.latents * self.config.classes,
            "action": action_size(self.action_space),
        }
        return {name: jnp.zeros((*batch_shape, size)) for name, size in sizes.items()}

    def observe(
        self, model: WorldModel, carry: PyTree, obs: PyTree, reset: jax.Array, share: Any, uniform: jax.Array | None
    ) -> Latent:
        """Return the state after one observation `[N, ...]`; without random numbers, with the most likely latents."""
        carry = reset_carry(carry, reset)
        acted = model.dynamics.from_action(carry["action"])
        deter = model.dynamics.advance(Latent(carry["deter"], carry["stoch"]), acted)
        log_probs = model.dynamics.posterior_log_probs(deter, model.dynamics.tokens(model.encoder(obs)), share)
        return Latent(deter, likeliest(log_probs) if uniform is None else drawn(log_probs, uniform))

    def unroll(
        self, model: WorldModel, start: Latent, obs: PyTree, actions: jax.Array, first: jax.Array, share: Any, key: Key
    ) -> tuple[Latent, jax.Array]:
        """Return the states after each of `T` observations `[T, B, ...]`, and the posteriors `[T, B, S, K]`.

        Args:
            model: with its parameters.
            start: the state before the first observation.
            obs: leaves `[T, B, ...]`.
            actions: the action before each observation, encoded, `[T, B, A]`.
            first: bool `[T, B]`: the observation is the first of an episode.
            share: of the uniform distribution in the latents'.
            key: for the latents.
        """
        dynamics = model.dynamics
        acted = dynamics.from_action(rows(reset_carry(actions, first))).reshape(*first.shape, -1)
        seen = dynamics.tokens(model.encoder(rows(obs))).reshape(*first.shape, -1)
        numbers = uniform(key, (*first.shape, self.config.latents))

        def step(latent: Latent, inputs: Any) -> tuple[Latent, tuple[Latent, jax.Array]]:
            acted, seen, first, numbers = inputs
            deter = dynamics.advance(reset_carry(latent, first), acted)
            log_probs = dynamics.posterior_log_probs(deter, seen, share)
            latent = Latent(deter, drawn(log_probs, numbers))
            return latent, (latent, log_probs)

        return jax.lax.scan(step, start, (acted, seen, first, numbers), unroll=_together(len(first)))[1]

    def imagine(self, model: WorldModel, start: Latent, length: int, share: Any, key: Key) -> tuple[jax.Array, PyTree]:
        """Return the features `[length + 1, M, F]` of imagined states, and the policy's actions `[length, M, ...]`."""
        keys, action_key = jax.random.split(key)
        numbers = uniform(keys, (length, *start.deter.shape[:-1], self.config.latents))

        def step(latent: Latent, inputs: Any) -> tuple[Latent, Any]:
            numbers, key = inputs
            action = self.policy(model, latent.features, share).sample(key)
            acted = model.dynamics.from_action(self.encoded(action))
            deter = model.dynamics.advance(latent, acted)
            found = Latent(deter, drawn(model.dynamics.prior_log_probs(deter, share), numbers))
            return found, (latent.features, action)

        given = numbers, jax.random.split(action_key, length)
        last, (features, actions) = jax.lax.scan(step, start, given, unroll=_together(length))
        return jnp.concatenate([features, last.features[None]]), actions

    def follow(self, model: WorldModel, start: Latent, actions: jax.Array) -> Latent:
        """Return the most likely states `[T, ...]` after each of `T` actions, encoded, without any observation."""

        def step(latent: Latent, action: jax.Array) -> tuple[Latent, Latent]:
            deter = model.dynamics.advance(latent, model.dynamics.from_action(action))
            latent = Latent(deter, likeliest(model.dynamics.prior_log_probs(deter, 0.0)))
            return latent, latent

        return jax.lax.scan(step, start, actions)[1]

    def policy(self, model: WorldModel, features: jax.Array, share: Any) -> Distribution:
        """Return the policy `[...]` in states with these features `[..., F]`."""
        outputs, space = model.actor(features), self.action_space
        match space:
            case Discrete():
                return Categorical(mixed(outputs, share))
            case MultiDiscrete():
                stops = [sum(space.nvec[: index + 1]) for index in range(len(space.nvec))]
                parts = [outputs[..., stop - n : stop] for n, stop in zip(space.nvec, stops, strict=True)]
                return MultiCategorical(jnp.concatenate([mixed(part, share) for part in parts], -1), space.nvec)
        mean, spread = jnp.split(outputs, 2, -1)
        low, high = STD_RANGE
        begin = (math.exp(self.config.initial_log_std) - low) / (high - low)
        std = low + (high - low) * jax.nn.sigmoid(spread + math.log(begin / (1 - begin)))
        return Normal(jnp.tanh(mean), jnp.log(std))

    def encoded(self, action: jax.Array) -> jax.Array:
        """Return an action as the model sees it, `[..., A]`: one-hot, or clipped to the range −1 to 1."""
        space = self.action_space
        match space:
            case Discrete():
                return jax.nn.one_hot(action, space.n)
            case MultiDiscrete():
                return jnp.concatenate([jax.nn.one_hot(action[..., i], n) for i, n in enumerate(space.nvec)], -1)
        return jnp.clip(action, -1, 1)

    def environment_action(self, action: jax.Array) -> jax.Array:
        """Return an action as the environment takes it: −1 to 1 becomes the range of a bounded Box."""
        space = self.action_space
        if not (isinstance(space, Box) and space.bounded):
            return action
        low, high = (jnp.broadcast_to(bound, action.shape) for bound in (space.low, space.high))
        return low + (high - low) * (jnp.clip(action, -1, 1) + 1) / 2

    def random_action(self, key: Key, batch_shape: tuple[int, ...]) -> jax.Array:
        """Return uniform actions, as the policy would give them."""
        space = self.action_space
        one = jax.eval_shape(space.sample, key)
        numbers = uniform(key, (*batch_shape, *one.shape))
        if isinstance(space, Box):
            return 2 * numbers - 1
        count = jnp.broadcast_to(jnp.float32(space.n if isinstance(space, Discrete) else space.nvec), numbers.shape)
        return jnp.floor(count * numbers).astype(jnp.int32)

    def step(
        self, params: Params, carry: PyTree, obs: PyTree, reset: jax.Array
    ) -> tuple[PyTree, Distribution, jax.Array]:
        """Return the next carry, the policy and the value `[N]`, all with the most likely latents.

        The carry after it has no action: this is to look at single observations.
        """
        model = self.bind(params)
        latent = self.observe(model, carry, obs, reset, 0.0, None)
        value = two_hot_mean(model.critic(latent.features))
        return {**carry, **latent._asdict()}, self.policy(model, latent.features, 0.0), value


def _together(length: int) -> int:
    """Return how many steps of a scan to compile as one: 1 on a CPU, a divisor of the length on an accelerator."""
    if jax.default_backend() == "cpu":
        return 1
    return max(steps for steps in range(1, 6) if length % steps == 0)


def dreamer_network(
    observation_space: Space, action_space: Space, config: WorldModelConfig, key: Key
) -> tuple[DreamerNetwork, Params]:
    """Build Dreamer's networks for these spaces, with their initial parameters."""
    action_size(action_space)
    if config.action_mask and has_mask(observation_space, action_space):
        raise InputError(
            "The observation has an action_mask, but Dreamer's imagination has none to enforce: train ppo or another "
            "on-policy algorithm, or set action_mask=False, so that the environment deals with forbidden actions."
        )
    view = make_view(observation_space, None, "auto")
    network, params = build(_Maker(view, action_space, config), key)
    return DreamerNetwork(network, config, action_space, tuple(sorted(params))), params


@dataclass(frozen=True)
class _Maker:
    """Makes the module; compared by value, so that its initialisation is compiled once."""

    view: View
    action_space: Any
    config: WorldModelConfig

    def __call__(self, rngs: nnx.Rngs) -> WorldModel:
        return WorldModel(self.view, self.action_space, self.config, rngs=rngs)
