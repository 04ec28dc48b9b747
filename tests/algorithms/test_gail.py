"""GAIL: a discriminator over any algorithm, and that it imitates."""

import pickle
from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from bench.imitation import ShuffledGAIL, train
from lehr import algorithms
from lehr.acting.policy import Policy, PolicyParameters, PolicyProgram
from lehr.acting.recording import record
from lehr.algorithms import gail, trpo
from lehr.cli import main
from lehr.config import from_yaml
from lehr.envs import make
from lehr.errors import InputError
from lehr.testing import Task, check_algorithm
from lehr.training.plan import make_plan, settings_classes
from tests.small import BACKTRACKING, SMALL


class Balance:
    """Balances CartPole: push to where the pole falls, leaning against the cart's drift."""

    @staticmethod
    def initial_carry(shape):
        return ()

    @staticmethod
    def act(params, carry, obs, reset, key, greedy):
        lean = obs @ jnp.array([0.05, 0.2, 1.0, 0.5])
        return carry, (lean > 0).astype(jnp.int32), {}


def expert(env):
    return Policy(PolicyProgram(Balance, env.observation_space, env.action_space), PolicyParameters((), ()))


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory):
    """Four episodes of an expert that balances for all 500 steps."""
    env = make("CartPole-v1", terminates=False)
    path = tmp_path_factory.mktemp("expert") / "demos.npz"
    found = record(expert(env), env, episodes=4, out=path)
    assert found.returns.tolist() == [500] * 4
    return str(path)


# Which algorithm -----------------------------------------------------------------------------------------------------


def test_the_algorithm_that_trains_the_policy_decides_the_settings():
    names = {field.name for cls in settings_classes("gail", {"policy_algorithm": "trpo"}) for field in fields(cls)}
    assert {"target_kl", "damping", "imitation_coef", "gradient_penalty_coef"} <= names
    assert "clip_range" not in names
    found = algorithms.find("gail", {"policy_algorithm": "trpo"})
    assert issubclass(found, trpo.Algorithm)
    assert found.Config().policy_algorithm == "trpo"
    assert found is algorithms.find("gail", {"policy_algorithm": trpo.Algorithm})
    assert algorithms.find("gail") is gail.Algorithm
    assert algorithms.find(found) is found


def test_another_process_finds_the_classes():
    found = algorithms.find("gail", {"policy_algorithm": "impala"})
    config = found.Config(imitation_coef=0.5)
    assert pickle.loads(pickle.dumps((found, config))) == (found, config)
    with pytest.raises(AttributeError, match="has no attribute 'Algorithm_over_nothing'"):
        _ = gail.Algorithm_over_nothing


def test_what_cannot_be_combined_is_refused(demonstrations):
    with pytest.raises(InputError, match="policy_algorithm is gail, which has a reward model of its own"):
        make_plan("gail", {"policy_algorithm": "gail"})
    with pytest.raises(InputError, match="reward_model is Novelty, but this algorithm has its own, Discriminator"):
        make_plan("gail", {"reward_model": "novelty", "demonstrations": demonstrations})
    with pytest.raises(InputError, match="demonstrations is none"):
        make_plan("gail", {})


def test_the_help_lists_the_flags_of_both(capsys):
    with pytest.raises(SystemExit):
        main(["train", "gail", "--policy-algorithm", "trpo", "--help"])
    out = capsys.readouterr().out
    assert "--target-kl" in out
    assert "--imitation-coef" in out
    assert "--clip-range" not in out


TINY = {
    **{name: value for name, value in SMALL.items() if name not in ("epochs", "minibatches")},
    "total_steps": 64,
    "value_epochs": 1,
    "value_minibatches": 2,
    "discriminator_sizes": (8,),
    "discriminator_updates": 2,
    "discriminator_batch": 16,
}


def test_it_is_the_algorithm_with_the_discriminator_as_its_reward_model(demonstrations, tmp_path, capsys):
    given = {**TINY, "env_parameters": {"terminates": False}, "demonstrations": demonstrations}
    one = lehr.train("gail", "CartPole-v1", policy_algorithm="trpo", run_dir=tmp_path / "gail", **given)
    other = lehr.train("trpo", "CartPole-v1", reward_model="discriminator", run_dir=tmp_path / "trpo", **given)
    jax.tree.map(np.testing.assert_array_equal, one.state.learner.params, other.state.learner.params)
    jax.tree.map(np.testing.assert_array_equal, one.state.reward_model.params, other.state.reward_model.params)
    assert one.final["coef/imitation_coef"] == 1
    saved = from_yaml(tmp_path / "gail" / "config.yaml")
    assert (saved["algorithm"], saved["policy_algorithm"], saved["demonstrations"]) == ("gail", "trpo", demonstrations)
    assert main(["resume", str(tmp_path / "gail"), "--total-steps", "96", "--imitation-coef", "0.5", "--progress"]) == 0
    assert "4 episodes of 500 to 500 steps (0 terminated), mean return 500" in capsys.readouterr().err
    assert lehr.load(tmp_path / "gail").final["coef/imitation_coef"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"policy_algorithm": "trpo", **BACKTRACKING["trpo"]}, {"absorbing_states": True}],
    ids=["trpo", "absorbing"],
)
def test_variants_keep_what_is_promised_of_every_algorithm(settings):
    assert check_algorithm("gail", **settings) == []


# Imitation -----------------------------------------------------------------------------------------------------------

FAST = {
    "num_envs": 16,
    "horizon": 8,
    "epochs": 2,
    "minibatches": 2,
    "hidden_sizes": (16,),
    "learning_rate": "1e-2 -> 0",
    "imitation_reward": "logit",
    "discriminator_sizes": (16,),
    "discriminator_updates": 4,
    "discriminator_batch": 64,
    "discriminator_learning_rate": 3e-3,
}


def follow_discrete(params, carry, obs, reset, key, greedy):
    return carry, (obs[:, 0] > 0).astype(jnp.int32), {}


def follow_box(params, carry, obs, reset, key, greedy):
    return carry, obs[:, :1], {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("actions", "rule"),
    [
        pytest.param("discrete", follow_discrete, id="discrete"),
        pytest.param("box", follow_box, id="box", marks=pytest.mark.slow),
    ],
)
def test_four_demonstrations_are_imitated_where_length_gives_nothing_away(actions, rule, tmp_path):
    """Episodes have four steps, whatever is done; the expert follows a sign. Shuffled labels teach nothing."""
    env = Task(actions)
    agent = type("Expert", (), {"initial_carry": Balance.initial_carry, "act": staticmethod(rule)})
    policy = Policy(PolicyProgram(agent, env.observation_space, env.action_space), PolicyParameters((), ()))
    found = record(policy, env, episodes=4, seed=1, out=tmp_path / "demos.npz")
    assert set(found.obs[:, 0].tolist()) == {-1, 1}
    best = lehr.evaluate(policy, env, 100, seed=1).returns.mean()
    given = {**FAST, "demonstrations": str(tmp_path / "demos.npz")}
    imitated, shuffled = (train(name, env, 19_200, [3], given).returns[0] for name in ("gail", ShuffledGAIL))
    assert imitated > 0.95 * best
    assert shuffled < 0.6 * best
