"""Action distributions, the output of a policy network, as pytrees of arrays.

All of them share one interface, batched over the leading axes `...` of their parameters:

- `sample(key)`: actions; `sample_and_log_prob(key)`: actions and their log probabilities `[...]`;
- `log_prob(action)`, `kl(other)` and `entropy(key=None, samples=1)`: `[...]`, summed over an action's components;
- `has_exact_entropy`: if true, `entropy` is a closed form and ignores its arguments; if false, it is an unbiased
  estimate that needs a key;
- `mode()`: the deterministic action;
- `environment_action(action)`: the action as the environment takes it; only `TanhNormal` changes it;
- `std()`: `[..., A]` for continuous actions, `None` for discrete ones.
"""

import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp

from lehr.errors import InputError
from lehr.types import Key


class Unsquashed:
    """What distributions share whose actions the environment takes as they are."""

    def environment_action(self, action: jax.Array) -> jax.Array:
        """Return the action unchanged."""
        return action


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Categorical(Unsquashed):
    """One of `A` categories: `p_i = exp(l_i) / Σ_j exp(l_j)` for logits `l`, `[..., A]`.

    An action is int32 `[...]`. A logit of −inf masks its category: it is never sampled and contributes nothing to
    entropy and divergence. A row whose categories are all masked has no distribution, and counts as uniform, with a
    gradient of 0.

    >>> policy = Categorical(jnp.log(jnp.array([0.5, 0.25, 0.25])))
    >>> round(float(policy.entropy()) / math.log(2), 4)
    1.5
    """

    logits: jax.Array

    has_exact_entropy: ClassVar[bool] = True

    @property
    def log_probs(self) -> jax.Array:
        """`log p_i = l_i − log Σ_j exp(l_j)`, `[..., A]`."""
        largest = jax.lax.stop_gradient(_last_max(self.logits))[..., None]
        shifted = jnp.where(largest == -jnp.inf, 0.0, self.logits - largest)
        return shifted - jnp.log(_last_sum(jnp.exp(shifted)))[..., None]

    def sample(self, key: Key) -> jax.Array:
        """Sample by inverting the cumulative distribution: one random number per action, whatever `A` is."""
        return _inverse_cdf(key, jnp.exp(self.log_probs))

    def sample_and_log_prob(self, key: Key) -> tuple[jax.Array, jax.Array]:
        """Sample actions and return their log probabilities, from a single softmax."""
        log_probs = self.log_probs
        action = _inverse_cdf(key, jnp.exp(log_probs))
        return action, _pick(log_probs, action)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """`log p_a`."""
        return _pick(self.log_probs, action)

    def entropy(self, key: Key | None = None, samples: int = 1) -> jax.Array:
        """`H = −Σ_i p_i log p_i`."""
        log_probs = self.log_probs
        probs = jnp.exp(log_probs)
        return -_last_sum(probs * jnp.where(probs > 0, log_probs, 0))

    def kl(self, other: "Categorical") -> jax.Array:
        """`KL(p‖q) = Σ_i p_i (log p_i − log q_i)`."""
        log_probs = self.log_probs
        probs = jnp.exp(log_probs)
        return _last_sum(probs * jnp.where(probs > 0, log_probs - other.log_probs, 0))

    def mode(self) -> jax.Array:
        """The most probable category."""
        return jnp.argmax(self.logits, -1).astype(jnp.int32)

    def std(self) -> None:
        """Categories have no standard deviation."""
        return None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MultiCategorical(Unsquashed):
    """`K` independent categoricals, the k-th over `nvec[k]` categories. An action is int32 `[..., K]`.

    The logits of all components are concatenated, `[..., Σ nvec]`. They are evaluated together, as one `Categorical`
    over `[..., K, max nvec]` whose missing categories are masked.

    >>> policy = MultiCategorical(jnp.zeros(5), nvec=(2, 3))
    >>> round(float(jnp.exp(policy.entropy())), 4)
    6.0
    """

    logits: jax.Array
    nvec: tuple[int, ...] = field(metadata={"static": True})

    has_exact_entropy: ClassVar[bool] = True

    def components(self) -> Categorical:
        """Return the components as one `Categorical` with batch axes `[..., K]`."""
        widest = max(self.nvec)
        stops = [sum(self.nvec[: k + 1]) for k in range(len(self.nvec))]
        padded = [_pad(self.logits[..., stop - n : stop], widest) for n, stop in zip(self.nvec, stops, strict=True)]
        return Categorical(jnp.stack(padded, -2))

    def sample(self, key: Key) -> jax.Array:
        """Sample every component."""
        return self.components().sample(key)

    def sample_and_log_prob(self, key: Key) -> tuple[jax.Array, jax.Array]:
        """Sample actions and return their log probabilities, from a single softmax."""
        action, log_prob = self.components().sample_and_log_prob(key)
        return action, log_prob.sum(-1)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """`Σ_k log p_k(a_k)`."""
        return self.components().log_prob(action).sum(-1)

    def entropy(self, key: Key | None = None, samples: int = 1) -> jax.Array:
        """`Σ_k H_k`."""
        return self.components().entropy().sum(-1)

    def kl(self, other: "MultiCategorical") -> jax.Array:
        """`Σ_k KL(p_k‖q_k)`."""
        return self.components().kl(other.components()).sum(-1)

    def mode(self) -> jax.Array:
        """The most probable category of every component."""
        return self.components().mode()

    def std(self) -> None:
        """Categories have no standard deviation."""
        return None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Normal(Unsquashed):
    """Independent components `a_i ~ N(μ_i, σ_i²)`, for mean and log σ `[..., A]`. An action is float32 `[..., A]`.

    >>> policy = Normal(mean=jnp.zeros(2), log_std=jnp.zeros(2))
    >>> round(float(jnp.exp(-policy.log_prob(jnp.zeros(2)))) / (2 * math.pi), 4)
    1.0
    """

    mean: jax.Array
    log_std: jax.Array

    has_exact_entropy: ClassVar[bool] = True

    def sample(self, key: Key) -> jax.Array:
        """`a = μ + σ ε` with `ε ~ N(0, 1)`: differentiable in the mean and σ."""
        return self.mean + jnp.exp(self.log_std) * jax.random.normal(key, self.mean.shape)

    def sample_and_log_prob(self, key: Key) -> tuple[jax.Array, jax.Array]:
        """Sample actions and return their log densities."""
        action = self.sample(key)
        return action, self.log_prob(action)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """`Σ_i −½ ((a_i − μ_i)/σ_i)² − log σ_i − ½ log 2π`."""
        deviation = (action - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * jnp.square(deviation) - self.log_std - 0.5 * math.log(2 * math.pi), -1)

    def entropy(self, key: Key | None = None, samples: int = 1) -> jax.Array:
        """`H = Σ_i log σ_i + ½ log 2πe`."""
        return jnp.sum(self.log_std + 0.5 * math.log(2 * math.pi * math.e), -1)

    def kl(self, other: "Normal") -> jax.Array:
        """`KL(p‖q) = Σ_i log σ_q − log σ_p + (σ_p² + (μ_p − μ_q)²) / (2 σ_q²) − ½`."""
        ratio = jnp.exp(2 * (self.log_std - other.log_std))
        distance = jnp.square((self.mean - other.mean) * jnp.exp(-other.log_std))
        return jnp.sum(other.log_std - self.log_std + 0.5 * (ratio + distance - 1), -1)

    def mode(self) -> jax.Array:
        """The mean."""
        return self.mean

    def std(self) -> jax.Array:
        """`σ`, `[..., A]`."""
        return jnp.exp(self.log_std)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TanhNormal:
    """A `Normal` squashed to a box: `a = low + (high − low) (tanh u + 1)/2` with `u ~ N(μ, σ²)`, `[..., A]`.

    Its density is that of `u` divided by the slope of the squashing, `log p(a) = log N(u) − Σ_i log da_i/du_i`; its
    entropy has no closed form. `low` and `high` are static, one number per component.

    An action is `u`, float32 `[..., A]`, and `environment_action` squashes it. In float32 many `u` share one `a` near
    the bounds: recovered from `a`, they would be wrong there, and the gradient of their probability with them.

    >>> policy = TanhNormal(jnp.zeros(1), jnp.zeros(1), low=(-2.0,), high=(4.0,))
    >>> policy.mode().tolist(), policy.environment_action(policy.mode()).tolist()
    ([0.0], [1.0])
    """

    mean: jax.Array
    log_std: jax.Array
    low: tuple[float, ...] = field(metadata={"static": True})
    high: tuple[float, ...] = field(metadata={"static": True})

    has_exact_entropy: ClassVar[bool] = False

    @property
    def normal(self) -> Normal:
        """The distribution of `u`, before squashing."""
        return Normal(self.mean, self.log_std)

    def sample(self, key: Key) -> jax.Array:
        """Sample `u`: differentiable in the mean and σ."""
        return self.normal.sample(key)

    def sample_and_log_prob(self, key: Key) -> tuple[jax.Array, jax.Array]:
        """Sample `u` and return the log densities of the squashed actions."""
        u = self.sample(key)
        return u, self.log_prob(u)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """`log N(u) − Σ_i log da_i/du_i`: the log density of the squashed action, from `u`."""
        return self.normal.log_prob(action) - self._log_slope(action)

    def environment_action(self, action: jax.Array) -> jax.Array:
        """Squash `u` to the box; clipped, since rounding could exceed a bound."""
        low, high = self._bounds()
        return jnp.clip(low + (high - low) * (0.5 * jnp.tanh(action) + 0.5), low, high)

    def entropy(self, key: Key | None = None, samples: int = 1) -> jax.Array:
        """Estimate `H = −E[log p(a)] = H(u) + E[Σ_i log da_i/du_i]`.

        The first term is exact; the second is a mean over reparametrised samples, differentiable in the mean and σ.
        """
        if key is None:
            raise InputError(
                "TanhNormal.entropy() was called without a key, but needs one to draw samples: call entropy(key)."
            )
        draws = jax.vmap(lambda k: self._log_slope(self.normal.sample(k)))(jax.random.split(key, samples))
        return self.normal.entropy() + draws.mean(0)

    def kl(self, other: "TanhNormal") -> jax.Array:
        """The divergence of the normals before squashing; squashing both to the same box does not change it."""
        return self.normal.kl(other.normal)

    def mode(self) -> jax.Array:
        """The mean of `u`, which squashed is the median of every component."""
        return self.mean

    def std(self) -> jax.Array:
        """`σ` of the normal before squashing, `[..., A]`."""
        return self.normal.std()

    def _bounds(self) -> tuple[jax.Array, jax.Array]:
        """Return low and high, `[..., A]`."""
        low, high = jnp.array(self.low, self.mean.dtype), jnp.array(self.high, self.mean.dtype)
        return jnp.broadcast_to(low, self.mean.shape), jnp.broadcast_to(high, self.mean.shape)

    def _log_slope(self, u: jax.Array) -> jax.Array:
        """`Σ_i log da_i/du_i = Σ_i log((high − low)/2) + log(1 − tanh² u)`.

        `log(1 − tanh² u)` is computed as `2 (log 2 − u − softplus(−2u))`, which is also accurate for large `|u|`.
        """
        low, high = self._bounds()
        log_derivative = 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))
        return jnp.sum(log_derivative + jnp.log((high - low) / 2), -1)


Distribution = Categorical | MultiCategorical | Normal | TanhNormal
"""Any action distribution."""


UNROLLED = 16
"""Up to this many categories, sums over them are unrolled: on a GPU a reduction over a short axis is a separate kernel,
while a few additions are fused into the surrounding one."""


def _columns(x: jax.Array) -> list[jax.Array]:
    return [x[..., index] for index in range(x.shape[-1])]


def _last_sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis."""
    return functools.reduce(jnp.add, _columns(x)) if x.shape[-1] <= UNROLLED else jnp.sum(x, -1)


def _last_max(x: jax.Array) -> jax.Array:
    """Maximum over the last axis."""
    return functools.reduce(jnp.maximum, _columns(x)) if x.shape[-1] <= UNROLLED else jnp.max(x, -1)


def uniform(key: Key, shape: tuple[int, ...]) -> jax.Array:
    """As `jax.random.uniform`, with the same numbers; drawn as a vector, on a CPU they take a third as long to compile.

    >>> key = jax.random.key(0)
    >>> bool((uniform(key, (2, 3, 4)) == jax.random.uniform(key, (2, 3, 4))).all())
    True
    """
    return jax.random.uniform(key, (math.prod(shape),)).reshape(shape)


def _inverse_cdf(key: Key, weights: jax.Array) -> jax.Array:
    """Draw index `i` of the last axis with probability `weights[i] / Σ weights`.

    The sample is the first index whose cumulative weight exceeds a uniform number in `[0, total)`, so an index of zero
    weight is never drawn.
    """
    drawn = jax.random.uniform(key, weights.shape[:-1])
    if weights.shape[-1] <= UNROLLED:
        sums = list(itertools.accumulate(_columns(weights)))
        passed = [(drawn * sums[-1] >= below).astype(jnp.int32) for below in sums[:-1]]
        return functools.reduce(jnp.add, passed, jnp.zeros(drawn.shape, jnp.int32))
    # Rounding in cumsum could give an index of zero weight a tiny probability, so exclude those.
    cumulative = jnp.where(weights > 0, jnp.cumsum(weights, -1), 0)
    return jnp.argmax((drawn * cumulative.max(-1))[..., None] < cumulative, -1).astype(jnp.int32)


def _pick(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values[..., index]`, for values `[..., A]` and index `[...]`."""
    if values.shape[-1] > UNROLLED:
        return jnp.take_along_axis(values, index[..., None].astype(jnp.int32), -1)[..., 0]
    chosen = values[..., 0]
    for position, column in enumerate(_columns(values)[1:], 1):
        chosen = jnp.where(index == position, column, chosen)
    return chosen


def _pad(logits: jax.Array, width: int) -> jax.Array:
    """Pad the last axis to `width` with masked categories."""
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, width - logits.shape[-1])]
    return jnp.pad(logits, padding, constant_values=-jnp.inf)
