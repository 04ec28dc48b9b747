"""Phasic policy gradient (Cobbe et al., 2020): PPO, with a regular auxiliary phase that trains the features on values.

    policy phase      L = L_policy + value_coef · L_value − entropy_coef · H
    auxiliary phase   L = L_aux + clone_coef · KL(π_before ‖ π) + L_value

Every update is a policy phase on its rollout. After every `policy_updates` updates, an auxiliary phase trains on all
rollouts since the last one: a value head on the actor's features teaches them what values depend on, while the KL term
keeps the policy where it was. See docs/ppg.md for the details.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from lehr.algorithms import ppo
from lehr.algorithms.base import ActorCriticAlgorithm
from lehr.algorithms.settings import ClippedSettings
from lehr.config import AutoBool, Coef, Plugin, check_counts
from lehr.errors import InputError
from lehr.maths import across, minibatches
from lehr.maths.advantages import advantages_of
from lehr.maths.distributions import Distribution
from lehr.maths.losses import validity, value_loss, weighted_mean
from lehr.networks import ActorCriticNetwork
from lehr.schedules.coefficient import Coefficient
from lehr.types import Key, Learner, Metrics, PyTree, Rollout


@dataclass(frozen=True)
class Config(ClippedSettings):
    """Settings of PPG. Coefficients accept a number or any schedule; the others are static."""

    policy_updates: int = 16
    """Updates between auxiliary phases; this many rollouts are stored."""
    auxiliary_epochs: int = 6
    """Passes over the stored rollouts in an auxiliary phase."""
    auxiliary_minibatches: int = 4
    """Gradient steps per stored rollout in one such pass; a minibatch has num_envs / auxiliary_minibatches segments,
    drawn from all stored rollouts."""
    normalise_rewards: AutoBool = True
    """Divide rewards by the running standard deviation of the discounted return; otherwise their scale sets the balance
    of value loss and KL divergence in auxiliary phases."""
    optimiser: Plugin = "adam"
    """Optimiser of both phases, with separate states: the name of any optax optimiser, or an optax transformation."""
    auxiliary_learning_rate: Annotated[Coef, Coefficient(("auxiliary_lr", "aux_learning_rate", "aux_lr"))] = "1e-3 -> 0"
    """Learning rate in auxiliary phases."""
    clone_coef: Annotated[Coef, Coefficient(("beta_clone", "beta_cl"))] = 1.0
    """Weight of the KL divergence from the policy before the auxiliary phase."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "policy_updates", "auxiliary_epochs", "auxiliary_minibatches")


class Kept(NamedTuple):
    """The data of an auxiliary phase: leaves `[T, N, ...]` for one rollout, `[policy_updates, T, N, ...]` for all."""

    obs: PyTree
    target: jax.Array
    """float32: value targets."""
    valid: Any
    """bool: the agent really took this step; in an auxiliary phase `()` if all are."""
    reset: Any
    """bool, or `()` if the network is not recurrent."""
    carry: PyTree
    """Recurrent states, without the axis T."""


class Auxiliary(NamedTuple):
    """State of the auxiliary phases, besides the network."""

    head: PyTree
    """The value head on the actor's features, `{"kernel": [F], "bias": []}`; `()` if the torso is shared."""
    optimiser: PyTree
    """Optimiser state of the auxiliary phases."""
    filled: jax.Array
    """int32 `[]`: number of rollouts stored since the last phase; the rest of the memory is outdated."""
    metrics: Metrics
    """Metrics of the last auxiliary phase; zeros before the first."""


@dataclass(frozen=True)
class Detached:
    """A shared network whose `unroll` stops the gradient of the value before the torso."""

    network: ActorCriticNetwork

    @property
    def is_recurrent(self) -> bool:
        """Whether the network is recurrent."""
        return self.network.is_recurrent

    def unroll(
        self, params: PyTree, carry: PyTree, obs: PyTree, reset: jax.Array
    ) -> tuple[PyTree, Distribution, jax.Array]:
        """Return the last carry, the policy `[T, N]` and the value `[T, N]`."""
        carry, actor, critic = self.network.features(params, carry, obs, reset)
        value = self.network.head_value(params, jax.lax.stop_gradient(critic))
        return carry, self.network.policy(params, actor), value


@dataclass(frozen=True)
class Algorithm(ActorCriticAlgorithm):
    """PPG: PPO's updates, and a regular auxiliary phase on the rollouts since the last one."""

    Config: ClassVar[type] = Config

    @property
    def policy_phase(self) -> ppo.Algorithm:
        """PPO. With a shared torso, the value loss trains only the value head."""
        network: Any = Detached(self.network) if self.network.is_shared else self.network
        return ppo.Algorithm(ppo.config_of(self.config), network)

    def init(self, key: Key, params: PyTree, example: Rollout) -> Learner:
        """Return a learner with these parameters, with memory for rollouts like the example."""
        network, rollouts = self.network, self.config.policy_updates
        head: PyTree = (
            () if network.is_shared else {"kernel": jnp.zeros(network.feature_sizes[0]), "bias": jnp.zeros(())}
        )
        names = ("kl", "value_error_before", "value_error", "loss")
        metrics = {f"auxiliary/{name}": jnp.float32(0) for name in names}
        auxiliary = Auxiliary(head, self.optimiser.init((params, head)), jnp.int32(0), metrics)
        shape = rollouts, *example.reward.shape
        memory = Kept(
            obs=jax.tree.map(lambda x: jnp.zeros((rollouts, *x.shape), x.dtype), example.obs),
            target=jnp.zeros(shape),
            valid=jnp.zeros(shape, bool),
            reset=jnp.zeros(shape, bool) if network.is_recurrent else (),
            carry=network.initial_carry((rollouts, shape[-1])),
        )
        return Learner(params, self.policy_phase.optimiser.init(params), auxiliary, memory)

    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Make one update: a policy phase on the rollout, and an auxiliary phase every `policy_updates` updates."""
        policy_key, auxiliary_key = jax.random.split(key)
        advantage, target = advantages_of(rollout, coef["discount"], coef["gae_lambda"])
        learner, metrics = self.policy_phase.passes(learner, ppo.Samples(rollout, advantage, target), coef, policy_key)
        params, old = learner.params, learner.auxiliary
        kept, filled = self._remember(learner.memory, old.filled, rollout, target), old.filled + 1
        is_due = filled == self.config.policy_updates
        used = kept if validity(rollout) is not None else kept._replace(valid=())
        params, head, optimiser, newest = self._phase_if(is_due, params, old, used, coef, auxiliary_key)
        auxiliary = Auxiliary(head, optimiser, jnp.where(is_due, 0, filled), newest)
        return Learner(params, learner.optimiser, auxiliary, kept), metrics | newest

    def _phase_if(
        self, is_due: jax.Array, params: PyTree, auxiliary: Auxiliary, kept: Kept, coef: Metrics, key: Key
    ) -> tuple[PyTree, PyTree, PyTree, Metrics]:
        """Run an auxiliary phase if it is due; the result is that of `auxiliary_phase`."""

        def unchanged(is_due: jax.Array, params: PyTree, auxiliary: Auxiliary, *others: Any) -> Any:
            return params, auxiliary.head, auxiliary.optimiser, auxiliary.metrics

        def chosen(is_due: jax.Array, *given: Any) -> Any:
            return jax.lax.cond(is_due, lambda: self.auxiliary_phase(*given), lambda: unchanged(is_due, *given))

        def members(size: int, is_batched: Any, *given: Any) -> tuple[Any, Any]:
            # By itself, vmap would compute a phase at every update, to use it when it is due. The members of a
            # population are in step as a rule, so most updates need none.
            axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(is_batched))
            choices = (jax.vmap(made, axes, axis_size=size) for made in (chosen, unchanged))
            found = jax.lax.cond(jnp.any(given[0]), *choices, *given)
            return found, jax.tree.map(lambda _: True, found)

        one = jax.custom_batching.custom_vmap(chosen)
        one.def_vmap(members)
        return one(is_due, params, auxiliary, kept, coef, key)

    def forget(self, learner: Learner) -> Learner:
        """Start a new policy phase: the rollouts of the current one are lost."""
        return learner._replace(auxiliary=learner.auxiliary._replace(filled=jnp.int32(0)))

    def _remember(self, kept: Kept, place: jax.Array, rollout: Rollout, target: jax.Array) -> Kept:
        """Return the stored rollouts with this one at index `place`."""
        valid = jnp.ones(target.shape, bool) if validity(rollout) is None else rollout.valid
        reset = rollout.reset if self.network.is_recurrent else ()
        newest = Kept(rollout.obs, target, valid, reset, rollout.carry)
        return jax.tree.map(lambda x, new: x.at[place].set(new), kept, newest)

    def auxiliary_phase(
        self, params: PyTree, auxiliary: Auxiliary, kept: Kept, coef: Metrics, key: Key
    ) -> tuple[PyTree, PyTree, PyTree, Metrics]:
        """Run all passes; return the parameters of network and head, the optimiser state, and metrics."""
        config = self.config
        policy, values = self._outputs(params, kept)
        # --- all segments in one batch, [T, policy_updates · N, ...], each with the policy before the phase
        data = kept._replace(carry=()), policy
        side_by_side = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]), data)
        data, unpack_data = minibatches.pack(side_by_side)
        carry = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept.carry)
        rollouts, segments, parts = config.policy_updates, kept.target.shape[2], config.auxiliary_minibatches
        if segments % parts:
            raise InputError(
                f"auxiliary_minibatches is {parts}, but {segments} segments cannot be split into {parts} equal parts; "
                f"choose a divisor of {segments}."
            )
        orders = minibatches.shuffled_epochs(key, rollouts * segments, rollouts * parts, config.auxiliary_epochs)
        packed, unpack = self.optimiser.pack((params, auxiliary.head))

        def gradient_step(carried: Any, indices: jax.Array) -> tuple[Any, jax.Array]:
            packed, state = carried
            minibatch, before = unpack_data(minibatches.take(data, indices, axis=1))
            minibatch = minibatch._replace(carry=minibatches.take(carry, indices, axis=0))
            loss, gradients = jax.value_and_grad(self.auxiliary_loss)(unpack(packed), minibatch, before, coef)
            rate, limit = coef["auxiliary_learning_rate"], coef.get("max_grad_norm")
            step = self.optimiser.step(packed, state, gradients, rate, limit, coef)
            return (step.params, step.state), loss

        (packed, state), losses = jax.lax.scan(gradient_step, (packed, auxiliary.optimiser), orders)
        params, head = unpack(packed)
        # --- metrics: evaluate policy and values once more
        (new_policy, new_values), valid = self._outputs(params, kept), validity(kept)
        metrics = {
            "auxiliary/kl": weighted_mean(policy.kl(new_policy), valid),
            "auxiliary/value_error_before": value_loss(values, kept.target, valid),
            "auxiliary/value_error": value_loss(new_values, kept.target, valid),
            "auxiliary/loss": jnp.mean(losses),
        }
        return params, head, state, across.mean(metrics)  # part of the state, and so the same on all devices

    def _outputs(self, params: PyTree, kept: Kept) -> tuple[Any, jax.Array]:
        """Return the policy, a `Distribution`, and the values `[policy_updates, T, N]`, computed rollout by rollout."""

        def one(kept: Kept) -> tuple[Distribution, jax.Array]:
            _, policy, values = self.network.unroll(params, kept.carry, kept.obs, kept.reset)
            return policy, values

        return jax.lax.map(one, kept)

    def _evaluated(self, params: PyTree, head: PyTree, kept: Kept) -> tuple[Distribution, jax.Array, jax.Array | None]:
        """Return the policy, the values and the head's values `[T, N]`; a shared torso has no such head."""
        network, seen = self.network, (kept.carry, kept.obs, kept.reset)
        if network.is_shared:
            return *network.unroll(params, *seen)[1:], None
        if isinstance(network, ActorCriticNetwork):
            return network.unroll_with(params, head, *seen)[1:]
        _, actor, critic = network.features(params, *seen)  # a network of the user's own
        return network.policy(params, actor), network.head_value(params, critic), actor @ head["kernel"] + head["bias"]

    def auxiliary_loss(self, trained: tuple[PyTree, PyTree], minibatch: Kept, before: Any, coef: Metrics) -> jax.Array:
        """Return L_aux + clone_coef · KL(π_before ‖ π) + L_value, for segments `[T, n]` and the policy before.

            L_aux = ½ mean (features · kernel + bias − R)²
            L_value = ½ mean (V − R)²

        `trained` holds the parameters of the network and of the head. A shared torso has a single value head on the
        actor's features, so the two value losses coincide and count once.
        """
        params, head = trained
        policy, values, auxiliary = self._evaluated(params, head, minibatch)
        valid = validity(minibatch)
        clone = weighted_mean(before.kl(policy), valid)
        loss = coef["clone_coef"] * clone + value_loss(values, minibatch.target, valid)
        if auxiliary is not None:
            loss += value_loss(auxiliary, minibatch.target, valid)
        return loss
