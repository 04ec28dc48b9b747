"""Wide MLPs, their kernels interpreted, against the same layers in plain JAX."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr import kernels
from lehr.algorithms import trpo
from lehr.kernels import lowered, mlp, wide_mlp, wide_mlp_programs
from lehr.networks import NetworkConfig, actor_critic
from lehr.networks.torsos import ACTIVATIONS
from lehr.spaces import Box, Discrete
from lehr.types import Rollout

SMALL = {
    "MIN_ROWS": 1,
    "MANY_ROWS": 64,
    "BLOCK_ROWS": 32,
    "BLOCK_COLUMNS": 64,
    "BACKWARD_BLOCK_ROWS": 64,
    "BACKWARD_BLOCK_COLUMNS": 32,
}
"""Tuning for small arrays, in which every loop has several steps."""


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setattr(mlp, "INTERPRET", True)
    for name, value in SMALL.items():
        monkeypatch.setattr(wide_mlp, name, value)


def draw(rng, *shape, scale=1.0):
    return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)


def make(inputs, hidden, widths, first=0, held=2, seed=0):
    """Hidden layers of `held` networks, and heads of those from `first` on."""
    rng = np.random.default_rng(seed)
    layers = [
        (draw(rng, held, i, o, scale=i**-0.5), draw(rng, held, o, scale=0.1))
        for i, o in itertools.pairwise((inputs, *hidden))
    ]
    heads = {
        first + index: (draw(rng, hidden[-1], width, scale=hidden[-1] ** -0.5), draw(rng, width))
        for index, width in enumerate(widths)
    }
    return layers, heads


def plain(x, layers, heads, activation):
    outputs = []
    for index, (head, head_bias) in heads.items():
        y = x
        for kernel, bias in layers:
            z = jnp.dot(y, kernel[index], precision="highest")
            y = ACTIVATIONS[activation](z + jnp.broadcast_to(bias[index], z.shape))
        z = jnp.dot(y, head, precision="highest")
        outputs.append(z + jnp.broadcast_to(head_bias, z.shape))
    return tuple(outputs)


def outputs_and_gradients(function, x, layers, heads, wants_dx):
    """The outputs, and the gradients of a random sum of them."""
    given = (x, layers, heads) if wants_dx else (layers, heads)
    outputs, pull = jax.vjp(function if wants_dx else lambda *given: function(x, *given), *given)
    rng = np.random.default_rng(7)
    return outputs, pull(tuple(draw(rng, *output.shape) for output in outputs))


def assert_close(found, expected, tolerance=2e-5):
    """Relative to the largest element: sums over rows cancel."""

    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * (1e-3 + float(jnp.max(jnp.abs(b)))))

    jax.tree.map(check, found, expected)


CASES = [
    ((77, 4), (128, 128), (2, 1), "tanh", 0, False),
    ((3, 43, 37), (128, 64), (5, 1), "elu", 0, True),
    pytest.param((9, 100), (32, 128, 64), (17, 1), "silu", 0, True, marks=pytest.mark.slow),
    pytest.param((130, 1), (128,), (3,), "gelu", 1, True, marks=pytest.mark.slow),
    pytest.param((64, 65), (256, 32), (1,), "relu", 0, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "hidden", "widths", "activation", "first", "wants_dx"), CASES)
def test_outputs_and_gradients_are_those_of_plain_jax(shape, hidden, widths, activation, first, wants_dx):
    x, given = draw(np.random.default_rng(1), *shape), make(shape[-1], hidden, widths, first)
    assert wide_mlp.fits(x, *given, activation)
    found = outputs_and_gradients(lambda *of: wide_mlp.evaluate(*of, activation), x, *given, wants_dx)
    expected = outputs_and_gradients(lambda *of: plain(*of, activation), x, *given, wants_dx)
    assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_sizes(seed):
    rng = np.random.default_rng(seed)
    hidden = (*rng.choice([32, 64, 128], rng.integers(0, 3)).tolist(), 128)
    widths, inputs = tuple(rng.integers(1, 20, 2).tolist()), int(rng.integers(1, 150))
    x, given = draw(rng, int(rng.integers(1, 200)), inputs), make(inputs, hidden, widths, seed=seed)
    activation = str(rng.choice(sorted(ACTIVATIONS)))
    found = outputs_and_gradients(lambda *of: wide_mlp.evaluate(*of, activation), x, *given, wants_dx=True)
    assert_close(found, outputs_and_gradients(lambda *of: plain(*of, activation), x, *given, wants_dx=True))


@pytest.mark.parametrize("activation", ["tanh", "silu"])
def test_programs_that_are_not_compiled_for_cuda_use_plain_jax(monkeypatch, activation):
    x, given = draw(np.random.default_rng(1), 70, 6), make(6, (128, 64), (3, 1))
    monkeypatch.setattr(mlp, "INTERPRET", False)
    monkeypatch.setattr(wide_mlp, "_refusal", lambda plan: "")
    found = outputs_and_gradients(lambda *of: wide_mlp.evaluate(*of, activation), x, *given, wants_dx=True)
    assert_close(found, outputs_and_gradients(lambda *of: plain(*of, activation), x, *given, wants_dx=True))


def test_the_gradient_of_a_network_that_is_not_evaluated_is_zero():
    x, (layers, heads) = draw(np.random.default_rng(1), 20, 6), make(6, (128,), (3,), first=1, held=3)
    gradient = jax.grad(lambda layers: jnp.sum(wide_mlp.evaluate(x, layers, heads, "tanh")[0]))(layers)
    used = jax.tree.map(lambda leaf: jnp.any(leaf != 0, range(1, leaf.ndim)).tolist(), gradient)
    assert used == [([False, True, False], [False, True, False])]


@pytest.mark.parametrize(
    ("hidden", "inputs", "widths", "activation", "rows", "is_fit"),
    [
        ((256, 256), 4, (2, 1), "tanh", 64, True),
        ((256, 256, 128), 300, (20, 1), "elu", 64, True),
        ((512, 256), 4, (2, 1), "tanh", 64, False),
        ((64, 64), 4, (2, 1), "tanh", 64, False),  # stays on chip, see lehr.kernels.mlp
        ((400, 300), 4, (2, 1), "tanh", 64, False),
        ((256, 16), 4, (2, 1), "tanh", 64, False),
        ((2048, 256), 4, (2, 1), "tanh", 64, False),
        ((256, 256), 2000, (2, 1), "tanh", 64, False),
        ((256, 256), 4, (100, 1), "tanh", 64, False),
        ((256, 256), 4, (2, 1), jnp.sin, 64, False),
        ((256, 256), 4, (2, 1), "tanh", 31, False),
        ((256, 256), 4, (2, 1), "tanh", 2**20, False),
    ],
)
def test_what_the_kernels_are_used_for(monkeypatch, hidden, inputs, widths, activation, rows, is_fit):
    monkeypatch.setattr(wide_mlp, "MIN_ROWS", 32)
    given = jax.eval_shape(lambda: make(inputs, hidden, widths))
    x = jax.ShapeDtypeStruct((rows, inputs), jnp.float32)
    assert wide_mlp.fits(x, *given, activation) == is_fit
    with kernels.together(2):  # members of a population
        assert not wide_mlp.fits(x, *given, activation)


@pytest.fixture
def calls(monkeypatch):
    """The calls of both programs."""
    made = []

    def recorded(name, function):
        def call(*arguments, **options):
            made.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(wide_mlp, name, call)

    wide_mlp._operation.cache_clear()
    recorded("forward", wide_mlp_programs.forward)
    recorded("backward", wide_mlp_programs.backward)
    yield made
    wide_mlp._operation.cache_clear()


def test_an_actor_critic_gives_the_same(monkeypatch, calls):
    config = NetworkConfig(hidden_sizes=(128, 64))
    network, params = actor_critic(Box(-1, 1, (4,)), Discrete(3), config, jax.random.key(0))
    carry, obs, reset = network.initial_carry((5,)), draw(np.random.default_rng(1), 5, 4), jnp.zeros(5, bool)

    def loss(params):
        _, policy, value = network.step(params, carry, obs, reset)
        return jnp.sum(jnp.square(policy.logits)) + jnp.sum(jnp.square(value))

    found = jax.jit(jax.value_and_grad(loss))(params)
    acted = jax.jit(network.act)(params, carry, obs, reset)[1].logits
    assert calls == ["forward", "backward", "forward"]
    monkeypatch.setenv("LEHR_KERNELS", "no-wide_mlp")
    assert_close(found, jax.jit(jax.value_and_grad(loss))(params))
    assert_close(acted, jax.jit(network.act)(params, carry, obs, reset)[1].logits)
    assert len(calls) == 3


def test_features_are_in_plain_jax_and_can_be_differentiated_forward(calls):
    network, params = actor_critic(
        Box(-1, 1, (4,)), Discrete(3), NetworkConfig(hidden_sizes=(128, 64)), jax.random.key(0)
    )
    carry, obs, reset = network.initial_carry((5,)), draw(np.random.default_rng(1), 1, 5, 4), jnp.zeros((1, 5), bool)

    def logits(params):
        return network.policy(params, network.features(params, carry, obs, reset)[1]).logits

    found, _ = jax.jit(lambda params: jax.jvp(logits, (params,), (params,)))(params)
    assert calls == []
    assert_close(found, network.unroll(params, carry, obs, reset)[1].logits)
    assert calls == ["forward"]


def test_an_update_of_trpo_which_differentiates_forward_is_the_same(monkeypatch, calls):
    network, params = actor_critic(
        Box(-1, 1, (4,)), Discrete(2), NetworkConfig(hidden_sizes=(128, 32)), jax.random.key(0)
    )
    rng = np.random.default_rng(0)
    no = jnp.zeros((6, 5), bool)
    rollout = Rollout(
        obs=draw(rng, 6, 5, 4),
        action=jnp.asarray(rng.integers(2, size=(6, 5)), jnp.int32),
        log_prob=jnp.full((6, 5), np.log(0.5), jnp.float32),
        reward=draw(rng, 6, 5),
        value=draw(rng, 6, 5),
        next_value=draw(rng, 6, 5),
        terminated=no,
        done=no,
        reset=no,
        valid=(),
        carry=network.initial_carry((5,)),
    )
    algorithm = trpo.Algorithm(trpo.Config(value_epochs=1, value_minibatches=1), network)
    coef = {"discount": 0.9, "gae_lambda": 0.9, "entropy_coef": 0.01, "value_learning_rate": 0.01, "target_kl": 0.01}
    coef |= {"damping": 0.1, "line_search_shrink": 0.5}
    coef = {name: jnp.float32(value) for name, value in coef.items()}

    def update(params):
        learner = algorithm.init(jax.random.key(0), params, jax.eval_shape(lambda x: x, rollout))
        learned = algorithm.learn(learner, rollout, coef, jax.random.key(1))[0].params
        return jax.tree.map(jnp.subtract, learned, params)

    found = jax.jit(lambda params: update(params))(params)
    assert "backward" in calls
    monkeypatch.setenv("LEHR_KERNELS", "off")
    assert_close(found, jax.jit(lambda params: update(params))(params), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["tanh", "silu"])
def test_bfloat16_rounds_factors_and_sums_in_float32(monkeypatch, activation):
    """Hidden layers of 256: sums in bfloat16 would be off by several percent."""
    x, given = draw(np.random.default_rng(1), 130, 70), make(70, (256, 32), (3, 1))

    def found(dtype):
        evaluate = lambda *of: wide_mlp.evaluate(*of, activation, dtype)  # noqa: E731
        return outputs_and_gradients(evaluate, x, *given, wants_dx=True)

    rounded = found(jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(rounded)} == {jnp.dtype("float32")}
    assert_close(rounded, found(jnp.float32), 0.03)
    assert not jnp.allclose(rounded[0][0], found(jnp.float32)[0][0], rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(mlp, "INTERPRET", False)  # for the same in plain JAX
    monkeypatch.setattr(wide_mlp, "_refusal", lambda plan: "")
    assert_close(rounded, found(jnp.bfloat16), 0.015)


def test_an_actor_critic_in_bfloat16_uses_the_kernels_if_they_are_chosen_for_it(monkeypatch, calls):
    config = NetworkConfig(hidden_sizes=(128, 64), precision="bfloat16")
    network, params = actor_critic(Box(-1, 1, (4,)), Discrete(3), config, jax.random.key(0))
    carry, obs = network.initial_carry((5,)), draw(np.random.default_rng(1), 5, 4)
    jax.eval_shape(network.value, params, carry, obs)
    assert calls == []
    monkeypatch.setattr(wide_mlp, "DTYPES", (jnp.float32, jnp.bfloat16))
    found = jax.jit(network.value)(params, carry, obs)
    assert calls == ["forward"]
    monkeypatch.setenv("LEHR_KERNELS", "off")
    assert_close(found, jax.jit(network.value)(params, carry, obs), 0.03)


@pytest.mark.parametrize(("first", "widths"), [(0, (2, 1)), (1, (1,)), (0, (3, 5))])
@pytest.mark.parametrize("activation", ["tanh", "silu"])
def test_what_is_compared_with_plain_jax_before_the_first_use_agrees(first, widths, activation):
    layers, heads = make(5, (128, 128), widths, first)
    plan = wide_mlp.plan_of(jnp.zeros((128, 5)), layers, heads, activation)
    both, in_plain_jax, arguments = wide_mlp._trial(plan)
    lowered._compare(both(*arguments), in_plain_jax(*arguments))


@pytest.mark.parametrize(("capability", "is_able"), [((9, 0), True), ((8, 6), False), ((), False)])
def test_only_processors_with_enough_shared_memory_use_the_kernels(monkeypatch, capability, is_able):
    monkeypatch.setattr(mlp, "INTERPRET", False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(lowered, "capability", lambda: capability)
    assert wide_mlp.is_able() == is_able
