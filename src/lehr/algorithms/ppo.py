"""Proximal policy optimisation (Schulman et al., 2017), with every coefficient a schedule.

    L = L_policy + value_coef · L_value − entropy_coef · H

One rollout, then `epochs` passes over it in minibatches: single steps, whole segments, windows of them, or those drawn
by priority. See docs/ppo.md for each detail.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from lehr.config import Coef, check_counts
from lehr.errors import InputError, closest
from lehr.maths import minibatches, sequences
from lehr.maths.advantages import advantages_of, corrected_gae
from lehr.maths.losses import (
    clip_fraction,
    clipped_surrogate,
    clipped_value_loss,
    policy_metrics,
    rollout_metrics,
    standardise,
    total_loss,
    validity,
    value_loss,
    weighted_mean,
)
from lehr.maths.optimise import Optimiser
from lehr.networks import ActorCriticNetwork
from lehr.types import NOTHING, Key, Learner, Metrics, PyTree, Rollout

Values = dict[str, jax.Array]
"""The coefficients to apply, a float32 `[]` by name."""


Minibatching = Literal["auto", "flat", "segments", "prioritised"]
Advantage = Literal["gae", "vtrace"]


@dataclass(frozen=True)
class Config:
    """PPO's settings. Coefficients take a number or any schedule; the others shape arrays and are fixed."""

    num_envs: int = 32
    """Environments that run side by side."""
    horizon: int = 64
    """Steps of each environment in one rollout."""
    epochs: int = 8
    """Passes over a rollout."""
    minibatches: int = 8
    """Gradient steps in one pass."""
    minibatching: Minibatching = "auto"
    """Minibatches of shuffled single steps (flat), of whole shuffled segments, or of segments drawn by priority; auto
    is segments where the network has a memory, there is a window, or the advantage is vtrace, and flat elsewhere."""
    window: int | None = None
    """Steps of the windows that segments are cut into; none keeps them whole."""
    burn_in: int = 0
    """Steps before a window that refresh its memory and are not learned from."""
    replacement: bool = False
    """Whether a prioritised minibatch may hold a segment twice."""
    accumulate: int = 1
    """Parts into which a minibatch is cut to save memory; their gradients are averaged."""
    advantage: Advantage = "gae"
    """GAE once per rollout, or corrected by V-trace's ratios of the current policy in every minibatch."""
    standardise_advantages: bool = True
    """Whether advantages are brought to mean 0 and deviation 1 in each minibatch."""
    normalise_observations: bool = False
    """Whether observations are normalised by their running mean and deviation."""
    normalise_rewards: bool = False
    """Whether rewards are divided by the running deviation of the discounted return."""
    optimiser: str = "adam"
    """Any optimiser of optax by its name: adam, adamw, rmsprop, muon, ..."""
    learning_rate: Coef = "1e-3 -> 0"
    """Step size of the optimiser."""
    entropy_coef: Coef = 0.01
    """Weight of the entropy bonus."""
    value_coef: Coef = 0.5
    """Weight of the value loss."""
    clip_range: Coef = 0.2
    """How far the probability ratio may leave 1 before its gradient is cut."""
    value_clip_range: Coef | None = None
    """How far a value may leave the one of the rollout before its gradient is cut; none clips nothing."""
    discount: Coef = 0.99
    """Worth of a reward one step later."""
    gae_lambda: Coef = 0.95
    """Mix of short and long returns in the advantage."""
    max_grad_norm: Coef | None = 0.5
    """Largest global norm of the gradient; none clips nothing."""
    reward_scale: Coef | None = None
    """Factor on the rewards; none leaves them as they are."""
    kl_coef: Coef | None = None
    """Weight of the divergence from the policy before the update; none adds nothing to the loss."""
    target_kl: Coef | None = None
    """Divergence at which the rest of an update's gradient steps is left out; none leaves out nothing."""
    rho_clip: Coef = 1.0
    """V-trace's clip of the ratio in the temporal difference."""
    c_clip: Coef = 1.0
    """V-trace's clip of the ratio in the trace."""
    priority_exponent: Coef = 0.8
    """How sharply segments are prioritised; 0 draws them uniformly."""
    importance_exponent: Coef = "0.2 -> 1"
    """How fully importance weights correct for the priorities; 1 corrects fully."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "classic": {
            "num_envs": 4,
            "horizon": 128,
            "epochs": 4,
            "minibatches": 4,
            "learning_rate": "2.5e-4 -> 0",
            "value_clip_range": 0.2,
        },
        "puffer": {
            "epochs": 1,
            "minibatches": 8,
            "minibatching": "prioritised",
            "advantage": "vtrace",
            "optimiser": "muon",
            "learning_rate": "0.015 -> 0 cosine",
            "entropy_coef": 0.001,
            "value_coef": 2.0,
            "value_clip_range": 0.2,
            "discount": 0.995,
            "gae_lambda": 0.9,
            "max_grad_norm": 1.5,
        },
    }

    def __post_init__(self) -> None:
        for name, known in (("minibatching", get_args(Minibatching)), ("advantage", get_args(Advantage))):
            if getattr(self, name) not in known:
                raise InputError(f"{name} is {getattr(self, name)!r}; {closest(str(getattr(self, name)), known)}")
        check_counts(self, "num_envs", "horizon", "epochs", "minibatches", "accumulate")
        if self.advantage == "vtrace" and self.minibatching == "flat":
            raise InputError(
                "advantage is 'vtrace', which needs whole segments; set minibatching to auto, segments or prioritised."
            )
        sequences.check(self.horizon, self.window, self.burn_in)
        if self.window is not None and self.advantage == "vtrace":
            raise InputError(
                f"window is {self.window}, but advantage is 'vtrace', which needs whole segments; set advantage to "
                "gae, or window to none."
            )
        if self.window is not None and self.minibatching == "flat":
            raise InputError(
                f"window is {self.window}, but minibatching is 'flat', which shuffles single steps; set minibatching "
                "to auto, segments or prioritised, or window to none."
            )

    @property
    def unused(self) -> frozenset[str]:
        """Coefficients that these settings do not use: they are neither evaluated nor logged."""
        names: set[str] = set()
        if self.advantage != "vtrace":
            names |= {"rho_clip", "c_clip"}
        if self.minibatching != "prioritised":
            names |= {"priority_exponent", "importance_exponent"}
        return frozenset(names)


class Batch(NamedTuple):
    """What a minibatch is cut from, leaves `[T, N, ...]`."""

    rollout: Rollout
    """Its `log_prob` is of the policy that the ratio is taken against."""
    advantage: jax.Array
    """float32 `[T, N]`."""
    target: jax.Array
    """float32 `[T, N]`: of the values."""
    reference: Any = ()
    """The policy that `kl_coef` keeps near, a `Distribution` of `[T, N]`; `()` where there is none."""


@dataclass(frozen=True)
class Algorithm:
    """The algorithm: how a learner begins, and how it learns from a rollout."""

    config: Config
    network: ActorCriticNetwork

    def __post_init__(self) -> None:
        whole = self.network.is_recurrent or self.config.advantage == "vtrace" or self.config.window is not None
        if self.config.minibatching == "auto":
            chosen: Literal["flat", "segments"] = "segments" if whole else "flat"
            object.__setattr__(self, "config", replace(self.config, minibatching=chosen))
        elif self.config.minibatching == "flat" and self.network.is_recurrent:
            raise InputError(
                "minibatching is 'flat', but the network has a memory, which needs whole segments; set minibatching to "
                "auto, segments or prioritised."
            )
        if self.config.burn_in and not self.network.is_recurrent:
            raise InputError(
                f"burn_in is {self.config.burn_in}, but the network has no memory to refresh; set burn_in to 0, or "
                "torso to lstm, gru or mingru."
            )

    @property
    def optimiser(self) -> Optimiser:
        """The optimiser, without a learning rate."""
        return Optimiser(self.config.optimiser)

    def init(self, params: PyTree) -> Learner:
        """A learner with these parameters."""
        return Learner(params, self.optimiser.init(params))

    def learn(self, learner: Learner, rollout: Rollout, coef: Values, key: Key) -> tuple[Learner, Metrics]:
        """One update: advantages, then minibatches, loss and gradient step, `epochs · minibatches` times."""
        advantage, target = advantages_of(rollout, coef["discount"], coef["gae_lambda"])
        reference: Any = ()
        if "kl_coef" in coef:
            _, reference, _ = self.network.unroll(learner.params, rollout.carry, rollout.obs, rollout.reset)
        return self.passes(learner, Batch(rollout, advantage, target, reference), coef, key)

    def passes(self, learner: Learner, whole: Batch, coef: Values, key: Key) -> tuple[Learner, Metrics]:
        """The learner after all gradient steps on a batch, and what there is to watch."""
        batch = self._in_windows(self._trimmed(whole), learner.params)
        params, unpack_params = self.optimiser.pack(learner.params)
        source = _Source(self.config, batch, coef, key)

        names: list[str] = []

        def row(metrics: Metrics) -> jax.Array:
            # One row for all: a scan that stacks each metric by itself would launch a kernel for each.
            names[:] = sorted(metrics)
            return jnp.stack([metrics[name] for name in names])

        def gradient_step(carried: Any, drawn: Any) -> tuple[Any, jax.Array]:
            params, state, priorities, active = carried
            indices, key = drawn
            minibatch, weights, indices = source.take(indices, priorities, key)
            loss_and_gradients = self._gradients(unpack_params(params), minibatch, weights, coef, key)
            (_, (metrics, advantages)), gradients = loss_and_gradients
            step = self.optimiser.step(params, state, gradients, coef["learning_rate"], coef.get("max_grad_norm"))
            metrics["gradient/norm"] = step.gradient_norm
            priorities = source.updated(priorities, indices, advantages)
            if "target_kl" not in coef:
                return (step.params, step.state, priorities, active), row(metrics)
            # The step is taken or left out as a whole; once left out, the rest of the update is too.
            active &= metrics["policy/approximate_kl"] <= coef["target_kl"]
            new, old = (step.params, step.state), (params, state)
            kept = jax.tree.map(lambda new, old: jnp.where(active, new, old), new, old)
            metrics["policy/steps_taken"] = active.astype(jnp.float32)
            return (*kept, priorities, active), row(metrics)

        start = (params, learner.optimiser, source.priorities, jnp.bool(True))
        (params, state, _, _), rows = jax.lax.scan(gradient_step, start, source.draws())
        metrics = dict(zip(names, jnp.mean(rows, axis=0), strict=True))
        metrics |= rollout_metrics(whole.rollout, whole.advantage, whole.target)
        return Learner(unpack_params(params), state, learner.memory), metrics

    def _trimmed(self, batch: Batch) -> Batch:
        """The batch without what these settings do not look at, so that it is not gathered."""
        rollout = batch.rollout
        if self.config.advantage == "gae":
            rollout = rollout._replace(reward=NOTHING, next_value=NOTHING, terminated=NOTHING, done=NOTHING)
            if self.config.value_clip_range is None:
                rollout = rollout._replace(value=NOTHING)
        if not self.network.is_recurrent:
            rollout = rollout._replace(reset=NOTHING)
        return batch._replace(rollout=rollout)

    def _in_windows(self, batch: Batch, params: PyTree) -> Batch:
        """The batch in windows `[L, W · N]`, if the settings say so, with what their memory is found from as carry."""
        window, burn_in = self.config.window, self.config.burn_in
        if window is None:
            return batch
        carry, obs, reset = batch.rollout.carry, batch.rollout.obs, batch.rollout.reset
        unroll = partial(self.network.unroll, params)
        if burn_in:
            carry = sequences.burn_ins(unroll, carry, obs, reset, window, burn_in)
        else:
            carry = sequences.carries(unroll, carry, obs, reset, window)
        pieces = sequences.cut(batch._replace(rollout=batch.rollout._replace(carry=())), window)
        return pieces._replace(rollout=pieces.rollout._replace(carry=carry))

    def _carry(self, params: PyTree, carry: PyTree) -> PyTree:
        """The memory that segments or windows begin with; a burn-in refreshes it, and is not learned from."""
        if not self.config.burn_in:
            return carry
        return sequences.burnt_in(partial(self.network.unroll, jax.lax.stop_gradient(params)), carry)

    def _gradients(self, params: PyTree, minibatch: Batch, weights: Any, coef: Values, key: Key) -> Any:
        """The loss of a minibatch and its gradients; in parts, one after the other, if the settings say so."""
        differentiate = jax.value_and_grad(self.loss, has_aux=True)
        if self.config.standardise_advantages and self.config.advantage == "gae":
            standardised = standardise(minibatch.advantage, validity(minibatch.rollout))
            minibatch = minibatch._replace(advantage=standardised)
        parts = self.config.accumulate
        if parts == 1:
            return differentiate(params, minibatch, weights, coef, key)

        def part(sums: Any, one: Any) -> tuple[Any, jax.Array]:
            minibatch, weights, key = one
            (loss, (metrics, advantages)), gradients = differentiate(params, minibatch, weights, coef, key)
            return jax.tree.map(jnp.add, sums, (loss, metrics, gradients)), advantages

        def cut(x: jax.Array, axis: int) -> jax.Array:
            if x.shape[axis] % parts:
                raise InputError(f"A minibatch of {x.shape[axis]} cannot be cut into accumulate={parts} equal parts.")
            shape = (*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :])
            return jnp.moveaxis(x.reshape(shape), axis, 0)

        axis = 0 if self.config.minibatching == "flat" else 1
        carry = jax.tree.map(lambda x: cut(x, 0), minibatch.rollout.carry)
        cut_rollout = jax.tree.map(lambda x: cut(x, axis), minibatch.rollout._replace(carry=()))._replace(carry=carry)
        rest = jax.tree.map(lambda x: cut(x, axis), minibatch._replace(rollout=NOTHING))
        whole = rest._replace(rollout=cut_rollout)
        split_weights = None if weights is None else cut(weights, 0)
        keys = jax.random.split(key, parts)
        first = jax.tree.map(lambda x: x[0], (whole, split_weights, keys))
        shapes = jax.eval_shape(lambda one: differentiate(params, one[0], one[1], coef, one[2]), first)
        (loss, (metrics, _)), gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        sums, advantages = jax.lax.scan(part, (loss, metrics, gradients), (whole, split_weights, keys))
        loss, metrics, gradients = jax.tree.map(lambda x: x / parts, sums)
        # [parts, T, n] back to [T, parts · n], as the segments were.
        advantages = jnp.moveaxis(advantages, 0, axis).reshape(minibatch.advantage.shape)
        return (loss, (metrics, advantages)), gradients

    def loss(self, params: PyTree, minibatch: Batch, weights: Any, coef: Values, key: Key) -> Any:
        """The loss of a minibatch, `[B]` steps or `[T, n]` segments; with metrics and the advantages it used."""
        rollout, advantages, targets, reference = minibatch
        valid = validity(rollout)
        # --- policy and value now, and against those that acted
        carry = self._carry(params, rollout.carry)
        _, policy, values = self.network.unroll(params, carry, rollout.obs, rollout.reset)
        log_ratio = policy.log_prob(rollout.action) - rollout.log_prob
        # --- advantages of the current policy
        if self.config.advantage == "vtrace":
            advantages, targets = corrected_gae(
                rollout.reward,
                rollout.value,
                rollout.next_value,
                rollout.terminated,
                rollout.done,
                jax.lax.stop_gradient(log_ratio),
                coef["discount"],
                coef["rho_clip"],
                coef["c_clip"],
                coef["gae_lambda"],
            )
        found = advantages
        if self.config.standardise_advantages and self.config.advantage == "vtrace":
            advantages = standardise(advantages, valid)
        if weights is not None:
            advantages = jnp.broadcast_to(weights, advantages.shape) * advantages
        # --- the three losses
        policy_loss = clipped_surrogate(log_ratio, advantages, coef["clip_range"], valid)
        if "value_clip_range" in coef:
            critic_loss = clipped_value_loss(values, rollout.value, targets, coef["value_clip_range"], valid)
        else:
            critic_loss = value_loss(values, targets, valid)
        entropy = weighted_mean(policy.entropy(key), valid)
        total, metrics = total_loss(policy_loss, critic_loss, entropy, coef)
        if "kl_coef" in coef:
            divergence = weighted_mean(reference.kl(policy), valid)
            total += coef["kl_coef"] * divergence
            metrics |= {"loss/total": total, "loss/kl": coef["kl_coef"] * divergence, "policy/kl": divergence}
        # --- what to watch
        metrics["policy/ratio"] = weighted_mean(jnp.exp(log_ratio), valid)
        metrics["policy/clip_fraction"] = clip_fraction(log_ratio, coef["clip_range"], valid)
        metrics |= policy_metrics(policy, entropy, log_ratio, valid)
        if weights is not None:
            metrics["priority/weight"] = jnp.mean(weights)
            metrics["priority/weight_max"] = jnp.max(weights)
        return total, (metrics, found if valid is None else jnp.where(valid, found, 0.0))


class _Source:
    """Where minibatches come from: it draws indices and gathers what they point to, as one packed array."""

    def __init__(self, config: Config, batch: Batch, coef: Values, key: Key) -> None:
        self.config, self.coef = config, coef
        self.steps, self.size = batch.advantage.shape
        self.draw_key, self.loss_key = jax.random.split(key)
        self.carry = batch.rollout.carry
        self.packed, self.unpack = minibatches.pack(batch._replace(rollout=batch.rollout._replace(carry=())))
        if config.minibatching == "flat":
            self.packed = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self.packed)
        self.is_prioritised = config.minibatching == "prioritised"
        if self.is_prioritised and self.size < config.minibatches:
            raise InputError(
                f"{config.minibatches} minibatches of {self.size} segments would be empty; choose at most {self.size} "
                "minibatches, or more environments."
            )
        valid = validity(batch.rollout)
        seen = batch.advantage if valid is None else jnp.where(valid, batch.advantage, 0.0)
        self.priorities = minibatches.priorities(seen) if self.is_prioritised else ()

    def draws(self) -> tuple[Any, Key]:
        """Indices and a key for every gradient step; prioritised indices are drawn when their turn comes."""
        config = self.config
        count = config.epochs * config.minibatches
        keys = jax.random.split(self.loss_key, count)
        if self.is_prioritised:
            return jax.random.split(self.draw_key, count), keys
        length = self.steps * self.size if config.minibatching == "flat" else self.size
        return minibatches.shuffled_epochs(self.draw_key, length, config.minibatches, config.epochs), keys

    def take(self, drawn: Any, priorities: Any, key: Key) -> tuple[Batch, Any, jax.Array]:
        """The minibatch, its importance weights `[n]` or `None`, and the indices of its segments."""
        weights = None
        if self.is_prioritised:
            indices, chosen = minibatches.prioritised(
                drawn,
                priorities,
                self.coef["priority_exponent"],
                self.coef["importance_exponent"],
                count=1,
                size=self.size // self.config.minibatches,
                replace=self.config.replacement,
            )
            drawn, weights = indices[0], chosen[0]
        axis = 0 if self.config.minibatching == "flat" else 1
        batch = self.unpack(minibatches.take(self.packed, drawn, axis=axis))
        carry = self.carry if self.config.minibatching == "flat" else minibatches.take(self.carry, drawn, axis=0)
        return batch._replace(rollout=batch.rollout._replace(carry=carry)), weights, drawn

    def updated(self, priorities: Any, indices: jax.Array, advantages: jax.Array) -> Any:
        """The priorities after a minibatch: what was just seen counts by its newest advantages; GAE's do not change."""
        if not self.is_prioritised or self.config.advantage == "gae":
            return priorities
        return priorities.at[indices].set(minibatches.priorities(advantages))
