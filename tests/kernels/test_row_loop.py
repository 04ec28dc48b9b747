"""A rollout as one kernel, interpreted, against `jax.lax.scan`."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr import kernels
from lehr.algorithms import ppo
from lehr.kernels import row_loop
from lehr.kernels.row_program import Program, Unsupported
from lehr.networks import NetworkConfig
from lehr.training.iteration import next_rollout
from lehr.training.program import assemble

ROWS, STEPS = 24, 32  # more than one block, the last one not full


@pytest.fixture
def interpreted(monkeypatch):
    """Any backend is able; yields the loops that were run as kernels."""
    loops = []
    run = row_loop._Loop.run

    def spy(self, arrays):
        loops.append(self)
        return run(self, arrays)

    monkeypatch.setattr(row_loop, "INTERPRET", True)
    monkeypatch.setattr(row_loop._Loop, "run", spy)
    monkeypatch.setattr(kernels, "_warned", set())
    return loops


def assert_close(found, wanted, tolerance=1e-5):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=tolerance, atol=tolerance)


WEIGHTS = jax.random.normal(jax.random.key(1), (4, 64)) * 0.5, jax.random.normal(jax.random.key(2), (64, 64)) * 0.1


def elementwise(carry, row):
    """Shapes, choices and rounding."""
    x, count, flag = carry
    key, shift = row
    noise = jax.random.normal(key, (ROWS, 4))
    x = jnp.tanh(x + 0.1 * noise + shift)
    turned = jnp.stack([x[:, 1], jnp.round(4.0 * x[:, 0]) / 4.0, jnp.clip(x[:, 2], -0.5, 0.5), x[:, 3]])
    y = jnp.concatenate([turned.T[:, ::-1][:, :2], x[:, jnp.array([3, 0])]], axis=1)
    best = jnp.argmax(y, axis=1)
    chosen = jnp.select([best == 0, best == 1], [y.sum(1), y.max(1)], y.min(1))
    parts = jnp.split(y.reshape(ROWS, 2, 2), 2, axis=1)
    y = jnp.where(flag[:, None], y, (parts[0] - parts[1]).repeat(2, axis=1).reshape(ROWS, 4) + jnp.cumsum(x, axis=1))
    count = jnp.where(chosen > 0.3, 0, count + 1)
    out = {"best": best, "sign": jnp.sign(chosen), "flag": (y > 0).all(axis=1), "ones": jnp.ones(ROWS), "key": noise[0]}
    return (y / 2.0, count, (count % 3 == 0) | (y < -0.4).any(axis=1)), out


def layers(carry, row):
    """Products with weights, from few columns to many and back."""
    (x,) = carry
    hidden = jax.nn.relu(jnp.tanh(x @ WEIGHTS[0] + 0.1) @ WEIGHTS[1] - jnp.arange(64)[None] / 64.0)
    small = hidden @ WEIGHTS[0].T
    return (0.9 * x + 0.1 * jnp.tanh(small @ jnp.eye(4) + row),), (small, hidden.max(axis=1), hidden.sum(axis=1))


WIDE = [jax.random.normal(jax.random.key(seed), (4, 192)) * 0.3 for seed in (4, 5)]
WIDER = [jax.random.normal(jax.random.key(seed), (192, 320)) * 0.1 for seed in (6, 7)]


def wide_layers(carry, row):
    """Layers of several tiles, the last of which are narrower, and more weights than are kept on chip."""
    (x,) = carry
    hidden = jnp.tanh(jnp.tanh(x @ WIDE[0] + jnp.arange(192)[None] / 192.0) @ WIDER[0] + 0.1)
    small = jnp.tanh(hidden @ WIDER[1].T) @ WIDE[1].T
    return (0.9 * x + 0.1 * jnp.tanh(small + row),), (small, hidden.max(axis=1), hidden.sum(axis=1), hidden[:, :128])


def memory(carry, row):
    """A gated state of 128 columns, reset in some rows; parts of a layer, and a wide output."""
    x, state, reset = carry
    gate, candidate = jnp.split(jnp.tanh(x @ WIDE[0][:, :64]) @ WIDER[0][:64, :256], 2, axis=1)
    state = jnp.where(reset[:, None], 0.0, state)
    state = state + jax.nn.sigmoid(gate) * (candidate - state)
    both = jnp.concatenate([state, candidate], axis=1)
    x = jnp.tanh(x + 0.1 * (both @ WIDER[1][0, :256].reshape(256, 1)) + row)
    return (x, state, x[:, 0] > 0.5), (state, x[:, 1], both.min(axis=1))


def start_of(body):
    x = jax.random.normal(jax.random.key(0), (ROWS, 4))
    if body is memory:
        return x, jax.random.normal(jax.random.key(8), (ROWS, 128)), jnp.arange(ROWS) % 2 == 0
    return (x, jnp.arange(ROWS, dtype=jnp.int32), jnp.arange(ROWS) % 2 == 0) if body is elementwise else (x,)


def rows_of(body):
    shifts = jnp.linspace(-0.5, 0.5, STEPS)
    return shifts if body is not elementwise else (jax.random.split(jax.random.key(3), STEPS), shifts)


@pytest.mark.parametrize("body", [elementwise, layers, wide_layers, memory])
def test_equals_scan(interpreted, body):
    start, rows = start_of(body), rows_of(body)
    found = kernels.scan(body, start, rows)
    assert len(interpreted) == 1
    assert_close(found, jax.lax.scan(body, start, rows))


def test_members_of_a_population_have_weights_of_their_own(interpreted):
    starts = jax.random.normal(jax.random.key(0), (3, 4, 4))
    scales = jnp.array([0.5, 1.0, 2.0])

    def train(scan, x, scale):
        def body(x, shift):
            x = jnp.tanh(jnp.tanh(x @ (scale * WEIGHTS[0])) @ WEIGHTS[0].T) + shift
            return x, x[:, 0]

        return scan(body, x, jnp.linspace(0.0, 1.0, 64))

    with kernels.together(3):
        found = jax.vmap(lambda *given: train(kernels.scan, *given))(starts, scales)
    assert len(interpreted) == 1
    assert_close(found, jax.vmap(lambda *given: train(jax.lax.scan, *given))(starts, scales))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda x, row: (jnp.cumsum(x, axis=0) / ROWS, row), "cumsum of the rows"),
        (lambda x, row: (x - x.mean(axis=0, keepdims=True), row), "reduce_sum over the rows"),
        (lambda x, row: (jnp.sort(x, axis=1), row), "sort"),
        (lambda x, row: (x[::-1], row), "rev of the rows"),
        (lambda x, row: (jnp.broadcast_to(row, x.shape), x[:, 0]), "a carry that does not depend"),
        (lambda x, row: (x[jnp.clip(x[:, 0].astype(int), 0, 3)], row), "a gather"),
    ],
)
def test_other_bodies_are_left_to_scan(interpreted, caplog, body, reason):
    start, rows = start_of(layers)[0], rows_of(layers)
    with caplog.at_level(logging.DEBUG, "lehr"):
        found = kernels.scan(body, start, rows)
    assert interpreted == []
    assert reason in caplog.text
    assert_close(found, jax.lax.scan(body, start, rows), tolerance=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.lax.broadcast_in_dim(x, (2, 3, 2), (1, 2)),
        lambda x: jax.lax.broadcast_in_dim(x, (3, 5, 2), (0, 2)),
        lambda x: x.astype(jnp.uint8),
        lambda x: x.astype(jnp.float32),
        lambda x: x.astype(bool),
        lambda x: -(x + x) * x - jnp.ones_like(x),
    ],
    ids=["a new first axis", "a new axis between", "small integers", "numbers", "truth values", "arithmetic"],
)
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint32", "bfloat16"])
def test_what_is_known_while_tracing_is_what_jax_computes(function, dtype):
    x = np.array([[1e9, -3.7], [0.0, 255.6], [2.5e9, 7.0]], np.float64)
    x = np.asarray(jnp.asarray(np.abs(x) if dtype == "uint32" else x, jnp.float32).astype(dtype))
    program, _ = Program.of(lambda carry, row: (carry + row, function(jnp.asarray(x))), jnp.zeros(2), jnp.zeros(2))
    (found,) = program.outputs
    known = found.static if found.static is not None else program.consts[found.number]
    np.testing.assert_array_equal(np.asarray(known), np.asarray(jax.jit(function)(x)), strict=True)


@pytest.mark.parametrize(
    ("start", "steps"),
    [
        ((jnp.zeros((ROWS, 4)), jnp.zeros(())), STEPS),
        ((jnp.zeros((ROWS, 4)), jnp.zeros((ROWS + 1, 4))), STEPS),
        (jnp.zeros((ROWS, 528)), STEPS),
        (tuple(jnp.zeros((ROWS, 30)) for _ in range(3)), STEPS),
        (jnp.zeros((ROWS, 4)), 2),
    ],
    ids=["a scalar", "other rows", "wide", "many columns", "few steps"],
)
def test_large_or_mixed_states_do_not_fit(interpreted, start, steps):
    assert not kernels.is_chosen("row_loop", start, jnp.zeros(steps))


def test_a_kernel_that_jax_refuses_is_replaced_with_one_warning(interpreted, monkeypatch, caplog):
    def refuse(self, arrays):
        raise ValueError("no such instruction")

    monkeypatch.setattr(row_loop._Loop, "run", refuse)
    start, rows = start_of(layers), rows_of(layers)
    for _ in range(2):
        assert_close(kernels.scan(layers, start, rows), jax.lax.scan(layers, start, rows), tolerance=0)
    assert [record.message for record in caplog.records if "row_loop" in record.message][1:] == []
    assert "The kernel row_loop does not work here (ValueError: no such instruction)" in caplog.text


def rollout_of(env, network=None, **settings):
    config = ppo.Config(num_envs=ROWS, horizon=STEPS, minibatches=1, **settings)
    program, state = assemble("ppo", env, config, NetworkConfig(**(network or {})), 10**6)
    return lambda: next_rollout(program, state).rollout


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("CartPole-v1", {}),
        ("Pendulum-v1", {"normalise_observations": True}),
        pytest.param("Pendulum-v1", {"network": {"hidden_sizes": (256, 256)}}, marks=pytest.mark.slow),
        ("Pendulum-v1", {"network": {"torso": "mingru", "recurrent_size": 128, "shared": True}}),
        *(
            pytest.param("Pendulum-v1", {"network": network}, marks=pytest.mark.slow)
            for network in (
                {"torso": "gru", "recurrent_size": 128},
                {"torso": "lstm", "recurrent_size": 128, "shared": True},
            )
        ),
    ],
)
def test_a_rollout_equals_the_plain_one(interpreted, monkeypatch, env, settings):
    collect = rollout_of(env, **settings)
    interpreted.clear()
    found = jax.jit(collect)()
    assert len(interpreted) == 1
    monkeypatch.setattr(row_loop, "INTERPRET", False)
    assert_close(found, jax.jit(lambda: collect())(), tolerance=1e-4)
    assert len(interpreted) == 1


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    "env", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "DeepChain-v0"]
)
def test_a_rollout_is_lowered_for_a_gpu(monkeypatch, lowers_for_cuda, env):
    """Without one: that it is chosen, and that JAX has a rule for every operation."""
    checked = []
    check = row_loop._Loop.check

    def spy(self, arrays):
        check(self, arrays)
        checked.append(self)

    monkeypatch.setattr(row_loop, "is_able", lambda: True)
    monkeypatch.setitem(kernels.KERNELS, "row_loop", kernels.Kernel(lambda: True, row_loop.fits, can_be_split=False))
    monkeypatch.setattr(row_loop._Loop, "check", spy)
    collect = rollout_of(env)
    checked.clear()
    jax.eval_shape(collect)
    assert len(checked) == 1


def test_ties_and_numbers_that_are_none(interpreted):
    """The first of equal entries is the largest, unless one is NaN; integers are combined bit by bit."""
    values = jnp.array(
        [[1.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, jnp.nan, 3.0, jnp.nan], [-1.0, -1.0, 0.5, 0.5]]
    )
    start = jnp.tile(values, (6, 1))

    def body(x, row):
        bits = jnp.stack([x[:, 0] > row, x[:, 3] > row], axis=1).astype(jnp.int32) + 2
        both = jax.lax.reduce_and(bits, axes=(1,)), jax.lax.reduce_or(bits, axes=(1,))
        return x * 1.0, (jnp.argmax(x, axis=1), jnp.argmin(x, axis=1), both)

    found = kernels.scan(body, start, jnp.linspace(-1.0, 1.0, STEPS))
    assert len(interpreted) == 1
    assert_close(found, jax.lax.scan(body, start, jnp.linspace(-1.0, 1.0, STEPS)), tolerance=0)


@pytest.mark.parametrize(
    ("sizes", "reason"), [((4, 40), "a layer of 40"), ((512, 528), r"\(512, 528\)"), ((64, 36), "a layer of 36")]
)
def test_layers_that_do_not_fit_are_left_to_scan(interpreted, sizes, reason):
    into, weights = jnp.ones((4, sizes[0])), jnp.ones(sizes)

    def body(x, row):
        wide = x if sizes[0] == 4 else x @ into
        return x + (wide @ weights).sum(1, keepdims=True), row

    with pytest.raises(Unsupported, match=reason):
        row_loop.scan(body, jnp.ones((ROWS, 4)), jnp.ones(STEPS), dict)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [(lambda x: x[:, 16:208], "columns 16 to 208"), (lambda x: x[:, ::2], "with strides"), (jnp.argmax, "argmax")],
)
def test_parts_of_wide_arrays_that_are_not_tiles_are_left_to_scan(interpreted, columns, reason):
    columns = columns if columns is not jnp.argmax else lambda x: jnp.argmax(x, axis=1, keepdims=True)

    def body(x, row):
        return x + columns(x @ jnp.ones((4, 320))).sum(1, keepdims=True), row

    with pytest.raises(Unsupported, match=reason):
        row_loop.scan(body, jnp.ones((ROWS, 4)), jnp.ones(STEPS), dict)


def test_only_some_of_many_weights_are_kept_on_chip(interpreted):
    start, rows = start_of(wide_layers), rows_of(wide_layers)
    kernels.scan(wide_layers, start, rows)
    kept = [request for request in interpreted[0].requests if request.is_tile]
    assert interpreted[0].is_large
    assert 0 < sum(request.size for request in kept) <= row_loop.MOST_KEPT[0] < 192 * 320


def test_fewer_weights_are_kept_until_the_kernel_fits_on_chip(monkeypatch):
    """As a compiler says that has memory for the activations and one tile of 128 × 128."""
    start, rows = start_of(wide_layers), rows_of(wide_layers)
    row = jax.eval_shape(lambda rows: rows[0], rows)
    loop = row_loop._Loop(Program.of(wide_layers, start, row)[0], ROWS, STEPS)
    tried = []

    def lower(arrays):
        tried.append(sum(request.size for request in loop.requests))
        if tried[-1] > 128 * 128:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded")

    monkeypatch.setattr(loop, "_lower", lower)
    loop.check([])
    assert len(tried) == 2
    assert 128 * 128 < tried[0] <= row_loop.MOST_KEPT[0]
    assert tried[1] == 128 * 128


def test_a_kernel_that_needs_too_much_memory_is_left_to_scan(monkeypatch, caplog):
    """The compiler says so only when it compiles a kernel, here for a GPU that is not there."""

    def exhausted(*arguments, compiles):
        assert compiles
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded")

    monkeypatch.setattr(row_loop.lowered, "check", exhausted)
    monkeypatch.setitem(kernels.KERNELS, "row_loop", kernels.Kernel(lambda: True, row_loop.fits, can_be_split=False))
    start, rows = start_of(wide_layers), rows_of(wide_layers)
    with caplog.at_level(logging.DEBUG, "lehr"):
        found = kernels.scan(wide_layers, start, rows)
    assert "row_loop does not fit here: more memory than there is on chip" in caplog.text
    assert_close(found, jax.lax.scan(wide_layers, start, rows), tolerance=0)
