import pickle
import sys

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lehr.spaces import Box, Dict, Discrete, MultiDiscrete, flatten, flatten_space, from_gymnasium, to_gymnasium

IMAGE = Box(0, 255, (4, 4, 3), np.uint8)
NESTED = Dict(
    {
        "arm": Dict({"angles": Box([-1, -2], [1, 2]), "speed": Box(-np.inf, np.inf, (3,))}),
        "gear": Discrete(5),
        "buttons": MultiDiscrete((2, 3)),
        "image": IMAGE,
    }
)
SPACES = [Box(-1, 1, (3,)), Box([0, -np.inf], [np.inf, 2]), IMAGE, Discrete(4), Discrete(4, start=-2)]
SPACES += [Box(0, 1, (3,), bool), MultiDiscrete((2, 5)), NESTED]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_samples_are_members_for_us_and_for_gymnasium(space):
    theirs = to_gymnasium(space)
    for seed in range(20):
        sample = jax.tree.map(np.asarray, space.sample(jax.random.key(seed)))
        assert space.contains(sample)
        assert theirs.contains(sample)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_gymnasium_and_back_is_the_same_space(space):
    assert from_gymnasium(to_gymnasium(space)) == space


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spaces_are_values(space):
    copy = pickle.loads(pickle.dumps(space))
    assert copy == space
    assert hash(copy) == hash(space)
    assert {space: "found"}[copy] == "found"


def test_box_equality_is_by_value():
    assert Box(-1, 1, (2,)) == Box([-1, -1], np.ones(2)) == Box(-1.0, 1.0, [2], jnp.float32)
    assert Box(0.0, 1, (2,)) == Box(-0.0, 1, (2,))
    assert Box(-1, 1, (2,)) != Box(-1, 1, (3,))
    assert Box(0, 1, (2,)) != Box(0, 1, (2,), np.int32)
    assert Box([0, 1], 2) != Box([1, 0], 2)
    assert Dict({"a": Discrete(2), "b": Discrete(3)}) == Dict({"b": Discrete(3), "a": Discrete(2)})
    assert Dict({"a": Discrete(2)}) != Dict({"a": Discrete(3)})


def test_a_discrete_space_says_where_it_starts():
    assert repr(Discrete(3)) == "Discrete(n=3)"
    assert repr(Discrete(3, start=5)) == "Discrete(n=3, start=5)"
    assert Discrete(3) == Discrete(3, start=0) != Discrete(3, start=5)
    assert Discrete(1, start=2**31 - 1).contains(2**31 - 1)


def test_box_bounds_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        Box(0, 1, (2,)).low[0] = -1


@given(st.floats(-3, 3, width=32), st.floats(-3, 3, width=32))
def test_box_contains_agrees_with_gymnasium(first, second):
    space, x = Box([-1, 0], [1, 2]), np.array([first, second], np.float32)
    assert space.contains(x) == to_gymnasium(space).contains(x)


@pytest.mark.parametrize(
    ("space", "x"),
    [
        (Box(-1, 1, (2,)), np.zeros(3, np.float32)),
        (Box(-1, 1, (2,)), np.array([0, np.nan])),
        (IMAGE, np.zeros((4, 4, 3), np.float32)),
        (Discrete(3), 3),
        (Discrete(3), -1),
        (Discrete(3, start=5), 4),
        (Discrete(3, start=5), 8),
        (Discrete(3), 1.0),
        (MultiDiscrete((2, 3)), np.array([2, 0])),
        (MultiDiscrete((2, 3)), np.array([0.0, 0.0])),
        (NESTED, {"gear": 1}),
        (NESTED, 1),
    ],
)
def test_what_is_not_a_member(space, x):
    assert not space.contains(x)


def test_box_samples_follow_the_bounds():
    space = Box([-1, 2, -np.inf, -np.inf], [3, np.inf, 2, np.inf])
    draws = np.asarray(jax.jit(jax.vmap(space.sample))(jax.random.split(jax.random.key(0), 10_000)))
    # Uniform on [-1, 3]; 2 plus and 2 minus a unit exponential; standard normal.
    np.testing.assert_allclose(draws.mean(axis=0), [1, 3, 1, 0], atol=0.05)
    np.testing.assert_allclose(draws.std(axis=0), [4 / np.sqrt(12), 1, 1, 1], atol=0.05)


@pytest.mark.parametrize(
    ("space", "values"),
    [
        (Box(0, 1, dtype=bool), [False, True]),
        (Box(250, 255, dtype=np.uint8), range(250, 256)),
        (Discrete(3, start=-1), range(-1, 2)),
        (MultiDiscrete((3,)), range(3)),
    ],
    ids=str,
)
def test_integer_samples_reach_every_value_equally(space, values):
    draws = np.asarray(jax.jit(jax.vmap(space.sample))(jax.random.split(jax.random.key(0), 6000))).ravel()
    counts = [np.sum(draws == value) for value in values]
    assert sum(counts) == 6000
    np.testing.assert_allclose(counts, 6000 / len(values), rtol=0.12)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_flatten_agrees_with_gymnasium(space):
    sample = space.sample(jax.random.key(1))
    theirs = to_gymnasium(space)
    expected = gymnasium.spaces.flatten(theirs, jax.tree.map(np.asarray, sample))
    np.testing.assert_allclose(flatten(space, sample), expected, rtol=1e-6)
    flat = gymnasium.spaces.flatten_space(theirs)
    assert flatten_space(space) == Box(flat.low, flat.high)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Box(1, 0), "Box got low=1 and high=0; low must not be above high in any entry"),
        (lambda: Box(np.zeros(3), 1, (2,)), r"shapes \(3,\) and \(\), which do not broadcast to the shape \(2,\)"),
        (lambda: Box(0, 256, dtype=np.uint8), "bounds 0 to 256, outside the range of uint8, 0 to 255"),
        (lambda: Box(-np.inf, 0, dtype=np.int32), "outside the range of int32"),
        (lambda: Box(0, 2, (3,), bool), "Box got bounds 0 to 2, but a bool is 0 or 1"),
        (lambda: Box(-np.inf, np.inf, (3,), bool), "Box got bounds -inf to inf, but a bool is 0 or 1"),
        (lambda: Discrete(0), "Discrete got n=0; it must be 1 or more"),
        (lambda: Discrete(2, start=2**31 - 1), "n=2 and start=2147483647; its integers must be from -2147483648 to 21"),
        (
            lambda: MultiDiscrete((2, 0)),
            r"MultiDiscrete got nvec=\(2, 0\); it needs at least one entry, and each must be 1 or more",
        ),
        (
            lambda: from_gymnasium(gymnasium.spaces.MultiDiscrete([2, 3], start=[0, 1])),
            "is not supported: wrap the environment so that its space is a Box",
        ),
        (
            lambda: from_gymnasium(gymnasium.spaces.Text(3)),
            "is not supported: wrap the environment so that its space is a Box",
        ),
    ],
)
def test_errors_say_what_is_wrong(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_conversion_without_gymnasium_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match="pip install gymnasium"):
        to_gymnasium(Discrete(2))
