"""Dreamer (Hafner et al., 2023), third version: learn a model of the environment, and behaviour in imagination.

A recurrent model with categorical latents learns from replayed sequences to predict observations, rewards and ends of
episodes. From every replayed state, the policy acts for some steps in the model alone; actor and critic learn from
these imagined steps. See docs/dreamer.md for the details.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from lehr.algorithms.base import Algorithm as Base
from lehr.algorithms.settings import Settings
from lehr.config import AutoBool, Coef, Plugin, check_counts
from lehr.errors import InputError
from lehr.maths import across
from lehr.maths import replay as ring
from lehr.maths.distributions import uniform
from lehr.maths.laprop import adaptive_clipping
from lehr.maths.optimise import Optimiser
from lehr.maths.two_hot import (
    ReturnRange,
    cross_entropy,
    lambda_returns,
    two_hot,
    two_hot_loss,
    two_hot_mean,
    update_range,
)
from lehr.networks.world_model import DreamerNetwork, Latent, WorldModel, WorldModelConfig, dreamer_network, rows
from lehr.schedules.coefficient import Coefficient
from lehr.spaces import Spaces
from lehr.types import Key, Learner, MetricRow, Metrics, Packed, PyTree, Rollout

stop = jax.lax.stop_gradient


@dataclass(frozen=True)
class Config(Settings):
    """Settings of Dreamer. Coefficients accept a number or any schedule; the others are static."""

    num_envs: int = 8
    horizon: int = 16
    normalise_observations: AutoBool = False
    normalise_rewards: AutoBool = False
    batch_size: int = 16
    """Replayed sequences per gradient step."""
    batch_length: int = 32
    """Steps of each replayed sequence, at least 2."""
    train_ratio: float = 32.0
    """Replayed steps per env step; rounded to a whole number of gradient steps per update."""
    replay_size: int = 200_000
    """Steps that the replay holds, over all environments; older ones are overwritten."""
    prefill: int = 1024
    """Steps with random actions before learning starts."""
    imagination_length: int = 15
    """Imagined steps from every replayed state."""
    optimiser: Plugin = "laprop"
    """Optimiser: laprop, the name of any optax optimiser, or an optax transformation."""
    learning_rate: Annotated[Coef, Coefficient(("lr", "alpha_lr"))] = 1e-3
    """Learning rate of the optimiser."""
    adaptive_clip: Annotated[Coef, Coefficient(("agc",), open_minimum=True)] | None = 0.3
    """Maximum norm of the gradient of each array, as a fraction of the array's own norm; none turns clipping off."""
    discount: Coef = 0.997
    return_lambda: Annotated[Coef, Coefficient(maximum=1.0)] = 0.95
    """Lambda of the imagined and replayed returns."""
    entropy_coef: Annotated[Coef, Coefficient(("ent_coef", "entropy_cost", "entropy_coeff"))] = 3e-4
    """Weight of the entropy bonus in the loss."""
    prediction_coef: Annotated[Coef, Coefficient()] = 1.0
    """Weight of the model's prediction losses: observation, reward and continuation."""
    dynamics_coef: Annotated[Coef, Coefficient(("beta_dyn",))] = 1.0
    """Weight of the divergence that trains the prior towards the posterior."""
    representation_coef: Annotated[Coef, Coefficient(("beta_rep",))] = 0.1
    """Weight of the divergence that trains the posterior towards the prior."""
    free_nats: Annotated[Coef, Coefficient(("kl_free",))] = 1.0
    """Divergence below which neither of the two is trained further."""
    replay_value_coef: Annotated[Coef, Coefficient(("repval_scale",))] = 0.3
    """Weight of the value loss on replayed steps."""
    slow_value_coef: Annotated[Coef, Coefficient(("slowreg",))] = 1.0
    """Weight of the value loss that keeps the critic close to its slow copy."""
    slow_value_rate: Annotated[Coef, Coefficient(("slow_critic_fraction",), maximum=1.0)] = 0.02
    """Rate at which the slow copy follows the critic, per gradient step."""
    return_rate: Annotated[Coef, Coefficient(maximum=1.0)] = 0.01
    """Rate at which the range of returns, which scales advantages, follows the imagined returns, per gradient step."""
    uniform_mix: Annotated[Coef, Coefficient(("unimix",), maximum=1.0)] = 0.01
    """Share of the uniform distribution in the latents and in discrete policies."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {},
        **{
            size: {
                "num_envs": 16,
                "batch_length": 64,
                "replay_size": 1_000_000,
                "learning_rate": "warmup 1%, 4e-5",
            }
            for size in ("1m", "12m", "25m")
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "batch_size", "imagination_length", "replay_size")
        check_counts(self, "batch_length", least=2)
        check_counts(self, "prefill", least=0)


class Auxiliary(NamedTuple):
    """What Dreamer learns besides its parameters."""

    slow_critic: PyTree
    """A moving average of the critic's parameters."""
    returns: ReturnRange
    cursor: ring.Cursor


class Carried(NamedTuple):
    """What a gradient step changes."""

    networks: PyTree
    """The parameters of the networks."""
    packed: PyTree
    """The same, as the optimiser works on them. To carry both costs less than to unpack them before and after."""
    optimiser: PyTree
    slow_critic: PyTree
    returns: ReturnRange
    latents: PyTree
    """Leaves `[N, C, ...]`: the latent states in the replay."""


@dataclass(frozen=True)
class Algorithm(Base):
    """Dreamer."""

    Config: ClassVar[type] = Config
    NetworkConfig: ClassVar[type] = WorldModelConfig
    needs: ClassVar[frozenset[str]] = frozenset({"final_obs"})

    config: Any
    network: DreamerNetwork

    @classmethod
    def build(
        cls, spaces: Spaces, config: Any, network_config: WorldModelConfig, key: Key
    ) -> tuple["Algorithm", PyTree]:
        """Build the world model for these spaces.

        Besides those of the networks, the parameters hold two numbers under "acting" that `learn` sets for `act`:
        whether to act at random, and the uniform share.
        """
        network, params = dreamer_network(spaces.observation, spaces.action, network_config, key)
        acting = {"random": jnp.float32(config.prefill > 0), "uniform_mix": jnp.float32(0.01)}
        return cls(config, network), {**params, "acting": acting}

    @property
    def optimiser(self) -> Optimiser:
        """The optimiser in the settings, without its learning rate."""
        return Optimiser(self.config.optimiser)

    @property
    def sequence(self) -> int:
        """Entries of a replayed sequence: the first only gives the state and the action before the others."""
        return self.config.batch_length + 1

    def init(self, key: Key, params: PyTree, example: Rollout) -> Learner:
        """Return a learner with an empty replay."""
        config, (horizon, streams) = self.config, example.reward.shape
        capacity = config.replay_size // (across.devices() * streams)
        usable = capacity - ring.margin(horizon)
        if usable < self.sequence or across.devices() * streams * usable < config.prefill:
            least = streams * (ring.margin(horizon) + max(self.sequence, -(-config.prefill // streams)))
            raise InputError(
                f"replay_size is {config.replay_size}, which is {capacity} steps of each of {streams} environments and "
                f"too few for batch_length={config.batch_length}, horizon={horizon} and prefill={config.prefill}; set "
                f"replay_size to {least} or more."
            )
        self.gradient_steps(example)
        data, cursor = ring.empty(example, capacity)
        zero = jnp.float32(0)
        auxiliary = Auxiliary(jax.tree.map(jnp.copy, params["critic"]), ReturnRange(zero, zero), cursor)
        return Learner(params, self.optimiser.init(self._trained(params)), auxiliary, data)

    def forget(self, learner: Learner) -> Learner:
        """Fill the replay anew: it was not saved."""
        cursor = ring.first_cursor(len(learner.auxiliary.cursor.head))
        return learner._replace(auxiliary=learner.auxiliary._replace(cursor=cursor))

    def _trained(self, params: PyTree) -> PyTree:
        """Return the parameters of the networks alone."""
        return {name: params[name] for name in self.network.parts}

    def gradient_steps(self, rollout: Rollout) -> int:
        """Return the number of gradient steps per update: replayed steps over steps of a batch."""
        config, collected = self.config, rollout.reward.size
        batch = across.share(config.batch_size, "batch_size") * config.batch_length
        steps = round(config.train_ratio * collected / batch)
        if steps < 1:
            raise InputError(
                f"train_ratio is {config.train_ratio:g}, but an update collects {collected} env steps and a batch "
                f"replays {batch}, so no batch fits; set train_ratio to {batch / collected:g} or more, or raise "
                "horizon."
            )
        return steps

    def initial_carry(self, batch_shape: tuple[int, ...]) -> PyTree:
        """Return zeros for the latent state and the last action."""
        return self.network.initial_carry(batch_shape)

    def act(
        self, params: PyTree, carry: PyTree, obs: PyTree, reset: jax.Array, key: Key, greedy: Any = False
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        """Update the latent state with the observation, and sample from the policy; greedy takes modes of both."""
        network, share = self.network, params["acting"]["uniform_mix"]
        model = network.bind(params)
        latent_key, action_key, random_key = jax.random.split(key, 3)
        numbers = uniform(latent_key, (*reset.shape, network.config.latents))
        latent = network.observe(model, carry, obs, reset, share, numbers)
        policy = network.policy(model, latent.features, share)
        at_random = (params["acting"]["random"] > 0) & jnp.logical_not(greedy)
        action = jnp.where(at_random, network.random_action(random_key, reset.shape), policy.sample(action_key))
        if greedy is not False:
            action = jnp.where(greedy, policy.mode(), action)
        carry = {**latent._asdict(), "action": network.encoded(action)}
        return carry, network.environment_action(action), {"action": action, **self._stored(latent)}

    def imagine(self, params: PyTree, obs: PyTree, carries: PyTree, seen: int) -> tuple[jax.Array, jax.Array]:
        """Return the images of an episode, and those that the model expects, both `[T + 1, H, W, C]` from 0 to 1.

        Args:
            params: the parameters.
            obs: the observations, leaves `[T + 1, ...]`.
            carries: what `act` carried on from each of the first `T` of them, leaves `[T, ...]`.
            seen: number of observations that the model sees, at most `T`. From then on it knows only the actions, and
                takes the most likely latents.
        """
        model = self.network.bind(params)
        if model.decoder.image is None:
            raise InputError(
                "The observations of this run have no image, so what its model imagines cannot be shown; leave out "
                "--imagine."
            )
        known = Latent(carries["deter"][:seen], carries["stoch"][:seen])
        start = jax.tree.map(lambda x: x[-1], known)
        imagined = self.network.follow(model, start, carries["action"][seen - 1 :])
        states = jax.tree.map(lambda *parts: jnp.concatenate(parts), known, imagined)
        return model.decoder.targets(obs)[0], model.decoder(states.features)[0]

    def _stored(self, latent: Latent) -> dict[str, jax.Array]:
        """Return a latent state as the replay stores it: classes as bytes."""
        stoch = latent.stoch.reshape(*latent.stoch.shape[:-1], *self._shape)
        return {"deter": latent.deter, "stoch": jnp.argmax(stoch, -1).astype(jnp.uint8)}

    @property
    def _shape(self) -> tuple[int, int]:
        return self.network.config.latents, self.network.config.classes

    def _restored(self, stored: dict[str, jax.Array]) -> Latent:
        """Return a latent state from the replay."""
        stoch = jax.nn.one_hot(stored["stoch"], self.network.config.classes)
        return Latent(stored["deter"], stoch.reshape(*stoch.shape[:-2], -1))

    # Learning ---------------------------------------------------------------------------------------------------------

    def learn(self, learner: Learner, rollout: Rollout, coef: Metrics, key: Key) -> tuple[Learner, Metrics]:
        """Write the rollout into the replay, then take gradient steps on replayed sequences."""
        auxiliary: Auxiliary = learner.auxiliary
        data, cursor = ring.append(learner.memory, auxiliary.cursor, rollout)
        networks = self._trained(learner.params)
        packed, unpack = self.optimiser.pack(networks)
        latents = data.entries.extras
        start = Carried(networks, packed, learner.optimiser, auxiliary.slow_critic, auxiliary.returns, latents)
        keys = jax.random.split(key, self.gradient_steps(rollout))

        def train(start: Carried) -> tuple[Carried, MetricRow]:
            clip = adaptive_clipping(networks, packed)

            def gradient_step(carried: Carried, key: Key) -> tuple[Carried, MetricRow]:
                return self._gradient_step(data, cursor, unpack, clip, carried, coef, key)

            return jax.lax.scan(gradient_step, start, keys)

        _, shapes = jax.eval_shape(train, start)
        enough = across.all(jnp.any(ring.number_of_sequences(cursor, self.sequence) > 0))
        steps = across.sum(jnp.sum(cursor.size))
        enough &= steps >= self.config.prefill
        after, taken = jax.lax.cond(
            enough, train, lambda start: (start, jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)), start
        )
        metrics = taken.mean()
        # A rollout that is not finite may not have been drawn yet, but must not stay in the replay.
        sound = jnp.all(jnp.isfinite(rollout.reward))
        for leaf in jax.tree.leaves((rollout.obs, rollout.action)):
            sound &= jnp.all(jnp.isfinite(leaf))
        metrics["loss/total"] = jnp.where(sound, metrics["loss/total"], jnp.nan)
        metrics["replay/steps"] = steps.astype(jnp.float32)
        metrics["replay/gradient_steps"] = jnp.where(enough, len(keys), 0).astype(jnp.float32)
        acting = {"random": 1 - enough.astype(jnp.float32), "uniform_mix": coef["uniform_mix"]}
        return Learner(
            {**after.networks, "acting": acting},
            after.optimiser,
            Auxiliary(after.slow_critic, after.returns, cursor),
            data._replace(entries=data.entries._replace(extras=after.latents)),
        ), metrics

    def _gradient_step(
        self, data: ring.Replay, cursor: ring.Cursor, unpack: Any, clip: Any, carried: Carried, coef: Metrics, key: Key
    ) -> tuple[Carried, MetricRow]:
        """Draw sequences, take one gradient step on all losses, and refresh the latent states in the replay."""
        draw_key, loss_key = jax.random.split(key)
        current = data._replace(entries=data.entries._replace(extras=carried.latents))
        batch = across.share(self.config.batch_size, "batch_size")
        drawn = ring.draw(current, cursor, draw_key, batch, self.sequence)
        (_, (found, returns, metrics)), gradients = jax.value_and_grad(self.loss, has_aux=True)(
            carried.networks, carried.slow_critic, carried.returns, drawn.entries, coef, loss_key
        )
        gradients = across.mean(self.optimiser.pack(gradients)[0])
        if "adaptive_clip" in coef:
            gradients = clip(gradients, carried.packed, coef["adaptive_clip"])
        step = self.optimiser.step(
            carried.packed, carried.optimiser, Packed(gradients), coef["learning_rate"], None, reduced=True
        )
        networks = unpack(step.params)
        slow = jax.tree.map(
            lambda slow, now: slow + coef["slow_value_rate"] * (now - slow),
            carried.slow_critic,
            networks["critic"],
        )
        metrics["gradient/norm"] = step.gradient_norm
        latents = self._refreshed(carried.latents, drawn, found)
        return Carried(networks, step.params, step.state, slow, returns, latents), MetricRow.of(metrics)

    def _refreshed(self, latents: dict[str, jax.Array], drawn: ring.Drawn, found: Latent) -> dict[str, jax.Array]:
        """Overwrite the latent states of the drawn entries with those just found, where they are finite."""
        sound = jnp.all(jnp.isfinite(found.deter), -1)
        capacity = latents["deter"].shape[1]
        place = jnp.where(sound, drawn.place[1:], capacity)  # out of bounds, where writes are dropped
        new = self._stored(found)
        return {name: room.at[drawn.stream[1:], place].set(new[name], mode="drop") for name, room in latents.items()}

    def loss(
        self,
        params: PyTree,
        slow_critic: PyTree,
        returns: ReturnRange,
        entries: ring.Entries,
        coef: Metrics,
        key: Key,
    ) -> tuple[jax.Array, tuple[Latent, ReturnRange, Metrics]]:
        """Return the total loss; the latent states found, the new range of returns, and metrics.

        Args:
            params: of all networks.
            slow_critic: parameters of the critic's slow copy.
            returns: the range of returns so far.
            entries: replayed sequences, leaves `[1 + T, B, ...]`.
            coef: the coefficients.
            key: random key.
        """
        network = self.network
        model, frozen = network.bind(params), network.bind(stop(params))
        slow = network.bind(stop({**params, "critic": slow_critic})).critic
        model_key, imagination_key = jax.random.split(key)
        # --- the model, on replayed sequences
        replayed = jax.tree.map(lambda x: x[1:], entries)
        states, losses, metrics = self._model_losses(model, entries, replayed, coef, model_key)
        # --- actor and critic, on steps imagined from every replayed state
        imagined = self._imagined(model, frozen, slow, states, coef, imagination_key)
        returns = update_range(returns, imagined.returns, coef["return_rate"])
        losses["policy"], found = self._policy_loss(model, imagined, returns, coef)
        metrics |= found
        # --- the critic, also on replayed steps, with the imagined returns as values
        losses["value"], losses["replay_value"] = self._value_losses(imagined, replayed, coef)
        # --- all of them
        weights = self._weights(coef)
        assert losses.keys() == weights.keys()
        total = sum((weights[name] * loss for name, loss in losses.items()), jnp.float32(0))
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()} | {"loss/total": total}
        metrics |= {"return/mean": imagined.returns.mean(), "return/scale": returns.scale}
        return total, (stop(states), returns, metrics)

    def _weights(self, coef: Metrics) -> dict[str, Any]:
        """Return the weight of each loss."""
        return {
            "observation": coef["prediction_coef"],
            "reward": coef["prediction_coef"],
            "continuation": coef["prediction_coef"],
            "dynamics": coef["dynamics_coef"],
            "representation": coef["representation_coef"],
            "policy": 1.0,
            "value": 1.0,
            "replay_value": coef["replay_value_coef"],
        }

    def _model_losses(
        self, model: WorldModel, entries: ring.Entries, replayed: ring.Entries, coef: Metrics, key: Key
    ) -> tuple[Latent, dict[str, jax.Array], Metrics]:
        """Return the states after each replayed observation `[T, B]`, the model's losses, and metrics."""
        start = self._restored(jax.tree.map(lambda x: x[0], entries.extras))
        actions = self.network.encoded(entries.action[:-1])
        share = coef["uniform_mix"]
        states, posterior = self.network.unroll(model, start, replayed.obs, actions, replayed.first, share, key)
        # From here on, all steps are rows `[T · B, ...]`.
        seen, posterior = rows((replayed, posterior))
        features = rows(states.features)
        prior = model.dynamics.prior_log_probs(rows(states.deter), share)
        # --- predictions
        squared, spread = jnp.zeros(seen.reward.shape), jnp.float32(0)
        for found, target in zip(model.decoder(features), model.decoder.targets(seen.obs), strict=True):
            axes = tuple(range(1, target.ndim))
            squared += jnp.sum(jnp.square(found - stop(target)), axes)
            constant = jnp.broadcast_to(target.mean(0), target.shape)
            spread += jnp.mean(jnp.sum(jnp.square(target - constant), axes))
        going_on = model.going_on(features)[..., 0]
        live = 1 - seen.terminal.astype(jnp.float32)
        losses = {
            "observation": squared.mean(),
            "reward": two_hot_loss(model.reward(features), seen.reward).mean(),
            "continuation": binary_cross_entropy(going_on, live).mean(),
        }
        # --- divergences, each of which trains one side
        dynamics, representation = balanced(posterior, prior, coef["free_nats"])
        losses["dynamics"], losses["representation"] = dynamics.mean(), representation.mean()
        metrics = {
            "model/divergence": divergence(posterior, prior).mean(),
            "model/unexplained": squared.mean() / jnp.maximum(spread, 1e-8),
            "model/prior_entropy": -jnp.sum(jnp.exp(prior) * prior, (-2, -1)).mean(),
            "model/posterior_entropy": -jnp.sum(jnp.exp(posterior) * posterior, (-2, -1)).mean(),
        }
        return states, losses, metrics

    def _imagined(
        self, model: WorldModel, frozen: WorldModel, slow: Any, states: Latent, coef: Metrics, key: Key
    ) -> "Imagined":
        """Imagine steps from every state `[T, B]`, without gradients but for the critic's logits."""
        start = jax.tree.map(lambda x: stop(x).reshape(-1, x.shape[-1]), states)
        length = self.config.imagination_length
        features, actions = self.network.imagine(frozen, start, length, coef["uniform_mix"], key)
        live = jax.nn.sigmoid(frozen.going_on(features)[..., 0])
        logits = model.critic(features, states.features.reshape(1, *features.shape[1:]))
        value = two_hot_mean(stop(logits[:-1]))
        returns = lambda_returns(
            two_hot_mean(frozen.reward(features)),
            value,
            live,
            jnp.zeros_like(live),
            coef["discount"],
            coef["return_lambda"],
        )
        # A step counts as much as it is likely to be reached, discounted.
        steps = jnp.concatenate([live[:1], coef["discount"] * live[1:-1]])
        slow_value, weight = two_hot_mean(slow(features)), jnp.cumprod(steps, axis=0)
        return Imagined(features, actions, returns, value, slow_value, weight, logits)

    def _policy_loss(
        self, model: WorldModel, imagined: "Imagined", returns: ReturnRange, coef: Metrics
    ) -> tuple[jax.Array, Metrics]:
        """Return the policy gradient's loss (REINFORCE, with the critic as baseline) with the entropy bonus."""
        policy = self.network.policy(model, imagined.features[:-1], coef["uniform_mix"])
        advantage = (imagined.returns - imagined.value[:-1]) / returns.scale
        entropy = policy.entropy()
        gain = policy.log_prob(imagined.actions) * stop(advantage) + coef["entropy_coef"] * entropy
        metrics = {
            "policy/entropy": entropy.mean(),
            "policy/advantage": jnp.abs(advantage).mean(),
            "value/mean": imagined.value.mean(),
        }
        return -jnp.mean(imagined.weight * gain), metrics

    def _value_losses(self, imagined: "Imagined", replayed: ring.Entries, coef: Metrics) -> tuple[jax.Array, jax.Array]:
        """Return the value losses on imagined and on replayed steps: towards returns, and towards the slow critic."""
        first_of_next = jnp.concatenate([replayed.first[1:], jnp.zeros_like(replayed.first[:1])])
        last = (replayed.last | first_of_next).astype(jnp.float32)
        bootstrap = imagined.returns[0].reshape(last.shape)
        live = 1 - replayed.terminal.astype(jnp.float32)
        returns = lambda_returns(replayed.reward, bootstrap, live, last, coef["discount"], coef["return_lambda"])

        def together(imagined: jax.Array, replayed: jax.Array) -> jax.Array:
            """Return both as rows of the logits, `[H + 2, M]`; the last steps, which have no return, are zeros."""
            unused = jnp.zeros_like(replayed[:1])
            ended = jnp.concatenate([replayed, unused]).reshape(1, -1)
            return jnp.concatenate([imagined, jnp.zeros_like(imagined[:1]), ended])

        replayed_slow = imagined.slow_value[0].reshape(last.shape)[:-1]
        targets = two_hot(together(imagined.returns, returns), self.network.config.bins)
        slow = two_hot(together(imagined.slow_value[:-1], replayed_slow), self.network.config.bins)
        loss = cross_entropy(imagined.logits, targets + coef["slow_value_coef"] * slow)
        loss *= together(imagined.weight, 1 - last[:-1])
        return loss[:-1].sum() / imagined.returns.size, loss[-1].sum() / returns.size


class Imagined(NamedTuple):
    """`H` steps imagined from each of `M` states, without gradients but for the logits."""

    features: jax.Array
    """float32 `[H + 1, M, F]`."""
    actions: PyTree
    """Leaves `[H, M, ...]`."""
    returns: jax.Array
    """float32 `[H, M]`."""
    value: jax.Array
    """float32 `[H + 1, M]`."""
    slow_value: jax.Array
    """float32 `[H + 1, M]`."""
    weight: jax.Array
    """float32 `[H, M]`."""
    logits: jax.Array
    """float32 `[H + 2, M, K]`: the critic's, with gradients, in these states and, in the last row, in the replayed."""


def divergence(one: jax.Array, other: jax.Array) -> jax.Array:
    """Return KL(p ‖ q), summed over the latents, for log-probabilities `[..., S, K]`.

    >>> half, sure = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.75, 0.25]]))
    >>> round(float(divergence(half, sure)), 4)
    0.1438
    """
    return jnp.sum(jnp.exp(one) * (one - other), (-2, -1))


def binary_cross_entropy(x: jax.Array, target: jax.Array) -> jax.Array:
    """Return −target log σ(x) − (1 − target) log σ(−x).

    JAX's own log σ has a log1p, which takes longer to compile than the rest; here 1 and more is its argument.

    >>> [round(float(binary_cross_entropy(jnp.float32(x), jnp.float32(0.25))), 3) for x in (0.0, 50.0, -50.0)]
    [0.693, 37.5, 12.5]
    """
    return jnp.maximum(x, 0) + jnp.log(1 + jnp.exp(-jnp.abs(x))) - target * x


def balanced(posterior: jax.Array, prior: jax.Array, free_nats: Any) -> tuple[jax.Array, jax.Array]:
    """Return the divergence of posterior and prior twice, `[...]`: one trains the prior, the other the posterior.

    max(free_nats, KL(stop(q) ‖ p)),  max(free_nats, KL(q ‖ stop(p)))
    """
    dynamics, representation = divergence(stop(posterior), prior), divergence(posterior, stop(prior))
    return jnp.maximum(dynamics, free_nats), jnp.maximum(representation, free_nats)
