"""Distributions against scipy, numerical integration and counting."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from scipy.integrate import quad

from lehr.errors import InputError
from lehr.maths.distributions import UNROLLED, Categorical, MultiCategorical, Normal, TanhNormal

PROBS = np.array([0.05, 0.6, 0.0, 0.25, 0.1, 0.0])
NVEC = (2, 4, 3)
BOX = {"low": (-2.0, 1.0), "high": (2.0, 1.5)}


def with_probs(probs):
    with np.errstate(divide="ignore"):
        return Categorical(jnp.log(jnp.asarray(probs, jnp.float32)))


def random_normal(seed, shape=(3, 2)):
    rng = np.random.default_rng(seed)
    return Normal(jnp.float32(rng.normal(size=shape)), jnp.float32(rng.normal(size=shape) * 0.5))


def chi_square_p(counts, probs):
    """p-value of observed counts, over the categories that can occur."""
    counts, probs = np.asarray(counts, float), np.asarray(probs)
    assert counts[probs == 0].sum() == 0
    return scipy.stats.chisquare(counts[probs > 0], probs[probs > 0] * counts.sum()).pvalue


@pytest.mark.parametrize("method", ["sample", "sample_and_log_prob"])
@pytest.mark.parametrize("probs", [PROBS, np.array([0.3, 0.7]), np.full(40, 1 / 40)])
def test_categorical_frequencies_match_the_probabilities(method, probs):
    policy = with_probs(np.broadcast_to(probs, (200_000, len(probs))))
    action = getattr(policy, method)(jax.random.key(3))
    action = action[0] if isinstance(action, tuple) else action
    assert action.dtype == jnp.int32
    assert chi_square_p(np.bincount(action, minlength=len(probs)), probs) > 1e-3


def test_categorical_draws_for_every_row_its_own_distribution():
    policy = with_probs(np.eye(4)[[2, 0, 3]])
    assert policy.sample(jax.random.key(0)).tolist() == [2, 0, 3]


def test_categorical_never_draws_what_is_forbidden_at_the_edges_of_the_uniform_numbers(monkeypatch):
    policy = with_probs([[0.0, 0.1, 0.2, 0.7, 0.0]] * 2)
    edges = jnp.array([0.0, np.nextafter(np.float32(1), np.float32(0))])
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape: edges)
    assert policy.sample(jax.random.key(0)).tolist() == [1, 3]


def test_categorical_needs_one_random_number_for_an_action():
    jaxpr = str(jax.make_jaxpr(lambda key: Categorical(jnp.zeros((7, 50))).sample(key))(jax.random.key(0)))
    assert re.findall(r"random_bits\[[^]]*shape=(\S+?)\s*\]", jaxpr) == ["(7,)"]


def test_sample_and_log_prob_computes_one_softmax():
    jaxpr = str(jax.make_jaxpr(lambda key: Categorical(jnp.zeros((7, 5))).sample_and_log_prob(key))(jax.random.key(0)))
    assert len(re.findall(r"= log[ \[]", jaxpr)) == 1


def test_categorical_matches_scipy():
    p, q = PROBS, np.array([0.2, 0.2, 0.1, 0.2, 0.2, 0.1])
    policy, other = with_probs(p), with_probs(q)
    np.testing.assert_allclose(policy.entropy(), scipy.stats.entropy(p), rtol=1e-5)
    np.testing.assert_allclose(policy.kl(other), scipy.stats.entropy(p, q), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(policy.log_prob)(jnp.array([1, 3])), np.log(p[[1, 3]]), rtol=1e-5)
    assert policy.mode() == 1
    assert policy.std() is None


def test_categorical_gradients_are_finite_beside_forbidden_categories():
    other = with_probs(PROBS)

    def everything(logits):
        policy = Categorical(logits)
        return policy.entropy() + policy.kl(other) + policy.log_prob(jnp.int32(1))

    assert np.isfinite(jax.grad(everything)(other.logits)).all()


def test_multi_categorical_is_the_product_of_its_components():
    logits = jnp.float32(np.random.default_rng(0).normal(size=(5, sum(NVEC))))
    policy, other = MultiCategorical(logits, NVEC), MultiCategorical(-logits, NVEC)
    parts = [Categorical(logits[:, 0:2]), Categorical(logits[:, 2:6]), Categorical(logits[:, 6:9])]
    other_parts = [Categorical(-part.logits) for part in parts]
    action, log_prob = policy.sample_and_log_prob(jax.random.key(0))
    assert action.shape == (5, 3)
    assert action.dtype == jnp.int32
    expected = sum(part.log_prob(action[:, k]) for k, part in enumerate(parts))
    np.testing.assert_allclose(log_prob, expected, rtol=1e-5)
    np.testing.assert_allclose(policy.log_prob(action), expected, rtol=1e-5)
    np.testing.assert_allclose(policy.entropy(), sum(part.entropy() for part in parts), rtol=1e-5)
    np.testing.assert_allclose(
        policy.kl(other), sum(p.kl(q) for p, q in zip(parts, other_parts, strict=True)), rtol=1e-5
    )
    np.testing.assert_array_equal(policy.mode(), np.stack([part.mode() for part in parts], -1))


def test_multi_categorical_frequencies_match_and_components_are_independent():
    logits = jnp.log(jnp.array([0.3, 0.7, 0.5, 0.2, 0.2, 0.1, 0.6, 0.3, 0.1]))
    action = np.asarray(MultiCategorical(jnp.tile(logits, (100_000, 1)), NVEC).sample(jax.random.key(1)))
    joint = np.einsum("i,j,k->ijk", *np.split(np.exp(np.asarray(logits, np.float64)), [2, 6]))
    counts = np.bincount(np.ravel_multi_index(action.T, NVEC), minlength=joint.size)
    assert chi_square_p(counts, joint.ravel() / joint.sum()) > 1e-3


def test_normal_matches_scipy():
    policy, other = random_normal(0), random_normal(1)
    reference = scipy.stats.norm(policy.mean, np.exp(policy.log_std))
    action, log_prob = policy.sample_and_log_prob(jax.random.key(0))
    np.testing.assert_allclose(log_prob, reference.logpdf(action).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(policy.entropy(), reference.entropy().sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(policy.mode(), policy.mean)
    np.testing.assert_allclose(policy.std(), reference.std(), rtol=1e-6)
    one = jax.tree.map(lambda x: float(x[0, 0]), (policy, other))
    p, q = (scipy.stats.norm(n.mean, np.exp(n.log_std)) for n in one)
    integral, _ = quad(lambda x: p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), -10, 10)
    np.testing.assert_allclose(
        jax.tree.map(lambda x: x[:, :1], policy).kl(jax.tree.map(lambda x: x[:, :1], other))[0], integral, rtol=1e-5
    )


def test_normal_samples_have_the_distribution():
    policy = Normal(jnp.full((20_000, 1), 1.5), jnp.full((20_000, 1), -0.7))
    draws = np.asarray(policy.sample(jax.random.key(0)))[:, 0]
    assert scipy.stats.kstest(draws, scipy.stats.norm(1.5, np.exp(-0.7)).cdf).pvalue > 1e-3


def squashed(mean=(0.4, -0.3), log_std=(-0.5, 0.2), batch=()):
    shape = (*batch, 2)
    return TanhNormal(*(jnp.broadcast_to(jnp.array(x), shape) for x in (mean, log_std)), **BOX)


def before_squashing(action, low, high):
    """The `u` whose squashed action this is, found in float64."""
    return jnp.float32(np.arctanh(2 * (np.asarray(action, np.float64) - low) / (np.asarray(high) - low) - 1))


@pytest.mark.parametrize("log_std", [-1.0, 0.5])
def test_tanh_normal_density_integrates_to_one(log_std):
    policy = TanhNormal(jnp.full((20_000, 1), 0.7), jnp.full((20_000, 1), log_std), (-2.0,), (3.0,))
    grid = np.linspace(-2, 3, 20_001)
    centres = (grid[1:] + grid[:-1]) / 2
    density = np.exp(policy.log_prob(before_squashing(centres[:, None], -2.0, 3.0)))
    assert abs(density.sum() * (grid[1] - grid[0]) - 1) < 1e-3


def test_tanh_normal_log_prob_matches_the_change_of_variables_in_float64():
    policy = squashed()
    y = np.array([[-0.999, 0.9], [0.0, -0.5], [0.7, 0.99]])
    low, high = (np.array(BOX[name]) for name in ("low", "high"))
    action = low + (high - low) * (y + 1) / 2
    normal = scipy.stats.norm(np.asarray(policy.mean), np.exp(np.asarray(policy.log_std)))
    expected = (normal.logpdf(np.arctanh(y)) - np.log((high - low) / 2 * (1 - y**2))).sum(-1)
    u = before_squashing(action, low, high)
    np.testing.assert_allclose(squashed(batch=(3,)).log_prob(u), expected, rtol=1e-4)
    np.testing.assert_allclose(squashed(batch=(3,)).environment_action(u), action, rtol=1e-5, atol=1e-6)


def test_tanh_normal_is_finite_for_far_means_and_stays_in_the_box():
    for mean in (0.0, 30.0, -1e4):
        policy = squashed(mean=(mean, mean))

        def at(mean, action, log_std=policy.log_std):
            return TanhNormal(mean, log_std, **BOX).log_prob(action)

        sample = policy.sample(jax.random.key(0))
        log_prob, gradient = jax.value_and_grad(at)(policy.mean, sample)
        assert np.isfinite(log_prob)
        assert np.isfinite(gradient).all()
        action = policy.environment_action(sample)
        assert ((action >= jnp.array(BOX["low"])) & (action <= jnp.array(BOX["high"]))).all()


@pytest.mark.parametrize("mean", [0.0, 7.0, 9.0, 12.0, -12.0])
def test_tanh_normal_has_the_true_gradient_where_actions_are_rounded_to_the_bounds(mean):
    """d log p / d mean = (u − mean) / σ² everywhere, also where float32 has one squashed action for many `u`."""
    policy = TanhNormal(jnp.full((1000, 1), mean), jnp.full((1000, 1), -0.5), (-1.0,), (1.0,))
    u, log_prob = policy.sample_and_log_prob(jax.random.key(0))
    np.testing.assert_array_equal(policy.log_prob(u), log_prob)
    gradient = jax.grad(lambda mean: TanhNormal(mean, policy.log_std, (-1.0,), (1.0,)).log_prob(u).sum())(policy.mean)
    np.testing.assert_allclose(gradient, (u - mean) / np.exp(-1.0), rtol=1e-4, atol=1e-4)


def test_tanh_normal_entropy_is_estimated_without_bias():
    """Against minus the integral of p log p; 20,000 samples leave a standard error below 0.01."""
    policy = TanhNormal(jnp.array([0.7]), jnp.array([0.3]), (-2.0,), (3.0,))
    normal = scipy.stats.norm(0.7, np.exp(0.3))

    def integrand(u):
        return normal.pdf(u) * (normal.logpdf(u) - np.log(2.5) - 2 * (np.log(2) - u - np.logaddexp(0, -2 * u)))

    expected = -quad(integrand, -12, 12)[0]
    assert abs(policy.entropy(jax.random.key(0), samples=20_000) - expected) < 0.03
    _, log_prob = jax.vmap(policy.sample_and_log_prob)(jax.random.split(jax.random.key(1), 20_000))
    assert abs(-log_prob.mean() - expected) < 0.05
    assert not policy.has_exact_entropy
    with pytest.raises(InputError, match=r"entropy\(key\)"):
        policy.entropy()


def test_tanh_normal_entropy_gradient_matches_finite_differences_of_the_integral():
    """With a wide normal the actions pile up at the bounds, so that a larger σ lowers the entropy."""

    def entropy(log_std):
        policy = TanhNormal(jnp.zeros(1), log_std[None], (-1.0,), (1.0,))
        return policy.entropy(jax.random.key(0), samples=20_000)

    def exact(log_std):
        normal = scipy.stats.norm(0, np.exp(log_std))
        slope = quad(lambda u: normal.pdf(u) * 2 * (np.log(2) - u - np.logaddexp(0, -2 * u)), -60, 60, limit=200)[0]
        return normal.entropy() + slope

    expected = (exact(1.01) - exact(0.99)) / 0.02
    assert expected < -1
    assert abs(jax.grad(entropy)(jnp.float32(1.0)) - expected) < 0.05 * abs(expected)


def test_tanh_normal_kl_equals_the_integral_over_actions():
    p, q = (TanhNormal(jnp.array([m]), jnp.array([s]), (-2.0,), (3.0,)) for m, s in ((0.3, -0.6), (-0.2, -0.3)))
    grid = np.linspace(-2, 3, 20_001)
    centres = jnp.float32((grid[1:] + grid[:-1]) / 2)[:, None]
    u = before_squashing(centres, -2.0, 3.0)
    log_p, log_q = (np.asarray(jax.vmap(policy.log_prob)(u), np.float64) for policy in (p, q))
    integral = (np.exp(log_p) * (log_p - log_q)).sum() * (grid[1] - grid[0])
    np.testing.assert_allclose(p.kl(q), integral, rtol=2e-3)


@pytest.mark.parametrize(
    "policy",
    [
        Categorical(jnp.zeros((4, 3))),
        MultiCategorical(jnp.zeros((4, 9)), NVEC),
        random_normal(0, (4, 2)),
        squashed(batch=(4,)),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_distributions_are_pytrees_that_pass_jit_and_vmap(policy):
    leaves = jax.tree.leaves(policy)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    keys = jax.random.split(jax.random.key(0), 4)
    action, log_prob = jax.jit(jax.vmap(lambda policy, key: policy.sample_and_log_prob(key)))(policy, keys)
    np.testing.assert_allclose(log_prob, policy.log_prob(action), rtol=1e-5)
    assert policy.kl(policy).shape == (4,)
    np.testing.assert_allclose(policy.kl(policy), 0, atol=1e-6)
    assert policy.entropy(jax.random.key(0)).shape == (4,)
    assert policy.mode().shape == action.shape


def test_a_single_category_is_always_drawn_for_the_whole_batch():
    action, log_prob = Categorical(jnp.zeros((5, 1))).sample_and_log_prob(jax.random.key(0))
    assert (action.shape, action.dtype, action.tolist(), log_prob.tolist()) == ((5,), jnp.int32, [0] * 5, [0.0] * 5)


@pytest.mark.parametrize("categories", [3, UNROLLED + 4])
def test_a_row_whose_categories_are_all_masked_is_uniform(categories):
    """And has no gradient; its neighbours are what they are without it, and NaN stays NaN."""
    some = jax.random.normal(jax.random.key(0), (categories,))
    logits = jnp.stack([some, jnp.full(categories, -jnp.inf), jnp.full(categories, jnp.nan)])

    def values(logits):
        policy = Categorical(logits)
        action = jnp.ones(logits.shape[:-1], jnp.int32)
        return policy.log_prob(action), policy.entropy(), policy.kl(Categorical(2 * logits))

    log_prob, entropy, kl = values(logits)
    np.testing.assert_allclose(log_prob[1], -np.log(categories), rtol=1e-6)
    np.testing.assert_allclose(entropy[1], np.log(categories), rtol=1e-6)
    np.testing.assert_allclose(kl[1], 0, atol=1e-6)
    for found, alone in zip(values(logits), values(some[None]), strict=True):
        np.testing.assert_array_equal(found[0], alone[0])
        assert np.isnan(found[2])
    gradient = jax.grad(lambda logits: sum(jnp.sum(part) for part in values(logits)))(logits[:2])
    assert np.isfinite(gradient).all()
    assert not np.asarray(gradient[1]).any()
    drawn = Categorical(logits[1]).sample(jax.random.key(1))
    assert 0 <= int(drawn) < categories
