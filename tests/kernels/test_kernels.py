"""The door to the kernels: who is let in, and what happens when one of them fails."""

import collections
import logging

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from lehr import kernels
from lehr.envs.suites.lean_step import lean_step
from lehr.errors import InputError
from lehr.kernels import mlp, mlp_plan, mlp_programs, written_out
from lehr.networks import NetworkConfig, actor_critic
from lehr.spaces import Box, Discrete

X = jnp.ones((600, 4))
LAYERS = [(jnp.ones((2, 4, 16)), jnp.zeros((2, 16))), (jnp.ones((2, 16, 16)), jnp.zeros((2, 16)))]
HEADS = {0: (jnp.ones((16, 3)), jnp.zeros(3)), 1: (jnp.ones((16, 1)), jnp.zeros(1))}


@pytest.fixture(autouse=True)
def _from_the_start(monkeypatch):
    monkeypatch.delenv("LEHR_KERNELS", raising=False)
    monkeypatch.delenv("LEHR_FUSED", raising=False)
    monkeypatch.setattr(kernels, "_warned", set())


@pytest.fixture
def able(monkeypatch):
    """The MLP's kernels are interpreted, so that any backend is able."""
    monkeypatch.setattr(mlp, "INTERPRET", True)


def chosen(x=X, layers=LAYERS, heads=HEADS, activation="tanh"):
    return kernels.is_chosen("mlp", x, layers, heads, activation)


# --- the switch


@pytest.mark.parametrize(
    ("text", "off"),
    [
        (None, set()),
        ("", set()),
        (
            "off",
            {
                "drawn_ahead",
                "gated_scan",
                "mlp",
                "mlp_cpu",
                "mlp_loss",
                "mlp_tangent",
                "recurrence",
                "row_loop",
                "row_step",
                "segment_draw",
                "steps_ahead",
                "wide_mlp",
                "written_out",
            },
        ),
        ("no-mlp", {"mlp"}),
        (" no-written_out , no-mlp,", {"mlp", "written_out"}),
    ],
)
def test_the_variable_turns_off_what_it_names(monkeypatch, able, text, off):
    if text is not None:
        monkeypatch.setenv("LEHR_KERNELS", text)
    assert kernels.switched_off() == off
    assert chosen() == ("mlp" not in off)
    assert kernels.is_chosen("written_out", X) == ("written_out" not in off)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no-mpl", r"LEHR_KERNELS is 'no-mpl', but 'no-mpl' is unknown; did you mean 'no-mlp'\?"),
        ("no-mlp,none", "but 'none' is unknown; known: off, no-drawn_ahead, no-gated_scan, no-mlp, no-mlp_cpu"),
        ("ON", "but 'ON' is unknown"),
    ],
)
def test_an_unknown_word_is_refused_where_a_program_is_traced(monkeypatch, text, message):
    monkeypatch.setenv("LEHR_KERNELS", text)
    for trace in (chosen, lambda: kernels.rewrite(jnp.sin)(X)):
        with pytest.raises(InputError, match=message):
            trace()


def test_the_older_name_of_the_switch_still_works(monkeypatch, able):
    monkeypatch.setenv("LEHR_FUSED", "off")
    assert not chosen()
    assert kernels.is_chosen("written_out", X)


# --- the choice


def test_a_program_for_elsewhere_is_plain(able):
    with kernels.plain():
        assert not chosen()
        assert not kernels.is_chosen("written_out", X)
    assert chosen()


def test_a_backend_that_cannot_is_left_alone(monkeypatch):
    assert not chosen()  # the tests run on a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert chosen()
    monkeypatch.setattr(mlp_plan, "triton", None)
    assert not chosen()


def test_it_is_the_program_that_counts_devices_and_not_the_machine(monkeypatch, able):
    monkeypatch.setattr(jax, "device_count", lambda *_: 8)
    assert chosen()
    mesh = AbstractMesh((4,), ("envs",))
    with jax.sharding.use_abstract_mesh(mesh):
        assert not chosen()
        assert kernels.is_chosen("written_out", X)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("envs",))):
        assert chosen()
    with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("envs",), axis_types=(AxisType.Manual,))):
        assert chosen()  # the program of one device, as under shard_map


@pytest.mark.parametrize(("devices", "expected"), [(1, True), (4, False)])
def test_an_argument_that_lies_on_several_devices_counts_too(able, devices, expected):
    found = []
    split = NamedSharding(AbstractMesh((devices,), ("envs",)), PartitionSpec("envs"))

    def program(x):
        found.append(chosen(x))
        return jax.vmap(lambda x: (found.append(chosen(x)), x)[1])(jnp.stack([x, x]))

    jax.jit(program).trace(jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=split))
    assert found == [expected] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"x": X[:511]},
        {"x": jnp.ones((600, 65))},
        {"layers": LAYERS[:1]},
        {"layers": [*LAYERS, LAYERS[1]]},
        {"layers": [LAYERS[0], (jnp.ones((2, 16, 65)), jnp.zeros((2, 65)))]},
        {"heads": {1: (jnp.ones((16, 17)), jnp.zeros(17))}},
        {"activation": "softplus"},
        {"activation": jnp.tanh},
    ],
)
def test_sizes_and_activations_that_do_not_fit_are_left_to_plain_jax(able, changes):
    assert chosen()
    assert not chosen(**changes)
    assert kernels.evaluate_mlps(**{"x": X, "layers": LAYERS, "heads": HEADS, "activation": "tanh", **changes}) is None


# --- the MLP falls back


def value_and_gradient(network, params):
    def loss(params):
        _, policy, value = network.unroll(params, network.initial_carry(()), X, None)
        return policy.logits[:, 0].sum() + value.sum()

    return jax.jit(jax.value_and_grad(loss))(params)


def fails(*arguments, **options):
    raise NotImplementedError("not in this JAX\nfor a reason")


@pytest.mark.parametrize(
    ("module", "piece", "interpret"),
    [(mlp_programs, "_forward_program", False), (mlp_programs, "_backward_program", False), (mlp, "forward", True)],
)
def test_an_mlp_that_jax_refuses_is_evaluated_in_plain_jax_with_one_warning(
    monkeypatch, caplog, module, piece, interpret
):
    """Both kernels are tried before either is part of a program, the one for the gradient too."""
    monkeypatch.setenv("LEHR_KERNELS", "no-mlp_cpu")  # what the result is compared with is plain JAX
    network, params = actor_critic(Box(-1, 1, (4,)), Discrete(3), NetworkConfig(), jax.random.key(0))
    expected = value_and_gradient(network, params)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mlp, "INTERPRET", interpret)
    monkeypatch.setattr(module, piece, fails)
    mlp._refused.cache_clear()
    jax.clear_caches()
    with caplog.at_level(logging.WARNING, "lehr"):
        assert chosen()
        for _ in range(2):
            found = value_and_gradient(network, params)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    (record,) = caplog.records
    assert record.name == "lehr"
    assert record.getMessage().startswith("The kernel mlp does not work here (NotImplementedError: ")
    assert "LEHR_KERNELS=no-mlp" in record.getMessage()
    mlp._refused.cache_clear()


# --- a rewritten program falls back

PLACES = jnp.array([2, 0, 1, 2])


def gathered(x):
    return {"taken": x[PLACES], "none": ()}


def primitives(function, *arguments):
    return collections.Counter(equation.primitive.name for equation in jax.make_jaxpr(function)(*arguments).jaxpr.eqns)


def flat(x):
    """Without calls inside, so that all primitives are seen."""
    numbers = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return jax.lax.gather(x, PLACES[:, None], numbers, (1, 4), mode="clip")


def test_a_program_is_rewritten_unless_it_is_switched_off(monkeypatch):
    assert primitives(kernels.rewrite(flat), X)["gather"] == 0
    monkeypatch.setenv("LEHR_KERNELS", "no-written_out")
    assert primitives(kernels.rewrite(flat), X)["gather"] == primitives(flat, X)["gather"] == 1


def wrong_shape(equation, inputs, known):
    return [jnp.zeros((1, 1))]


@pytest.mark.parametrize("rule", [fails, wrong_shape], ids=["raises", "another shape"])
def test_what_cannot_be_rewritten_stays_plain_with_one_warning(monkeypatch, caplog, rule):
    monkeypatch.setitem(written_out._RULES, "gather", rule)
    with caplog.at_level(logging.WARNING, "lehr"):
        for _ in range(2):
            found = jax.jit(kernels.rewrite(gathered))(X[:3])
    jax.tree.map(np.testing.assert_array_equal, found, gathered(X[:3]))
    (record,) = caplog.records
    assert record.name == "lehr"
    assert "The kernel written_out does not work here" in record.getMessage()
    assert "LEHR_KERNELS=no-written_out" in record.getMessage()


def test_a_rewriting_that_fails_half_way_leaves_nothing_behind(monkeypatch, caplog):
    monkeypatch.setitem(written_out._RULES, "gather", fails)
    seen = []

    def function(x):
        jax.debug.callback(lambda: seen.append(True))
        return x[PLACES]

    jax.block_until_ready(jax.jit(kernels.rewrite(function))(X))
    jax.effects_barrier()
    assert seen == [True]
    assert len(caplog.records) == 1


def test_a_mistake_of_the_function_itself_is_raised_as_it_is(caplog):
    def function(x):
        raise InputError("this step is wrong")

    with pytest.raises(InputError, match="this step is wrong") as caught:
        kernels.rewrite(function)(X)
    assert caught.value.__context__ is None
    assert caplog.records == []


def step(state, action):
    return {"q": state["q"][PLACES[:3]] + action, "unread": state["q"].sum(-1)}


@pytest.mark.parametrize("piece", ["_evaluate", "written_out"])
def test_the_step_of_an_environment_goes_on_when_the_rewriting_raises(monkeypatch, caplog, piece):
    """Whether the rewriting itself is at fault or the program that it gives cannot be traced."""
    state, action = {"q": jnp.arange(12.0).reshape(3, 4), "unread": jnp.zeros(3)}, jnp.ones((3, 4))
    expected = step(state, action)
    monkeypatch.setattr(written_out, piece, fails if piece == "_evaluate" else lambda function: fails)
    lean = lean_step("a task", step, state, action, seen=lambda state: state["unread"])
    assert lean.names == ("['q']",)
    kept, seen = jax.jit(lean.step)(lean.kept(state), action)
    np.testing.assert_array_equal(kept[0], expected["q"])
    np.testing.assert_array_equal(seen, expected["unread"])
    assert len(caplog.records) == 1
