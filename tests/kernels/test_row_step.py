"""A step of many environments as a program on single numbers: the same results as plain JAX, or a refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr import kernels
from lehr.kernels import row_step
from lehr.kernels.row_program import Unsupported

N = 512
KEY = jax.random.key(0)
STATE = {"x": jax.random.normal(KEY, (N, 5, 3)), "count": jnp.arange(N) % 7, "fixed": jnp.ones((N, 2))}
ACTION = jax.random.normal(jax.random.fold_in(KEY, 1), (N, 3))
PARENTS = np.array([0, 0, 1, 0, 3])


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(row_step, "INTERPRET", True)
    monkeypatch.setattr(row_step, "LEAST_NODES", 1)
    monkeypatch.setattr(row_step, "CONDITIONAL_LOOPS", True)


def moved(x, action):
    """A step of one environment: gathers, scatters, products and a sum at places that are known."""
    x = x + 0.1 * x[PARENTS] @ jnp.outer(action, action)
    return x.at[PARENTS].add(jnp.cross(x, action)) / (1 + jnp.sum(x**2))


def substeps(x, action):
    return jax.lax.fori_loop(0, 4, lambda _, x: moved(x, action), x)


def until_small(x, action):
    """A loop whose length differs between environments."""
    return jax.lax.while_loop(lambda x: jnp.sum(jnp.abs(x)) > 2.0, lambda x: x * 0.7 + 0.001 * action[None], x)


def solved(x, action):
    """The solution of a linear system, by the factor of Cholesky."""
    matrix = x.T @ x + jnp.eye(3)
    return x + jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(matrix, lower=True), action)[None]


def nearest(x, action):
    """The two rows that are nearest, which is not known while tracing."""
    _, places = jax.lax.top_k(-jnp.sum((x - action[None]) ** 2, axis=1), 2)
    return x.at[0].set(x[places].sum(0))


def angles(x, action):
    return (
        x + jnp.arccos(jnp.clip(x, -1, 1)) + jnp.arctan2(x, action[None]) + jnp.where(x > 0, jnp.sqrt(jnp.abs(x)), -x)
    )


def powers(x, action):
    """Of numbers of both signs, by whole exponents, one of them 0, and of a magnitude by any."""
    whole = jnp.floor(2 * action)
    return jnp.clip(jax.lax.pow(x, jnp.broadcast_to(whole, x.shape)), -9, 9) + jnp.abs(x) ** jnp.float32(0.3)


def step_of(function):
    def step(state, action):
        x = jax.vmap(function)(state["x"], action)
        count = state["count"] + (x[:, 0, 0] > 0)
        return state | {"x": x, "count": count}, {"reward": x.sum((1, 2)), "even": count % 2 == 0}

    return step


@pytest.mark.parametrize("function", [moved, substeps, until_small, solved, nearest, angles, powers])
def test_a_step_gives_what_plain_jax_gives(function):
    step = step_of(function)
    stepper = row_step.stepper(step, STATE, ACTION)
    packed, state = stepper.pack(STATE), STATE
    for _ in range(2):
        packed, seen = jax.jit(stepper.step)(packed, ACTION)
        state, wanted = jax.jit(step)(state, ACTION)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), seen, wanted)
    found = stepper.unpack(packed)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for name, x in state.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_allclose(found[name], x, rtol=2e-4, atol=2e-5)


def test_states_come_back_from_packing_as_they_were():
    stepper = row_step.stepper(step_of(moved), STATE, ACTION)
    jax.tree.map(np.testing.assert_array_equal, stepper.unpack(stepper.pack(STATE)), STATE)


def test_what_no_step_changes_is_not_written():
    stepper = row_step.stepper(step_of(moved), STATE, ACTION)
    packed = stepper.pack(STATE)
    after, _ = stepper.step(packed, ACTION)
    assert after[1] is packed[1]
    assert [x.shape for x in packed[1]] == [(2, N)]


@pytest.mark.parametrize(
    "mixes",
    [
        lambda x: x - x.mean(0, keepdims=True),
        lambda x: x[::-1],
        lambda x: jnp.cumsum(x, axis=0),
        lambda x: x + x[:1],
        lambda x: jnp.einsum("nij,mij->nij", x, x),
        lambda x: x.reshape(5, N, 3).reshape(N, 5, 3) + x,
        lambda x: x * jnp.arange(N)[:, None, None],
        lambda x: jnp.where(jnp.any(x > 0), x, -x),
    ],
)
def test_a_step_in_which_environments_depend_on_each_other_is_refused(mixes):
    def step(state, action):
        return state | {"x": mixes(state["x"])}, {}

    with pytest.raises(Unsupported):
        row_step.stepper(step, STATE, ACTION)


def test_a_step_that_is_refused_runs_in_plain_jax():
    def step(state, action):
        return state | {"x": state["x"] - state["x"].mean(0, keepdims=True)}, {}

    stepper = kernels.stepper(step, STATE, ACTION)
    after, _ = stepper.step(stepper.pack(STATE), ACTION)
    np.testing.assert_array_equal(stepper.unpack(after)["x"], step(STATE, ACTION)[0]["x"])


def test_it_can_be_turned_off(monkeypatch):
    assert kernels.is_chosen("row_step", STATE, ACTION)
    monkeypatch.setenv("LEHR_KERNELS", "no-row_step")
    assert not kernels.is_chosen("row_step", STATE, ACTION)


@pytest.mark.parametrize("rows", [128, 600])
def test_few_rows_and_rows_that_do_not_fill_blocks_are_left_to_plain_jax(rows):
    assert not kernels.is_chosen("row_step", {"x": jnp.zeros((rows, 3))}, jnp.zeros((rows, 2)))


@pytest.mark.parametrize(
    "view",
    [lambda x: x.astype(jnp.float16), lambda x: x.astype(jnp.bfloat16), lambda x: jnp.ones(3), lambda x: jnp.ones(())],
)
def test_results_that_cannot_be_packed_are_left_to_plain_jax(view):
    def step(state, action):
        x = state["x"] * 0.5 + action[:, None]
        return state | {"x": x}, {"seen": view(x[:, 0, 0])}

    stepper = kernels.stepper(step, STATE, ACTION)
    _, seen = stepper.step(stepper.pack(STATE), ACTION)
    np.testing.assert_array_equal(seen["seen"], step(STATE, ACTION)[1]["seen"])


@pytest.mark.parametrize("table", [jnp.array([1.0, 4.0, 9.0]), jnp.array([1, 4, 9])])
@pytest.mark.parametrize("filling", [None, 7])
def test_a_place_outside_an_array_gives_the_number_that_it_is_filled_with(table, filling):
    def step(state, action):
        seen = table.at[state["count"]].get(mode="fill", fill_value=filling)
        return state | {"x": state["x"] + action[:, None]}, {"seen": seen}

    stepper = row_step.stepper(step, STATE, ACTION)
    _, seen = stepper.step(stepper.pack(STATE), ACTION)
    np.testing.assert_array_equal(seen["seen"], step(STATE, ACTION)[1]["seen"])


def test_powers_with_integer_exponents_and_choices_by_platform_have_rules():
    def step(state, action):
        powers = (1.0 + jnp.abs(state["x"])) ** state["count"][:, None, None]
        doubled = jax.lax.platform_dependent(action, cuda=lambda x: 2 * x, default=lambda x: x + x)
        return state | {"x": state["x"] + action[:, None]}, {"powers": powers, "doubled": doubled}

    stepper = row_step.stepper(step, STATE, ACTION)
    _, seen = stepper.step(stepper.pack(STATE), ACTION)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), seen, step(STATE, ACTION)[1])


def test_a_product_of_small_floats_that_is_summed_in_float32_is_refused():
    def step(state, action):
        x = state["x"].astype(jnp.bfloat16)
        seen = jnp.einsum("nij,nij->n", x, x, preferred_element_type=jnp.float32)
        return state | {"x": state["x"] + action[:, None]}, {"seen": seen}

    with pytest.raises(Unsupported, match="float32"):
        row_step.stepper(step, STATE, ACTION)
