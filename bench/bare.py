"""The bare loop: a minimal PPO on CartPole, as the baseline of the throughput benchmark.

No schedules, metrics, truncation, episode statistics or options: two tanh MLPs, a rollout, GAE, minibatches
of whole environments and Adam, in plain JAX. It shows what the trainer's features cost.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def _reset(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), jnp.int32(0)


def _step(key: jax.Array, state: jax.Array, elapsed: jax.Array, action: jax.Array) -> Any:
    position, velocity, angle, rate = state
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    push = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * rate**2 * sine) / 1.1
    spin = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    speed = push - 0.05 * spin * cosine / 1.1
    state = jnp.stack([position + 0.02 * velocity, velocity + 0.02 * speed, angle + 0.02 * rate, rate + 0.02 * spin])
    elapsed = elapsed + 1
    done = (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > 12 * jnp.pi / 180) | (elapsed >= 500)
    fresh, zero = _reset(key)
    return jnp.where(done, fresh, state), jnp.where(done, zero, elapsed), jnp.float32(1.0), done


def _layers(key: jax.Array, sizes: tuple[int, ...]) -> list[tuple[jax.Array, jax.Array]]:
    keys = jax.random.split(key, len(sizes))
    orthogonal = jax.nn.initializers.orthogonal(2**0.5)
    return [(orthogonal(k, (i, o)), jnp.zeros(o)) for k, i, o in zip(keys, sizes[:-1], sizes[1:], strict=False)]


def _forward(layers: Any, x: jax.Array) -> jax.Array:
    for weight, bias in layers[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def make(num_envs: int, horizon: int, minibatches: int, epochs: int, hidden: int = 64) -> tuple[Any, Any]:
    """Return `init(key)`, which returns a carry, and `run(carry, updates)`, which makes `updates` (static) updates.

    Both are compiled by `jax.jit`.
    """

    def init(key: jax.Array) -> Any:
        actor_key, critic_key, env_key, key = jax.random.split(key, 4)
        params = _layers(actor_key, (4, hidden, hidden, 2)), _layers(critic_key, (4, hidden, hidden, 1))
        states, elapsed = jax.vmap(_reset)(jax.random.split(env_key, num_envs))
        zeros = jax.tree.map(jnp.zeros_like, params)
        return params, (zeros, zeros, jnp.float32(0)), states, elapsed, key

    def adam(params: Any, gradients: Any, state: Any) -> Any:
        first, second, count = state
        count = count + 1
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
        gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / (norm + 1e-8)), gradients)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradients)

        def move(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return p - 3e-3 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-5)

        return jax.tree.map(move, params, first, second), (first, second, count)

    def rollout(params: Any, states: jax.Array, elapsed: jax.Array, key: jax.Array) -> Any:
        def step(carry: Any, key: jax.Array) -> Any:
            states, elapsed = carry
            logits, values = _forward(params[0], states), _forward(params[1], states)[..., 0]
            action_key, env_key = jax.random.split(key)
            actions = jnp.argmax(logits + jax.random.gumbel(action_key, logits.shape), -1)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], -1)[:, 0]
            keys = jax.random.split(env_key, num_envs)
            next_states, next_elapsed, rewards, done = jax.vmap(_step)(keys, states, elapsed, actions)
            return (next_states, next_elapsed), (states, actions, chosen, values, rewards, done)

        carry, steps = lax.scan(step, (states, elapsed), jax.random.split(key, horizon))
        return carry, steps, _forward(params[1], carry[0])[..., 0]

    def advantages(values: jax.Array, rewards: jax.Array, done: jax.Array, last: jax.Array) -> jax.Array:
        def step(carry: Any, row: Any) -> Any:
            advantage, following = carry
            value, reward, goes_on = row
            advantage = reward + 0.99 * following * goes_on - value + 0.99 * 0.95 * goes_on * advantage
            return (advantage, value), advantage

        rows = values, rewards, 1.0 - done
        return lax.scan(step, (jnp.zeros(num_envs), last), rows, reverse=True, unroll=8)[1]

    def loss(params: Any, minibatch: Any) -> jax.Array:
        states, actions, old, advantage, target = minibatch
        log_probs, values = jax.nn.log_softmax(_forward(params[0], states)), _forward(params[1], states)[..., 0]
        ratio = jnp.exp(jnp.take_along_axis(log_probs, actions[..., None], -1)[..., 0] - old)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return policy_loss + 0.25 * jnp.square(values - target).mean() - 0.01 * entropy

    def update(carry: Any, _: None) -> Any:
        params, optimiser, states, elapsed, key = carry
        key, rollout_key, learn_key = jax.random.split(key, 3)
        (states, elapsed), steps, last = rollout(params, states, elapsed, rollout_key)
        observed, actions, chosen, values, rewards, done = steps
        advantage = advantages(values, rewards, done, last)
        data = observed, actions, chosen, advantage, advantage + values

        def epoch(carry: Any, key: jax.Array) -> Any:
            def minibatch(carry: Any, indices: jax.Array) -> Any:
                chosen = jax.tree.map(lambda x: jnp.take(x, indices, axis=1), data)
                return adam(carry[0], jax.grad(loss)(carry[0], chosen), carry[1]), None

            return lax.scan(minibatch, carry, jax.random.permutation(key, num_envs).reshape(minibatches, -1))[0], None

        (params, optimiser), _ = lax.scan(epoch, (params, optimiser), jax.random.split(learn_key, epochs))
        return (params, optimiser, states, elapsed, key), done.mean()

    @partial(jax.jit, static_argnums=1, donate_argnums=0)
    def run(carry: Any, updates: int) -> Any:
        return lax.scan(update, carry, None, length=updates)

    return jax.jit(init), run
