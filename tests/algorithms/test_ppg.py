"""PPG: its auxiliary phase against NumPy, when it comes and what it sees, and whose gradient goes where."""

from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.algorithms import ppg, ppo
from lehr.errors import InputError
from tests.algorithms.rollouts import (
    SEGMENTS,
    STEPS,
    assert_params_close,
    assert_steps_not_taken_teach_nothing,
    begun,
    compiled,
    learned_from,
    lived,
    made_up,
    network_of,
    numpy_gae,
    outputs,
)

COEF = {
    "learning_rate": 0.0,
    "auxiliary_learning_rate": 0.01,
    "entropy_coef": 0.0,
    "value_coef": 0.5,
    "clone_coef": 1.0,
    "clip_range": 0.2,
    "discount": 0.9,
    "gae_lambda": 0.8,
}
"""With a rate of 0 in the policy phase, whatever changes is the auxiliary phase's doing."""

ONCE = {"epochs": 1, "minibatches": 1, "policy_updates": 1, "auxiliary_epochs": 1, "auxiliary_minibatches": 1}
VALID = np.random.default_rng(5).random((STEPS, SEGMENTS)) < 0.7


@cache
def algorithm_of(network=None, torso="mlp", **settings):
    config = ppg.Config(**{"num_envs": SEGMENTS, "horizon": STEPS, **ONCE, **settings})
    return ppg.Algorithm(config, network or network_of(torso)[0])


def learn(algorithm, rollout, torso="mlp", params=None, **coef):
    return learned_from(algorithm, rollout, {**COEF, **coef}, torso, params)


def updates(algorithm, rollouts, params, **coef):
    """The learners after each of some updates, the first one in front, and their metrics."""
    values = {name: jnp.float32(value) for name, value in {**COEF, **coef}.items()}
    learners, metrics = [begun(algorithm, params)], []
    for index, rollout in enumerate(rollouts):
        learner, found = compiled(algorithm)(learners[-1], rollout, values, jax.random.key(index))
        learners.append(learner)
        metrics.append({name: float(value) for name, value in found.items()})
    return learners, metrics


def identical(one, other):
    return jax.tree.all(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), one, other))


def targets_of(rollout):
    return numpy_gae(rollout, COEF["discount"], COEF["gae_lambda"])[1]


def divergence(before, after):
    """The mean KL of two policies' log probabilities."""
    return (np.exp(before) * (before - after)).sum(-1).mean()


# When it comes, and what it sees -------------------------------------------------------------------------------------


def test_an_auxiliary_phase_comes_after_every_so_many_updates_and_sees_the_rollouts_since_the_last():
    algorithm = algorithm_of(policy_updates=3, auxiliary_epochs=2)
    rollouts = [made_up()._replace(reward=made_up().reward + index) for index in range(8)]
    learners, metrics = updates(algorithm, rollouts, network_of()[1])
    changed = [not identical(a.params, b.params) for a, b in pairwise(learners)]
    assert changed == [False, False, True, False, False, True, False, False]
    assert [int(learner.auxiliary.filled) for learner in learners] == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    for phase in (3, 6):
        kept, seen = learners[phase].memory, rollouts[phase - 3 : phase]
        np.testing.assert_allclose(kept.target, [targets_of(rollout) for rollout in seen], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(kept.obs, [rollout.obs for rollout in seen])
        assert kept.valid.all()
    np.testing.assert_allclose(learners[7].memory.target[0], targets_of(rollouts[6]), rtol=1e-4, atol=1e-5)
    # Adam counts its steps: 2 passes of 3 each in a phase, apart from those of the policy phases.
    steps = [int(max(jax.tree.leaves(learner.auxiliary.optimiser), key=lambda x: x.ndim == 0)) for learner in learners]
    assert steps == [0, 0, 0, 6, 6, 6, 12, 12, 12]
    # What is reported is of the newest phase.
    names = [name for name in metrics[0] if name.startswith("auxiliary/")]
    assert len(names) == 4
    for name in names:
        column = [found[name] for found in metrics]
        assert column[:2] == [0, 0]
        assert column[2] == column[3] == column[4] != column[5]
        assert column[5] == column[6] == column[7] > 0
    errors = [(outputs()[1] - target) ** 2 / 2 for target in map(targets_of, rollouts[:3])]
    assert metrics[2]["auxiliary/value_error_before"] == pytest.approx(np.mean(errors), rel=1e-3)


def test_in_a_population_a_phase_comes_for_the_members_for_which_it_is_due():
    """Two members, of which one is a rollout ahead: its phase changes nothing of the other."""
    algorithm = algorithm_of(policy_updates=3, auxiliary_epochs=2)
    rollouts = [made_up()._replace(reward=made_up().reward + index) for index in range(3)]
    alone, _ = updates(algorithm, rollouts, network_of()[1])
    values = {name: jnp.float32(value) for name, value in COEF.items()}
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), alone[2], alone[1])
    seen = jax.tree.map(lambda *leaves: jnp.stack(leaves), rollouts[2], rollouts[1])
    keys = jax.vmap(jax.random.key)(jnp.array([2, 1]))
    found, _ = jax.jit(jax.vmap(algorithm.learn, (0, 0, None, 0)))(both, seen, values, keys)
    for index, expected in enumerate((alone[3], alone[2])):
        one = jax.tree.map(lambda leaf, index=index: leaf[index], found)
        assert_params_close(one.params, expected.params)
        assert int(one.auxiliary.filled) == int(expected.auxiliary.filled) == (0, 2)[index]
    assert not identical(alone[3].params, alone[2].params)


def test_a_policy_phase_is_ppos():
    """With the same key, but for the rounding of another program."""
    network, params = network_of()
    settings = {"num_envs": SEGMENTS, "horizon": STEPS, "epochs": 2, "minibatches": 2}
    coef = {name: jnp.float32(value) for name, value in {**COEF, "learning_rate": 0.01, "entropy_coef": 0.1}.items()}
    algorithm, other = algorithm_of(**settings, policy_updates=2), ppo.Algorithm(ppo.Config(**settings), network)
    found, metrics = compiled(algorithm)(begun(algorithm, params), lived(), coef, jax.random.key(7))
    key = jax.random.split(jax.random.key(7))[0]
    expected, watched = compiled(other)(begun(other, params), lived(), coef, key)
    for one, same in (
        (found.params, expected.params),
        (found.optimiser, expected.optimiser),
        ({name: metrics[name] for name in watched}, watched),
    ):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), one, same)


@pytest.mark.parametrize("torso", ["mlp", pytest.param("gru", marks=pytest.mark.slow)])
def test_members_of_a_population_have_their_phases_when_they_are_due(torso):
    algorithm, params = algorithm_of(torso=torso, policy_updates=2, optimiser="sgd"), network_of(torso)[1]
    coef = {name: jnp.float32(value) for name, value in COEF.items()}
    first, second = updates(algorithm, [made_up(torso)], params)[0]
    alone = [compiled(algorithm)(one, made_up(torso), coef, jax.random.key(3)) for one in (first, second)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), first, second)
    learned = jax.jit(jax.vmap(lambda one: algorithm.learn(one, made_up(torso), coef, jax.random.key(3))))(stacked)
    for index in range(2):
        assert_params_close(jax.tree.map(lambda x, index=index: x[index], learned), alone[index])
    assert learned[0].auxiliary.filled.tolist() == [1, 0]
    assert identical(alone[0][0].params, params)
    assert not identical(alone[1][0].params, params)


# The gradient step ---------------------------------------------------------------------------------------------------


def by_hand(params, rollout, rate, clone_coef, steps):
    """Steps of plain gradient descent on the auxiliary loss, the derivatives written out, in float64.

    One hidden layer for actor and critic, `h = tanh(x W + b)`; softmax policy; `KL(p₀ ‖ p)` has the slope `p − p₀` in the
    logits, and `½ (V − R)²` the slope `V − R` in the value.
    """
    obs, target = np.float64(rollout.obs).reshape(-1, 3), targets_of(rollout).ravel()
    weight = np.asarray(rollout.valid).ravel() / np.asarray(rollout.valid).sum()
    layer = params["trunk"]["mlps"]["stack"]["layers"]["0"]
    kernels, biases = np.float64(layer["kernel"]), np.float64(layer["bias"])
    policy = [np.float64(params["policy_head"]["logits"][name]) for name in ("kernel", "bias")]
    value = [np.float64(params["value_head"][name]) for name in ("kernel", "bias")]
    head = [np.zeros((kernels.shape[-1], 1)), np.zeros(1)]
    first = None
    for _ in range(steps):
        actor, critic = (np.tanh(obs @ kernel + bias) for kernel, bias in zip(kernels, biases, strict=True))
        probs = np.exp(actor @ policy[0] + policy[1])
        probs /= probs.sum(-1, keepdims=True)
        first = probs if first is None else first
        of_logits = clone_coef * weight[:, None] * (probs - first)
        of_value = (weight * ((critic @ value[0] + value[1])[:, 0] - target))[:, None]
        of_head = (weight * ((actor @ head[0] + head[1])[:, 0] - target))[:, None]
        of_actor = (of_logits @ policy[0].T + of_head @ head[0].T) * (1 - actor**2)
        of_critic = of_value @ value[0].T * (1 - critic**2)
        for (kernel, bias), features, slope in (
            (policy, actor, of_logits),
            (value, critic, of_value),
            (head, actor, of_head),
            ((kernels[0], biases[0]), obs, of_actor),
            ((kernels[1], biases[1]), obs, of_critic),
        ):
            kernel -= rate * features.T @ slope
            bias -= rate * slope.sum(0)
    return (
        {
            "trunk": {"mlps": {"stack": {"layers": {"0": {"kernel": kernels, "bias": biases}}}}},
            "policy_head": {"logits": {"kernel": policy[0], "bias": policy[1]}},
            "value_head": {"kernel": value[0], "bias": value[1]},
        },
        {"kernel": head[0][:, 0], "bias": head[1][0]},
    )


def test_gradient_steps_are_those_worked_out_by_hand():
    """The first moves the head, the second the features too, and from the third on the policy is pulled back."""
    params, rollout = network_of()[1], made_up()._replace(valid=jnp.asarray(VALID))
    algorithm = algorithm_of(optimiser="sgd", auxiliary_epochs=4)
    learners, _ = updates(algorithm, [rollout], params, auxiliary_learning_rate=0.3, clone_coef=2.0)
    expected, head = by_hand(params, rollout, rate=0.3, clone_coef=2.0, steps=4)
    assert_params_close(learners[1].params, expected)
    assert_params_close(learners[1].auxiliary.head, head)
    # Each of the two is seen: without them the result is another one.
    for other in (by_hand(params, rollout, 0.3, 0.0, 4)[0], by_hand(params, rollout, 0.3, 2.0, 3)[0]):
        with pytest.raises(AssertionError):
            assert_params_close(learners[1].params, other)


def test_the_gradient_of_a_phase_is_clipped_as_that_of_an_update():
    params = network_of()[1]
    algorithm = algorithm_of(optimiser="sgd")
    (_, after), _ = updates(algorithm, [made_up()], params, auxiliary_learning_rate=1.0, max_grad_norm=1e-3)
    moved = jax.tree.map(lambda x, y: float(jnp.sum((x - y) ** 2)), after.params, params)
    length = sum(jax.tree.leaves(moved)) + sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(after.auxiliary.head))
    assert np.sqrt(length) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("torso", ["mlp", "gru"])
def test_minibatches_are_segments_of_all_rollouts_each_with_its_own_memory_and_policy(torso):
    """At a rate of 0 nothing moves: the divergence is 0 in every minibatch, and the mean of their losses is the whole."""
    algorithm = algorithm_of(torso=torso, policy_updates=2, auxiliary_epochs=2, auxiliary_minibatches=4)
    other = made_up(torso)._replace(
        reward=2 * made_up(torso).reward, carry=jax.tree.map(lambda x: x[::-1], made_up(torso).carry)
    )
    learners, metrics = updates(
        algorithm, [made_up(torso), other], network_of(torso)[1], auxiliary_learning_rate=0.0, clone_coef=1e6
    )
    network, params = network_of(torso)
    errors, aux = [], []
    for rollout in (made_up(torso), other):
        _, _, values = network.unroll(params, rollout.carry, rollout.obs, rollout.reset)
        errors.append((np.float64(values) - targets_of(rollout)) ** 2 / 2)
        aux.append(targets_of(rollout) ** 2 / 2)  # the head still says 0
    assert identical(learners[2].params, params)
    found = metrics[1]
    assert found["auxiliary/kl"] == pytest.approx(0, abs=1e-6)
    assert found["auxiliary/value_error_before"] == pytest.approx(np.mean(errors), rel=1e-4)
    assert found["auxiliary/value_error"] == pytest.approx(np.mean(errors), rel=1e-4)
    assert found["auxiliary/loss"] == pytest.approx(np.mean(errors) + np.mean(aux), rel=1e-2)


# What it does --------------------------------------------------------------------------------------------------------


LONG = {"auxiliary_epochs": 60, "auxiliary_minibatches": 2}


def test_a_phase_improves_the_values_and_the_features_and_holds_the_policy():
    network, params = network_of()
    target = targets_of(made_up())
    reached = {}
    for clone_coef in (0.0, 10.0):
        after, metrics = learn(algorithm_of(**LONG), made_up(), clone_coef=clone_coef)
        moved = divergence(outputs()[0], outputs(params=after)[0])
        error = ((outputs(params=after)[1] - target) ** 2).mean() / 2
        assert metrics["auxiliary/kl"] == pytest.approx(moved, rel=1e-2)
        assert metrics["auxiliary/value_error"] == pytest.approx(error, rel=1e-3)
        assert error < 0.7 * metrics["auxiliary/value_error_before"]
        reached[clone_coef] = moved
    assert 0 < reached[10.0] < 0.01
    assert reached[0.0] > 20 * reached[10.0]

    def unexplained(params):
        """What the best linear function of the actor's features leaves of the targets."""
        features = network.features(params, made_up().carry, made_up().obs, made_up().reset)[1]
        columns = np.column_stack([np.float64(features).reshape(target.size, -1), np.ones(target.size)])
        return np.linalg.lstsq(columns, target.ravel())[1][0]

    assert unexplained(after) < 0.9 * unexplained(params)
    actor, critic = network.split(after)
    for found, before in zip((actor, critic), network.split(params), strict=True):
        for name in found:
            assert not identical(found[name], before[name])


@pytest.mark.parametrize("torso", ["mlp", pytest.param("gru", marks=pytest.mark.slow)])
def test_what_is_not_valid_teaches_nothing(torso):
    algorithm = algorithm_of(torso=torso, auxiliary_epochs=3, auxiliary_minibatches=2)
    assert_steps_not_taken_teach_nothing(algorithm, COEF, torso)


# One torso -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torso", ["mlp", pytest.param("gru", marks=pytest.mark.slow)])
def test_values_train_a_shared_torso_in_auxiliary_phases_alone(torso):
    """Where nothing is to be gained, the values are all there is to learn in a policy phase."""
    zeros = jnp.zeros_like(made_up().reward)
    rollout = lived(torso)._replace(reward=zeros, value=zeros, next_value=zeros)
    network, params = network_of(torso, shared=True)
    alone = rollout._replace(carry=network.initial_carry((SEGMENTS,)))
    for phase, coef in ((False, {"learning_rate": 0.01}), (True, {"clone_coef": 0.0})):
        algorithm = algorithm_of(network, policy_updates=1 if phase else 2)
        after, _ = learn(algorithm, alone, params=params, **coef)
        assert not identical(after["value_head"], params["value_head"])
        assert identical(after["trunk"], params["trunk"]) == (not phase)
        assert identical(after["policy_head"], params["policy_head"])
    # Where actor and critic are apart, the critic's torso learns in both.
    separate, params = network_of(torso)
    after, _ = learn(algorithm_of(separate, policy_updates=2), rollout, params=params, learning_rate=0.01)
    (actor, critic), (old_actor, old_critic) = separate.split(after), separate.split(params)
    assert identical(actor, old_actor)
    assert not identical(critic["trunk"], old_critic["trunk"])


def test_in_a_shared_torso_the_value_head_is_the_auxiliary_one():
    """The step is down the gradient of value loss and divergence, taken apart from the algorithm."""
    network, params = network_of(shared=True)
    rollout, target = made_up(), jnp.float32(targets_of(made_up()))
    algorithm = algorithm_of(network, optimiser="sgd", auxiliary_epochs=2)

    def log_probs_and_values(params):
        _, policy, values = network.unroll(params, rollout.carry, rollout.obs, rollout.reset)
        return jax.nn.log_softmax(policy.logits), values

    def loss(params, before):
        log_probs, values = log_probs_and_values(params)
        kl = jnp.mean(jnp.sum(jnp.exp(before) * (before - log_probs), -1))
        return jnp.mean((values - target) ** 2) / 2 + 3.0 * kl

    expected, before = params, log_probs_and_values(params)[0]
    for _ in range(2):
        gradients = jax.jit(jax.grad(loss))(expected, before)
        expected = jax.tree.map(lambda x, slope: x - 0.3 * slope, expected, gradients)
    learners, _ = updates(algorithm, [rollout], params, auxiliary_learning_rate=0.3, clone_coef=3.0)
    assert learners[1].auxiliary.head == ()
    assert_params_close(learners[1].params, expected)


# Whole runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("Pendulum-v1", {"distribution": "tanh_normal", "state_dependent_std": True, "optimiser": "muon"}),
        ("CartPole-v1", {"shared": True, "torso": "gru", "normalise_observations": True}),
        ("CartPole-v1", {"torso": "mingru", "critic_torso": "mlp", "precision": "bfloat16", "max_grad_norm": None}),
    ],
    ids=["squashed", "shared memory", "a memory for the actor"],
)
def test_options_run(env, settings, begin, advance):
    run = advance(begin("ppg", env, **settings), 5)
    for name, column in run.metrics.items():
        assert name.startswith("episode/") or np.isfinite(column).all(), name
    assert run.metrics["auxiliary/loss"][-1] > 0
    assert run.metrics["auxiliary/kl"][-1] < 0.5


def test_mistakes_are_explained():
    with pytest.raises(InputError, match="policy_updates is 0; it must be 1 or more"):
        ppg.Config(policy_updates=0)
    with pytest.raises(
        InputError, match="auxiliary_minibatches is 3, but 8 segments cannot be split into 3 equal parts"
    ):
        learn(algorithm_of(auxiliary_minibatches=3), made_up())


@pytest.mark.slow
def test_there_is_room_for_every_agent(begin, advance):
    run = advance(begin("ppg", "Swarm-v0", num_envs=2), 4)
    agents = run.program.env.num_agents
    assert agents > 1
    assert run.state.learner.memory.target.shape == (2, 8, 2 * agents)
    assert run.metrics["auxiliary/loss"][-1] > 0
    assert run.metrics["auxiliary/kl"][-1] < 0.5
