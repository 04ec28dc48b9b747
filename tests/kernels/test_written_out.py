"""Small gathers, scatters and products that are written out: the same numbers, and none of them is left."""

import collections

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.kernels.written_out import MOST_PLACES, written_out

PARENTS = np.array([-1, 0, 1, 0, 3])
X = jax.random.normal(jax.random.key(0), (6, 5, 3))
FIVE, MATRIX = X[0], X[0, :3]


def primitives(function, *arguments):
    """How often each primitive is in the program of a function, programs inside included."""
    found = collections.Counter()

    def count(jaxpr):
        for equation in jaxpr.eqns:
            found[equation.primitive.name] += 1
            for value in equation.params.values():
                for inner in value if isinstance(value, (tuple, list)) else [value]:
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        count(inner)

    count(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


def looped(x):
    """A scan whose body gathers and scatters at places that it is given from outside."""
    places = jnp.asarray(PARENTS)

    def body(total, row):
        return total.at[places].add(row, mode="drop") * 0.5, row[places]

    return jax.lax.scan(body, x[0], x)


def small_places(x):
    """The last place that a byte can name, and the first: neighbours, if the difference of bytes wrapped."""
    places = jnp.array([[255], [0]], jnp.uint8)
    numbers = jax.lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    return jax.lax.gather(x, places, numbers, (1,), mode="clip")


FUNCTIONS = {
    "a gather": (lambda x: x[jnp.array([4, 0, 1, 2, 2])], FIVE),
    "places at the end of a small type": (small_places, jnp.arange(257.0)),
    "neighbours": (lambda x: x[jnp.arange(1, 4)], FIVE),
    "from the end": (lambda x: x[jnp.array([-1, -5])], FIVE),
    "the second axis": (lambda x: x[:, jnp.array([2, 0])], FIVE),
    "a table of places": (lambda x: x[jnp.array([[0, 4], [1, 1], [3, 2]])], FIVE),
    "a batch": (jax.vmap(lambda x: x[jnp.array([2, 0, 1])]), X),
    "take": (lambda x: jnp.take(x, jnp.array([1, 3]), axis=0, mode="wrap"), FIVE),
    "places of places": (lambda x: x[jnp.array([3, 0, 2])[jnp.array([2, 2])]], FIVE),
    "a scatter": (lambda x: jnp.zeros((4, 3)).at[jnp.array([1, 1, 0, 3, 1])].add(x), FIVE),
    "a scatter on the second axis": (lambda x: jnp.ones((5, 2)).at[:, jnp.array([1, 0, 1])].add(x), FIVE),
    "a scatter to the outside": (lambda x: jax.ops.segment_sum(x, jnp.asarray(PARENTS), 4), FIVE),
    "a batch of scatters": (jax.vmap(lambda x: jax.ops.segment_sum(x, jnp.asarray(PARENTS), 5)), X),
    "a scalar product": (lambda x: jnp.dot(x[0], x[1]), FIVE),
    "scalar products": (jax.vmap(lambda x: jnp.dot(x, x + 1)), FIVE),
    "a matrix and vectors": (jax.vmap(lambda x: MATRIX @ x), FIVE),
    "matrices and vectors": (jax.vmap(lambda x: x[:3] @ x[4]), X),
    "matrices and matrices": (jax.vmap(lambda x: x[:3] @ x[1:4].T), X),
    "an outer product": (lambda x: jnp.einsum("i,j->ij", x[0], x[1]), FIVE),
    "over two axes": (lambda x: jnp.einsum("bij,ij->b", x[:, :2, :2], x[0, :2, :2]), X),
    "whole numbers and others": (lambda x: jnp.dot(x[0], jnp.array([1, 0, -2])), FIVE),
    "whole numbers": (lambda x: jnp.dot((9 * x[0]).astype(jnp.int8), jnp.arange(3), preferred_element_type=int), FIVE),
    "a number and an array": (lambda x: jax.lax.dot_general(2.0, x, (((), ()), ((), ()))), FIVE),
    "a sum": (lambda x: x.sum(-1), X),
    "a function within": (lambda x: jax.jit(lambda y: y[jnp.array([0, 2])].sum(-1))(x) * 2, FIVE),
    "places given to a function within": (lambda x: jax.jit(lambda y, i: y[i % 5])(x, jnp.asarray(PARENTS)), FIVE),
    "a loop": (looped, X),
}
GONE = ("gather", "scatter-add", "dot_general", "reduce_sum")


@pytest.mark.parametrize(("function", "x"), FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_the_numbers_are_the_same_and_nothing_is_left(function, x):
    before, after = primitives(function, x), primitives(written_out(function), x)
    assert sum(before[name] for name in GONE) > 0
    assert sum(after[name] for name in GONE) == 0
    assert jax.tree.structure(jax.eval_shape(function, x)) == jax.tree.structure(
        jax.eval_shape(written_out(function), x)
    )
    with jax.enable_x64(True):  # so that no order of a sum can be told from another
        x = np.asarray(x, np.float64)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12),
            function(x),
            jax.jit(written_out(function))(x),
        )


def narrow(x):
    """A scatter whose updates are narrower than what they are added to."""
    numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return jax.lax.scatter_add(x, jnp.array([[1], [2]]), jnp.ones((2, 2)), numbers)


LEFT = {
    "a narrow scatter": (narrow, FIVE, "scatter-add"),
    "a scatter into nothing": (lambda x: jax.ops.segment_sum(x, jnp.asarray(PARENTS), 0), FIVE, "scatter-add"),
    "half precision": (
        lambda x: jnp.dot(jnp.array([256, 1, 1], jnp.bfloat16), x),
        jnp.ones(3, "bfloat16"),
        "dot_general",
    ),
    "places that depend on an argument": (lambda x: FIVE[jnp.argsort(x[:, 0])], FIVE, "gather"),
    "places outside, which give nan": (lambda x: x.at[jnp.array([0, 7])].get(mode="fill"), FIVE, "gather"),
    "many places": (lambda x: x[jnp.array([0, 1] * MOST_PLACES)], FIVE, "gather"),
    "a scatter into many": (lambda x: jnp.zeros((2 * MOST_PLACES, 3)).at[jnp.arange(5)].add(x), FIVE, "scatter-add"),
    "a scatter that sets": (lambda x: jnp.zeros((9, 3)).at[jnp.arange(5)].set(x), FIVE, "scatter"),
    "places on two axes": (lambda x: x[jnp.array([0, 1]), jnp.array([1, 2])], FIVE, "gather"),
    "a large product": (lambda x: x.reshape(30, 3) @ x.reshape(30, 3).T, X, "dot_general"),
    "a branch": (lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y[jnp.array([1, 0])], lambda y: y[:2], x), FIVE, "cond"),
}


@pytest.mark.parametrize(("function", "x", "left"), LEFT.values(), ids=LEFT.keys())
def test_what_cannot_be_written_out_is_left_as_it_is(function, x, left):
    assert primitives(written_out(function), x)[left] == primitives(function, x)[left] > 0
    np.testing.assert_array_equal(function(x), written_out(function)(x))


def test_random_numbers_are_those_of_their_context():
    def function(x):
        with jax.threefry_partitionable(False):
            return x + jax.random.normal(jax.random.key(3), x.shape)

    assert not np.allclose(function(FIVE), FIVE + jax.random.normal(jax.random.key(3), FIVE.shape))
    np.testing.assert_array_equal(function(FIVE), written_out(function)(FIVE))


def test_a_remainder_by_nothing_is_the_dividend():
    function = written_out(lambda x: x[jax.lax.rem(jnp.array([3, 2, 7]), jnp.array([0, 0, 4]))])
    np.testing.assert_array_equal(function(FIVE), FIVE[jnp.array([3, 2, 3])])


def test_what_has_an_effect_is_not_known_before_the_program_runs():
    drawn = []

    def draw():
        drawn.append(len(drawn))
        return np.int32(drawn[-1])

    def function(x):
        return x[jax.experimental.io_callback(draw, jax.ShapeDtypeStruct((), jnp.int32)).reshape(1)]

    compiled = jax.jit(written_out(function)).lower(FIVE).compile()
    assert drawn == []
    np.testing.assert_array_equal(np.concatenate([compiled(FIVE), compiled(FIVE)]), FIVE[:2])


def test_a_callback_is_called_when_the_program_runs_and_not_before():
    called = []

    def function(x):
        jax.debug.callback(lambda: called.append(True))
        return x + 1

    compiled = jax.jit(written_out(function)).lower(FIVE).compile()
    assert called == []
    compiled(FIVE)
    jax.effects_barrier()
    assert called == [True]


def test_gradients_go_through_what_is_written_out():
    function = FUNCTIONS["a loop"][0]
    expected, found = (jax.grad(lambda x, f=f: f(x)[0].sum())(X) for f in (function, written_out(function)))
    np.testing.assert_allclose(expected, found, rtol=1e-5)


def test_arguments_may_be_any_tree():
    function = written_out(lambda state, action: {"sum": state["q"] + action, "none": ()})
    assert function({"q": jnp.ones(2)}, jnp.ones(2))["sum"].tolist() == [2.0, 2.0]
