"""Random network distillation (Burda et al., 2018): a bonus for observations that the agent has rarely seen.

A predictor learns to give the outputs of a fixed random network; where it errs, the observation is new:

    e(s') = mean (predictor(x) − target(x))²,   x = clip((s' − mean) / std, −5, 5)
    r = task_coef · r_environment + novelty_coef · e / std(Σ γ^k e)

See docs/rewards.md for the details.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from lehr.config import Coef, check_counts
from lehr.errors import InputError
from lehr.maths.losses import weighted_mean
from lehr.maths.normalise import (
    RewardScaling,
    RunningStatistics,
    initial_scaling,
    initial_statistics,
    normalise,
    scale_rewards,
    update_statistics,
)
from lehr.maths.optimise import Optimiser
from lehr.networks import Network
from lehr.rewards.base import RewardModel
from lehr.rewards.inputs import Inputs, Judge, Shapes, judge_network, observation_inputs
from lehr.schedules.coefficient import Coefficient
from lehr.spaces import Space, Spaces
from lehr.types import Key, Learner, Metrics, PyTree, Rollout

CLIP = 5.0
"""Largest magnitude of a normalised observation."""
OPTIMISER = Optimiser("adam")


@dataclass(frozen=True)
class NoveltySettings:
    """Settings of the bonus."""

    novelty_sizes: tuple[int, ...] = (64, 64)
    """Sizes of the hidden layers of the predictor and of the random network."""
    novelty_outputs: int = 64
    """Number of outputs of the random network."""
    novelty_updates: int = 4
    """Gradient steps of the predictor per update."""
    novelty_share: float = 0.25
    """Share of a rollout's steps that the predictor learns from, so that novelty does not wear off too fast."""
    novelty_coef: Annotated[Coef, Coefficient(("novelty_weight", "intrinsic_coef"))] = 1.0
    """Weight of the novelty bonus."""
    task_coef: Annotated[Coef, Coefficient(("task_weight", "extrinsic_coef"))] = 1.0
    """Weight of the environment's reward."""
    novelty_learning_rate: Annotated[Coef, Coefficient(("novelty_lr",))] = 1e-3
    """Learning rate of the novelty predictor."""


class Fixed(NamedTuple):
    """What the bonus remembers besides the predictor."""

    target: PyTree
    """Parameters of the random network, which never change."""
    observations: RunningStatistics
    """Of the network's inputs."""
    bonus: RewardScaling
    """Of the discounted sum of errors."""


@dataclass(frozen=True)
class Novelty(RewardModel):
    """The environment's reward plus a bonus for new observations."""

    Config: ClassVar[type] = NoveltySettings
    space: Space
    config: NoveltySettings

    @classmethod
    def build(cls, spaces: Spaces, config: NoveltySettings) -> "Novelty":
        """Return the bonus for these observations."""
        check_counts(config, "novelty_outputs", "novelty_updates")
        if not 0 < config.novelty_share <= 1:
            raise InputError(f"novelty_share is {config.novelty_share}; it must be above 0 and at most 1.")
        return cls(spaces.observation, config)

    @property
    def needs(self) -> frozenset[str]:
        """The observation after each step, the last of an episode included."""
        return frozenset({"final_obs"})

    @property
    def shapes(self) -> Shapes:
        """The shapes of what the networks see."""
        one = jax.eval_shape(jax.vmap(self.space.sample), jax.random.split(jax.random.key(0), 1))
        return Shapes.of(jax.eval_shape(self.inputs, one))

    @property
    def network(self) -> Network[Judge]:
        """The architecture of both networks."""
        return judge_network(self.shapes, self.config.novelty_sizes, self.config.novelty_outputs, "relu")[0]

    def inputs(self, obs: PyTree) -> Inputs:
        """Return observations `[B, ...]` as floats."""
        return observation_inputs(self.space, obs)

    def init(self, key: Key, example: Rollout) -> Learner:
        """Return two networks with random parameters, and empty statistics."""
        sizes = self.config.novelty_sizes, self.config.novelty_outputs, "relu"
        initialise = judge_network(self.shapes, *sizes)[1]
        params, target = (initialise(k) for k in jax.random.split(key))
        one = jax.eval_shape(lambda obs: jax.tree.map(lambda x: x[0], self._seen(obs)), example.final_obs)
        scaling = initial_scaling(example.reward.shape[1])
        return Learner(params, OPTIMISER.init(params), Fixed(target, initial_statistics(one), scaling))

    def _seen(self, obs: PyTree) -> Inputs:
        """Observations `[T, N, ...]` as inputs `[T · N, ...]`."""
        return self.inputs(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs))

    def errors(self, params: PyTree, target: PyTree, inputs: Inputs) -> jax.Array:
        """Return the mean squared error of the predictor, `[B]`."""
        wanted = jax.lax.stop_gradient(self.network.apply(target, "__call__", *inputs))
        return jnp.mean(jnp.square(self.network.apply(params, "__call__", *inputs) - wanted), axis=-1)

    def judged(self, learner: Learner, rollout: Rollout, coef: Metrics) -> tuple[Fixed, Inputs, jax.Array]:
        """Return the statistics with this rollout's, the inputs `[T · N, ...]`, and the bonus `[T, N]`."""
        fixed, inputs = learner.auxiliary, self._seen(rollout.final_obs)
        valid = () if isinstance(rollout.valid, tuple) else rollout.valid.reshape(-1)
        statistics = update_statistics(fixed.observations, inputs, valid)
        inputs = normalise(statistics, inputs, CLIP)
        errors = self.errors(learner.params, fixed.target, inputs).reshape(rollout.reward.shape)
        # An episode that ends does not end the novelty, so the sum goes on over it.
        goes_on = jnp.zeros(errors.shape, bool)
        bonus, scaled = scale_rewards(fixed.bonus, errors, goes_on, coef["discount"], rollout.valid)
        return fixed._replace(observations=statistics, bonus=bonus), inputs, scaled

    def reward(self, learner: Learner, rollout: Rollout, coef: Metrics) -> jax.Array:
        """Return task_coef · r_environment + novelty_coef · bonus."""
        _, _, bonus = self.judged(learner, rollout, coef)
        if not isinstance(rollout.valid, tuple):
            bonus = jnp.where(rollout.valid, bonus, 0.0)
        return coef["task_coef"] * rollout.reward + coef["novelty_coef"] * bonus

    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Fit the predictor to a share of the rollout, and update the statistics."""
        fixed, inputs, bonus = self.judged(learner, rollout, coef)
        weight = jnp.ones(bonus.size) if isinstance(rollout.valid, tuple) else rollout.valid.reshape(-1)
        updates = self.config.novelty_updates
        rows = max(1, round(self.config.novelty_share * bonus.size / updates))
        order = jax.random.permutation(key, bonus.size)[: rows * updates].reshape(updates, -1)

        def gradient_step(carried: Any, indices: jax.Array) -> tuple[Any, jax.Array]:
            params, state = carried
            some, counts = jax.tree.map(lambda x: x[indices], (inputs, weight))

            def loss(params: PyTree) -> jax.Array:
                return weighted_mean(self.errors(params, fixed.target, some), counts)

            error, gradients = jax.value_and_grad(loss)(params)
            step = OPTIMISER.improve(params, state, gradients, coef["novelty_learning_rate"], None)
            return (step.params, step.state), error

        (params, state), errors = jax.lax.scan(gradient_step, (learner.params, learner.optimiser), order)
        metrics = {"novelty/error": jnp.mean(errors), "novelty/bonus": weighted_mean(bonus.reshape(-1), weight)}
        return Learner(params, state, fixed), metrics
