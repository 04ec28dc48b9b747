"""Settings that algorithms share: what auto means, and the optimiser's options in Python, YAML and on the command line."""

import argparse
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
import optax
import pytest

import lehr
from lehr import algorithms, config
from lehr.algorithms import a2c, ppo
from lehr.cli import main
from lehr.config import Coef
from lehr.errors import InputError
from lehr.spaces import Box, Dict, Discrete, MultiDiscrete, Spaces
from lehr.training.plan import make_plan
from tests.small import SMALL

OPTIONS = {"b1": 0.8, "nesterov": True}


def test_options_are_given_as_a_mapping_or_as_text_and_kept_in_the_config():
    texts = {"optimiser": "adam", "optimiser-options": "b1=0.8, nesterov=true"}
    (given,) = config.build([a2c.Config], texts)
    assert given == a2c.Config(optimiser="adam", optimiser_options=OPTIONS)
    assert hash(given) == hash(a2c.Config(optimiser="adam", optimiser_options=OPTIONS))
    mapping = config.to_mapping(given)
    assert mapping["optimiser_options"] == OPTIONS
    assert type(mapping["optimiser_options"]) is dict  # which YAML can hold
    assert config.build([a2c.Config], mapping) == (given,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimiser_options": "b1=0.5"}, "The optimiser 'rmsprop' has no option 'b1'; known: decay, eps"),
        ({"optimiser": "adam", "optimiser_options": "bb1=0.5"}, "has no option 'bb1'; did you mean 'b1'?"),
        ({"optimiser_options": "b1"}, "optimiser_options is 'b1'; give names and values such as"),
        ({"beta1": 0.9}, "beta1 is given, but the optimiser 'rmsprop' has no option 'b1'"),
        (
            {"beta1": "0.9 -> 1", "optimiser": "adam"},
            r"beta1 is '0.9 -> 1 over 64', which reaches 1; it must stay in \[0, 1\)",
        ),
    ],
)
def test_options_that_are_wrong_are_refused_before_training(settings, message, capsys):
    with pytest.raises(InputError, match=message):
        lehr.train("a2c", total_steps=64, **settings)
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["train", "a2c", "--total-steps", "64", *flags]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_run_takes_its_options_and_anneals_its_weight_decay(begin, advance):
    """One step of sgd on a rollout without rewards for the policy: what is left is the decay, by hand."""
    still = {"entropy_coef": 0.0, "value_coef": 0.0, "learning_rate": 0.1, "reward_scale": 1e-30, "max_grad_norm": None}
    settings = {"optimiser": "sgd", "weight_decay": "0.5 -> 0", "optimiser_options": {"momentum": 0.9}}
    run = begin("a2c", "CartPole-v1", total_steps=4 * 64, critic_torso="mlp", **still, **settings)
    assert any(isinstance(part, optax.TraceState) for part in run.state.learner.optimiser)
    silent = jax.tree.map(lambda x: x, run.state.learner.params)
    silent["value_head"] = jax.tree.map(lambda x: 0 * x, silent["value_head"])
    run = run._replace(state=run.state._replace(learner=run.state.learner._replace(params=silent)))
    after = advance(run, 4)
    decays = [0.5, 0.375, 0.25, 0.125]
    np.testing.assert_allclose(after.metrics["coef/weight_decay"], decays, rtol=1e-6)
    factor = np.prod([1 - 0.1 * decay for decay in decays])
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, factor * y, rtol=1e-4, atol=1e-7), after.state.learner.params, silent
    )


@pytest.mark.slow
def test_a_run_with_options_is_saved_and_goes_on(tmp_path):
    small = {name: value for name, value in SMALL.items() if name not in ("epochs", "minibatches")}
    given = {"optimiser": "adamw", "optimiser_options": OPTIONS, "beta2": "0.9 -> 0.99", "checkpoint_every": 64}
    whole = lehr.train("a2c", total_steps=128, run_dir=tmp_path / "whole", **small, **given)
    assert config.from_yaml(tmp_path / "whole" / "config.yaml")["optimiser_options"] == OPTIONS
    assert whole.metrics["coef/beta2"].tolist() == pytest.approx([0.9, 0.9225, 0.945, 0.9675])
    longer = lehr.resume(tmp_path / "whole", total_steps=256)
    assert longer.config["optimiser_options"] == OPTIONS


VECTOR, SCALED, IMAGE = Box([-1, -8], [1, 8]), Box(0, 1, (6,)), Box(0, np.inf, (8, 8, 3))
CONTINUOUS = Box(-2, 2, (1,))


@pytest.mark.parametrize(
    ("observation", "action", "observations", "rewards"),
    [
        (VECTOR, CONTINUOUS, True, True),
        (Box(-np.inf, np.inf, (3,)), CONTINUOUS, True, True),
        (VECTOR, Discrete(2), False, False),
        (VECTOR, MultiDiscrete((2, 3)), False, False),
        (SCALED, Box(-np.inf, np.inf, (2,)), False, True),
        (IMAGE, CONTINUOUS, False, True),
        (Box(0, 255, (4,), np.uint8), CONTINUOUS, False, True),
        (Dict({"speed": VECTOR, "gear": Discrete(3)}), CONTINUOUS, True, True),
        (Dict({"speed": VECTOR, "picture": IMAGE}), CONTINUOUS, False, True),
    ],
)
def test_auto_normalises_where_actions_are_continuous_and_observations_not_scaled(
    observation, action, observations, rewards
):
    spaces = Spaces(observation, action)
    chosen = ppo.Config().for_spaces(spaces)
    assert (chosen.normalise_observations, chosen.normalise_rewards) == (observations, rewards)
    opposite = ppo.Config(normalise_observations=not observations, normalise_rewards=not rewards)
    assert opposite.for_spaces(spaces) == opposite


def test_a_run_states_what_auto_meant_and_presets_and_old_settings_are_kept():
    def normalised(**settings):
        mapping = make_plan("ppo", {**SMALL, "env": "Pendulum-v1", **settings}).mapping
        return mapping["normalise_observations"], mapping["normalise_rewards"]

    assert normalised() == normalised(normalise_rewards="auto") == (True, True)
    assert normalised(normalise_rewards=False) == (True, False)
    assert normalised(preset="classic") == normalised(preset="puffer") == (False, False)


@pytest.mark.parametrize(
    ("algorithm", "continuous", "discrete"),
    [
        *(
            (
                name,
                {"discount": "0.95 -> 0.99", "entropy_coef": "0.1 -> 0"},
                {"discount": 0.99, "entropy_coef": "0.01 -> 0"},
            )
            for name in ("a2c", "impala")
        ),
        ("trpo", {"discount": "0.95 -> 0.99"}, {"discount": 0.99}),
        (
            "recurrent_ppo",
            {"discount": "0.95 -> 0.99", "learning_rate": "1e-3 -> 0"},
            {"discount": "0.98 -> 0.99", "learning_rate": "2e-3 -> 0"},
        ),
    ],
)
def test_what_the_actions_decide_is_stated_by_the_run_unless_it_is_given(algorithm, continuous, discrete):
    def stated(action, **settings):
        cls = algorithms.find(algorithm).Config
        chosen = cls(**settings).for_spaces(Spaces(VECTOR, action))
        return {name: getattr(chosen, name) for name in continuous}

    assert stated(CONTINUOUS) == stated(Dict({"speed": CONTINUOUS, "gear": Discrete(3)})) == continuous
    assert stated(Discrete(2)) == discrete
    given = dict.fromkeys(continuous, 0.5)
    assert stated(CONTINUOUS, **given) == stated(Discrete(2), **given) == given
    mapping = make_plan(algorithm, {"total_steps": 1024, "env": "Pendulum-v1"}).mapping
    assert continuous.items() <= mapping.items()


def test_settings_of_ones_own_may_depend_on_the_actions_besides_those_of_their_parents():
    @dataclass(frozen=True)
    class Own(a2c.Config):
        value_coef: Coef | None = None
        by_actions: ClassVar[dict[str, tuple[Any, Any]]] = {"value_coef": (0.3, 0.7), "discount": (0.8, 0.9)}

    continuous, discrete = (Own().for_spaces(Spaces(VECTOR, action)) for action in (CONTINUOUS, Discrete(2)))
    assert (continuous.value_coef, continuous.discount, continuous.entropy_coef) == (0.3, 0.8, "0.1 -> 0")
    assert (discrete.value_coef, discrete.discount, discrete.entropy_coef) == (0.7, 0.9, "0.01 -> 0")


@pytest.mark.parametrize("algorithm", ["a2c", "impala"])
def test_a2c_and_impala_also_normalise_where_actions_are_choices(algorithm):
    def normalised(observation, action):
        chosen = algorithms.find(algorithm).Config().for_spaces(Spaces(observation, action))
        return chosen.normalise_observations, chosen.normalise_rewards

    assert normalised(VECTOR, Discrete(2)) == normalised(VECTOR, CONTINUOUS) == (True, True)
    assert normalised(SCALED, Discrete(2)) == normalised(IMAGE, Discrete(2)) == (False, False)
    assert normalised(SCALED, CONTINUOUS) == (False, True)


def test_a_switch_with_auto_is_written_like_any_other_or_with_a_value(capsys):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    config.add_flags(parser, [ppo.Config], ["ppo"])

    def given(*words):
        (built,) = config.build([ppo.Config], config.given_flags(parser.parse_args(words)))
        return built.normalise_rewards

    assert given("--normalise-rewards") is given("--norm-reward", "true") is True
    assert given("--no-normalise-rewards") is given("--normalize_rewards=false") is given("--no-norm-reward") is False
    assert given("--normalise-rewards", "auto") == given() == "auto"
    with pytest.raises(InputError, match="normalise_rewards is 'often'; give auto, true or false"):
        given("--normalise-rewards", "often")
    with pytest.raises(SystemExit):
        given("--no-normalise-rewards", "auto")
    assert "unexpected argument 'auto' after --no-normalise-rewards" in capsys.readouterr().err
