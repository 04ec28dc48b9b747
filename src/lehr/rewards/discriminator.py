"""The discriminator of generative adversarial imitation learning (Ho & Ermon, 2016) as a reward model.

A network learns to tell the steps of an expert from those of the policy, and rewards what it takes for the expert's:

    D = sigmoid(f(x))        x: state and action, state alone, or state and next state
    L = −E_expert[log D] − E_policy[log(1 − D)] − discriminator_entropy_coef · H(D)
        + gradient_penalty_coef · E[(‖∇f‖ − gradient_norm)²]
    r = task_coef · r_environment + imitation_coef · r_D

See docs/rewards.md for the details.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from lehr import networks
from lehr.acting.agent import observed
from lehr.acting.demonstrations import read_demonstrations
from lehr.config import Coef, check_counts
from lehr.errors import InputError
from lehr.maths import across
from lehr.maths.losses import weighted_mean
from lehr.maths.optimise import Optimiser
from lehr.rewards.base import RewardModel
from lehr.rewards.inputs import Inputs, Judge, Rows, Shapes, action_inputs, joined, judge_network, observation_inputs
from lehr.schedules.coefficient import Coefficient
from lehr.spaces import Spaces
from lehr.types import Key, Learner, Loaded, MetricRow, Metrics, PyTree, Rollout

Sees = Literal["state-action", "state", "transition"]
Form = Literal["positive", "negative", "logit"]


@dataclass(frozen=True)
class DiscriminatorSettings:
    """Settings of the discriminator."""

    demonstrations: str | None = None
    """Demonstrations of an expert: a file that 'lehr record' wrote, or minari: and the id of a Minari data set."""
    demonstration_episodes: int | None = None
    """Number of episodes to use, from the first; none uses all of them."""
    discriminator_input: Sees = "state-action"
    """What the discriminator judges: state-action, state, or transition (state and next state, without actions)."""
    imitation_reward: Form = "positive"
    """Form of the reward: positive, −log(1 − D), which favours long episodes; negative, log D, which favours short
    ones; logit, log D − log(1 − D)."""
    discriminator_sizes: tuple[int, ...] = (64, 64)
    """Sizes of its hidden layers."""
    discriminator_updates: int = 16
    """Gradient steps of the discriminator per update."""
    discriminator_batch: int = 256
    """Steps of the expert, and as many of the policy, per gradient step."""
    spectral_normalisation: bool = False
    """Divide each of its weight matrices by its largest singular value."""
    absorbing_states: bool = False
    """Also learn a reward for what comes after a terminal state, for tasks whose episodes end early."""
    imitation_coef: Annotated[Coef, Coefficient(("imitation_weight",))] = 1.0
    """Weight of the discriminator's reward."""
    task_coef: Annotated[Coef, Coefficient(("task_weight", "extrinsic_coef"))] = 0.0
    """Weight of the environment's reward."""
    discriminator_learning_rate: Annotated[Coef, Coefficient(("discriminator_lr", "disc_lr"))] = 3e-4
    """Learning rate of the discriminator."""
    gradient_penalty_coef: Annotated[Coef, Coefficient(("gradient_penalty", "grad_penalty_coef"))] | None = 0.3
    """Weight of the gradient penalty of the discriminator; none leaves it out."""
    gradient_norm: Annotated[Coef, Coefficient(("gradient_target",))] = 0.0
    """Norm of the gradient that the penalty aims at; 1 is Wasserstein's, 0 lets the reward become flat."""
    discriminator_entropy_coef: Annotated[Coef, Coefficient(("disc_ent_coef",))] = 1e-3
    """Weight of the entropy of the discriminator's decisions in its loss."""
    label_smoothing: Annotated[Coef, Coefficient(("label_smooth",), maximum=1.0)] = 0.0
    """Smoothing s of the discriminator's labels; they are 1 − s / 2 for the expert and s / 2 for the policy."""


@dataclass(frozen=True)
class Discriminator(RewardModel):
    """Rewards steps that look like those of demonstrations."""

    Config: ClassVar[type] = DiscriminatorSettings
    learns_first: ClassVar[bool] = True
    spaces: Spaces
    config: Any
    """An instance of `DiscriminatorSettings`, or of the settings of an algorithm that inherits from it."""

    @classmethod
    def build(cls, spaces: Spaces, config: Any) -> "Discriminator":
        """Return the discriminator for these spaces."""
        check_counts(config, "discriminator_updates", "discriminator_batch", "demonstration_episodes")
        return cls(spaces, config)

    @property
    def needs(self) -> frozenset[str]:
        """What it judges besides observations."""
        return frozenset(
            {"state-action": {"taken"}, "transition": {"final_obs"}}.get(self.config.discriminator_input, ())
        )

    def load(self) -> Loaded:
        """Read the demonstrations."""
        source, episodes = self.config.demonstrations, self.config.demonstration_episodes
        if source is None:
            raise InputError(
                "demonstrations is none, but there is nothing to imitate without them; record some with 'lehr record "
                "RUN --out demos.npz' and give that file, or give minari:ID."
            )
        found, digest = read_demonstrations(source, self.spaces)
        if episodes is not None and episodes > len(found.lengths):
            raise InputError(
                f"demonstration_episodes is {episodes}, but '{source}' has {len(found.lengths)} episodes; give at most "
                "as many."
            )
        found = found if episodes is None else found.first(episodes)
        data = {"obs": found.obs, "terminated": found.terminated}
        if "final_obs" in self.needs:
            data["final_obs"] = found.next_obs
        if "taken" in self.needs:
            data["taken"] = found.actions
        summary = f"Demonstrations from '{source}': {found.summary}."
        return Loaded(jax.tree.map(jnp.asarray, data), ((source, digest),), summary)

    # --- the network

    @property
    def shapes(self) -> Shapes:
        """The shapes of what the network sees."""
        observation, action = (
            jax.eval_shape(jax.vmap(space.sample), jax.random.split(jax.random.key(0), 1)) for space in self.spaces
        )
        steps = {"obs": observation, "taken": action, "final_obs": observation}
        return Shapes.of(jax.eval_shape(self.inputs, steps))

    @property
    def network(self) -> networks.Network[Judge]:
        """The network f."""
        return judge_network(self.shapes, self.config.discriminator_sizes, 1)[0]

    def init(self, key: Key, example: Rollout) -> Learner:
        """Return the first parameters and the state of their optimiser."""
        network_key, vector_key = jax.random.split(key)
        params = judge_network(self.shapes, self.config.discriminator_sizes, 1)[1](network_key)
        vectors = singular_vectors(params, vector_key) if self.config.spectral_normalisation else ()
        return Learner(params, OPTIMISER.init(params), vectors)

    def logits(self, params: PyTree, vectors: PyTree, inputs: Inputs) -> jax.Array:
        """Return f(x), float32 `[B]`."""
        if self.config.spectral_normalisation:
            params, _ = spectrally_normalised(params, vectors)
        return self.network.apply(params, "__call__", *inputs)[:, 0]

    # --- what it sees

    def normalised(self, learner: Learner, statistics: Any) -> Learner:
        """Normalise the expert's observations with the statistics of the policy's."""
        seen = {name: observed(statistics, learner.data[name]) for name in ("obs", "final_obs") if name in learner.data}
        return learner._replace(data=learner.data | seen)

    def inputs(self, steps: dict[str, PyTree]) -> Inputs:
        """Return steps, leaves `[B, ...]`, as the network sees them; the last entry marks absorbing states."""
        parts = [observation_inputs(self.spaces.observation, steps["obs"])]
        if "taken" in self.needs:
            parts.append((action_inputs(self.spaces.action, steps["taken"]),))
        if "final_obs" in self.needs:
            parts.append(observation_inputs(self.spaces.observation, steps["final_obs"]))
        if self.config.absorbing_states:
            parts.append((jnp.zeros((len(parts[0][0]), 1)),))
        return joined(*parts)

    def rows(self, steps: dict[str, PyTree], indices: jax.Array) -> Rows:
        """Return some of the steps; with absorbing states, also what comes after those that terminated."""
        chosen = jax.tree.map(lambda x: x[indices], steps)
        inputs = self.inputs(chosen)
        weight = chosen.get("valid", jnp.ones(len(indices))).astype(jnp.float32)
        if not self.config.absorbing_states:
            return Rows(inputs, weight)
        after = weight * chosen["terminated"].astype(jnp.float32)
        both = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), inputs, absorbing(inputs))
        return Rows(both, jnp.concatenate([weight, after]))

    def steps_of(self, rollout: Rollout) -> dict[str, PyTree]:
        """Return what it uses of a rollout, leaves `[T · N, ...]`."""
        steps = {"obs": rollout.obs, "terminated": rollout.terminated}
        steps |= {name: getattr(rollout, name) for name in self.needs}
        if not isinstance(rollout.valid, tuple):
            steps["valid"] = rollout.valid
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)

    @property
    def batch_size(self) -> int:
        """Steps of the expert, and as many of the policy, per gradient step and device."""
        return across.share(self.config.discriminator_batch, "discriminator_batch")

    def batches(self, learner: Learner, steps: dict[str, PyTree], key: Key) -> tuple[Rows, Rows]:
        """Draw steps of the expert and of the policy."""
        size, keys = self.batch_size, jax.random.split(key)
        drawn = (
            jax.random.randint(k, (size,), 0, len(data["terminated"]))
            for k, data in zip(keys, (learner.data, steps), strict=True)
        )
        expert, policy = (self.rows(data, indices) for data, indices in zip((learner.data, steps), drawn, strict=True))
        return expert, policy

    # --- rewards

    def reward(self, learner: Learner, rollout: Rollout, coef: Metrics) -> jax.Array:
        """Return task_coef · r_environment + imitation_coef · r_D."""
        inputs = self.inputs(self.steps_of(rollout))
        judged = imitation_reward(self.logits(learner.params, learner.auxiliary, inputs), self.config.imitation_reward)
        judged = judged.reshape(rollout.reward.shape)
        if self.config.absorbing_states:
            one = jax.tree.map(lambda x: x[:1], absorbing(inputs))
            after = imitation_reward(self.logits(learner.params, learner.auxiliary, one), self.config.imitation_reward)
            # After a terminal state, the absorbing state is rewarded for ever: Σ γ^t r for t = 1, 2, ...
            total = after[0] * coef["discount"] / jnp.maximum(1 - coef["discount"], 1e-3)
            judged = judged + jnp.where(rollout.terminated, total, 0.0)
        if not isinstance(rollout.valid, tuple):
            judged = jnp.where(rollout.valid, judged, 0.0)
        return coef["task_coef"] * rollout.reward + coef["imitation_coef"] * judged

    # --- learning

    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Make a few gradient steps, each on a batch of the expert's steps and one of the policy's."""
        steps, data = self.steps_of(rollout), learner.data

        def gradient_step(learner: Learner, key: Key) -> tuple[Learner, MetricRow]:
            batch_key, loss_key = jax.random.split(key)
            expert, policy = self.batches(learner._replace(data=data), steps, batch_key)
            loss = partial(self.loss, vectors=learner.auxiliary, expert=expert, policy=policy, coef=coef, key=loss_key)
            gradients, metrics = jax.grad(loss, has_aux=True)(learner.params)
            rate = coef["discriminator_learning_rate"]
            step = OPTIMISER.improve(learner.params, learner.optimiser, gradients, rate, None)
            vectors = learner.auxiliary
            if self.config.spectral_normalisation:
                _, vectors = spectrally_normalised(step.params, vectors)
            return learner._replace(params=step.params, optimiser=step.state, auxiliary=vectors), MetricRow.of(metrics)

        keys = jax.random.split(key, self.config.discriminator_updates)
        learner, rows = jax.lax.scan(gradient_step, learner._replace(data=()), keys)
        return learner._replace(data=data), rows.mean()

    def loss(
        self, params: PyTree, vectors: PyTree, expert: Rows, policy: Rows, coef: Metrics, key: Key
    ) -> tuple[jax.Array, Metrics]:
        """Return the loss of a batch, and metrics."""
        judge = partial(self.logits, params, vectors)
        real, fake = judge(expert.inputs), judge(policy.inputs)
        smoothing = coef["label_smoothing"] / 2
        classification = weighted_mean(cross_entropy(real, 1 - smoothing), expert.weight)
        classification += weighted_mean(cross_entropy(fake, smoothing), policy.weight)
        entropy = (
            weighted_mean(bernoulli_entropy(real), expert.weight)
            + weighted_mean(bernoulli_entropy(fake), policy.weight)
        ) / 2
        total = classification - coef["discriminator_entropy_coef"] * entropy
        metrics = {
            "discriminator/loss": classification,
            "discriminator/entropy": entropy,
            "discriminator/expert_right": weighted_mean((real > 0).astype(jnp.float32), expert.weight),
            "discriminator/policy_right": weighted_mean((fake < 0).astype(jnp.float32), policy.weight),
        }
        if "gradient_penalty_coef" in coef:
            size = self.batch_size
            one, other = (jax.tree.map(lambda x: x[:size], rows.inputs) for rows in (expert, policy))
            penalties = gradient_penalty(judge, one, other, coef["gradient_norm"], key)
            penalty = weighted_mean(penalties, policy.weight[:size])
            total += coef["gradient_penalty_coef"] * penalty
            metrics["discriminator/gradient_penalty"] = penalty
        return total, metrics


OPTIMISER = Optimiser("adam")


def imitation_reward(logits: jax.Array, form: str) -> jax.Array:
    """The reward of steps with these logits: −log(1 − D), log D, or log D − log(1 − D) = f.

    >>> [round(float(imitation_reward(jnp.float32(0.0), form)), 4) for form in ("positive", "negative", "logit")]
    [0.6931, -0.6931, 0.0]
    """
    match form:
        case "positive":
            return jax.nn.softplus(logits)
        case "negative":
            return -jax.nn.softplus(-logits)
    return logits


def cross_entropy(logits: jax.Array, target: Any) -> jax.Array:
    """−t log D − (1 − t) log(1 − D), elementwise.

    >>> round(float(cross_entropy(jnp.float32(0.0), 1.0)), 4)
    0.6931
    """
    return jax.nn.softplus(logits) - target * logits


def bernoulli_entropy(logits: jax.Array) -> jax.Array:
    """−D log D − (1 − D) log(1 − D), elementwise.

    >>> round(float(bernoulli_entropy(jnp.float32(0.0))), 4)
    0.6931
    """
    return jax.nn.softplus(logits) - jax.nn.sigmoid(logits) * logits


def gradient_penalty(judge: Any, expert: Inputs, policy: Inputs, norm: Any, key: Key) -> jax.Array:
    """(‖∇f(x)‖ − norm)² at random points x between the expert's and the policy's steps, `[B]`."""
    share = jax.random.uniform(key, expert[0].shape[:1])

    def between(one: jax.Array, other: jax.Array) -> jax.Array:
        weight = share.reshape(-1, *(1,) * (one.ndim - 1))
        return weight * one + (1 - weight) * other

    def total(inputs: Inputs) -> jax.Array:
        return jnp.sum(judge(inputs))

    slopes = jax.grad(total)(jax.tree.map(between, expert, policy))
    squares = sum(jnp.sum(jnp.square(slope).reshape(len(slope), -1), axis=1) for slope in slopes)
    return jnp.square(jnp.sqrt(squares + 1e-12) - norm)


def absorbing(inputs: Inputs) -> Inputs:
    """The absorbing state, in the shape of these inputs: all zeros but the last entry of the vector, which is 1."""
    *image, vector = jax.tree.map(jnp.zeros_like, inputs)
    return (*image, vector.at[:, -1].set(1.0))


# Spectral normalisation ----------------------------------------------------------------------------------------------


def singular_vectors(params: PyTree, key: Key) -> dict[str, jax.Array]:
    """Return a first guess of the largest singular vector of each weight matrix, a unit vector, by its path."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.ndim > 1:
            key, drawn = jax.random.split(key)
            found[jax.tree_util.keystr(path)] = _unit(jax.random.normal(drawn, leaf.shape[-1:]))
    return found


def spectrally_normalised(params: PyTree, vectors: dict[str, jax.Array]) -> tuple[PyTree, dict[str, jax.Array]]:
    """Divide each weight matrix by its largest singular value (Miyato et al., 2018), estimated by a power iteration.

    Returns the parameters, and the vectors after the iteration, which are the guess of the next.
    """
    better = {}

    def normalise(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if name not in vectors:
            return leaf
        matrix = leaf.reshape(-1, leaf.shape[-1])
        fixed = jax.lax.stop_gradient(matrix)
        left = _unit(fixed @ vectors[name])
        better[name] = right = _unit(left @ fixed)
        return leaf / (left @ matrix @ right)

    return jax.tree_util.tree_map_with_path(normalise, params), better


def _unit(vector: jax.Array) -> jax.Array:
    return vector / jnp.maximum(jnp.linalg.norm(vector), 1e-12)
