"""The estimators against NumPy loops, hand-worked cases, closed forms and rlax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.maths.advantages import Steps, corrected_gae, gae, lambda_returns, vtrace

STEPS, ENVIRONMENTS = 12, 3


def random_rollout(seed: int) -> dict[str, np.ndarray]:
    """A rollout with terminations and truncations in it, where next_values[t] = values[t + 1] inside episodes."""
    rng = np.random.default_rng(seed)
    shape = (STEPS, ENVIRONMENTS)
    kind = rng.choice(3, shape, p=[0.6, 0.2, 0.2])
    values = rng.normal(size=shape)
    following = np.concatenate([values[1:], rng.normal(size=(1, ENVIRONMENTS))])
    return {
        "rewards": rng.normal(size=shape),
        "values": values,
        "next_values": np.where(kind == 0, following, rng.normal(size=shape)),
        "terminated": kind == 1,
        "done": kind > 0,
        "log_ratios": rng.normal(size=shape),
    }


def on_device(rollout: dict[str, np.ndarray], *names: str) -> list[jax.Array]:
    chosen = names or ("rewards", "values", "next_values", "terminated", "done", "log_ratios")
    return [jnp.asarray(x if x.dtype == bool else x.astype(np.float32)) for x in (rollout[name] for name in chosen)]


def steps_and_ratios(rollout: dict[str, np.ndarray]) -> tuple[Steps, jax.Array]:
    *arrays, log_ratios = on_device(rollout)
    return Steps(*arrays), log_ratios


def gae_by_summation(rollout: dict[str, np.ndarray], discount: float, gae_lambda: float) -> np.ndarray:
    """Σ_k (γλ)^k δ_{t+k} until the episode's or the rollout's end, summed forward, with no recurrence."""
    advantages = np.zeros((STEPS, ENVIRONMENTS))
    for i in range(ENVIRONMENTS):
        for start in range(STEPS):
            for t in range(start, STEPS):
                future = 0.0 if rollout["terminated"][t, i] else rollout["next_values"][t, i]
                error = rollout["rewards"][t, i] + discount * future - rollout["values"][t, i]
                advantages[start, i] += (discount * gae_lambda) ** (t - start) * error
                if rollout["done"][t, i]:
                    break
    return advantages


def vtrace_by_summation(
    rollout: dict[str, np.ndarray], discount: float, rho_clip: float, c_clip: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """IMPALA's equation (1), V_s + Σ_t γ^{t−s} (Π c) ρ_t δ_t, and its policy-gradient advantage."""
    targets, advantages = np.zeros((STEPS, ENVIRONMENTS)), np.zeros((STEPS, ENVIRONMENTS))
    ratios = np.exp(rollout["log_ratios"])
    for i in range(ENVIRONMENTS):
        for start in range(STEPS):
            targets[start, i] = rollout["values"][start, i]
            trace = 1.0
            for t in range(start, STEPS):
                future = 0.0 if rollout["terminated"][t, i] else rollout["next_values"][t, i]
                error = rollout["rewards"][t, i] + discount * future - rollout["values"][t, i]
                targets[start, i] += discount ** (t - start) * trace * min(rho_clip, ratios[t, i]) * error
                trace *= gae_lambda * min(c_clip, ratios[t, i])
                if rollout["done"][t, i]:
                    break
        for t in range(STEPS):
            if rollout["terminated"][t, i]:
                future = 0.0
            elif rollout["done"][t, i] or t == STEPS - 1:
                future = rollout["next_values"][t, i]
            else:
                future = targets[t + 1, i]
            gain = rollout["rewards"][t, i] + discount * future - rollout["values"][t, i]
            advantages[t, i] = min(rho_clip, ratios[t, i]) * gain
    return targets, advantages


def test_gae_by_hand():
    """Environment 0 terminates at t = 1, environment 1 is truncated there with a final value of 10."""
    rewards = jnp.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    values = jnp.array([[4.0, 4.0], [6.0, 6.0], [8.0, 8.0]])
    next_values = jnp.array([[6.0, 6.0], [10.0, 10.0], [2.0, 2.0]])
    terminated = jnp.array([[False, False], [True, False], [False, False]])
    done = jnp.array([[False, False], [True, True], [False, False]])
    advantages, returns = gae(Steps(rewards, values, next_values, terminated, done), 0.5, 0.5)
    # δ = [1 + 3 − 4, 2 − 6, 3 + 1 − 8] and [0, 2 + 5 − 6, −4]; A_0 = δ_0 + 0.25 A_1, and no A crosses the end.
    np.testing.assert_allclose(advantages, [[-1.0, 0.25], [-4.0, 1.0], [-4.0, -4.0]])
    np.testing.assert_allclose(returns, [[3.0, 4.25], [2.0, 7.0], [4.0, 4.0]])


@given(seed=st.integers(0, 10**6), discount=st.floats(0, 1), gae_lambda=st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_gae_equals_its_sum(seed, discount, gae_lambda):
    rollout = random_rollout(seed)
    advantages, returns = gae(steps_and_ratios(rollout)[0], discount, gae_lambda)
    expected = gae_by_summation(rollout, discount, gae_lambda)
    np.testing.assert_allclose(advantages, expected, atol=1e-5)
    np.testing.assert_allclose(returns, expected + rollout["values"], atol=1e-5)


def test_true_values_have_no_advantage():
    """Reward 1 for ever is worth 1 / (1 − γ); cut by time limits it still is, so GAE finds nothing to correct."""
    discount = 0.9
    values = jnp.full((8, 2), 1 / (1 - discount))
    done = jnp.zeros((8, 2), bool).at[3].set(True)
    never = jnp.zeros((8, 2), bool)
    advantages, _ = gae(Steps(jnp.ones((8, 2)), values, values, never, done), discount, 0.95)
    np.testing.assert_allclose(advantages, 0.0, atol=1e-5)
    wrong, _ = gae(Steps(jnp.ones((8, 2)), values, values, done, done), discount, 0.95)
    np.testing.assert_allclose(wrong[3], -discount / (1 - discount), rtol=1e-5)


def test_vtrace_by_hand():
    """π/μ = [4, ½, 2], ρ̄ = 2, c̄ = 1, γ = ½, λ = 1; the second step is truncated with a final value of 4."""
    rewards, values, next_values = jnp.array([1.0, 1.0, 1.0]), jnp.array([2.0, 4.0, 6.0]), jnp.array([4.0, 4.0, 8.0])
    never, done = jnp.zeros(3, bool), jnp.array([False, True, False])
    log_ratios = jnp.log(jnp.array([4.0, 0.5, 2.0]))
    targets, advantages = vtrace(Steps(rewards, values, next_values, never, done), log_ratios, 0.5, 2.0, 1.0)
    # ρδ = [2 (1 + 2 − 2), ½ (1 + 2 − 4), 2 (1 + 4 − 6)] = [2, −½, −2]; v_0 = 2 + 2 + ½ · 1 · (−½).
    np.testing.assert_allclose(targets, [3.75, 3.5, 4.0], rtol=1e-6)
    # v' = [v_1, final value, value after the rollout] = [3.5, 4, 8].
    np.testing.assert_allclose(advantages, [2 * (1 + 1.75 - 2), 0.5 * (1 + 2 - 4), 2 * (1 + 4 - 6)], rtol=1e-6)


@given(
    seed=st.integers(0, 10**6),
    discount=st.floats(0, 1),
    rho_clip=st.floats(0.1, 3),
    c_clip=st.floats(0.1, 2),
    gae_lambda=st.floats(0, 1),
)
@settings(max_examples=20, deadline=None)
def test_vtrace_equals_its_sum(seed, discount, rho_clip, c_clip, gae_lambda):
    rollout = random_rollout(seed)
    targets, advantages = vtrace(*steps_and_ratios(rollout), discount, rho_clip, c_clip, gae_lambda)
    expected_targets, expected_advantages = vtrace_by_summation(rollout, discount, rho_clip, c_clip, gae_lambda)
    np.testing.assert_allclose(targets, expected_targets, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(advantages, expected_advantages, rtol=1e-4, atol=1e-4)


def test_vtrace_on_policy_is_gae():
    """Without clips and with λ = 1 the targets are GAE's returns, and the advantages too."""
    steps, _ = steps_and_ratios(random_rollout(0))
    on_policy = jnp.zeros((STEPS, ENVIRONMENTS))
    targets, advantages = vtrace(steps, on_policy, 0.95, jnp.inf, jnp.inf)
    expected_advantages, expected_returns = gae(steps, 0.95, 1.0)
    np.testing.assert_allclose(targets, expected_returns, atol=1e-5)
    np.testing.assert_allclose(advantages, expected_advantages, atol=1e-5)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.8])
def test_corrected_gae_on_policy_is_gae(gae_lambda):
    steps, _ = steps_and_ratios(random_rollout(1))
    on_policy = jnp.zeros((STEPS, ENVIRONMENTS))
    corrected = corrected_gae(steps, on_policy, 0.95, 1.0, 1.0, gae_lambda)
    np.testing.assert_allclose(corrected, gae(steps, 0.95, gae_lambda), atol=1e-6)


def test_corrected_gae_equals_a_loop():
    rollout = random_rollout(2)
    discount, rho_clip, c_clip, gae_lambda = 0.9, 1.5, 0.8, 0.7
    expected, following = np.zeros((STEPS, ENVIRONMENTS)), np.zeros(ENVIRONMENTS)
    for t in reversed(range(STEPS)):
        ratio = np.exp(rollout["log_ratios"][t])
        future = rollout["next_values"][t] * ~rollout["terminated"][t]
        error = np.minimum(ratio, rho_clip) * (rollout["rewards"][t] + discount * future - rollout["values"][t])
        following = error + discount * gae_lambda * np.minimum(ratio, c_clip) * following * ~rollout["done"][t]
        expected[t] = following
    advantages, returns = corrected_gae(*steps_and_ratios(rollout), discount, rho_clip, c_clip, gae_lambda)
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(returns, expected + rollout["values"], rtol=1e-4, atol=1e-5)


def test_lambda_returns_equal_a_loop():
    rollout = random_rollout(3)
    continues = np.random.default_rng(3).uniform(size=(STEPS, ENVIRONMENTS))
    expected, following = np.zeros((STEPS, ENVIRONMENTS)), rollout["next_values"][-1]
    for t in reversed(range(STEPS)):
        value = rollout["next_values"][t]
        mixed = np.where(rollout["done"][t], value, 0.3 * value + 0.7 * following)
        following = rollout["rewards"][t] + 0.9 * continues[t] * mixed
        expected[t] = following
    rewards, next_values, done = on_device(rollout, "rewards", "next_values", "done")
    returns = lambda_returns(rewards, next_values, jnp.asarray(continues, jnp.float32), 0.9, 0.7, done)
    np.testing.assert_allclose(returns, expected, rtol=1e-4, atol=1e-5)


def test_lambda_returns_are_the_returns_of_gae():
    """With certain continuations both are TD(λ), if next_values[t] = values[t + 1] inside an episode."""
    rollout = random_rollout(4)
    rewards, next_values, terminated, done = on_device(rollout, "rewards", "next_values", "terminated", "done")
    returns = lambda_returns(rewards, next_values, 1.0 - terminated, 0.9, 0.7, done)
    np.testing.assert_allclose(returns, gae(steps_and_ratios(rollout)[0], 0.9, 0.7)[1], atol=1e-5)


def test_lambda_returns_of_imagination_have_a_closed_form():
    """With λ = 1, r = 1, V = 0 and no end: (1 − γ^k) / (1 − γ) with k steps to go."""
    returns = lambda_returns(jnp.ones(5), jnp.zeros(5), jnp.ones(5), 0.5, 1.0)
    np.testing.assert_allclose(returns, [(1 - 0.5**k) / 0.5 for k in (5, 4, 3, 2, 1)])


def test_coefficients_may_be_traced_and_differ_between_members():
    arrays = steps_and_ratios(random_rollout(5))
    discounts, lambdas, clips = jnp.array([0.9, 0.99]), jnp.array([0.5, 1.0]), jnp.array([1.0, 2.0])
    together = jax.jit(jax.vmap(lambda discount, lam, clip: vtrace(*arrays, discount, clip, clip, lam)))
    for member, result in enumerate(zip(*together(discounts, lambdas, clips), strict=True)):
        alone = vtrace(*arrays, *(float(x[member]) for x in (discounts, clips, clips, lambdas)))
        np.testing.assert_allclose(result, alone, atol=1e-5)


def test_shapes_that_would_broadcast_are_refused():
    ones, column, never = jnp.ones(4), jnp.ones((4, 1)), jnp.zeros(4, bool)
    with pytest.raises(ValueError, match=r"values \(4, 1\).*must have the same shape; reshape"):
        gae(Steps(ones, column, ones, never, never), 0.9, 0.9)


def test_gae_equals_rlax():
    rlax = pytest.importorskip("rlax")
    rollout = random_rollout(6)
    # rlax has one discount for bootstrap and trace, so only terminations, and values in one array.
    rewards, values, done = on_device(rollout, "rewards", "values", "terminated")
    last = jnp.ones((1, ENVIRONMENTS))
    following = jnp.concatenate([values, last])
    estimate = jax.vmap(rlax.truncated_generalized_advantage_estimation, in_axes=(1, 1, None, 1), out_axes=1)
    expected = estimate(rewards, 0.9 * (1.0 - done), 0.7, following)
    advantages, _ = gae(Steps(rewards, values, following[1:], done, done), 0.9, 0.7)
    np.testing.assert_allclose(advantages, expected, atol=1e-5)
    returns = jax.vmap(rlax.lambda_returns, in_axes=(1, 1, 1, None), out_axes=1)
    np.testing.assert_allclose(
        lambda_returns(rewards, following[1:], 1.0 - done, 0.9, 0.7),
        returns(rewards, 0.9 * (1.0 - done), following[1:], 0.7),
        atol=1e-5,
    )


@pytest.mark.parametrize("gae_lambda", [1.0, 0.7])
def test_vtrace_equals_rlax(gae_lambda):
    rlax = pytest.importorskip("rlax")
    rewards, values, done, log_ratios = on_device(random_rollout(7), "rewards", "values", "terminated", "log_ratios")
    following = jnp.concatenate([values[1:], jnp.ones((1, ENVIRONMENTS))])
    estimate = jax.vmap(
        lambda v, v_next, r, discount, rho: rlax.vtrace_td_error_and_advantage(
            v, v_next, r, discount, rho, lambda_=gae_lambda, clip_rho_threshold=1.5, clip_pg_rho_threshold=1.5
        ),
        in_axes=1,
        out_axes=1,
    )
    expected = estimate(values, following, rewards, 0.9 * (1.0 - done), jnp.exp(log_ratios))
    targets, advantages = vtrace(Steps(rewards, values, following, done, done), log_ratios, 0.9, 1.5, 1.0, gae_lambda)
    np.testing.assert_allclose(targets, expected.errors + values, rtol=1e-4, atol=1e-5)
    if gae_lambda == 1.0:  # below 1, rlax mixes V into the bootstrap of the advantage, which IMPALA does not
        np.testing.assert_allclose(advantages, expected.pg_advantage, rtol=1e-4, atol=1e-5)
