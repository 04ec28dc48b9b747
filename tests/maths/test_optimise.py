"""An optimiser with its rate outside does what optax does with the rate inside, on a flat vector as on a tree."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lehr.errors import InputError
from lehr.maths.optimise import DEFAULTS, ELEMENTWISE, REFUSED, optimiser

RATES = (0.1, 0.03, 0.3, 0.0)
"""A rate for each step, as a schedule would give them."""


def parameters():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "head": {"kernel": jax.random.normal(keys[0], (4, 3)), "bias": jax.random.normal(keys[1], (3,))},
        "torso": {"kernel": jax.random.normal(keys[2], (2, 5, 4))},
    }


def gradients(step):
    keys = jax.random.split(jax.random.key(step + 1), 3)
    shapes = jax.tree.map(jnp.shape, parameters(), is_leaf=lambda x: hasattr(x, "shape"))
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return structure.unflatten([jax.random.normal(key, shape) for key, shape in zip(keys, leaves, strict=True)])


def stepped(chosen, params, max_grad_norm=None):
    """The parameters after each step, not packed, and the norms of the gradients."""
    packed, unpack = chosen.pack(params)
    state, found, norms = chosen.init(params), [], []
    update = jax.jit(chosen.step)
    for step, rate in enumerate(RATES):
        packed, state, norm = update(packed, state, gradients(step), rate, max_grad_norm)
        found.append(unpack(packed))
        norms.append(float(norm))
    return found, norms


def stepped_by_optax(make, params, max_grad_norm=None):
    """The same with the rate inside: an optimiser for each step, all with one state."""
    state, found = make(1.0).init(params), []
    for step, rate in enumerate(RATES):
        given = gradients(step)
        if max_grad_norm is not None:
            given, _ = optax.clip_by_global_norm(max_grad_norm).update(given, optax.EmptyState())
        updates, state = jax.jit(make(rate).update)(given, state, params)
        params = optax.apply_updates(params, updates)
        found.append(params)
    return found


def assert_close(found, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize(
    ("name", "options", "make"),
    [
        ("adam", {}, lambda rate: optax.adam(rate, eps=1e-5)),
        ("adam", {"b1": 0.5, "eps": 1e-8}, lambda rate: optax.adam(rate, b1=0.5)),
        ("adamw", {"weight_decay": 0.1}, lambda rate: optax.adamw(rate, eps=1e-5, weight_decay=0.1)),
        ("rmsprop", {}, lambda rate: optax.rmsprop(rate, decay=0.99, eps=1e-5)),
        ("sgd", {"momentum": 0.9}, lambda rate: optax.sgd(rate, momentum=0.9)),
        ("lamb", {}, optax.lamb),
    ],
    ids=["adam", "adam with options", "adamw", "rmsprop", "sgd", "lamb, not elementwise"],
)
def test_steps_are_those_of_optax_with_the_rate_inside(name, options, make):
    found, norms = stepped(optimiser(name, options), parameters())
    assert_close(found, stepped_by_optax(make, parameters()))
    assert norms == pytest.approx([float(optax.tree.norm(gradients(step))) for step in range(len(RATES))], rel=1e-5)


@pytest.mark.parametrize("limit", [0.5, 1e6], ids=["clipped", "left alone"])
def test_gradients_are_clipped_by_their_global_norm(limit):
    found, norms = stepped(optimiser("sgd"), parameters(), max_grad_norm=limit)
    assert_close(found, stepped_by_optax(optax.sgd, parameters(), max_grad_norm=limit))
    assert min(norms) > 1, "the norm that is reported is the one before clipping"


def test_elementwise_optimisers_work_on_one_flat_vector():
    """Each named so gives on the flat vector what optax gives on the tree."""
    assert optimiser("adam").pack(parameters())[0].shape == (4 * 3 + 3 + 2 * 5 * 4,)
    for name in sorted(ELEMENTWISE):
        chosen = optimiser(name)
        packed, unpack = chosen.pack(parameters())
        after = unpack(chosen.step(packed, chosen.init(parameters()), gradients(0), 0.1, None).params)
        tree = chosen.transformation
        updates, _ = jax.jit(tree.update)(gradients(0), tree.init(parameters()), parameters())
        assert_close(after, jax.tree.map(lambda p, u: p + 0.1 * u, parameters(), updates))


def test_muon_makes_every_matrix_of_a_stack_orthogonal_by_itself():
    """A kernel `[2, in, out]` holds the layers of actor and critic: each gets the step it would get alone."""
    stack = jax.random.normal(jax.random.key(1), (2, 5, 4))
    chosen = optimiser("muon")
    together, unpack = chosen.pack({"kernel": stack})
    together = unpack(chosen.step(together, chosen.init({"kernel": stack}), {"kernel": 3 * stack}, 0.1, None).params)
    for index in range(2):
        one = {"kernel": stack[index]}
        alone = optax.contrib.muon(0.1)
        updates, _ = alone.update({"kernel": 3 * stack[index]}, alone.init(one), one)
        np.testing.assert_allclose(together["kernel"][index] - stack[index], updates["kernel"], rtol=1e-4, atol=1e-5)
        singular = np.linalg.svd(updates["kernel"], compute_uv=False)
        assert singular.max() / singular.min() < 2.5, "the step is orthogonal, nearly, whatever the gradient"


def test_muon_leaves_what_is_no_kernel_to_adam():
    params = {"bias": jnp.ones(3), "log_std": jnp.ones((2, 3)), "kernel": jnp.eye(3)}
    slopes = jax.tree.map(lambda x: 0.5 * x + 0.1, params)
    chosen, adam = optimiser("muon"), optax.nadam(0.1)
    after = chosen.step(params, chosen.init(params), slopes, 0.1, None).params
    updates, _ = adam.update(slopes, adam.init(params), params)
    expected = optax.apply_updates(params, updates)
    for name, is_adams in (("bias", True), ("log_std", True), ("kernel", False)):
        assert np.allclose(after[name], expected[name], rtol=1e-4) == is_adams, name


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_parameters_keep_their_type_whatever_the_rate_has(dtype):
    params = {"w": jnp.ones(3, dtype)}
    adam = optimiser("adam")
    packed, unpack = adam.pack(params)
    with jax.enable_x64(True):
        step = adam.step(packed, adam.init(params), params, jnp.float64(0.125), max_grad_norm=None)
    assert unpack(step.params)["w"].dtype == dtype
    np.testing.assert_allclose(np.asarray(unpack(step.params)["w"], np.float32), 0.875, rtol=1e-3)


def test_a_gradient_of_zero_divides_nothing():
    params = {"w": jnp.ones(3)}
    chosen = optimiser("adam")
    step = chosen.step(chosen.pack(params)[0], chosen.init(params), {"w": jnp.zeros(3)}, 0.1, 0.5)
    np.testing.assert_array_equal(step.params, jnp.ones(3))
    assert float(step.gradient_norm) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_not_clipped_away(bad):
    params = {"w": jnp.ones(3)}
    chosen = optimiser("sgd")
    step = chosen.step(chosen.pack(params)[0], chosen.init(params), {"w": jnp.array([1.0, bad, 1.0])}, 0.1, 0.5)
    assert not np.isfinite(step.params).all()
    assert not np.isfinite(step.gradient_norm)


def test_many_learning_rates_are_one_program():
    params = {"w": jnp.ones(3)}
    chosen = optimiser("adam")
    packed, state = chosen.pack(params)[0], chosen.init(params)
    many = jax.vmap(lambda rate: chosen.step(packed, state, {"w": jnp.ones(3)}, rate, 0.5).params)
    np.testing.assert_allclose(many(jnp.array([0.1, 0.2]))[:, 0], [0.9, 0.8], rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rmsprp", {}, "There is no optimiser 'rmsprp'; did you mean 'rmsprop'?"),
        ("apply_updates", {}, "There is no optimiser 'apply_updates'"),
        (
            "adamw",
            {"weightdecay": 0.5},
            "The optimiser 'adamw' has no option 'weightdecay'; did you mean 'weight_decay'?",
        ),
        ("adam", {"beta1": 0.5}, "The optimiser 'adam' has no option 'beta1'; known: b1, b2, eps"),
        ("adam", {"learning_rate": 0.5}, "The optimiser 'adam' has no option 'learning_rate'"),
    ],
)
def test_what_is_unknown_is_refused_with_the_nearest(name, options, message):
    with pytest.raises(InputError) as refused:
        optimiser(name, options)
    assert message in str(refused.value)


# Which of optax's optimisers work --------------------------------------------------------------------------------------

CHANGING = (0.03, 100.0, 0.1, 1.0, 3.0, 0.5, 2.0, 0.2)
"""Rates that change so much that an optimiser with a rate inside its memory or its limits shows."""
DRIFT = gradients(100)
NEED_MORE = {"dpsgd", "lbfgs", "momo", "momo_adam", "schedule_free", "sophia"}
"""Those that cannot even take a step with gradients alone."""


def with_learning_rate():
    """Everything in optax that has a learning rate, by name."""
    found = {**vars(optax), **vars(optax.contrib)}
    functions = {name: f for name, f in found.items() if inspect.isfunction(f) and not name.startswith("_")}
    return {name: f for name, f in functions.items() if "learning_rate" in inspect.signature(f).parameters}


def moved(make, inside):
    """How far parameters get, with the rate inside the optimiser, or multiplied in; gradients mostly agree."""
    begun = jax.tree.map(lambda x: x, {"head": parameters()["head"]})
    state, params = make(1.0).init(begun), begun
    update = jax.jit(lambda rate, *given: make(rate if inside else 1.0).update(*given))
    for step, rate in enumerate(CHANGING):
        given = jax.tree.map(lambda drift, x: drift + 0.3 * x, DRIFT["head"], gradients(step)["head"])
        updates, state = update(rate, {"head": given}, state, params)
        params = jax.tree.map(lambda p, u, rate=rate: p + (1.0 if inside else rate) * u, params, updates)
    return np.concatenate([np.ravel(x - y) for x, y in zip(*map(jax.tree.leaves, (params, begun)), strict=True)])


def is_a_factor(name):
    make = partial(with_learning_rate()[name], **DEFAULTS.get(name, {}))
    inside, outside = moved(make, True), moved(make, False)
    return bool(np.abs(inside - outside).max() < 1e-5 * np.abs(inside).max())


def test_optimisers_that_are_refused_exist():
    assert set(REFUSED) <= set(with_learning_rate())
    assert set(REFUSED) >= NEED_MORE
    for name in REFUSED:
        for given in (name, with_learning_rate()[name]):
            with pytest.raises(InputError, match=f"The optimiser '{name}' cannot be used: .*; choose another"):
                optimiser(given)


@pytest.mark.parametrize("name", sorted(set(with_learning_rate()) - NEED_MORE))
@pytest.mark.filterwarnings("ignore:Specifying a key", "ignore:.* is deprecated")
def test_a_rate_that_is_no_factor_is_refused_and_every_other_is_taken(name):
    """For all optimisers that this version of optax has, new ones included."""
    assert is_a_factor(name) == (name not in REFUSED)
    if name not in REFUSED:
        optimiser(name)


# Coefficients --------------------------------------------------------------------------------------------------------


def after(chosen, coef, rate=0.1):
    packed, unpack = chosen.pack(parameters())
    state = chosen.init(parameters())
    update = jax.jit(chosen.step)
    for step in range(3):
        packed, state, _ = update(packed, state, gradients(step), rate, None, coef)
    return unpack(packed)


@pytest.mark.parametrize("name", ["adamw", "lion", "nadamw"])
def test_weight_decay_is_that_of_the_optimiser(name):
    """And it replaces the optimiser's own, which for these is not 0."""
    expected = after(optimiser(name, {"weight_decay": 0.3}), {})
    assert_close(after(optimiser(name), {"weight_decay": 0.3}), expected)
    assert_close(after(optimiser(name), {"weight_decay": 0.0}), after(optimiser(name, {"weight_decay": 0.0}), {}))


def test_weight_decay_of_sgd_by_hand():
    params, slope = {"w": jnp.array([2.0, -1.0])}, {"w": jnp.array([1.0, 1.0])}
    chosen = optimiser("sgd")
    step = chosen.step(chosen.pack(params)[0], chosen.init(params), slope, 0.1, None, {"weight_decay": 0.5})
    np.testing.assert_allclose(step.params, [2 - 0.1 * (1 + 0.5 * 2), -1 - 0.1 * (1 - 0.5)], rtol=1e-6)


@pytest.mark.parametrize("name", ["adabelief", "adamw", "adan", "lamb", "lion", "radam"])
def test_betas_that_change_are_those_of_optax(name):
    optimiser(name).check(["beta1", "beta2"])
    found = after(optimiser(name), {"beta1": 0.6, "beta2": 0.97})
    assert_close(found, after(optimiser(name, {"b1": 0.6, "b2": 0.97}), {}))


def test_many_weight_decays_and_betas_are_one_program():
    chosen, params = optimiser("adamw"), {"w": jnp.ones(3)}
    packed, state = chosen.pack(params)[0], chosen.init(params)

    def one(decay, beta):
        return chosen.step(packed, state, {"w": jnp.ones(3)}, 0.1, None, {"weight_decay": decay, "beta1": beta}).params

    found = jax.jit(jax.vmap(one))(jnp.array([0.0, 1.0]), jnp.array([0.9, 0.5]))
    np.testing.assert_allclose(found[:, 0], [0.9, 0.8], rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "coefficients", "message"),
    [
        ("adamw", {"weight_decay": 0.1}, ["weight_decay"], "weight_decay is given, and weight_decay in optimiser_opti"),
        ("adam", {"b1": 0.1}, ["beta1"], "beta1 is given, and b1 in optimiser_options too"),
        ("sgd", {}, ["beta2"], "beta2 is given, but the optimiser 'sgd' has no option 'b2'; it has momentum, nesterov"),
        ("adam", {"b1": "high"}, [], "The option 'b1' of the optimiser 'adam' is 'high'; give a number."),
        ("sgd", {"momentum": "high"}, [], "The optimiser 'sgd' does not work with the options momentum=high: "),
        (optax.sgd(1.0), {"momentum": 0.9}, [], "the optimiser is a transformation that is already made"),
    ],
)
def test_options_that_do_not_fit_are_refused(name, options, coefficients, message):
    with pytest.raises(InputError) as refused:
        optimiser(name, options).check(coefficients)
    assert message in str(refused.value)
