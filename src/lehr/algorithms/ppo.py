"""Proximal policy optimisation (Schulman et al., 2017), with every coefficient a schedule.

    L = L_policy + value_coef · L_value − entropy_coef · H

Each rollout is followed by `epochs` passes over it in minibatches of single steps, whole segments, windows of segments,
or segments drawn by priority. See docs/ppo.md for the details.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from lehr import kernels
from lehr.algorithms.base import ActorCriticAlgorithm
from lehr.algorithms.settings import ClippedSettings, DivergenceSettings, SegmentSettings, TargetKLSettings
from lehr.config import Coef
from lehr.errors import InputError
from lehr.maths import accumulate, across, sequences
from lehr.maths.advantages import advantages_of, corrected_gae_of
from lehr.maths.losses import (
    PartOf,
    Weights,
    clip_fraction,
    clipped_surrogate,
    clipped_value_loss,
    masked,
    policy_metrics,
    rollout_metrics,
    standardise,
    total_loss,
    validity,
    value_loss,
    weighted_mean,
)
from lehr.maths.minibatches import Minibatch, MinibatchSource, priorities
from lehr.schedules.coefficient import Coefficient
from lehr.types import NOTHING, Key, Learner, MetricRow, Metrics, PyTree, Rollout

PRIO_BETA0 = (
    "prio_beta0",
    "in PufferLib it is where the exponent starts on its way to 1, so write importance_exponent='0.2 -> 1'",
)


@dataclass(frozen=True)
class Config(SegmentSettings, DivergenceSettings, TargetKLSettings):
    """Settings of PPO. Coefficients accept a number or any schedule; the others are static."""

    epochs: int = 8
    replacement: bool = False
    """Sample prioritised segments with replacement."""
    standardise_advantages: bool = True
    """Standardise advantages to mean 0 and standard deviation 1 in each minibatch."""
    priority_exponent: Annotated[Coef, Coefficient(("prio_alpha", "priority_alpha"))] = 0.8
    """Strength of the prioritisation of segments; 0 samples uniformly."""
    importance_exponent: Annotated[
        Coef, Coefficient(("prio_beta", "priority_beta"), maximum=1.0, others=(PRIO_BETA0,))
    ] = "0.2 -> 1"
    """Strength of the importance-sampling correction for the priorities; 1 corrects fully."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "classic": {
            "num_envs": 4,
            "horizon": 128,
            "epochs": 4,
            "minibatches": 4,
            "learning_rate": "2.5e-4 -> 0",
            "value_clip_range": 0.2,
            "normalise_observations": False,
            "normalise_rewards": False,
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
            "normalise_observations": False,
            "normalise_rewards": False,
        },
    }

    @property
    def unused(self) -> frozenset[str]:
        """Coefficients that these settings do not use; they are neither evaluated nor logged."""
        ratios = () if self.advantage == "vtrace" else ("rho_clip", "c_clip")
        exponents = () if self.minibatching == "prioritised" else ("priority_exponent", "importance_exponent")
        return frozenset((*ratios, *exponents))


def config_of(config: ClippedSettings) -> Config:
    """Return PPO's settings for another algorithm's gradient steps, with the settings that both share."""
    return Config(**{field.name: getattr(config, field.name) for field in fields(ClippedSettings)})


class Samples(NamedTuple):
    """The data that minibatches are drawn from, leaves `[T, N, ...]`."""

    rollout: Rollout
    """Its `log_prob` is that of the policy in the ratio's denominator."""
    advantage: jax.Array
    """float32 `[T, N]`."""
    target: jax.Array
    """float32 `[T, N]`: value targets."""
    reference: Any = ()
    """The policy in the KL penalty of `kl_coef`, a `Distribution` of `[T, N]`; `()` without a penalty."""


@dataclass(frozen=True)
class Algorithm(ActorCriticAlgorithm):
    """PPO: several passes over each rollout in minibatches, with clipped losses."""

    Config: ClassVar[type] = Config

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", self.config.for_network(self.network.is_recurrent))
        whole = self.network.is_recurrent or self.config.advantage == "vtrace" or self.config.window is not None
        if self.config.minibatching == "auto":
            chosen: Literal["flat", "segments"] = "segments" if whole else "flat"
            object.__setattr__(self, "config", replace(self.config, minibatching=chosen))
        elif self.config.minibatching == "flat" and self.network.is_recurrent:
            raise InputError(
                "minibatching is 'flat', but the network is recurrent and needs whole segments; set minibatching to "
                "auto, segments or prioritised."
            )
        if self.config.burn_in and not self.network.is_recurrent:
            raise InputError(
                f"burn_in is {self.config.burn_in}, but the network is not recurrent; set burn_in to 0, or torso to "
                "lstm, gru or mingru."
            )

    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Make one update: compute advantages, then take `epochs · minibatches` gradient steps."""
        advantage, target = advantages_of(rollout, coef["discount"], coef["gae_lambda"])
        reference: Any = ()
        if "kl_coef" in coef:
            _, reference, _ = self.network.unroll(learner.params, rollout.carry, rollout.obs, rollout.reset)
        return self.passes(learner, Samples(rollout, advantage, target, reference), coef, key)

    def passes(self, learner: Learner, samples: Samples, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Take all gradient steps on the samples; return the learner, and metrics."""
        config = self.config
        data, carry = self._in_windows(self._trimmed(samples), learner.params)
        how = config.replacement, self._standardised, kernels.gathers_ahead(data, config.epochs)
        source = MinibatchSource(config.minibatching, data, carry, config.epochs, config.minibatches, key, *how)
        params, unpack_params = self.optimiser.pack(learner.params)

        def gradient_step(carried: Any, drawn: Any) -> tuple[Any, MetricRow]:
            (params, state, known, active), (drawn, key) = carried, drawn
            minibatch = source.take(drawn, known, coef.get("priority_exponent"), coef.get("importance_exponent"))
            (_, (metrics, advantages)), gradients = self._gradients(params, unpack_params, minibatch, coef, key)
            step = self.optimiser.step(params, state, gradients, coef["learning_rate"], coef.get("max_grad_norm"), coef)
            metrics["gradient/norm"] = step.gradient_norm
            if source.kind == "prioritised" and config.advantage == "vtrace":  # GAE's advantages do not change
                known = known.at[minibatch.indices].set(priorities(advantages))
            if "target_kl" not in coef:
                return (step.params, step.state, known, active), MetricRow.of(metrics)
            # A step is either taken or skipped; after the first skipped one, the rest of the update is skipped too.
            active &= across.mean(metrics["policy/approximate_kl"]) <= coef["target_kl"]
            kept = jax.tree.map(partial(jnp.where, active), (step.params, step.state), (params, state))
            metrics["policy/steps_taken"] = active.astype(jnp.float32)
            return (*kept, known, active), MetricRow.of(metrics)

        known = priorities(masked(data.advantage, validity(data.rollout))) if source.kind == "prioritised" else ()
        start = params, learner.optimiser, known, jnp.bool(True)
        (params, state, _, _), rows = kernels.gradient_steps(gradient_step, start, source.draws())
        metrics = rows.mean() | rollout_metrics(samples.rollout, samples.advantage, samples.target)
        return learner._replace(params=unpack_params(params), optimiser=state), metrics

    def _trimmed(self, samples: Samples) -> Samples:
        """Drop the parts of the samples that these settings do not use, so that minibatches do not gather them."""
        rollout = samples.rollout._replace(final_obs=NOTHING, extras=NOTHING)
        if self.config.advantage == "gae":
            rollout = rollout._replace(reward=NOTHING, next_value=NOTHING, terminated=NOTHING, done=NOTHING)
            if self.config.value_clip_range is None:
                rollout = rollout._replace(value=NOTHING)
        if not self.network.is_recurrent:
            rollout = rollout._replace(reset=NOTHING)
        return samples._replace(rollout=rollout)

    def _standardised(self, samples: Samples) -> Samples:
        """Return a minibatch with standardised advantages, if they are known before its gradient step."""
        if self.config.advantage == "vtrace" or not self.config.standardise_advantages:
            return samples
        return samples._replace(advantage=standardise(samples.advantage, validity(samples.rollout)))

    def _in_windows(self, samples: Samples, params: PyTree) -> tuple[Samples, PyTree]:
        """Return the samples, cut into windows `[L, W · N]` if `window` is set, and their initial recurrent states."""
        window, burn_in, rollout = self.config.window, self.config.burn_in, samples.rollout
        data = samples._replace(rollout=rollout._replace(carry=()))
        if window is None:
            return data, rollout.carry
        seen = partial(self.network.unroll, params), rollout.carry, rollout.obs, rollout.reset
        carry = sequences.burn_ins(*seen, window, burn_in) if burn_in else sequences.carries(*seen, window)
        return sequences.cut(data, window), carry

    def _evaluated(self, params: PyTree, minibatch: Minibatch) -> tuple[Any, jax.Array]:
        """Return the policy and the values of a minibatch; a burn-in refreshes its recurrent states if there is one."""
        rollout, carry = minibatch.data.rollout, minibatch.carry
        if self.config.burn_in:
            carry = sequences.burnt_in(partial(self.network.unroll, jax.lax.stop_gradient(params)), carry)
        return self.network.unroll(params, carry, rollout.obs, rollout.reset)[1:]

    def _gradients(
        self, packed: PyTree, unpack: Callable[[PyTree], PyTree], minibatch: Minibatch, coef: Metrics, key: Key
    ) -> Any:
        """Return the loss of a minibatch and its gradients, accumulated over its parts if `accumulate` is set."""
        samples, valid, found = minibatch.data, validity(minibatch.data.rollout), minibatch.data.advantage
        params, differentiate = unpack(packed), jax.value_and_grad(self.loss, has_aux=True)
        parts, axis = self.config.accumulate, 0 if self.config.minibatching == "flat" else 1

        def cut(samples: Samples) -> Minibatch:
            memory, weights = accumulate.in_parts((minibatch.carry, minibatch.weights), parts, axis=0)
            return Minibatch(accumulate.in_parts(samples, parts, axis), memory, weights, NOTHING)

        if self.config.advantage == "vtrace":
            if parts == 1:  # estimated in the loss, which evaluates the network anyway
                return differentiate(params, minibatch, valid, coef, key)
            estimates = jax.lax.map(lambda part: self._estimates(params, part, coef), cut(samples))
            found, target = (accumulate.joined(part, axis) for part in estimates)
            advantage = standardise(found, valid) if self.config.standardise_advantages else found
            samples = samples._replace(advantage=advantage, target=target)
        if parts == 1:

            def loss_of(minibatch: Minibatch) -> Callable[[PyTree], Any]:
                return lambda params: self.loss(params, minibatch, validity(minibatch.data.rollout), coef, key)

            in_rows = self.config.minibatching == "segments" and not self.network.is_recurrent
            by_rows = loss_of(minibatch.as_rows()) if in_rows else None
            return kernels.value_and_grad(loss_of(minibatch), packed, unpack, by_rows)

        def part_of(given: tuple[Minibatch, Key]) -> Any:
            # Means of parts, averaged, must be the mean of the whole, in which each valid step counts alike.
            mask = validity(given[0].data.rollout)
            weights = None if mask is None or valid is None else PartOf(mask, across.mean_count(jnp.sum(valid)) / parts)
            return differentiate(params, given[0], weights, coef, given[1], estimated=True)

        (loss, metrics, gradients), _ = accumulate.mean_over_parts(
            part_of, (cut(samples), jax.random.split(key, parts))
        )
        return (loss, (metrics, masked(found, valid))), gradients

    def _estimates(self, params: PyTree, minibatch: Minibatch, coef: Metrics) -> tuple[jax.Array, jax.Array]:
        """Return the current policy's advantages, with V-trace's ratios, and the value targets."""
        rollout, (policy, _) = minibatch.data.rollout, self._evaluated(params, minibatch)
        return corrected_gae_of(rollout, policy.log_prob(rollout.action) - rollout.log_prob, coef)

    def loss(
        self, params: PyTree, minibatch: Minibatch, valid: Weights, coef: Metrics, key: Key, estimated: bool = False
    ) -> Any:
        """Return the loss of a minibatch of `[B]` steps or `[T, n]` segments, metrics, and the advantages it used.

        The advantages come with the minibatch; V-trace's are estimated here, unless they are `estimated` already.
        """
        (rollout, advantages, targets, reference), weights = minibatch.data, minibatch.weights
        # --- current policy and value, and the ratio to the policy that acted
        policy, values = self._evaluated(params, minibatch)
        log_ratio = policy.log_prob(rollout.action) - rollout.log_prob
        # --- advantages of the current policy
        found = advantages
        if self.config.advantage == "vtrace" and not estimated:
            found, targets = corrected_gae_of(rollout, jax.lax.stop_gradient(log_ratio), coef)
            advantages = standardise(found, valid) if self.config.standardise_advantages else found
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
        # --- metrics
        metrics["policy/ratio"] = weighted_mean(jnp.exp(log_ratio), valid)
        metrics["policy/clip_fraction"] = clip_fraction(log_ratio, coef["clip_range"], valid)
        metrics |= policy_metrics(policy, entropy, log_ratio, valid)
        if weights is not None:
            metrics["priority/weight"] = jnp.mean(weights)
            metrics["priority/weight_max"] = across.maximum(jnp.max(weights))
        return total, (metrics, masked(found, valid))
