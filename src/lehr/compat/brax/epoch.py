"""Brax's PPO as pure functions: one training step, and an epoch of them, which is compiled as one program.

Keys, minibatches and estimators are Brax's, so with the same seed only rounding differs from Brax's own training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lehr import kernels
from lehr.acting.rollout import scan_unroll
from lehr.compat.brax import upstream
from lehr.compat.brax.loss import LossSettings, NetworkParams, Transitions, ppo_loss
from lehr.compat.brax.pixels import without_pixels
from lehr.compat.brax.random_keys import action_keys
from lehr.compat.brax.segments import MinibatchDraw, TrainingSizes, by_segment, draw_minibatches, gatherer
from lehr.envs.suites.lean_step import LeanStep
from lehr.maths.optimise import Optimiser
from lehr.schedules import env_steps
from lehr.schedules.bundle import Coefficients
from lehr.types import Key, MetricRow, Metrics, PyTree


class BraxParams(NamedTuple):
    """Everything a policy is made from. Users may keep a reference, so these buffers are never donated."""

    networks: NetworkParams
    normalizer: PyTree
    """Brax's `RunningStatisticsState`."""

    @property
    def as_tuple(self) -> tuple[PyTree, PyTree, PyTree]:
        """Normalizer, policy and value, in Brax's order."""
        return self.normalizer, self.networks.policy, self.networks.value


class CarriedState(NamedTuple):
    """The rest of the training state."""

    optimiser: PyTree
    rate: jax.Array
    """float32 `[]`: the learning rate, if it is adaptive."""
    updates: jax.Array
    """uint32 `[]`: training steps so far; times `steps_per_update`, this is the clock."""
    environments: tuple[jax.Array, ...]
    """See `LeanStep.kept`."""


class BraxRollout(NamedTuple):
    """`U · T` steps of all environments."""

    obs: PyTree
    """Leaves `[U · T + 1, N, ...]`."""
    steps: Transitions
    """Leaves `[U · T, N, ...]`, without the observations."""
    info: dict[str, PyTree]
    """Leaves `[U · T, N, ...]`: the rest of what `outcome` returns."""


@dataclass(frozen=True, eq=False)
class BraxPPO:
    """Everything about a training that is fixed when it is compiled."""

    environments: LeanStep
    network: Any
    """Brax's `PPONetworks`."""
    make_policy: Callable[..., Any]
    loss: LossSettings
    sizes: TrainingSizes
    training_steps: int
    """Training steps in one epoch."""
    max_grad_norm: float | None
    normalize_until_count: int | None
    bootstrap_on_timeout: bool
    augment_pixels: bool
    adaptive: Any
    """The controller that adapts the learning rate after every minibatch, or `None`."""
    report: Callable[..., None] | None
    """Called on the host with the episodes and metrics of each training step."""

    @property
    def optimiser(self) -> Optimiser:
        """Adam with optax's own options."""
        return Optimiser("adam", (("eps", 1e-8),))

    def epoch(
        self, coefficients: Coefficients, params: BraxParams, carried: CarriedState, key: Key
    ) -> tuple[BraxParams, CarriedState, Metrics]:
        """All training steps until the next evaluation or reset.

        Metrics are means over the training steps, except for coefficients, of which the last applied value is returned.
        """

        def one(state: Any, _: None) -> tuple[Any, tuple[Metrics, Metrics]]:
            params, carried, key = state
            params, carried, key, metrics, applied = self.training_step(coefficients, params, carried, key)
            return (params, carried, key), (jax.tree.map(jnp.mean, metrics), applied)

        state, (metrics, applied) = jax.lax.scan(one, (params, carried, key), length=self.training_steps)
        params, carried, _ = state
        return params, carried, jax.tree.map(jnp.mean, metrics) | {name: x[-1] for name, x in applied.items()}

    def training_step(
        self, coefficients: Coefficients, params: BraxParams, carried: CarriedState, key: Key
    ) -> tuple[BraxParams, CarriedState, Key, Metrics, Metrics]:
        """One rollout and the learning on it.

        Returns:
            The parameters, the rest of the state, the next key, metrics `[passes, minibatches]` and coefficients `[]`.
        """
        learn_key, rollout_key, key = jax.random.split(key, 3)

        # --- coefficients: at the env steps before this rollout, the same for all gradient steps on it
        coef = coefficients.values(coefficients.init(), env_steps(carried.updates, self.sizes.steps_per_update))

        # --- rollout
        environments, rollout = self.rollout(params, carried.environments, rollout_key)
        if self.bootstrap_on_timeout:
            rollout = bootstrapped(rollout, coef["discounting"])

        # --- normalisation; an adaptive rate compares with the policy of the rollout, so it needs the old statistics
        updated = upstream.running_statistics.update(
            params.normalizer,
            without_pixels(jax.tree.map(lambda x: x[:-1], rollout.obs)),
            until_count=self.normalize_until_count,
        )
        normalizer = updated if self.adaptive is None else params.normalizer

        # --- minibatches, advantages, loss, gradient steps
        networks, optimiser, rate, metrics = self.learn(params.networks, carried, normalizer, rollout, coef, learn_key)

        # --- metrics
        applied = {name: value for name, value in coef.items() if name not in metrics}
        if self.report is not None:
            episodes = jax.tree.map(partial(by_segment, sizes=self.sizes), [rollout.info[name] for name in REPORTED])
            jax.debug.callback(self.report, *episodes, metrics | applied)
        carried = CarriedState(optimiser, rate, carried.updates + 1, environments)
        return BraxParams(networks, updated), carried, key, metrics, applied

    def rollout(
        self, params: BraxParams, environments: tuple[jax.Array, ...], key: Key
    ) -> tuple[tuple[jax.Array, ...], BraxRollout]:
        """Act for `U · T` steps."""
        policy = self.make_policy(params.as_tuple)
        keys = action_keys(key, self.sizes.unrolls, self.sizes.unroll_length)

        def observed(kept: tuple[jax.Array, ...]) -> PyTree:
            return self.environments.whole(kept).obs

        action, _ = jax.eval_shape(lambda kept, key: policy(observed(kept), key), environments, keys[0])
        stepper = kernels.stepper(self.environments.step, environments, action)

        def act(packed: PyTree, key: Key) -> tuple[PyTree, BraxRollout]:
            obs = observed(stepper.unpack(packed))
            action, extras = policy(obs, key)
            packed, info = stepper.step(packed, action)
            steps = Transitions(
                obs=(),
                raw_action=extras["raw_action"],
                log_prob=extras["log_prob"],
                policy=extras["distribution_params"],
                reward=info.pop("reward"),
                done=info.pop("done"),
                truncation=info.pop("truncation"),
                value=extras.get("value", ()),
            )
            return packed, BraxRollout(obs, steps, info)

        unroll = scan_unroll(divisor_of=len(keys))
        packed, rollout = jax.lax.scan(act, stepper.pack(environments), keys, unroll=unroll)
        environments = stepper.unpack(packed)
        # The observation after an unroll is the first one of the next: only that after the last unroll is missing.
        last = observed(environments)
        obs = jax.tree.map(lambda x, last: jnp.concatenate([x, last[None]]), rollout.obs, last)
        return environments, rollout._replace(obs=obs)

    def learn(
        self,
        params: NetworkParams,
        carried: CarriedState,
        normalizer: PyTree,
        rollout: BraxRollout,
        coef: Mapping[str, jax.Array],
        key: Key,
    ) -> tuple[NetworkParams, PyTree, jax.Array, Metrics]:
        """All gradient steps on a rollout.

        Returns:
            The parameters, the optimiser's state, the adaptive learning rate, and metrics `[passes, minibatches]`.
        """
        packed, unpack = self.optimiser.pack(params)
        gather = gatherer(rollout.obs, rollout.steps, self.sizes, self.augment_pixels)
        differentiate = jax.value_and_grad(ppo_loss, has_aux=True)

        def gradient_step(state: Any, draw: MinibatchDraw) -> tuple[Any, MetricRow]:
            packed, optimiser, rate = state
            (_, metrics), gradients = differentiate(
                unpack(packed), normalizer, gather(draw), draw.key, self.network, self.loss, coef
            )
            if self.adaptive is not None:
                rate = metrics["learning_rate"] = self._adapted(rate, metrics["kl_mean"])
            step = self.optimiser.step(
                packed,
                optimiser,
                gradients,
                coef["learning_rate"] if self.adaptive is None else rate,
                self.max_grad_norm,
            )
            return (step.params, step.state, rate), MetricRow.of(metrics)

        start = packed, carried.optimiser, carried.rate
        draws = draw_minibatches(key, self.sizes, self.augment_pixels)
        (packed, optimiser, rate), rows = jax.lax.scan(gradient_step, start, draws)
        table = rows.values.reshape(self.sizes.num_updates_per_batch, self.sizes.num_minibatches, -1)
        return unpack(packed), optimiser, rate, {name: table[..., index] for index, name in enumerate(rows.names)}

    def _adapted(self, rate: jax.Array, divergence: jax.Array) -> jax.Array:
        """The learning rate after a minibatch; as in Brax, an infinite divergence lowers it and NaN leaves it."""
        finite = jnp.minimum(divergence, jnp.finfo(jnp.float32).max)
        return self.adaptive.update(self.adaptive.init()._replace(value=rate), {"kl_mean": finite}).value


REPORTED = ("episode_metrics", "episode_done")
"""What is reported of episodes, in the order of Brax's arguments."""


def outcome(state: Any, bootstraps: bool, reports: bool) -> dict[str, PyTree]:
    """What training needs from Brax's state after a step."""
    names = ["truncation", *(["time_out"] if bootstraps else []), *(REPORTED if reports else [])]
    return {"reward": state.reward, "done": state.done} | {name: state.info[name] for name in names}


def bootstrapped(rollout: BraxRollout, discount: jax.Array) -> BraxRollout:
    """Add γ V(s_t) to the reward where the environment reports a time-out, as Brax does for the steps cut off."""
    steps = rollout.steps
    reward = steps.reward + discount * rollout.info["time_out"] * steps.value
    return rollout._replace(steps=steps._replace(reward=reward))
