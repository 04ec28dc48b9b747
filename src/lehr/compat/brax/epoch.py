"""One training step of Brax's PPO as a pure function, and all of them between two evaluations as one compiled program.

Keys are derived as Brax derives them and segments are shuffled into its order, so that the same seed lives through the
same rollouts and minibatches: what differs from Brax's own training is rounding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lehr.acting.rollout import scan_unroll
from lehr.compat.brax import theirs
from lehr.compat.brax.loss import LossSettings, Minibatch, Networks, ppo_loss
from lehr.compat.brax.pixels import shifted, without_pixels
from lehr.envs.suites.lean_step import LeanStep
from lehr.maths.metrics import MetricRow
from lehr.maths.minibatches import pack, take
from lehr.maths.optimise import Optimiser
from lehr.schedules import env_steps
from lehr.schedules.bundle import Coefficients
from lehr.types import Key, Metrics, PyTree


class Learned(NamedTuple):
    """What a policy is made of. Users hold on to it, so its memory is never given to the next program."""

    params: Networks
    normalizer: PyTree
    """Brax's `RunningStatisticsState`."""

    @property
    def for_users(self) -> tuple[PyTree, PyTree, PyTree]:
        """The parameters in Brax's order."""
        return self.normalizer, self.params.policy, self.params.value


class Carried(NamedTuple):
    """What else training remembers."""

    optimiser: PyTree
    rate: jax.Array
    """float32 `[]`: the learning rate, where it adapts."""
    updates: jax.Array
    """uint32 `[]`: training steps so far; the clock is this times the env steps of one."""
    environments: tuple[jax.Array, ...]
    """See `LeanStep.kept`."""


class Lived(NamedTuple):
    """A rollout: leaves `[U · T, N, ...]`, `U` unrolls of `T` steps one after the other."""

    obs: PyTree
    """Leaves `[U · T + 1, N, ...]`."""
    rest: Minibatch
    """All but the observations."""
    seen: dict[str, PyTree]
    """What else the environments tell: see `seen_of`."""


class Drawn(NamedTuple):
    """What a minibatch is made from."""

    segments: jax.Array
    """int32 `[B]`."""
    key: Key
    shifts: Any
    """Keys `[B]` of the augmentation, `()` without one."""


@dataclass(frozen=True, eq=False)
class Program:
    """All of a training that is fixed when it is compiled."""

    environments: LeanStep
    network: Any
    """Brax's `PPONetworks`."""
    make_policy: Callable[..., Any]
    loss: LossSettings
    num_envs: int
    unroll_length: int
    unrolls: int
    """How many unrolls of every environment make the data of one training step."""
    num_minibatches: int
    num_updates_per_batch: int
    action_repeat: int
    training_steps: int
    """Between two evaluations or resets."""
    max_grad_norm: float | None
    normalize_until_count: int | None
    bootstrap_on_timeout: bool
    augment_pixels: bool
    adaptive: Any
    """The controller that moves the learning rate after every minibatch, or `None`."""
    report: Callable[..., None] | None
    """Called on the host with what happened in each training step."""

    @property
    def optimiser(self) -> Optimiser:
        """Adam with optax's own options."""
        return Optimiser("adam", (("eps", 1e-8),))

    @property
    def segments(self) -> int:
        """Pieces of `T` steps in the data of one training step."""
        return self.unrolls * self.num_envs

    @property
    def steps_per_update(self) -> int:
        """Env steps of one training step, action repeats included."""
        return self.segments * self.unroll_length * self.action_repeat

    def epoch(
        self, coefficients: Coefficients, learned: Learned, carried: Carried, key: Key
    ) -> tuple[Learned, Carried, Metrics]:
        """All training steps until the next evaluation or reset.

        Metrics are means over them, but for coefficients: of these it is the value that was applied last.
        """

        def one(state: Any, _: None) -> tuple[Any, tuple[Metrics, Metrics]]:
            learned, carried, key = state
            learned, carried, key, metrics, applied = self.training_step(coefficients, learned, carried, key)
            return (learned, carried, key), (jax.tree.map(jnp.mean, metrics), applied)

        state, (metrics, applied) = jax.lax.scan(one, (learned, carried, key), length=self.training_steps)
        learned, carried, _ = state
        return learned, carried, jax.tree.map(jnp.mean, metrics) | {name: x[-1] for name, x in applied.items()}

    def training_step(
        self, coefficients: Coefficients, learned: Learned, carried: Carried, key: Key
    ) -> tuple[Learned, Carried, Key, Metrics, Metrics]:
        """One rollout and the learning on it; the next key; metrics `[passes, minibatches]` and coefficients `[]`."""
        learn_key, rollout_key, key = jax.random.split(key, 3)

        # --- coefficients: of the env steps before this rollout, the same for all gradient steps on it
        coef = coefficients.values(coefficients.init(), env_steps(carried.updates, self.steps_per_update))

        # --- rollout
        environments, lived = self.rollout(learned, carried.environments, rollout_key)
        if self.bootstrap_on_timeout:
            lived = bootstrapped(lived, coef["discounting"])

        # --- normalisation; an adaptive rate must see the policy that acted as it acted, so it learns with the old one
        updated = theirs.running_statistics.update(
            learned.normalizer,
            without_pixels(jax.tree.map(lambda x: x[:-1], lived.obs)),
            until_count=self.normalize_until_count,
        )
        normalizer = updated if self.adaptive is None else learned.normalizer

        # --- minibatches, advantages, loss, update
        params, optimiser, rate, metrics = self.learn(learned.params, carried, normalizer, lived, coef, learn_key)

        # --- metrics
        applied = {name: value for name, value in coef.items() if name not in metrics}
        if self.report is not None:
            episodes = jax.tree.map(self._by_segment, {name: lived.seen[name] for name in REPORTED})
            jax.debug.callback(self.report, *(episodes[name] for name in REPORTED), metrics | applied)
        return (
            Learned(params, updated),
            Carried(optimiser, rate, carried.updates + 1, environments),
            key,
            metrics,
            applied,
        )

    def rollout(
        self, learned: Learned, environments: tuple[jax.Array, ...], key: Key
    ) -> tuple[tuple[jax.Array, ...], Lived]:
        """Act for `U · T` steps."""
        policy = self.make_policy(learned.for_users)
        keeps_value = self.bootstrap_on_timeout or self.loss.clipping_epsilon_value is not None

        def act(kept: tuple[jax.Array, ...], key: Key) -> tuple[tuple[jax.Array, ...], Lived]:
            obs = self.environments.whole(kept).obs
            action, extras = policy(obs, key)
            kept, seen = self.environments.step(kept, action)
            rest = Minibatch(
                obs=(),
                raw_action=extras["raw_action"],
                log_prob=extras["log_prob"],
                policy=extras["distribution_params"],
                reward=seen.pop("reward"),
                done=seen.pop("done"),
                truncation=seen.pop("truncation"),
                value=extras["value"] if keeps_value else (),
            )
            return kept, Lived(obs, rest, seen)

        keys = unroll_keys(key, self.unrolls, self.unroll_length)
        environments, lived = jax.lax.scan(act, environments, keys, unroll=scan_unroll(divisor_of=len(keys)))
        # What follows the last step of an unroll is what the next unroll begins with: only the very last is missing.
        last = self.environments.whole(environments).obs
        return environments, lived._replace(
            obs=jax.tree.map(lambda x, last: jnp.concatenate([x, last[None]]), lived.obs, last)
        )

    def learn(
        self,
        params: Networks,
        carried: Carried,
        normalizer: PyTree,
        lived: Lived,
        coef: Mapping[str, jax.Array],
        key: Key,
    ) -> tuple[Networks, PyTree, jax.Array, Metrics]:
        """The parameters, the optimiser and the rate after all gradient steps on a rollout, and their metrics."""
        packed, unpack = self.optimiser.pack(params)
        fetch = self._fetch(lived)
        differentiate = jax.value_and_grad(ppo_loss, has_aux=True)

        def gradient_step(state: Any, drawn: Drawn) -> tuple[Any, MetricRow]:
            packed, optimiser, rate = state
            (_, metrics), gradients = differentiate(
                unpack(packed), normalizer, fetch(drawn), drawn.key, self.network, self.loss, coef
            )
            if self.adaptive is not None:
                # Brax lets the rate fall after an infinite divergence too; after one that is no number it stays.
                finite = {"kl_mean": jnp.minimum(metrics["kl_mean"], jnp.finfo(jnp.float32).max)}
                rate = self.adaptive.update(self.adaptive.init()._replace(value=rate), finite).value
                metrics["learning_rate"] = rate
            step = self.optimiser.step(
                packed,
                optimiser,
                gradients,
                coef["learning_rate"] if self.adaptive is None else rate,
                self.max_grad_norm,
            )
            return (step.params, step.state, rate), MetricRow.of(metrics)

        start = packed, carried.optimiser, carried.rate
        (packed, optimiser, rate), rows = jax.lax.scan(gradient_step, start, self._draw(key))
        table = rows.values.reshape(self.num_updates_per_batch, self.num_minibatches, -1)
        return unpack(packed), optimiser, rate, {name: table[..., index] for index, name in enumerate(rows.names)}

    def _draw(self, key: Key) -> Drawn:
        """All minibatches of all passes, leaves `[passes · minibatches, ...]`, by Brax's keys and in its order."""

        def one_pass(key: Key, _: None) -> tuple[Key, tuple[Key, Key, Key]]:
            key, order, loss = jax.random.split(key, 3)
            key, shift = jax.random.split(key) if self.augment_pixels else (key, key)
            return key, (order, loss, shift)

        _, (orders, losses, shifts) = jax.lax.scan(one_pass, key, length=self.num_updates_per_batch)
        segments = jax.vmap(lambda key: jax.random.permutation(key, self.segments))(orders)
        keys = jax.vmap(lambda key: chain(key, self.num_minibatches, used=1))(losses)
        shift_keys: Any = ()
        if self.augment_pixels:
            by_segment = jax.vmap(lambda key: jax.random.split(key, self.segments))(shifts)
            shift_keys = jax.vmap(lambda keys, chosen: keys[chosen])(by_segment, segments)
        count = self.num_updates_per_batch * self.num_minibatches
        size = self.segments // self.num_minibatches
        return Drawn(
            segments.reshape(count, size),
            keys.reshape(count, *keys.shape[2:]),
            jax.tree.map(lambda x: x.reshape(count, size, *x.shape[2:]), shift_keys),
        )

    def _fetch(self, lived: Lived) -> Callable[[Drawn], Minibatch]:
        """A function that gathers a minibatch, time first, straight from the rows of a rollout."""
        obs, unpack_obs = rows_of(lived.obs)
        rest, unpack_rest = rows_of(lived.rest)
        length, size = self.unroll_length, self.num_envs

        def fetch(drawn: Drawn) -> Minibatch:
            first = drawn.segments // size * (length * size) + drawn.segments % size
            rows = first[None, :] + jnp.arange(length + 1, dtype=first.dtype)[:, None] * size
            found = unpack_obs(take(obs, rows, axis=0))
            if self.augment_pixels:
                found = shifted(found, drawn.shifts)
            return unpack_rest(take(rest, rows[:-1], axis=0))._replace(obs=found)

        return fetch

    def _by_segment(self, x: jax.Array) -> jax.Array:
        """`[U · T, N, ...]` to `[U · N, T, ...]`."""
        x = x.reshape(self.unrolls, self.unroll_length, *x.shape[1:]).swapaxes(1, 2)
        return x.reshape(self.segments, self.unroll_length, *x.shape[3:])


REPORTED = ("episode_metrics", "episode_done")


def seen_of(state: Any, bootstraps: bool, reports: bool) -> dict[str, PyTree]:
    """What training looks at in a state of Brax's after a step."""
    names = ["truncation", *(["time_out"] if bootstraps else []), *(REPORTED if reports else [])]
    return {"reward": state.reward, "done": state.done} | {name: state.info[name] for name in names}


def bootstrapped(lived: Lived, discount: jax.Array) -> Lived:
    """Brax's reward at a time limit that the environment reports, r_t + γ V(s_t): what was cut off is worth as much."""
    rest = lived.rest
    return lived._replace(rest=rest._replace(reward=rest.reward + discount * lived.seen["time_out"] * rest.value))


def chain(key: Key, length: int, used: int) -> Key:
    """Keys split off one after the other, `[length]`: of each pair one is used and the other is split again."""

    def link(key: Key, _: None) -> tuple[Key, Key]:
        pair = jax.random.split(key)
        return pair[1 - used], pair[used]

    return jax.lax.scan(link, key, length=length)[1]


def unroll_keys(key: Key, unrolls: int, length: int) -> Key:
    """The keys of all actions of a rollout, `[unrolls · length]`, made at once: a chain of unrolls, and one in each."""
    each = jax.vmap(lambda key: chain(key, length, used=0))(chain(key, unrolls, used=0))
    return each.reshape(unrolls * length, *each.shape[2:])


def rows_of(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Leaves `[L, N, ...]` as rows `[L · N, ...]`, small ones side by side in one array; and the way back."""
    leaves = jax.tree.leaves(tree)
    packed, unpack = tree, lambda taken: taken
    if all(leaf.ndim <= 3 for leaf in leaves) and any(leaf.dtype == jnp.float32 for leaf in leaves):
        packed, unpack = pack(tree)  # not for images, which gain nothing from another copy
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), packed), unpack
