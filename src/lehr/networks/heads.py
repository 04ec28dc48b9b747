"""Heads map features to a distribution over actions. They always compute in float32."""

import jax
import jax.numpy as jnp
from flax import nnx

from lehr import masks
from lehr.errors import InputError
from lehr.maths.distributions import Categorical, Distribution, MultiCategorical, Normal, TanhNormal
from lehr.spaces import Box, Discrete, MultiDiscrete

LOG_STD_RANGE = (-10.0, 2.0)
"""Bounds of a state-dependent log σ, so that an unfamiliar observation cannot blow up the policy."""


class CategoricalHead(nnx.Module):
    """Logits for `Discrete` and `MultiDiscrete` actions."""

    def __init__(self, in_features: int, space: Discrete | MultiDiscrete, rngs: nnx.Rngs) -> None:
        self.space = space
        self.nvec = space.nvec if isinstance(space, MultiDiscrete) else None
        out_features = space.n if isinstance(space, Discrete) else sum(space.nvec)
        self.logits = linear(in_features, out_features, gain=0.01, rngs=rngs)

    @property
    def layer(self) -> nnx.Linear:
        """The layer from features to logits."""
        return self.logits

    def __call__(self, features: jax.Array) -> Distribution:
        """Features `[..., F]` to a distribution with batch axes `[...]`."""
        return self.distribution(self.layer(features))

    def distribution(self, logits: jax.Array, possible: jax.Array | None = None) -> Distribution:
        """Return the distribution for the outputs of the layer, over the possible actions, bool like the outputs."""
        if possible is not None:
            logits = masks.forbid(self.space, logits, possible)
        return Categorical(logits) if self.nvec is None else MultiCategorical(logits, self.nvec)


class NormalHead(nnx.Module):
    """Mean and log σ for actions in a one-dimensional `Box`; log σ is a parameter, or a function of the state."""

    def __init__(
        self,
        in_features: int,
        space: Box,
        *,
        squash: bool,
        state_dependent_std: bool,
        initial_log_std: tuple[float, ...],
        rngs: nnx.Rngs,
    ) -> None:
        if len(space.shape) != 1:
            raise InputError(
                f"Actions have shape {space.shape}, but a policy needs exactly one axis: flatten the action space."
            )
        if squash and not space.bounded:
            raise InputError(
                f"distribution is 'tanh_normal', which needs a bounded Box, but actions are in {space}: use 'normal'."
            )
        (size,) = space.shape
        self.bounds = (tuple(space.low.tolist()), tuple(space.high.tolist())) if squash else None
        self.state_dependent_std = state_dependent_std
        self.initial_log_std = initial_log_std
        if state_dependent_std:
            self.mean_and_log_std = linear(in_features, 2 * size, gain=0.01, rngs=rngs)
        else:
            self.mean = linear(in_features, size, gain=0.01, rngs=rngs)
            self.log_std = nnx.Param(jnp.array(initial_log_std))

    @property
    def layer(self) -> nnx.Linear:
        """The layer from features to the mean, or to the mean and the change of log σ."""
        return self.mean_and_log_std if self.state_dependent_std else self.mean

    def __call__(self, features: jax.Array) -> Distribution:
        """Features `[..., F]` to a distribution with batch axes `[...]`."""
        return self.distribution(self.layer(features))

    def distribution(self, outputs: jax.Array, possible: jax.Array | None = None) -> Distribution:
        """Return the distribution for the outputs of the layer; continuous actions have no mask."""
        if self.state_dependent_std:
            mean, change = jnp.split(outputs, 2, -1)
            initial = jnp.broadcast_to(jnp.array(self.initial_log_std), change.shape)
            log_std = jnp.clip(initial + change, *LOG_STD_RANGE)
        else:
            mean = outputs
            log_std = jnp.broadcast_to(self.log_std[...], mean.shape)
        return Normal(mean, log_std) if self.bounds is None else TanhNormal(mean, log_std, *self.bounds)


def linear(in_features: int, out_features: int, *, gain: float, rngs: nnx.Rngs) -> nnx.Linear:
    """Return a linear layer with orthogonal initialisation."""
    init = nnx.initializers.orthogonal(gain)
    return nnx.Linear(in_features, out_features, kernel_init=init, dtype=jnp.float32, rngs=rngs)
