"""Losses as part of the kernel that differentiates the networks, interpreted, against plain JAX."""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr import kernels
from lehr.algorithms import ppo
from lehr.kernels import lowered, mlp, mlp_blocks, mlp_loss
from lehr.kernels.row_loss import RowLoss
from lehr.kernels.row_program import Unsupported
from lehr.maths.minibatches import Minibatch
from lehr.maths.optimise import optimiser
from lehr.networks import NetworkConfig, actor_critic
from lehr.spaces import Box, Discrete
from lehr.types import NOTHING, Packed, Rollout

ROWS = 40
COEF = {"entropy_coef": 0.01, "value_coef": 0.5, "clip_range": 0.2, "value_clip_range": 0.1}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setattr(mlp, "INTERPRET", True)
    monkeypatch.setattr(mlp, "PROGRAMS", 4)
    monkeypatch.setattr(mlp, "MIN_ROWS", 1)
    monkeypatch.setattr(mlp_blocks, "OPERAND", jnp.float32)  # what is scaled for float16, but not rounded
    monkeypatch.setattr(mlp_loss, "BLOCK_ROWS", 16)
    monkeypatch.setattr(kernels, "_warned", set())


@pytest.fixture
def launches(monkeypatch):
    """The number of programs of each launch."""
    found, original = [], mlp_loss.gradients
    monkeypatch.setattr(
        mlp_loss, "gradients", lambda plan, *rest: (found.append(plan.backward_programs), original(plan, *rest))[1]
    )
    return found


def problem(action_space, valid=(), **changes):
    """A function of packed parameters that differentiates PPO's loss, and parameters."""
    config = NetworkConfig(hidden_sizes=(16, 24))
    network, params = actor_critic(Box(-1, 1, (4,)), action_space, config, jax.random.key(0))
    params["policy_head"] = jax.tree.map(lambda x: 100 * x, params["policy_head"])  # the initial policy is uniform
    rng = np.random.default_rng(0)
    noise = jnp.asarray(rng.normal(size=(4, ROWS)), jnp.float32)
    obs = jnp.asarray(rng.normal(size=(ROWS, 4)), jnp.float32)
    _, reference, _ = network.unroll(jax.tree.map(lambda x: 0.7 * x, params), (), obs, ())
    action = reference.sample(jax.random.key(1))
    parts = dict.fromkeys(Rollout._fields, NOTHING) | {
        "obs": obs,
        "action": action,
        "log_prob": reference.log_prob(action) + 0.2 * noise[0],
        "value": noise[1],
        "valid": valid,
        "carry": (),
    }
    samples = ppo.Samples(Rollout(**parts), noise[2], noise[3], reference)
    algorithm = ppo.Algorithm(ppo.Config(value_clip_range=0.1, **changes), network)
    coef = {name: jnp.float32(value) for name, value in (COEF | changes).items()}
    packed, unpack = optimiser("adam").pack(params)
    minibatch = Minibatch(samples, (), None, NOTHING)

    def differentiated(packed):
        (total, (metrics, _)), gradients = algorithm._gradients(packed, unpack, minibatch, coef, jax.random.key(2))
        if isinstance(gradients, Packed):
            norm = jnp.linalg.norm(gradients.gradients) if gradients.norm is None else gradients.norm
            return total, metrics, gradients.gradients, norm
        gradients = optimiser("adam").pack(gradients)[0]
        return total, metrics, gradients, jnp.linalg.norm(gradients)

    return differentiated, packed


def assert_close(found, expected, tolerance=2e-5):
    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(jnp.max(jnp.abs(b))))

    jax.tree.map(check, found, expected)


@pytest.mark.parametrize(
    ("space", "members", "programs"),
    [(Discrete(2), 3, 1), (Box(-1, 1, (2,)), 1, 2)],
    ids=["discrete, a population", "continuous, with a penalty, partly valid, several programs"],
)
def test_the_loss_of_ppo_its_metrics_and_its_gradient_are_the_same(monkeypatch, launches, space, members, programs):
    is_continuous = isinstance(space, Box)
    given = {"valid": jnp.arange(ROWS) % 5 > 0, "kl_coef": 0.1} if is_continuous else {}
    differentiated, packed = problem(space, **given)
    many = jnp.stack([packed, 1.1 * packed, 0.8 * packed])[:members]

    def all_of(many):
        with kernels.together(members):
            return jax.vmap(differentiated)(many)

    found = jax.jit(all_of)(many)
    monkeypatch.setenv("LEHR_KERNELS", "no-mlp_loss,no-mlp")
    expected = jax.jit(lambda many: all_of(many))(many)
    assert launches == [programs]
    assert_close(found, expected)


def separate(outputs):
    """Derivatives and sums of a loss of two networks that can be part of the kernel."""
    return [2.0 * outputs[0], jnp.cos(outputs[1])], (jnp.sum(outputs[0] ** 2, axis=0), jnp.mean(outputs[1]))


def test_sums_belong_to_the_network_that_they_depend_on():
    loss = RowLoss(separate, (2, 1), rows=8)
    assert loss.owners == [0, 0, 1]
    # What the programs of the other network find is not used.
    sums, mean = loss.others(loss.known(), jnp.array([[1.0, 2.0, np.nan], [np.nan, np.nan, 16.0]]))
    assert (sums.tolist(), float(mean)) == ([1.0, 2.0], 2.0)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda o: ([o[0] * o[1], o[1]], ()), "not terms of their own"),
        (lambda o: ([o[0], o[1]], jnp.sum(o[0][:, :1] * o[1])), "outputs of several networks"),
        (lambda o: ([o[0] - jnp.mean(o[0]), o[1]], ()), "depend on sums"),
        (lambda o: ([o[0], o[1]], o[1]), "an output for each row"),
        (lambda o: ([o[0], o[1]], jnp.max(o[1])), "reduce_max over the rows"),
    ],
    ids=["mixed", "mixed sum", "standardised", "by row", "largest"],
)
def test_other_losses_are_refused(loss, reason):
    with pytest.raises(Unsupported, match=reason):
        RowLoss(loss, (2, 1), rows=8)


def test_a_loss_that_does_not_evaluate_the_networks_once_stays_plain(launches, caplog):
    def loss(params):
        return jnp.sum(params["w"] ** 2), ()

    packed, unpack = optimiser("adam").pack({"w": jnp.arange(3.0)})
    with caplog.at_level(logging.DEBUG, "lehr"):
        (total, _), gradients = kernels.value_and_grad(loss, packed, unpack)
    assert float(total) == 5.0
    assert gradients["w"].tolist() == [0.0, 2.0, 4.0]
    assert (launches, caplog.messages) == (
        [],
        ["The kernel mlp_loss does not fit here: 0 evaluations of small MLPs in the loss."],
    )


@pytest.mark.parametrize("members", [1, 3])
def test_more_rows_than_it_is_known_to_be_faster_for_stay_plain(monkeypatch, launches, members):
    differentiated, packed = problem(Discrete(2))
    for most in (ROWS, ROWS - 1):
        monkeypatch.setattr(mlp_loss, "MOST_ROWS", most)
        with kernels.together(members):
            jax.eval_shape(differentiated, packed)
        assert len(launches) == 1


@pytest.mark.parametrize("space", [Discrete(2), Box(-1, 1, (2,))], ids=["discrete", "continuous"])
def test_a_program_for_cuda_that_runs_elsewhere_gives_the_same(monkeypatch, space):
    differentiated, packed = problem(space)
    monkeypatch.setattr(mlp, "INTERPRET", False)
    for name in ("mlp", "mlp_loss"):
        able = replace(kernels.KERNELS[name], is_able=lambda: True)
        monkeypatch.setitem(kernels.KERNELS, name, able)
    found = jax.jit(differentiated)(packed)
    monkeypatch.setenv("LEHR_KERNELS", "off")
    assert_close(found, jax.jit(lambda packed: differentiated(packed))(packed))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_it_lowers_for_cuda_and_what_jax_refuses_is_replaced_with_one_warning(monkeypatch, caplog, lowers_for_cuda):
    differentiated, packed = problem(Discrete(2))
    monkeypatch.setattr(mlp, "INTERPRET", False)
    for name in ("mlp", "mlp_loss"):
        able = replace(kernels.KERNELS[name], is_able=lambda: True)
        monkeypatch.setitem(kernels.KERNELS, name, able)
    text = jax.jit(differentiated).trace(packed).lower(lowering_platforms=("cuda",)).as_text()
    assert "mlp_loss" in text
    assert "fused_mlp" not in text

    def refuse(*arguments):
        raise NotImplementedError("no such operation")

    monkeypatch.setattr(mlp_loss, "gradients", refuse)
    monkeypatch.setattr(lowered, "_lowered", set())
    monkeypatch.setattr(lowered, "_read", list)
    for _ in range(2):
        jax.eval_shape(lambda packed: differentiated(packed), packed)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no-mlp_loss" in caplog.text
