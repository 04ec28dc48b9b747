"""Trust-region policy optimisation (Schulman et al., 2015): natural gradient steps with a KL constraint.

    maximise  mean ρ A + entropy_coef · H   subject to   mean KL(π_old ‖ π) ≤ target_kl

The direction solves (F + damping · 1) x = g by conjugate gradients, where F is the Fisher information of the policy and
g the gradient. A line search shortens the step until it improves the objective within the constraint. The value
function is fitted separately, with a gradient method. See docs/trpo.md for the details.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from lehr import kernels
from lehr.algorithms.base import ActorCriticAlgorithm, HalfBoxNetworkConfig
from lehr.algorithms.settings import OnPolicySettings, OpenDiscountSettings, TargetKLSettings
from lehr.config import Coef, Names, Plugin, check_counts
from lehr.maths import across, minibatches
from lehr.maths.advantages import advantages_of
from lehr.maths.distributions import Distribution
from lehr.maths.losses import (
    policy_metrics,
    rollout_metrics,
    standardise,
    surrogate_loss,
    validity,
    value_loss,
    weighted_mean,
)
from lehr.networks import ActorCriticNetwork
from lehr.schedules.coefficient import Coefficient
from lehr.types import Key, Learner, Metrics, PyTree, Rollout

SOLVED = 1e-5
"""The solver stops when the residual is below this fraction of the gradient's norm, the precision of float32."""


@dataclass(frozen=True)
class Config(OpenDiscountSettings, OnPolicySettings, TargetKLSettings):
    """Settings of TRPO. Coefficients accept a number or any schedule; the others are static."""

    num_envs: int = 16
    horizon: int = 128
    conjugate_steps: Annotated[int, Names(("cg_max_steps",))] = 15
    """Maximum number of conjugate gradient steps."""
    line_search_steps: Annotated[int, Names(("line_search_max_iter",))] = 10
    """Step lengths that the line search tries, including the full step, before it leaves the policy unchanged."""
    value_epochs: Annotated[int, Names(("n_critic_updates",))] = 10
    """Passes over each rollout to fit the value function."""
    value_minibatches: int = 16
    """Minibatches, and so gradient steps, per such pass."""
    optimiser: Plugin = "adam"
    """Optimiser of the value function: the name of any optax optimiser, or an optax transformation."""
    target_kl: Coef = "0.01 -> 0.001"
    """Maximum KL divergence of an update."""
    damping: Annotated[Coef, Coefficient(("cg_damping",))] = 0.1
    """Damping added to the diagonal of the Fisher information."""
    line_search_shrink: Annotated[
        Coef,
        Coefficient(
            ("line_search_shrinking_factor", "backtrack_coeff", "backtrack_ratio"), maximum=1.0, open_minimum=True
        ),
    ] = 0.8
    """Factor on the step after each rejection by the line search."""
    entropy_coef: Coef = 0.0
    value_learning_rate: Annotated[Coef, Coefficient(("value_lr", "critic_learning_rate", "critic_lr", "vf_lr"))] = 1e-3
    """Learning rate of the value function."""
    discount: Coef | None = None
    """Discount factor; none is 0.95 -> 0.99 if actions are continuous, else 0.99."""

    by_actions: ClassVar[Mapping[str, tuple[Any, Any]]] = {"discount": ("0.95 -> 0.99", 0.99)}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "conjugate_steps", "line_search_steps", "value_epochs", "value_minibatches")


class _Search(NamedTuple):
    """State of the line search."""

    tried: jax.Array
    """int32 `[]`: number of lengths tried so far."""
    accepted: jax.Array
    """bool `[]`."""
    parameters: jax.Array
    """`[P]`: the accepted parameters, or those before the step until one is accepted."""
    gain: jax.Array
    """float32 `[]`: improvement of the objective."""
    kl: jax.Array
    """float32 `[]`: KL divergence from the policy before."""
    first_kl: jax.Array
    """float32 `[]`: KL divergence of the full step."""


@dataclass(frozen=True)
class Algorithm(ActorCriticAlgorithm):
    """TRPO: a natural gradient step of the policy, then a fit of the value function."""

    Config: ClassVar[type] = Config
    NetworkConfig: ClassVar[type] = HalfBoxNetworkConfig

    def init(self, key: Key, params: PyTree, example: Rollout) -> Learner:
        """Return a learner with these parameters. Its optimiser covers only the critic's."""
        _, critic = self.network.split(params)
        return Learner(params, self.optimiser.init(critic))

    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Make one update: advantages, a natural gradient step of the policy, and a fit of the value function."""
        policy_key, value_key = jax.random.split(key)
        actor, critic = self.network.split(learner.params)
        advantages, targets = advantages_of(rollout, coef["discount"], coef["gae_lambda"])
        actor, metrics = self.improve(actor, critic, rollout, advantages, coef, policy_key)
        critic, state, errors = self.fit(actor, critic, learner.optimiser, rollout, targets, coef, value_key)
        metrics |= errors | rollout_metrics(rollout, advantages, targets)
        metrics["loss/total"] = metrics["loss/policy"] + metrics["loss/entropy"] + metrics["loss/value"]
        return Learner(self.network.merge(actor, critic), state), metrics

    # --- the policy

    def improve(
        self, actor: PyTree, critic: PyTree, rollout: Rollout, advantages: jax.Array, coef: Metrics, key: Key
    ) -> tuple[PyTree, Metrics]:
        """Take a natural gradient step; return the actor's parameters, and metrics."""
        valid = validity(rollout)
        if self.config.standardise_advantages:
            advantages = standardise(advantages, valid)
        start, unravel = ravel_pytree(actor)

        def by_kernels(parameters: jax.Array) -> Distribution:
            return self.policies(self.network.merge(unravel(parameters), critic), rollout)

        def by_features(parameters: jax.Array) -> Distribution:
            return self._by_features(self.network.merge(unravel(parameters), critic), rollout)

        def losses(policy: Distribution) -> tuple[jax.Array, jax.Array]:
            log_ratio = policy.log_prob(rollout.action) - rollout.log_prob
            entropy = weighted_mean(policy.entropy(key), valid)
            return surrogate_loss(log_ratio, advantages, valid), entropy

        def objective(policy: Distribution) -> jax.Array:
            loss, entropy = losses(policy)
            return coef["entropy_coef"] * entropy - loss

        # --- the direction, with J, the Jacobian of the policy's outputs
        before, jacobian, transposed, policy_of = kernels.linearise(by_kernels, start, by_features)

        def divergence(policy: Distribution) -> jax.Array:
            return weighted_mean(before.kl(policy), valid)

        _, hessian = jax.linearize(jax.grad(divergence), before)

        def curvature(vector: jax.Array) -> jax.Array:
            """Return (F + damping · 1) v with F = Jᵀ H J, where H is the Hessian of the divergence in the outputs."""
            return across.mean(transposed(hessian(jacobian(vector)))) + coef["damping"] * vector

        old, slope = jax.value_and_grad(objective)(before)
        gradient = across.mean(transposed(slope))
        direction, residual = conjugate_gradients(curvature, gradient, self.config.conjugate_steps)
        # --- the step: as long as the quadratic model of the divergence allows, shortened until it is accepted
        length = 2 * coef["target_kl"] / jnp.maximum(jnp.vdot(direction, gradient - residual), 1e-12)
        step = jnp.sqrt(length) * direction

        def attempt(search: _Search) -> _Search:
            parameters = start + coef["line_search_shrink"] ** search.tried * step
            policy = policy_of(parameters)
            gain, kl = across.mean((objective(policy) - old, divergence(policy)))
            accepted = (gain > 0) & (kl <= coef["target_kl"])
            return _Search(
                tried=search.tried + 1,
                accepted=accepted,
                parameters=jnp.where(accepted, parameters, start),
                gain=jnp.where(accepted, gain, 0.0),
                kl=jnp.where(accepted, kl, 0.0),
                first_kl=jnp.where(search.tried == 0, kl, search.first_kl),
            )

        def goes_on(search: _Search) -> jax.Array:
            return ~search.accepted & (search.tried < self.config.line_search_steps)

        zero = jnp.zeros_like(old)
        found = jax.lax.while_loop(goes_on, attempt, _Search(jnp.int32(0), jnp.bool(False), start, zero, zero, zero))
        # --- metrics
        policy_loss, entropy = losses(before)
        norm = jnp.linalg.norm(gradient)
        log_ratio = policy_of(found.parameters).log_prob(rollout.action) - rollout.log_prob
        metrics = policy_metrics(before, entropy, log_ratio, valid) | {
            "loss/policy": policy_loss,
            "loss/entropy": -coef["entropy_coef"] * entropy,
            "gradient/norm": norm,
            "trust_region/accepted": found.accepted.astype(jnp.float32),
            "trust_region/backtracks": (found.tried - found.accepted).astype(jnp.float32),
            "trust_region/kl_full_step": found.first_kl,
            "trust_region/kl": found.kl,
            "trust_region/gain": found.gain,
            "trust_region/residual": jnp.linalg.norm(residual) / jnp.maximum(norm, 1e-12),
        }
        return unravel(found.parameters), metrics

    def _by_features(self, params: PyTree, rollout: Rollout) -> Distribution:
        """Return the policy `[T, N]`, computed from features, which support forward-mode differentiation."""
        network, seen = self.network, (rollout.carry, rollout.obs, rollout.reset)
        features = (
            network.features(params, *seen)[1] if network.is_recurrent else network.actor_features(params, *seen)[1]
        )
        return network.policy(params, features)

    # --- the values

    def fit(
        self,
        actor: PyTree,
        critic: PyTree,
        state: PyTree,
        rollout: Rollout,
        targets: jax.Array,
        coef: Metrics,
        key: Key,
    ) -> tuple[PyTree, PyTree, Metrics]:
        """Fit the value function to a rollout; return the critic's parameters, the optimiser state, and metrics."""
        config, whole = self.config, self.network.critic_is_recurrent
        data = rollout.obs, rollout.reset, targets, rollout.valid
        if not whole:  # single steps
            data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)
        size = targets.shape[1] if whole else targets.size
        orders = minibatches.shuffled_epochs(key, size, config.value_minibatches, config.value_epochs)
        packed, unpack = self.optimiser.pack(critic)
        # As one vector, the critic's parameters are the same alone; merged with the actor's, they would be copied.
        is_alone = not whole and isinstance(packed, jax.Array) and isinstance(self.network, ActorCriticNetwork)

        def form(packed: PyTree) -> PyTree:
            return self.network.critic_alone(unpack(packed)) if is_alone else unpack(packed)

        def loss(critic: PyTree, indices: jax.Array) -> tuple[jax.Array, tuple[()]]:
            obs, reset, wanted, valid = minibatches.take(data, indices, axis=1 if whole else 0)
            params = critic if is_alone else self.network.merge(actor, critic)
            if whole:
                carry = minibatches.take(rollout.carry, indices, axis=0)
                values = self.network.unroll(params, carry, obs, reset)[2]
            else:
                values = self.network.value(params, rollout.carry, obs)
            return value_loss(values, wanted, None if isinstance(valid, tuple) else valid), ()

        def gradient_step(carried: Any, indices: jax.Array) -> tuple[Any, jax.Array]:
            packed, state = carried
            (error, _), gradients = kernels.value_and_grad(lambda critic: loss(critic, indices), packed, form)
            step = self.optimiser.step(packed, state, gradients, coef["value_learning_rate"], None, coef)
            return (step.params, step.state), jnp.stack([error, step.gradient_norm])

        (packed, state), rows = kernels.gradient_steps(gradient_step, (packed, state), orders)
        error, norm = jnp.mean(rows, axis=0)
        return unpack(packed), state, {"loss/value": error, "gradient/value_norm": norm}


def conjugate_gradients(
    product: Callable[[jax.Array], jax.Array], target: jax.Array, steps: int
) -> tuple[jax.Array, jax.Array]:
    """Solve A x = b for a symmetric positive definite A, given by its products; return x and b − A x, `[P]` each.

    Args:
        product: function that maps v to A v.
        target: b, `[P]`.
        steps: maximum number of products; P products give the exact solution, up to rounding.

    >>> matrix, target = jnp.array([[2.0, 1.0], [1.0, 3.0]]), jnp.array([3.0, 4.0])
    >>> solution, residual = conjugate_gradients(lambda vector: matrix @ vector, target, steps=2)
    >>> [round(float(x), 5) for x in solution]
    [1.0, 1.0]
    """
    enough = jnp.square(SOLVED) * jnp.vdot(target, target)

    def goes_on(carried: Any) -> jax.Array:
        count, _, _, _, error = carried
        return (count < steps) & (error > enough)

    def advance(carried: Any) -> Any:
        count, solution, residual, direction, error = carried
        image = product(direction)
        length = error / jnp.vdot(direction, image)
        residual = residual - length * image
        smaller = jnp.vdot(residual, residual)
        return count + 1, solution + length * direction, residual, residual + smaller / error * direction, smaller

    begin = jnp.int32(0), jnp.zeros_like(target), target, target, jnp.vdot(target, target)
    _, solution, residual, _, _ = jax.lax.while_loop(goes_on, advance, begin)
    return solution, residual
