"""The fused MLP, its kernels interpreted, against the same layers in plain JAX."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr import kernels
from lehr.algorithms import ppo, trpo
from lehr.kernels import lowered, mlp_blocks
from lehr.kernels import mlp as fused
from lehr.networks import NetworkConfig, actor_critic
from lehr.networks.torsos import ACTIVATIONS
from lehr.spaces import Box, Discrete
from lehr.types import Rollout


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setattr(fused, "INTERPRET", True)
    monkeypatch.setenv("LEHR_KERNELS", "off")
    monkeypatch.setattr(fused, "BLOCK_ROWS", 32)
    monkeypatch.setattr(fused, "BACKWARD_BLOCK_ROWS", 16)
    monkeypatch.setattr(fused, "PROGRAMS", 4)
    monkeypatch.setattr(fused, "FORWARD_PROGRAMS", 4)
    monkeypatch.setattr(fused, "MIN_ROWS", 1)
    monkeypatch.setattr(mlp_blocks, "OPERAND", jnp.float32)  # what is scaled for float16, but not rounded


def make(sizes, *lead, seed=0):
    """Layers of random weights, `[*lead, i, o]` and `[*lead, o]`."""
    rng = np.random.default_rng(seed)
    return [
        (jnp.asarray(rng.normal(size=(*lead, i, o)) / i**0.5, jnp.float32), jnp.asarray(rng.normal(size=(*lead, o)), jnp.float32))
        for i, o in itertools.pairwise(sizes)
    ]  # fmt: skip


def rows(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def plain(x, layers, activation):
    *hidden, (kernel, bias) = layers
    for k, b in hidden:
        y = x @ k
        x = ACTIVATIONS[activation](y + jnp.broadcast_to(b, y.shape))
    y = x @ kernel
    return y + jnp.broadcast_to(bias, y.shape)


def assert_close(found, expected, tolerance=1e-5):
    """Relative to the largest element: sums over rows cancel."""

    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(jnp.max(jnp.abs(b))))

    jax.tree.map(check, found, expected)


def outputs_and_gradients(function, x, layers, wants_dx=True):
    """Outputs, and gradients with respect to the layers and, if asked for, the inputs."""

    @jax.jit
    def both(x, layers):
        outputs, pull = (
            jax.vjp(function, x, layers) if wants_dx else jax.vjp(lambda layers: function(x, layers), layers)
        )
        return outputs, pull(rows(*outputs.shape, seed=2))

    return both(x, layers)


@pytest.mark.parametrize(
    ("count", "sizes", "activation"),
    [
        (77, (1, 64, 32, 1), "tanh"),
        (150, (16, 64, 32, 1), "tanh"),
        (33, (64, 16, 16, 16, 2), "tanh"),
        (33, (20, 128, 128, 6), "relu"),
        (1, (17, 48, 3), "gelu"),
    ],
)
def test_outputs_and_gradients_equal_plain_jax(count, sizes, activation):
    x, layers = rows(count, sizes[0]), make(sizes)
    found = outputs_and_gradients(lambda x, layers: fused.fused_mlp(x, layers, activation), x, layers)
    expected = outputs_and_gradients(lambda x, layers: plain(x, layers, activation), x, layers)
    assert_close(found, expected)


def test_full_precision_can_be_asked_for(monkeypatch):
    monkeypatch.setattr(mlp_blocks, "OPERAND", jnp.float16)  # not used
    x, layers = rows(40, 4), make((4, 16, 16, 2))
    expected = outputs_and_gradients(lambda x, layers: plain(x, layers, "tanh"), x, layers)

    def evaluate(x, layers):
        return fused.fused_mlp(x, layers, "tanh", precision="highest")

    assert_close(outputs_and_gradients(evaluate, x, layers), expected)
    with jax.default_matmul_precision("highest"):
        found = outputs_and_gradients(lambda x, layers: fused.fused_mlp(x, layers, "tanh"), x, layers)
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("inputs", "head", "gradient"),
    [(1.0, 1.0, 1.0), (1e6, 1e6, 1e10), (1e-6, 1e-6, 1e-10)],
    ids=["usual", "large", "small"],
)
def test_operands_in_float16_are_within_its_range(monkeypatch, inputs, head, gradient):
    monkeypatch.setattr(mlp_blocks, "OPERAND", jnp.float16)
    x, layers = inputs * rows(200, 5), make((5, 64, 64, 3))
    layers[0] = (layers[0][0] / inputs, layers[0][1])
    layers[-1] = (layers[-1][0] * head, layers[-1][1] * head)
    growing = jnp.linspace(0.01, 1.0, 200)[:, None] * gradient  # later blocks have larger derivatives

    def evaluated(function):
        outputs, pull = jax.vjp(function, x, layers)
        return outputs, pull(growing * rows(*outputs.shape, seed=2))

    found = evaluated(lambda x, layers: fused.fused_mlp(x, layers, "tanh"))
    expected = evaluated(lambda x, layers: plain(x, layers, "tanh"))
    worst = [
        float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True)
    ]
    assert max(worst) < 2e-3
    assert min(worst[0], max(worst)) > 1e-5  # it is rounded


def test_what_is_not_finite_stays_so(monkeypatch):
    monkeypatch.setattr(mlp_blocks, "OPERAND", jnp.float16)
    x, layers = rows(40, 4), make((4, 16, 16, 2))
    for value in (np.nan, np.inf):
        _, pull = jax.vjp(lambda layers: fused.fused_mlp(x, layers, "tanh"), layers)
        (found,) = pull(jnp.ones((40, 2)).at[3, 0].set(value))
        assert all(not np.all(np.isfinite(kernel)) for kernel, _ in found)
        broken = fused.fused_mlp(x.at[3, 0].set(value * 0), layers, "tanh")
        assert not np.any(np.isfinite(broken[3]))


def test_two_networks_are_evaluated_together_and_a_population_is_a_vmap():
    x, layers = rows(3, 5, 8, 4), make((4, 16, 16, 2), 3, 2)

    def evaluate(function):
        return outputs_and_gradients(jax.vmap(function), x, layers, wants_dx=False)

    found = evaluate(lambda x, layers: fused.fused_mlp(x, layers, "tanh"))
    assert found[0].shape == (3, 2, 5, 8, 2)
    assert_close(found, evaluate(lambda x, layers: jax.vmap(lambda layers: plain(x, layers, "tanh"))(layers)))


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("index", [0, 1])
def test_a_network_that_is_not_evaluated_has_no_gradient(index, members):
    """Both hold their slices of the hidden layers, but one has a head: gradients are those of the one alone."""
    x, layers, (head,) = rows(40, 4), make((4, 16, 16), 2), make((16, 3), seed=3)

    def one(layers, head):
        with kernels.together(members):
            return fused.evaluate(x, layers, {index: head}, "tanh")[0]

    def alone(layers, head):
        return plain(x, [*((kernel[index], bias[index]) for kernel, bias in layers), head], "tanh")

    found, expected = (
        jax.jit(jax.grad(lambda layers, head, f=f: jnp.sum(f(layers, head) ** 2), (0, 1)))(layers, head)
        for f in (one, alone)
    )
    assert_close(found, expected)
    for kernel, bias in found[0]:
        assert not np.any(kernel[1 - index])
        assert not np.any(bias[1 - index])


def test_a_population_may_share_its_inputs():
    x, layers = rows(40, 4), make((4, 16, 16, 2), 3)
    found = jax.jit(jax.vmap(lambda layers: fused.fused_mlp(x, layers, "tanh")))(layers)
    assert_close(found, jax.vmap(lambda layers: plain(x, layers, "tanh"))(layers))


def test_inputs_are_not_differentiated_unless_asked_for(monkeypatch):
    x, layers, wanted = rows(40, 4), make((4, 16, 16, 2)), []
    backward = fused.backward
    monkeypatch.setattr(
        fused, "backward", lambda *a, wants_dx: (wanted.append(wants_dx), backward(*a, wants_dx=wants_dx))[1]
    )
    for argnums in (0, 1, (0, 1)):
        jax.eval_shape(jax.grad(lambda layers, x: jnp.sum(fused.fused_mlp(x, layers, "tanh")), argnums), layers, x)
    assert wanted == [False, True, True]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_derivatives(name):
    z = jnp.linspace(-5.0, 5.0, 100)
    activate, derivative = fused.ACTIVATIONS[name]
    np.testing.assert_allclose(activate(z), ACTIVATIONS[name](z), rtol=1e-6)
    np.testing.assert_allclose(
        derivative(z, activate(z)), jax.vmap(jax.grad(ACTIVATIONS[name]))(z), rtol=1e-5, atol=1e-6
    )


def test_every_other_platform_takes_plain_jax(monkeypatch):
    monkeypatch.setattr(fused, "INTERPRET", False)
    x, layers = rows(40, 4), make((4, 16, 16, 2))
    found = outputs_and_gradients(lambda x, layers: fused.fused_mlp(x, layers, "tanh"), x, layers)
    assert_close(found, outputs_and_gradients(lambda x, layers: plain(x, layers, "tanh"), x, layers))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_the_kernels_lower_for_cuda(monkeypatch, lowers_for_cuda):
    monkeypatch.setattr(fused, "INTERPRET", False)
    x, layers = rows(100, 4), make((4, 64, 64, 2), 2)
    loss = jax.jit(jax.grad(lambda layers, x: jnp.sum(jnp.square(fused.fused_mlp(x, layers, "tanh")))))
    text = loss.trace(layers, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "fused_mlp_forward" in text or "_forward_program" in text
    assert "fused_mlp_backward" in text or "_backward_program" in text


# --- in an actor-critic


def evaluate(network, params, obs):
    carry, reset = network.initial_carry((len(obs),)), jnp.zeros(len(obs), bool)
    step = network.step(params, carry, obs, reset)[1:]
    unroll = network.unroll(params, carry, obs[None], reset[None])[1:]
    return network.act(params, carry, obs, reset)[1], network.value(params, carry, obs), step, unroll


@pytest.fixture
def calls(monkeypatch):
    """What is evaluated by the kernels from now on, as one entry for each forward and each backward kernel."""
    found = []
    monkeypatch.setattr(fused, "forward", lambda *a, f=fused.forward: (found.append("forward"), f(*a))[1])
    monkeypatch.setattr(fused, "backward", lambda *a, f=fused.backward, **k: (found.append("backward"), f(*a, **k))[1])
    return found


@pytest.mark.parametrize(
    ("action_space", "changes"),
    [(Discrete(3), {}), (Box(-1, 1, (2,)), {"activation": "relu", "state_dependent_std": True})],
    ids=["discrete", "box"],
)
def test_an_actor_critic_gives_the_same(monkeypatch, calls, action_space, changes):
    config = NetworkConfig(hidden_sizes=(16, 16), **changes)
    network, params = actor_critic(Box(-1, 1, (4,)), action_space, config, jax.random.key(0))
    obs = rows(5, 4)
    expected = evaluate(network, params, obs)
    assert calls == []
    monkeypatch.delenv("LEHR_KERNELS")
    assert_close(jax.jit(lambda params: evaluate(network, params, obs))(params), expected)
    assert calls == ["forward"] * 4


@pytest.mark.parametrize(
    ("changes", "rows_needed"),
    [
        ({"layer_norm": True}, 1),
        ({"precision": "bfloat16"}, 1),
        ({"hidden_sizes": (16,)}, 1),
        ({"hidden_sizes": (256, 256)}, 1),
        ({"shared": True}, 1),
        ({"activation": jnp.sin}, 1),
        ({}, 6),
    ],
)
def test_other_networks_stay_as_they_are(monkeypatch, calls, changes, rows_needed):
    monkeypatch.delenv("LEHR_KERNELS")
    monkeypatch.setattr(fused, "MIN_ROWS", rows_needed)
    config = NetworkConfig(**{"hidden_sizes": (16, 16), **changes})

    def evaluated():
        network, params = actor_critic(Box(-1, 1, (4,)), Discrete(2), config, jax.random.key(0))
        return evaluate(network, params, rows(5, 4))

    jax.eval_shape(evaluated)
    assert calls == []


def test_features_are_in_plain_jax_and_can_be_differentiated_forward(monkeypatch, calls):
    monkeypatch.delenv("LEHR_KERNELS")
    config = NetworkConfig(hidden_sizes=(16, 16))
    network, params = actor_critic(Box(-1, 1, (4,)), Discrete(3), config, jax.random.key(0))
    carry, obs, reset = network.initial_carry((5,)), rows(1, 5, 4), jnp.zeros((1, 5), bool)

    def outputs(params):
        _, actor, critic = network.features(params, carry, obs, reset)
        return network.policy(params, actor), network.head_value(params, critic)

    found, _ = jax.jit(lambda params: jax.jvp(outputs, (params,), (params,)))(params)
    assert calls == []
    assert_close(found, jax.jit(network.unroll)(params, carry, obs, reset)[1:])
    assert calls == ["forward"]


def test_a_whole_rollout_is_valued_by_one_kernel(monkeypatch, calls):
    config = NetworkConfig(hidden_sizes=(16, 16))
    network, params = actor_critic(Box(-1, 1, (4,)), Discrete(3), config, jax.random.key(0))
    carry, obs = network.initial_carry((0,)), rows(6, 5, 4)
    monkeypatch.setattr("lehr.networks.observations.ROWS_AT_ONCE", 10)
    expected = network.value(params, carry, obs)
    monkeypatch.delenv("LEHR_KERNELS")
    assert_close(jax.jit(network.value)(params, carry, obs), expected)
    assert calls == ["forward"]


def learning(algorithm, config, **coef):
    """A function of parameters that makes one update, and parameters to begin with."""
    network, params = actor_critic(
        Box(-1, 1, (4,)), Discrete(2), NetworkConfig(hidden_sizes=(16, 16)), jax.random.key(0)
    )
    rng = np.random.default_rng(0)
    noise, no = rng.normal(size=(3, 6, 5)).astype(np.float32), np.zeros((6, 5), bool)
    rollout = Rollout(
        obs=rows(6, 5, 4),
        action=jnp.asarray(rng.integers(2, size=(6, 5)), jnp.int32),
        log_prob=jnp.full((6, 5), np.log(0.5), jnp.float32),
        reward=noise[0],
        value=noise[1],
        next_value=noise[2],
        terminated=no,
        done=no,
        reset=no,
        valid=(),
        carry=network.initial_carry((5,)),
    )
    made = algorithm.Algorithm(config, network)
    coef = {
        name: jnp.float32(value)
        for name, value in {"discount": 0.9, "gae_lambda": 0.9, "entropy_coef": 0.01, **coef}.items()
    }
    example = jax.eval_shape(lambda x: x, rollout)

    def learned(params):
        learner = made.init(jax.random.key(0), params, example)
        return made.learn(learner, rollout, coef, jax.random.key(1))[0].params

    return learned, params


@pytest.mark.slow
def test_an_update_of_ppo_is_the_same(monkeypatch, calls):
    coef = {"learning_rate": 0.01, "value_coef": 0.5, "clip_range": 0.2, "max_grad_norm": 0.5}
    update, params = learning(ppo, ppo.Config(epochs=2, minibatches=1, optimiser="sgd"), **coef)
    expected = jax.jit(update)(params)
    monkeypatch.setenv("LEHR_KERNELS", "no-mlp_loss")
    jax.clear_caches()
    found = jax.jit(lambda params: update(params))(params)
    assert "backward" in calls
    assert_close(jax.tree.map(jnp.subtract, found, params), jax.tree.map(jnp.subtract, expected, params), 1e-4)


def test_an_update_of_trpo_which_differentiates_forward_can_be_traced(monkeypatch, calls):
    coef = {"value_learning_rate": 0.01, "target_kl": 0.01, "damping": 0.1, "line_search_shrink": 0.5}
    update, params = learning(trpo, trpo.Config(value_epochs=1, value_minibatches=1), **coef)
    monkeypatch.delenv("LEHR_KERNELS")
    jax.eval_shape(update, params)
    assert "backward" in calls


@pytest.mark.parametrize("count", [4, 40])
def test_members_of_a_population_are_an_axis_of_the_grid(count, monkeypatch):
    members = 3
    layers = make((5, 16, 16, 3), members, 2)  # two networks of each member
    x = rows(members, count, 5)

    def kernel(x, layers):
        with kernels.together(members):
            return jax.vmap(lambda x, layers: fused.fused_mlp(x, layers, "tanh"))(x, layers)

    def expected(x, layers):
        return jax.vmap(lambda x, layers: jax.vmap(lambda layers: plain(x, layers, "tanh"))(layers))(x, layers)

    text = str(jax.make_jaxpr(kernel)(x, layers))
    assert "fused_mlp_forward" in text
    assert_close(outputs_and_gradients(kernel, x, layers), outputs_and_gradients(expected, x, layers))


def test_few_rows_of_many_members_are_enough_for_the_kernels(monkeypatch):
    monkeypatch.setattr(fused, "MIN_ROWS", 512)
    *hidden, head = make((4, 64, 64, 2), 1)
    given = rows(4, 4), hidden, {0: (head[0][0], head[1][0])}, "tanh"
    assert not fused.fits(*given)
    with kernels.together(128):
        assert fused.fits(*given)
    with kernels.together(127):
        assert not fused.fits(*given)
    assert not fused.fits(*given)


@pytest.mark.parametrize(("capability", "is_half"), [((7, 5), False), ((8, 0), True), ((10, 0), True), ((), True)])
def test_operands_are_float16_where_the_gpu_has_the_instructions(monkeypatch, capability, is_half):
    monkeypatch.setattr(lowered, "capability", lambda: capability)
    hidden = [(jnp.zeros((1, 4, 8)), jnp.zeros((1, 8)))]
    assert fused.plan_of(jnp.zeros((8, 4)), hidden, {0: (jnp.zeros((8, 2)), jnp.zeros(2))}, "tanh").is_half == is_half


@pytest.mark.parametrize("members", [1, 512])
@pytest.mark.parametrize("rows", [16, 64, 1000, 100_000])
def test_what_is_tried_before_has_the_loops_and_partial_sums_of_the_program(rows, members):
    hidden = [(jnp.zeros((2, 4, 8)), jnp.zeros((2, 8)))] * 2
    heads = {index: (jnp.zeros((8, width)), jnp.zeros(width)) for index, width in enumerate((2, 1))}
    with kernels.together(members):
        plan = fused.plan_of(jax.ShapeDtypeStruct((rows, 4), jnp.float32), hidden, heads, "tanh")
    tried = plan.probe
    assert tried.rows < 2 * max(plan.block_rows, plan.backward_block_rows)
    assert (tried.blocks_per_forward_program > 1) == (plan.blocks_per_forward_program > 1)
    assert (tried.backward_programs > 1) == (plan.backward_programs > 1)
