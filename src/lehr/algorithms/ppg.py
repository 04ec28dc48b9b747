"""Phasic policy gradient (Cobbe et al., 2020): PPO, and now and then a phase that trains the features on values.

    policy phase      L = L_policy + value_coef · L_value − entropy_coef · H
    auxiliary phase   L = L_aux + clone_coef · KL(π_before ‖ π) + L_value

Every update is a policy phase on its rollout. Every `policy_updates` of them an auxiliary phase goes over all rollouts
since the last one: a value head on the actor's features teaches these what values depend on, while the policy is held
where it was. See docs/ppg.md for each detail.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lehr.algorithms import ppo
from lehr.config import Coef, check_counts
from lehr.errors import InputError
from lehr.maths import minibatches
from lehr.maths.advantages import advantages_of
from lehr.maths.distributions import Distribution
from lehr.maths.losses import value_loss, weighted_mean
from lehr.maths.optimise import Optimiser
from lehr.networks import ActorCriticNetwork
from lehr.types import Key, Learner, Metrics, PyTree, Rollout


@dataclass(frozen=True)
class Config:
    """PPG's settings. Coefficients take a number or any schedule; the others shape arrays and are fixed."""

    num_envs: int = 32
    """Environments that run side by side."""
    horizon: int = 64
    """Steps of each environment in one rollout."""
    epochs: int = 4
    """Passes over a rollout in a policy phase."""
    minibatches: int = 8
    """Gradient steps in one such pass."""
    policy_updates: int = 16
    """Updates from one auxiliary phase to the next; so many rollouts are kept for it."""
    auxiliary_epochs: int = 6
    """Passes over all kept rollouts in an auxiliary phase."""
    auxiliary_minibatches: int = 4
    """Gradient steps in one such pass for each kept rollout; a minibatch is num_envs / auxiliary_minibatches
    segments, drawn from all kept rollouts."""
    standardise_advantages: bool = True
    """Whether advantages are brought to mean 0 and deviation 1 in each minibatch."""
    normalise_observations: bool = False
    """Whether observations are normalised by their running mean and deviation."""
    normalise_rewards: bool = True
    """Whether rewards are divided by the running deviation of the discounted return. Without it their size decides how
    much the divergence counts beside the values in an auxiliary phase."""
    optimiser: str = "adam"
    """Any optimiser of optax by its name, for both phases, each with a state of its own."""
    learning_rate: Coef = "1e-3 -> 0"
    """Step size of the optimiser in policy phases."""
    auxiliary_learning_rate: Coef = "1e-3 -> 0"
    """Step size of the optimiser in auxiliary phases."""
    entropy_coef: Coef = 0.01
    """Weight of the entropy bonus."""
    value_coef: Coef = 0.5
    """Weight of the value loss in policy phases."""
    clone_coef: Coef = 1.0
    """Weight of the divergence from the policy before an auxiliary phase."""
    clip_range: Coef = 0.2
    """How far the probability ratio may leave 1 before its gradient is cut."""
    value_clip_range: Coef | None = None
    """How far a value may leave the one of the rollout before its gradient is cut, in policy phases; none clips
    nothing."""
    discount: Coef = 0.99
    """Worth of a reward one step later."""
    gae_lambda: Coef = 0.95
    """Mix of short and long returns in the advantage."""
    max_grad_norm: Coef | None = 0.5
    """Largest global norm of the gradient, in both phases; none clips nothing."""
    reward_scale: Coef | None = None
    """Factor on the rewards; none leaves them as they are."""

    def __post_init__(self) -> None:
        check_counts(self, "num_envs", "horizon", "epochs", "minibatches")
        check_counts(self, "policy_updates", "auxiliary_epochs", "auxiliary_minibatches")

    @property
    def unused(self) -> frozenset[str]:
        """All coefficients are used."""
        return frozenset()


class Kept(NamedTuple):
    """What an auxiliary phase looks at: leaves `[T, N, ...]`, behind `policy_updates` where all rollouts are held."""

    obs: PyTree
    target: jax.Array
    """float32: of the values."""
    valid: jax.Array
    """bool: the step was really taken."""
    reset: Any
    """bool, or `()` for a network without memory."""
    carry: PyTree
    """Without the axis T."""


class Memory(NamedTuple):
    """What a learner remembers besides its network and the optimiser of its policy phases."""

    head: PyTree
    """The value on the actor's features, `{"kernel": [F], "bias": []}`; `()` where the torso is shared."""
    optimiser: PyTree
    """Of the auxiliary phases."""
    kept: Kept
    """The rollouts since the last auxiliary phase, and behind them what is left of older ones."""
    filled: jax.Array
    """int32 `[]`: how many rollouts there are since then."""
    metrics: Metrics
    """Of the newest auxiliary phase; zeros before the first."""


@dataclass(frozen=True)
class Algorithm:
    """The algorithm: how a learner begins, and how it learns from a rollout."""

    config: Config
    network: ActorCriticNetwork

    @property
    def optimiser(self) -> Optimiser:
        """The optimiser of the auxiliary phases, without a learning rate."""
        return Optimiser(self.config.optimiser)

    @property
    def policy_phase(self) -> ppo.Algorithm:
        """PPO. Where the torso is shared, its values train the value head alone."""
        config = ppo.Config(
            num_envs=self.config.num_envs,
            horizon=self.config.horizon,
            epochs=self.config.epochs,
            minibatches=self.config.minibatches,
            standardise_advantages=self.config.standardise_advantages,
            optimiser=self.config.optimiser,
            value_clip_range=self.config.value_clip_range,
        )
        return ppo.Algorithm(config, self.network.detached() if self.network.is_shared else self.network)

    def init(self, params: PyTree) -> Learner:
        """A learner with these parameters, and room for observations of one agent in each environment, as they are."""
        network = self.network
        one = jax.eval_shape(network.observation_space.sample, jax.random.key(0))
        obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.config.num_envs, *x.shape), x.dtype), one)
        head: PyTree = () if network.is_shared else {"kernel": jnp.zeros(network.actor_features), "bias": jnp.zeros(())}
        names = ("kl", "value_error_before", "value_error", "loss")
        metrics = {f"auxiliary/{name}": jnp.float32(0) for name in names}
        memory = Memory(head, self.optimiser.init((params, head)), self._room(obs), jnp.int32(0), metrics)
        return self.policy_phase.init(params)._replace(memory=memory)

    def make_room(self, learner: Learner, obs: PyTree) -> Learner:
        """The learner with room for rollouts of observations like these, `[N, ...]`."""
        return learner._replace(memory=learner.memory._replace(kept=self._room(obs)))

    def _room(self, obs: PyTree) -> Kept:
        """Room for `policy_updates` rollouts of observations like these."""
        rollouts, horizon = self.config.policy_updates, self.config.horizon
        size = jax.tree.leaves(obs)[0].shape[0]
        shape = rollouts, horizon, size
        return Kept(
            obs=jax.tree.map(lambda x: jnp.zeros((rollouts, horizon, *x.shape), x.dtype), obs),
            target=jnp.zeros(shape),
            valid=jnp.zeros(shape, bool),
            reset=jnp.zeros(shape, bool) if self.network.is_recurrent else (),
            carry=self.network.initial_carry((rollouts, size)),
        )

    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """One update: a policy phase on the rollout, and after every `policy_updates` of them an auxiliary phase."""
        policy_key, auxiliary_key = jax.random.split(key)
        advantage, target = advantages_of(rollout, coef["discount"], coef["gae_lambda"])
        learner, metrics = self.policy_phase.passes(learner, ppo.Batch(rollout, advantage, target), coef, policy_key)
        params, memory = learner.params, self._remember(learner.memory, rollout, target)
        is_due = memory.filled == self.config.policy_updates
        params, head, optimiser, watched = jax.lax.cond(
            is_due,
            lambda: self.auxiliary_phase(params, memory, coef, auxiliary_key),
            lambda: (params, memory.head, memory.optimiser, memory.metrics),
        )
        memory = Memory(head, optimiser, memory.kept, jnp.where(is_due, 0, memory.filled), watched)
        return Learner(params, learner.optimiser, memory), metrics | watched

    def _remember(self, memory: Memory, rollout: Rollout, target: jax.Array) -> Memory:
        """The memory with one rollout more."""
        room = memory.kept.target.shape[1:]
        if target.shape != room:
            raise InputError(
                f"A rollout has {target.shape[0]} steps and {target.shape[1]} segments, but there is room for "
                f"{room[0]} and {room[1]}: make_room is for observations of other numbers."
            )
        valid = jnp.ones(room, bool) if isinstance(rollout.valid, tuple) else rollout.valid
        reset = rollout.reset if self.network.is_recurrent else ()
        newest = Kept(rollout.obs, target, valid, reset, rollout.carry)
        kept = jax.tree.map(lambda x, new: x.at[memory.filled].set(new), memory.kept, newest)
        return memory._replace(kept=kept, filled=memory.filled + 1)

    def auxiliary_phase(
        self, params: PyTree, memory: Memory, coef: Metrics, key: Key
    ) -> tuple[PyTree, PyTree, PyTree, Metrics]:
        """The parameters of network and head, the optimiser's state, and what there is to watch, after all passes."""
        config, kept = self.config, memory.kept
        policy, values = self._outputs(params, kept)
        # --- all segments side by side, [T, policy_updates · N, ...], each with the policy before the phase
        data = kept._replace(carry=()), policy
        side_by_side = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]), data)
        data, unpack_data = minibatches.pack(side_by_side)
        carry = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept.carry)
        rollouts, segments, parts = config.policy_updates, kept.target.shape[2], config.auxiliary_minibatches
        if segments % parts:
            raise InputError(
                f"auxiliary_minibatches is {parts}, but {segments} segments cannot be cut into so many equal parts; "
                f"choose a divisor of {segments}."
            )
        orders = minibatches.shuffled_epochs(key, rollouts * segments, rollouts * parts, config.auxiliary_epochs)
        packed, unpack = self.optimiser.pack((params, memory.head))

        def gradient_step(carried: Any, indices: jax.Array) -> tuple[Any, jax.Array]:
            packed, state = carried
            minibatch, before = unpack_data(minibatches.take(data, indices, axis=1))
            minibatch = minibatch._replace(carry=minibatches.take(carry, indices, axis=0))
            loss, gradients = jax.value_and_grad(self.auxiliary_loss)(unpack(packed), minibatch, before, coef)
            rate, limit = coef["auxiliary_learning_rate"], coef.get("max_grad_norm")
            step = self.optimiser.step(packed, state, gradients, rate, limit)
            return (step.params, step.state), loss

        (packed, state), losses = jax.lax.scan(gradient_step, (packed, memory.optimiser), orders)
        params, head = unpack(packed)
        # --- what to watch: the policy and the values are looked at once more
        new_policy, new_values = self._outputs(params, kept)
        metrics = {
            "auxiliary/kl": weighted_mean(policy.kl(new_policy), kept.valid),
            "auxiliary/value_error_before": value_loss(values, kept.target, kept.valid),
            "auxiliary/value_error": value_loss(new_values, kept.target, kept.valid),
            "auxiliary/loss": jnp.mean(losses),
        }
        return params, head, state, metrics

    def _outputs(self, params: PyTree, kept: Kept) -> tuple[Any, jax.Array]:
        """The policy, a `Distribution`, and the values `[policy_updates, T, N]`, one rollout after the other."""

        def one(kept: Kept) -> tuple[Distribution, jax.Array]:
            _, policy, values, _ = self.network.unroll_with_features(params, kept.carry, kept.obs, kept.reset)
            return policy, values

        return jax.lax.map(one, kept)

    def auxiliary_loss(self, trained: tuple[PyTree, PyTree], minibatch: Kept, before: Any, coef: Metrics) -> jax.Array:
        """L_aux + clone_coef · KL(π_before ‖ π) + L_value, of segments `[T, n]` and the policies before.

            L_aux = ½ mean (features · kernel + bias − R)²
            L_value = ½ mean (V − R)²

        `trained` is the network's parameters and the head's. A shared torso has one value head, which sees the actor's
        features: there the two losses are one, counted once.
        """
        params, head = trained
        _, policy, values, features = self.network.unroll_with_features(
            params, minibatch.carry, minibatch.obs, minibatch.reset
        )
        clone = weighted_mean(before.kl(policy), minibatch.valid)
        loss = coef["clone_coef"] * clone + value_loss(values, minibatch.target, minibatch.valid)
        if not self.network.is_shared:
            loss += value_loss(features @ head["kernel"] + head["bias"], minibatch.target, minibatch.valid)
        return loss
