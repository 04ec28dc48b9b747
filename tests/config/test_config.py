"""Dataclass ↔ mapping ↔ YAML ↔ command line."""

import argparse
import inspect
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import optax
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lehr import algorithms
from lehr.algorithms import a2c, ppo
from lehr.algorithms.settings import ClippedSettings
from lehr.cli import Parser
from lehr.config import (
    Coef,
    add_flags,
    build,
    coefficients,
    describe,
    from_yaml,
    given_flags,
    merge,
    refuse_unknown,
    to_mapping,
    to_yaml,
    with_preset,
)
from lehr.config import fields as fields_module
from lehr.config.spelling import suggestion
from lehr.errors import InputError, page
from lehr.networks import NetworkConfig
from lehr.schedules import Coefficient, Controller, coefficient_schedule, constant, linear, plateau, schedule
from lehr.training.plan import RunConfig, settings_classes

TOTAL = 1000
ENTROPY = ("ent_coef", "entropy_cost", "entropy_coeff")


@dataclass(frozen=True)
class Base:
    """What every algorithm has."""

    learning_rate: Annotated[Coef, Coefficient(("lr", "alpha_lr"))] = 2.5e-4
    """Learning rate of the optimiser."""
    seed: int = 0
    """Where randomness comes from."""


@dataclass(frozen=True)
class Algorithm(Base):
    """An algorithm's config."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "classic": {"learning_rate": "2.5e-4 -> 0", "num_minibatches": 4, "ent_coef": 0.05},
        "puffer": {"optimiser": "muon", "learning_rate": 0.015, "learning_rate_schedule": "cosine", "sizes": (128,)},
    }

    entropy_coef: Annotated[Coef, Coefficient(ENTROPY)] = 0.01
    """Weight of the entropy bonus; 20% of the loss
    at most."""
    discount: Annotated[Coef, Coefficient(("gamma", "discounting"), maximum=1.0)] = 0.99
    clip_range: Annotated[Coef, Coefficient(("clip_coef",), open_minimum=True)] = "0.2 -> 0.1"
    """How far the ratio may leave 1."""
    target_kl: Annotated[Coef, Coefficient(("kl_target",), open_minimum=True)] | None = None
    """Divergence at which an update stops."""
    num_minibatches: int = 4
    """Minibatches per epoch."""
    value_clipping: bool = True
    """Whether values are clipped."""
    optimiser: Literal["adam", "adamw", "muon"] = "adam"
    """The optax transformation."""
    sizes: tuple[int, ...] = (64, 64)
    """Dense layers."""
    momentum: float = 0.9
    stop_at: float | None = None
    tags: tuple[str, ...] = ()
    mixture: tuple[float, ...] | None = None

    def __post_init__(self):
        if self.num_minibatches < 1:
            raise InputError(f"num_minibatches is {self.num_minibatches}; give at least 1.")


@dataclass(frozen=True)
class Run:
    """What a run is."""

    env: str
    """The environment's name."""
    total_steps: int = 1_000_000
    """The budget in env steps."""
    run_dir: str | None = None
    """Where the run is kept."""
    layers: tuple[int, ...] = field(default_factory=lambda: (1, 2))


def algorithm(**given):
    return build([Algorithm], given)[0]


def fails(text, call, *arguments, **named):
    """Assert that a call fails with exactly this sentence."""
    with pytest.raises(InputError) as caught:
        call(*arguments, **named)
    assert str(caught.value) == text


def decay(step):
    return 0.02 / (1 + step)


# Conversion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("num_minibatches", 8, 8),
        ("num_minibatches", np.int64(8), 8),
        ("num_minibatches", 8.0, 8),
        ("num_minibatches", "8", 8),
        ("num_minibatches", " 8 ", 8),
        ("num_minibatches", "500k", 500_000),
        ("num_minibatches", "1.5M", 1_500_000),
        ("num_minibatches", "1e6", 1_000_000),
        ("num_minibatches", "500_000", 500_000),
        ("seed", "12345678901234567891", 12345678901234567891),
        ("seed", 12345678901234567891, 12345678901234567891),
        ("seed", "-3", -3),
        ("momentum", "1e-4", 1e-4),
        ("momentum", 1, 1.0),
        ("momentum", np.float32(0.5), 0.5),
        ("momentum", "-0.5", -0.5),
        ("momentum", math.inf, math.inf),
        ("stop_at", "475", 475.0),
        ("stop_at", "none", None),
        ("stop_at", "Null", None),
        ("stop_at", None, None),
        ("value_clipping", False, False),
        *(("value_clipping", text, True) for text in ("true", "True", "yes", "on")),
        *(("value_clipping", text, False) for text in ("false", "FALSE", "no", "off")),
        ("sizes", "64,32", (64, 32)),
        ("sizes", "[64, 32]", (64, 32)),
        ("sizes", "(64,)", (64,)),
        ("sizes", "64", (64,)),
        ("sizes", 64, (64,)),
        ("sizes", [64, "1k"], (64, 1000)),
        ("sizes", "[]", ()),
        ("sizes", "()", ()),
        ("sizes", "", ()),
        ("sizes", [], ()),
        ("tags", "a, b", ("a", "b")),
        ("tags", "['a', \"b c\"]", ("a", "b c")),
        ("tags", ["a,b"], ("a,b",)),
        ("mixture", "0.5,1", (0.5, 1.0)),
        ("mixture", "none", None),
        ("optimiser", "muon", "muon"),
    ],
)
def test_texts_and_objects_become_the_field_s_type(name, given, value):
    found = getattr(algorithm(**{name: given}), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        ("num_minibatches", "many", "num_minibatches is 'many'; give a whole number such as 64 or 500k."),
        ("num_minibatches", 1.5, "num_minibatches is 1.5; give a whole number such as 64 or 500k."),
        ("num_minibatches", "1e-4", "num_minibatches is '1e-4'; give a whole number such as 64 or 500k."),
        ("num_minibatches", "20%", "num_minibatches is '20%'; give a whole number such as 64 or 500k."),
        ("num_minibatches", True, "num_minibatches is True; give a whole number such as 64 or 500k."),
        ("num_minibatches", math.inf, "num_minibatches is inf; give a whole number such as 64 or 500k."),
        ("num_minibatches", None, "num_minibatches is None; give a whole number such as 64 or 500k."),
        ("num_minibatches", "none", "num_minibatches is 'none'; give a whole number such as 64 or 500k."),
        ("num_minibatches", [8], "num_minibatches is [8]; give a whole number such as 64 or 500k."),
        ("momentum", "fast", "momentum is 'fast'; give a number."),
        ("momentum", False, "momentum is False; give a number."),
        ("momentum", math.nan, "momentum is nan; give a number."),
        ("momentum", 10**400, f"momentum is 1{'0' * 38}…{'0' * 39}; give a number."),
        ("momentum", "", "momentum is ''; give a number."),
        ("stop_at", "never", "stop_at is 'never'; give a number, or none."),
        ("value_clipping", "maybe", "value_clipping is 'maybe'; give true or false."),
        ("value_clipping", 1, "value_clipping is 1; give true or false."),
        ("sizes", "64,wide", "sizes is '64,wide'; give whole numbers such as 64,64."),
        ("sizes", "64,,64", "sizes is '64,,64'; give whole numbers such as 64,64."),
        ("sizes", [64, None], "sizes is [64, None]; give whole numbers such as 64,64."),
        ("tags", [1], "tags is [1]; give texts such as position,velocity."),
        ("mixture", "[a]", "mixture is '[a]'; give numbers such as 0.5,1, or none."),
        ("optimiser", "adan", "optimiser is 'adan'; did you mean 'adam'?"),
        ("optimiser", "sgd", "optimiser is 'sgd'; known: adam, adamw, muon"),
        ("optimiser", None, "optimiser is None; known: adam, adamw, muon"),
    ],
)
def test_what_the_type_does_not_allow_is_an_error(name, given, sentence):
    fails(sentence, algorithm, **{name: given})


def test_texts_take_paths_and_nothing_else():
    (run,) = build([Run], {"env": "CartPole-v1", "run_dir": Path("runs") / "a"})
    assert run.run_dir == str(Path("runs") / "a")
    fails("env is 3; give a text.", build, [Run], {"env": 3})
    assert build([Run], {"env": "none"})[0].env == "none"


def test_a_choice_may_be_a_number():
    numbers = make_dataclass("Numbers", [("layers", Literal[1, 2], 1)], frozen=True)
    assert build([numbers], {"layers": "2"})[0].layers == 2
    fails("layers is True; known: 1, 2", build, [numbers], {"layers": True})


@pytest.mark.parametrize(("given", "value"), [("off", "off"), (False, "off"), (True, "on"), ("on", "on")])
def test_on_and_off_may_be_truth_values_as_yaml_reads_them(given, value):
    switch = make_dataclass("Switch", [("replay", Literal["on", "off"], "on")], frozen=True)
    assert build([switch], {"replay": given})[0].replay == value


def test_a_field_without_default_must_be_given():
    fails("env is not given; give a text.", build, [Run], {"total_steps": "2M"})


def test_the_dataclass_s_own_errors_pass_through():
    fails("num_minibatches is 0; give at least 1.", algorithm, num_minibatches="0")


# Keys --------------------------------------------------------------------------------------------------------------


def test_several_classes_are_one_namespace():
    run, config, network = build(
        [Run, Algorithm, NetworkConfig], {"env": "CartPole-v1", "hidden-sizes": "32", "seed": 3, "total_steps": "2M"}
    )
    assert run == Run("CartPole-v1", total_steps=2_000_000)
    assert config == Algorithm(seed=3)
    assert network == NetworkConfig(hidden_sizes=(32,))


def test_nothing_given_is_all_defaults():
    assert build([Algorithm, NetworkConfig], {}) == (Algorithm(), NetworkConfig())


@pytest.mark.parametrize("key", ["entropy_coef", "entropy-coef", "ent_coef", "ent-coef", "entropy_cost"])
def test_a_coefficient_has_many_spellings(key):
    assert algorithm(**{key: 0.5}) == Algorithm(entropy_coef=0.5)


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("entorpy_coef", "did you mean 'entropy_coef'?"),
        ("ent_coeff", "did you mean 'ent_coef'?"),
        ("entropy", "did you mean 'entropy_coef'?"),
        ("gama", "did you mean 'gamma'?"),
        ("ent_coef_shedule", "did you mean 'ent_coef_schedule'?"),
        ("num-minibatch", "did you mean 'num_minibatches'?"),
        ("xyzzy", f"known: {', '.join(f.name for f in fields(Algorithm))}"),
        ("prio_alpha", f"known: {', '.join(f.name for f in fields(Algorithm))}"),
        (True, f"known: {', '.join(f.name for f in fields(Algorithm))}"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, advice):
    fails(f"There is no setting {key!r}; {advice}", build, [Algorithm], {key: 1})


def test_a_setting_of_another_library_that_looks_like_ours_is_told_apart():
    with pytest.raises(InputError, match="no setting 'vf_clip_param': it is RLlib's maximum squared value error"):
        build([ClippedSettings], {"vf_clip_param": 10})
    for key, instead in (
        ("kl_target", "kl_coef='kl_penalty(0.2, target=0.01)'"),
        ("desired_kl", "learning_rate='adaptive_kl(3e-4, target=0.01)'"),
        ("prio_beta0", "importance_exponent='0.2 -> 1'"),
    ):
        with pytest.raises(InputError, match=f"no setting '{key}': in .* so write {re.escape(instead)}"):
            build([ppo.Config], {key: 0.01})
        name, _, text = instead.partition("=")
        build([ppo.Config], {name: text.strip("'")})


# Names from other libraries --------------------------------------------------------------------------------------

PPO = [RunConfig, ppo.Config, NetworkConfig]


def settings(**given):
    return {name: value for config in build(PPO, given) for name, value in vars(config).items()}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # Stable-Baselines3
        (
            {"n_envs": 4, "n_steps": 2048, "batch_size": 64, "n_epochs": 10, "total_timesteps": 1e6},
            {"num_envs": 4, "horizon": 2048, "minibatches": 4 * 2048 // 64, "epochs": 10, "total_steps": 1_000_000},
        ),
        ({"activation_fn": type("ReLU", (), {})}, {"activation": "relu"}),
        ({"net_arch": [64, 32]}, {"hidden_sizes": (64, 32), "critic_hidden_sizes": None}),
        ({"net_arch": {"pi": [32], "vf": [64, 64]}}, {"hidden_sizes": (32,), "critic_hidden_sizes": (64, 64)}),
        (
            {"normalize_advantage": False, "log_std_init": -1},
            {"standardise_advantages": False, "initial_log_std": -1.0},
        ),
        # CleanRL
        (
            {"env_id": "Acrobot-v1", "num_steps": 128, "num_minibatches": 4, "update_epochs": 3, "norm_adv": False},
            {"env": "Acrobot-v1", "horizon": 128, "minibatches": 4, "epochs": 3, "standardise_advantages": False},
        ),
        ({"minibatch_size": "256", "num_envs": 8, "num_steps": 128}, {"minibatches": 4}),
        # PureJaxRL
        ({"NUM_ENVS": 4, "NUM_STEPS": 128, "LR": 1e-4}, {"num_envs": 4, "horizon": 128, "learning_rate": 1e-4}),
        # Brax
        (
            {"num_timesteps": 10**6, "unroll_length": 20, "num_updates_per_batch": 4, "normalize_observations": True},
            {"total_steps": 10**6, "horizon": 20, "epochs": 4, "normalise_observations": True},
        ),
        # RLlib
        (
            {"train_batch_size": 4096, "num_envs": 8, "sgd_minibatch_size": 128, "num_sgd_iter": 30},
            {"horizon": 512, "minibatches": 32, "epochs": 30},
        ),
        # rsl_rl
        (
            {"num_steps_per_env": 24, "num_mini_batches": 4, "num_envs": 16, "max_iterations": 10},
            {"horizon": 24, "minibatches": 4, "total_steps": 24 * 16 * 10},
        ),
        ({"optimizer": "adamw", "normalize_rewards": "yes"}, {"optimiser": "adamw", "normalise_rewards": True}),
    ],
)
def test_the_names_of_other_libraries_mean_what_they_mean_there(given, expected):
    found = settings(**given)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"batch_size": 48}, "num_envs · horizon = 32 · 64 = 2048 env steps, which is not a multiple"),
        ({"batch_size": 64, "minibatches": 3}, "batch_size is 64, which means minibatches=32, but minibatches is 3"),
        ({"batch_size": "many"}, "batch_size is 'many'; give a whole number"),
        ({"train_batch_size": 100}, "train_batch_size is 100 env steps, which 32 environments cannot share"),
        (
            {"unroll_length": 10, "batch_size": 256, "num_minibatches": 8, "num_envs": 512},
            "in Brax it counts segments of unroll_length steps, .* write horizon=40, minibatches=8, without",
        ),
        ({"n_steps": 8, "num_steps": 9}, "horizon is given twice, as 'n_steps' and as 'num_steps'"),
        ({"ent_coef": 0.02, "ent_coef_final": 0.001}, "'ent_coef_final'; .* write entropy_coef='0.02 -> 0.001'"),
        ({"entropy_cost_end": 0.002}, "'entropy_cost_end'; .* write entropy_coef='0.01 -> 0.002'"),
        ({"anneal_lr": True}, "'anneal_lr'; .* write learning_rate='0.001 -> 0'"),
        ({"no_anneal_lr": True}, "a number stays the same all along; write learning_rate=2.5e-4"),
        ({"callback": print}, "'callback': pass a function as progress_fn="),
        ({"num_workers": 2}, "'num_workers': in RLlib it is a factor"),
        ({"mlp_layers": 2}, "did you mean 'hidden_sizes', "),
        ({"exploration": 2}, r"did you mean 'entropy_coef'\?$"),
        ({"steps": 2}, "'steps': write total_steps for the budget of the run, or horizon for the steps of each"),
        ({"logdir": "here"}, "'logdir': name the run's directory with run_dir="),
        ({"gpu": 0}, "'gpu': JAX chooses the device"),
        ({"render_mode": "human"}, "'render_mode': .* 'lehr play RUN' then records an episode"),
        ({"torch_deterministic": True}, "'torch_deterministic': drop it: the same seed always gives the same run"),
        ({"resume": True}, "'resume': 'lehr resume RUN' continues a stopped run, in Python lehr.resume"),
        ({"lag": 4}, r"no setting 'lag': it is a setting of appo and impala\.$"),
        ({"novelty_coef": 1}, r"it is a setting of the reward model novelty; add reward_model='novelty'\.$"),
        ({"novelty_coef_schedule": 1}, "it is a setting of the reward model novelty"),
        (
            {"demonstrations": "d.npz"},
            "of the reward model discriminator and of gail; add reward_model='discriminator'",
        ),
        ({"xyzzy": 2}, r"no setting 'xyzzy'; .*docs/migration.md lists what other libraries call settings\.$"),
    ],
)
def test_what_differs_is_explained_and_what_is_unknown_gets_few_suggestions(given, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        settings(**given)
    assert str(caught.value).count("'") <= 2 * 6


def test_an_algorithm_without_minibatches_says_so():
    with pytest.raises(InputError, match="'batch_size': this algorithm learns from a whole rollout at once"):
        build([RunConfig, a2c.Config], {"batch_size": 64})


def test_a_name_of_another_library_replaces_what_it_decides_in_a_file():
    """As when a run is resumed: its file has every setting."""
    found = merge(PPO, {"minibatches": 8, "horizon": 64}, {"batch_size": 1024, "n_steps": 128})
    assert found == {"horizon": 128, "batch_size": 1024}
    assert settings(**found)["minibatches"] == 32 * 128 // 1024


def test_the_names_of_other_libraries_are_flags_too():
    made = argparse.ArgumentParser(prog="lehr train")
    add_flags(made, PPO, ["run", "ppo", "network"])
    words = ["--n-envs", "4", "--n_steps", "64", "--batch-size", "32", "--no-normalize-advantage", "--net-arch", "8,8"]
    given = given_flags(made.parse_args([*words, "--total-timesteps", "1k", "--optimizer", "adamw"]))
    found = settings(**given)
    assert (found["num_envs"], found["horizon"], found["minibatches"], found["total_steps"]) == (4, 64, 8, 1000)
    assert (found["standardise_advantages"], found["hidden_sizes"], found["optimiser"]) == (False, (8, 8), "adamw")
    assert "--n-envs" not in made.format_help()
    with pytest.raises(
        InputError, match=r"no option '--entropy-cost-end'; .* write --entropy-coef \"0.01 -> 0.003\"\."
    ):
        refuse_unknown(made, made.parse_known_args(["--entropy-cost-end", "0.003"])[1])
    with pytest.raises(InputError, match="no option '--callback': pass a function as progress_fn="):
        refuse_unknown(made, ["--callback", "print"])


@pytest.mark.parametrize("name", algorithms.names())
def test_no_two_settings_of_an_algorithm_have_the_same_name(name):
    fields = [field for cls in settings_classes(name) for field in describe(cls)]
    spelled = [
        word for field in fields for word in (field.name, *field.aliases, *(c.name for c in field.names.conversions))
    ]
    own = {field.name for field in fields}
    assert sorted(word for word in set(spelled) if spelled.count(word) > 1 and word not in own) == []


@pytest.mark.parametrize("key", ["discount_schedule", "gamma"])
def test_static_fields_have_neither_schedules_nor_aliases(key):
    fixed = make_dataclass("Fixed", [("discount", float, 0.9)])
    with pytest.raises(InputError, match=f"^There is no setting '{key}'; "):
        build([fixed], {key: 0.5})


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            ("ent_coef", "entropy_coef"),
            "entropy_coef is given twice, as 'ent_coef' and as 'entropy_coef'; remove 'ent_coef'.",
        ),
        (
            ("entropy_coef", "ent_coef"),
            "entropy_coef is given twice, as 'entropy_coef' and as 'ent_coef'; remove 'ent_coef'.",
        ),
        (("lr", "alpha_lr"), "learning_rate is given twice, as 'lr' and as 'alpha_lr'; remove 'lr'."),
        (
            ("lr_schedule", "learning_rate_schedule"),
            "learning_rate_schedule is given twice, as 'lr_schedule' and as 'learning_rate_schedule'; remove "
            "'lr_schedule'.",
        ),
        (
            ("num-minibatches", "num_minibatches"),
            "num_minibatches is given twice, as 'num-minibatches' and as 'num_minibatches'; remove 'num-minibatches'.",
        ),
    ],
)
def test_two_spellings_at_once_say_which_to_remove(keys, sentence):
    fails(sentence, build, [Algorithm], dict.fromkeys(keys, "1"))
    fails(sentence, merge, [Algorithm], dict.fromkeys(keys, "1"), {})


def test_names_that_clash_are_the_programmer_s_mistake():
    with pytest.raises(TypeError, match="Two of Algorithm, Base have a field 'learning_rate'; rename one"):
        build([Algorithm, Base], {})


# Coefficients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        (0, 0.0),
        (0.02, 0.02),
        ("1e-4", 1e-4),
        (np.float64(0.5), 0.5),
        ("0.03 -> 0.001 cosine", "0.03 -> 0.001 cosine"),
        ("0.03→0.001", "0.03→0.001"),
        ({"shape": "linear", "start": 1, "end": 0, "over": "50%"}, "1 -> 0 over 50%"),
        ([[0, 0.1], [500, 0.0]], "0.1 -> 0 over 500"),
        (linear(0.1, 0), "0.1 -> 0"),
        (constant(0.1), 0.1),
        ("plateau(0.03)", "plateau(0.03)"),
        (plateau(0.03, patience=5), "plateau(value=0.03, patience=5)"),
        (optax.linear_schedule, optax.linear_schedule),
    ],
)
def test_a_coefficient_is_kept_as_a_number_a_text_or_a_function(spec, kept):
    found = algorithm(entropy_coef=spec).entropy_coef
    assert found == kept
    assert type(found) is type(kept)


def test_a_bad_coefficient_names_its_key():
    fails(
        "entropy_coef: In the schedule '0.1 -> ', character 7: expected a value after '->', but the schedule ends here.",
        algorithm,
        ent_coef="0.1 -> ",
    )
    fails(
        "entropy_coef: True is not a schedule; give a number, a string, a mapping, [step, value] pairs or a function.",
        algorithm,
        entropy_coef=True,
    )
    fails(
        "entropy_coef: The schedule 'linear' is a shape without values; add them, for example '0.03 -> 0.001 linear'.",
        algorithm,
        entropy_coef="linear",
    )
    fails(
        "entropy_coef_warmup_steps: The position -5 is below 0; the first step is 0.",
        algorithm,
        ent_coef_warmup_steps=-5,
    )


def test_only_an_optional_coefficient_may_be_none():
    assert algorithm(target_kl="0.02").target_kl == 0.02
    for nothing in (None, "none"):
        assert algorithm(target_kl=nothing).target_kl is None
        fails(
            "entropy_coef is none; give a number or a schedule such as '0.03 -> 0.001 cosine'.",
            algorithm,
            entropy_coef=nothing,
        )


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"ent_coef": 0.02, "ent_coef_schedule": "linear"}, "0.02 -> 0"),
        ({"ent_coef": "2e-2", "ent_coef_schedule": " cosine "}, "0.02 -> 0 cosine"),
        ({"ent_coef_schedule": "linear"}, "0.01 -> 0"),
        ({"ent_coef_schedule": "constant"}, 0.01),
        ({"ent_coef_schedule": {"type": "cosine", "end": 0.001}}, "0.01 -> 0.001 cosine"),
        ({"ent_coef_schedule": {"kind": "constant"}}, 0.01),
        ({"ent_coef_schedule": "0.03 -> 0.001"}, "0.03 -> 0.001"),
        ({"ent_coef_schedule": {"value": 0.5}}, 0.5),
        ({"ent_coef": 0.03, "ent_coef_schedule": "0.03 -> 0.001"}, "0.03 -> 0.001"),
        ({"ent_coef": 0.03, "ent_coef_schedule": "0 -> 0.03 over 5%, 0.03"}, "0 -> 0.03 over 5%, 0.03"),
        ({"ent_coef": 0.02, "ent_coef_warmup_steps": 200}, "0 -> 0.02 over 200, 0.02"),
        ({"ent_coef_warmup_steps": "20%"}, "0 -> 0.01 over 20%, 0.01"),
        (
            {"ent_coef": 0.02, "ent_coef_schedule": "linear", "ent_coef_warmup_steps": "1k"},
            "0 -> 0.02 over 1k, 0.02 -> 0",
        ),
        ({"ent_coef": "0.02 -> 0.01", "ent_coef_warmup_steps": 0}, "0.02 -> 0.01"),
        ({"ent_coef": 0.02, "ent_coef_schedule": None, "ent_coef_warmup_steps": "none"}, 0.02),
        ({"ent_coef": 0.02, "entropy-cost-schedule": "linear"}, "0.02 -> 0"),
        ({"ent_coef_schedule": "plateau(0.03)"}, "plateau(0.03)"),
    ],
)
def test_three_keys_make_one_schedule(given, kept):
    assert algorithm(**given) == Algorithm(entropy_coef=kept)


def test_a_shape_or_a_warmup_starts_from_the_default():
    assert algorithm(clip_coef_warmup_steps=100).clip_range == "0 -> 0.2 over 100, 0.2 -> 0.1"
    fails(
        "clip_range is already a schedule, '0.2 -> 0.1'; give clip_range as a number, or remove clip_range_schedule.",
        algorithm,
        clip_coef_schedule="cosine",
    )
    fails(
        "target_kl_schedule is 'linear', which has no start, and target_kl is not given; give target_kl.",
        algorithm,
        target_kl_schedule="linear",
    )
    fails(
        "target_kl_warmup_steps is 10, but target_kl is none; remove one of them.", algorithm, target_kl_warmup_steps=10
    )
    assert algorithm(target_kl_schedule="0.02 -> 0.01").target_kl == "0.02 -> 0.01"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"entropy_coef": 0.02, "entropy_coef_schedule": "0.03 -> 0.001"},
            "entropy_coef is 0.02 but entropy_coef_schedule starts at 0.03; remove entropy_coef, or start the schedule "
            "there.",
        ),
        (
            {"entropy_coef": 0.02, "entropy_coef_schedule": "0.05 until 20%, 0.02 -> 0"},
            "entropy_coef is 0.02 but entropy_coef_schedule starts at 0.05; remove entropy_coef, or start the schedule "
            "there.",
        ),
        (
            {"entropy_coef": 0.03, "entropy_coef_schedule": "plateau(0.03)"},
            "entropy_coef_schedule is 'plateau(value=0.03)', which has its own start; remove entropy_coef.",
        ),
        (
            {"entropy_coef": "0.03 -> 0.01", "entropy_coef_schedule": "0.03 -> 0.001"},
            "entropy_coef is already a schedule, '0.03 -> 0.01'; give entropy_coef as a number, or remove "
            "entropy_coef_schedule.",
        ),
        (
            {"entropy_coef": "plateau(0.03)", "entropy_coef_warmup_steps": 10},
            "entropy_coef_warmup_steps is 10, but 'plateau(value=0.03)' reacts to metrics and cannot be warmed up; remove "
            "one of them.",
        ),
        (
            {"entropy_coef": "0 -> 0.1", "entropy_coef_warmup_steps": "10%"},
            "entropy_coef_warmup_steps is '10%', but the schedule '0 -> 0.1' already starts at 0; remove "
            "entropy_coef_warmup_steps.",
        ),
    ],
)
def test_keys_that_contradict_each_other(given, sentence):
    fails(sentence, algorithm, **given)


values = st.sampled_from([None, 0.02, "0.02", "3e-2", "0.03 -> 0.001", "0 -> 0.03 over 5%, 0.03", linear(0.02, 0.01)])
shapes = st.sampled_from(
    [
        *(None, "linear", "cosine", "constant", "exponential", "0.03 -> 0.001", "0.02 -> 0 over 50%", "plateau(0.02)"),
        *({"shape": "cosine"}, {"end": 0.001}, {"kind": "constant"}, {"start": 0.03, "end": 0.001}),
        *([[0, 0.02], [9, 0.01]], "0 -> 0.02 over 5%, 0.02 -> 0.001", "0 -> 0.03 over 10, 0.03", decay),
    ]
)
ramps = st.sampled_from([None, 0, 10, "100", "20%"])
Entropy = make_dataclass("Entropy", [("entropy_coef", Annotated[Coef, Coefficient(ENTROPY)] | None, None)], frozen=True)


@given(values, shapes, ramps)
def test_the_three_keys_mean_what_coefficient_schedule_makes_of_them(value, shape, ramp):
    assume(not (shape is decay and ramp == "20%"))  # only with a budget can a function wait for a share of it
    keys = {"entropy_coef": value, "entropy_coef_schedule": shape, "entropy_coef_warmup_steps": ramp}
    keys = {key: part for key, part in keys.items() if part is not None}

    def found():
        return coefficients(build([Entropy], keys)[0], TOTAL)["entropy_coef"]

    try:
        expected = coefficient_schedule(Coefficient(ENTROPY, name="entropy_coef"), keys, TOTAL)
    except InputError:
        with pytest.raises((InputError, KeyError)):
            found()
        return
    if isinstance(expected, Controller):
        assert found() == expected
    else:
        steps = [0, 1, 5, 10, 50, 99, 100, 150, 200, 500, 999, 1000, 5000]
        np.testing.assert_allclose(found()(steps), expected(steps), rtol=1e-12)


def test_the_warmup_of_a_function_is_in_steps():
    warmed = coefficients(algorithm(ent_coef=decay, ent_coef_warmup_steps=4), TOTAL)["entropy_coef"]
    assert [warmed(step) for step in (0, 1, 4, 5)] == [0, 0.005, 0.02, 0.01]
    with pytest.raises(
        InputError,
        match="The warm-up of a function has length 20%; give it in env steps, since a function has no budget",
    ):
        algorithm(ent_coef=decay, ent_coef_warmup_steps="20%")


def test_coefficients_are_bound_and_without_none():
    found = coefficients(algorithm(entropy_coef="0.03 -> 0.01", lr="adaptive_kl(3e-4)"), TOTAL)
    assert list(found) == ["learning_rate", "entropy_coef", "discount", "clip_range"]
    assert found["entropy_coef"] == linear(0.03, 0.01, over=TOTAL)
    assert found["clip_range"](500) == pytest.approx(0.15)
    assert found["learning_rate"] == schedule("adaptive_kl(3e-4)")
    assert coefficients(Algorithm(target_kl=0.02), TOTAL)["target_kl"] == constant(0.02)


def test_coefficients_are_checked_by_name():
    fails(
        "discount is '0.9 -> 1.1 over 1k', which reaches 1.1; it must stay in [0, 1] at every step.",
        coefficients,
        Algorithm(discount="0.9 -> 1.1"),
        TOTAL,
    )
    with pytest.raises(InputError, match=r"^entropy_coef: In the schedule '0.1 => 0'"):
        coefficients(Algorithm(entropy_coef="0.1 => 0"), TOTAL)
    with pytest.raises(InputError, match=r"^entropy_coef: Phase 2 .* would last -1000 steps with a budget of 1000"):
        coefficients(algorithm(ent_coef_warmup_steps=2000, ent_coef_schedule="linear"), TOTAL)


def test_a_coefficient_is_declared_at_its_field_alone():
    made = make_dataclass(
        "Made", [("courage", Annotated[Coef, Coefficient(("nerve",), maximum=2.0)], 1.0)], frozen=True
    )
    (config,) = build([made], {"nerve": "2 -> 1"})
    assert coefficients(config, TOTAL)["courage"](TOTAL) == 1
    fails(
        "courage is '3', which reaches 3; it must stay in [0, 2] at every step.", coefficients, made(courage=3), TOTAL
    )


def test_a_subclass_that_changes_a_default_keeps_range_names_and_meaning():
    child = make_dataclass("Child", [("discount", Coef, 0.5)], bases=(Algorithm,), frozen=True)
    (found,) = [field for field in describe(child) if field.name == "discount"]
    assert found.default == 0.5
    assert found.aliases == ("gamma", "discounting")
    fails(
        "discount is '2', which reaches 2; it must stay in [0, 1] at every step.",
        coefficients,
        child(discount=2),
        TOTAL,
    )


def test_without_a_declaration_a_coefficient_is_0_or_more():
    made = make_dataclass("Made", [("courage", Coef, 1.0)], frozen=True)
    fails(
        "courage is '-1', which reaches -1; it must stay in [0, ∞) at every step.",
        coefficients,
        made(courage=-1),
        TOTAL,
    )


@pytest.mark.parametrize("kind", [dict, int | str, tuple[int, int], list[int], Any])
def test_a_type_that_configs_do_not_hold_is_the_programmer_s_mistake(kind):
    with pytest.raises(TypeError, match=r"^Odd.thing is annotated with .*; a config accepts Coef, Plugin, bool, int"):
        describe(make_dataclass("Odd", [("thing", kind)]))


# Presets -----------------------------------------------------------------------------------------------------------


def test_a_preset_gives_values_where_no_key_does():
    assert algorithm(preset="classic") == Algorithm(learning_rate="2.5e-4 -> 0", entropy_coef=0.05)
    puffer = Algorithm(optimiser="muon", learning_rate="0.015 -> 0 cosine", sizes=(128,))
    assert with_preset(Algorithm, "puffer") == puffer
    assert algorithm(preset=None) == algorithm(preset="none") == Algorithm()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"preset": "classic", "entropy_cost": 0.3}, {"learning_rate": "2.5e-4 -> 0", "entropy_coef": 0.3}),
        ({"entropy_coef_schedule": "linear", "preset": "classic"}, {"learning_rate": "2.5e-4 -> 0", "entropy_coef": "0.05 -> 0"}),
        ({"preset": "classic", "lr": 1e-3}, {"learning_rate": 1e-3, "entropy_coef": 0.05}),
        ({"preset": "classic", "lr_schedule": "1e-3 -> 0"}, {"learning_rate": "1e-3 -> 0", "entropy_coef": 0.05}),
        ({"preset": "puffer", "sizes": "1,2", "lr": 1}, {"optimiser": "muon", "learning_rate": "1 -> 0 cosine", "sizes": (1, 2)}),
        ({"preset": "puffer", "lr": "0.1 -> 0.01"}, {"optimiser": "muon", "learning_rate": "0.1 -> 0.01", "sizes": (128,)}),
    ],
)  # fmt: skip
def test_explicit_keys_override_a_preset(given, expected):
    assert algorithm(**given) == Algorithm(**expected)


def test_an_unknown_preset_names_the_nearest():
    fails("There is no preset 'clasic'; did you mean 'classic'?", with_preset, Algorithm, "clasic")
    fails("There is no preset 3; known: classic, puffer", algorithm, preset=3)
    fails("There is no setting 'preset'; known: learning_rate, seed", build, [Base], {"preset": "classic"})


def test_one_preset_may_set_fields_of_two_classes():
    small = make_dataclass("Small", [("depth", int, 1)], namespace={"PRESETS": {"tiny": {"depth": 0, "seed": 7}}})
    assert build([small, Base], {"preset": "tiny"}) == (small(0), Base(seed=7))
    other = make_dataclass("Other", [("width", int, 1)], namespace={"PRESETS": {"tiny": {"width": 2}}})
    assert build([small, Base, other], {"preset": "tiny"}) == (small(0), Base(seed=7), other(2))
    made = argparse.ArgumentParser(prog="lehr train")
    add_flags(made, [small, Algorithm], ["small", "algorithm"])
    assert "Preset for settings that are not given: tiny, classic, puffer." in " ".join(made.format_help().split())


# Precedence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("below", "above", "merged"),
    [
        ({"ent_coef": 0.1}, {"entropy-coef": "0.2"}, {"entropy_coef": "0.2"}),
        ({"entropy_coef": 0.1}, {"ent_coef": "0.2"}, {"entropy_coef": "0.2"}),
        ({"preset": "a"}, {"preset": "b"}, {"preset": "b"}),
        ({"num-envs": 1, "a": 2}, {"num_envs": "3"}, {"num_envs": "3", "a": 2}),
        ({"lr": 1, "lr_schedule": "linear"}, {"learning_rate": 2}, {"learning_rate": 2, "learning_rate_schedule": "linear"}),
        ({"lr": 1, "lr_schedule": "linear"}, {"learning_rate_schedule": "cosine"}, {"learning_rate": 1, "learning_rate_schedule": "cosine"}),
        ({"lr": 1, "lr_schedule": "linear", "lr_warmup_steps": 5}, {"learning_rate": "2 -> 1"}, {"learning_rate": "2 -> 1"}),
        ({"lr": 1, "lr_schedule": "linear"}, {"lr_schedule": "2 -> 1"}, {"learning_rate_schedule": "2 -> 1"}),
        ({"lr_schedule": "2 -> 1"}, {"lr": 3}, {"learning_rate": 3}),
        ({"lr": "2 -> 1"}, {"lr_warmup_steps": 3}, {"learning_rate": "2 -> 1", "learning_rate_warmup_steps": 3}),
        ({"lr": 1, "lr_schedule": "linear"}, {"lr_schedule": "none"}, {"learning_rate": 1, "learning_rate_schedule": None}),
        ({"target_kl": 1, "kl_target_schedule": "linear"}, {"target_kl": "none"}, {"target_kl": None}),
        ({"lr": 1, "gamma": 2}, {"lr": "2 -> 1"}, {"discount": 2, "learning_rate": "2 -> 1"}),
    ],
)  # fmt: skip
def test_what_is_above_overrides_what_is_below(below, above, merged):
    assert merge([Algorithm], below, above) == merged


# Round trips -------------------------------------------------------------------------------------------------------

finite = st.floats(min_value=1e-6, max_value=1e6)
specs = st.one_of(
    finite,
    st.builds("{!r} -> {!r} {}".format, finite, finite, st.sampled_from(["", "cosine", "exponential over 20%"])),
    st.builds(linear, finite, finite, over=st.sampled_from([None, "50%", 100])),
    st.builds(plateau, finite),
)
texts = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=8)
configs = st.builds(
    lambda **given: algorithm(**given),
    learning_rate=specs,
    entropy_coef=specs,
    target_kl=st.none() | specs,
    seed=st.integers(-(2**63), 2**64 - 1),
    num_minibatches=st.integers(1, 2**63),
    value_clipping=st.booleans(),
    optimiser=st.sampled_from(["adam", "adamw", "muon"]),
    sizes=st.lists(st.integers(-(2**63), 2**64 - 1)).map(tuple),
    momentum=st.floats(allow_nan=False),
    stop_at=st.none() | st.floats(allow_nan=False),
    tags=st.lists(texts).map(tuple),
    mixture=st.none() | st.lists(st.floats(allow_nan=False)).map(tuple),
)


@given(configs)
def test_mapping_json_and_yaml_give_the_config_back(tmp_path_factory, config):
    mapping = to_mapping(config)
    assert build([Algorithm], mapping) == (config,)
    assert build([Algorithm], json.loads(json.dumps(mapping))) == (config,)
    path = tmp_path_factory.mktemp("configs") / "config.yaml"
    to_yaml(path, mapping)
    assert from_yaml(path) == mapping


def test_several_configs_are_one_mapping():
    configs = (Run("CartPole-v1"), Algorithm(sizes=(1,), entropy_coef=linear(1, 0)), NetworkConfig(actor_obs=("a",)))
    mapping = to_mapping(*configs)
    assert list(mapping)[:5] == ["env", "total_steps", "run_dir", "layers", "learning_rate"]
    assert mapping["sizes"] == [1]
    assert mapping["entropy_coef"] == "1 -> 0"
    assert build([Run, Algorithm, NetworkConfig], mapping) == (
        configs[0],
        Algorithm(sizes=(1,), entropy_coef="1 -> 0"),
        configs[2],
    )


@pytest.mark.parametrize("function", [decay, schedule(decay)])
def test_a_function_must_be_given_again(function):
    mapping = to_mapping(Algorithm(entropy_coef=function))
    assert mapping["entropy_coef"] == "<function decay>"
    fails(
        "entropy_coef was a function, <function decay>, which cannot be saved in a file; pass the function again.",
        build,
        [Algorithm],
        mapping,
    )
    assert build([Algorithm], merge([Algorithm], mapping, {"ent_coef": decay})) == (Algorithm(entropy_coef=decay),)


# YAML --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_yaml_is_one_key_a_line(tmp_path):
    to_yaml(tmp_path / "config.yaml", to_mapping(Algorithm(learning_rate=1e-5, clip_range="0.2 → 0.1")))
    lines = (tmp_path / "config.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ["learning_rate: 1.0e-05", "seed: 0"]
    assert {"sizes: [64, 64]", "stop_at: null", "tags: []", "clip_range: 0.2 → 0.1"} <= set(lines)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: &x [1]\nseed: *x", "line 1: anchors and aliases, such as &x, are not allowed"),
        ("seed: *x", "line 1: anchors and aliases, such as *x, are not allowed"),
        ("seed: !!int x", "line 1: 'x' is not a valid value of the type 'int'"),
        ("seed: !!float x", "line 1: 'x' is not a valid value of the type 'float'"),
        ("seed: !!bool x", "line 1: 'x' is not a valid value of the type 'bool'"),
        ("a: 1\nseed: !!timestamp x", "line 2: 'x' is not a valid value of the type 'timestamp'"),
        ("seed: 2001-99-99", "line 1: '2001-99-99' is not a valid value of the type 'timestamp'"),
        ("seed: " + "9" * 5000, f"line 1: '{'9' * 38}…{'9' * 38}' is not a valid value of the type 'int'"),
        ("seed: 0x" + "f" * 5000, f"line 1: '0x{'f' * 36}…{'f' * 38}' is not a valid value of the type 'int'"),
        ("seed: [0, {a: 0x" + "f" * 5000 + "}]", f"line 1: '0x{'f' * 36}…{'f' * 38}' is not a valid value"),
        ("seed: " + "[" * 5000, "line 1: lists and mappings are nested more than 50 deep"),
        ("seed: " + "{a: " * 5000, "line 1: lists and mappings are nested more than 50 deep"),
        ("a:\n" + "".join(f"{' ' * i}- \n" for i in range(1, 200)), "line 52: lists and mappings are nested more than"),
        ("!!map [a, b]", "line 1: expected a mapping node, but found sequence"),
    ],
)  # fmt: skip
def test_a_hostile_yaml_file_is_one_sentence(text, problem, written):
    path = written(text)
    with pytest.raises(InputError) as caught:
        from_yaml(path)
    assert str(caught.value).startswith(f"The config {path}, {problem}")
    assert "\n" not in str(caught.value)


def test_a_yaml_file_is_not_read_beyond_its_largest_size(written, tmp_path):
    path = written("a: 1\n" + "# much\n" * 100_000)
    fails(f"The config {path} is larger than 64 KiB; give a YAML file with the settings of a run.", from_yaml, path)
    with pytest.raises(InputError, match="larger than 64 KiB"):
        from_yaml("/dev/zero")


def test_a_huge_number_is_quoted_by_its_size():
    given = {"seed": 2**20000 - 1}
    fails("seed is a whole number of 20000 bits; give a whole number such as 64 or 500k.", build, [Base], given)


def test_settings_that_could_not_be_read_again_are_not_written(tmp_path):
    pairs = [[step, 1 / (step + 1)] for step in range(4000)]
    with pytest.raises(InputError, match=r"All settings together take \d+,\d+ bytes .* learning_rate takes \d+,\d+ of"):
        to_yaml(tmp_path / "config.yaml", {"env": "CartPole-v1", "learning_rate": pairs})
    assert not list(tmp_path.iterdir())


def test_what_occurs_twice_is_written_twice(tmp_path):
    twice = {"a": 1}
    to_yaml(tmp_path / "config.yaml", {"x": twice, "y": twice})
    assert from_yaml(tmp_path / "config.yaml") == {"x": {"a": 1}, "y": {"a": 1}}


def test_numbers_that_yaml_takes_for_texts(written):
    given = from_yaml(
        written("lr: 1e-4\nmomentum: 5e-1\nnum_minibatches: 1e1\nsizes: 64,64\nent_coef: {start: 1e-2, end: 0}\n")
    )
    assert given["lr"] == "1e-4"
    assert algorithm(**given) == Algorithm(1e-4, momentum=0.5, num_minibatches=10, entropy_coef="0.01 -> 0")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr: 1\nseed: 2\nlr: 3\n", "The config {}, line 3: the key 'lr' is given twice; fix that line."),
        ("lr:\n  start: 1\n  start: 2\n", "The config {}, line 3: the key 'start' is given twice; fix that line."),
        ("lr: 1\nseed: [1, 2\n", "The config {}, line 3: expected ',' or ']', but got '<stream end>'; fix that line."),
        ("lr: 1\nseed: 2: 3\n", "The config {}, line 2: mapping values are not allowed here; fix that line."),
        ("[1, 2]: 3\n", "The config {}, line 1: found unhashable key; fix that line."),
        ("- 1\n- 2\n", "The config {} contains a list; write lines of 'name: value'."),
        ("hello\n", "The config {} contains a str; write lines of 'name: value'."),
        (b"lr: \xff\xfe\xfd\n", "The config {} is not UTF-8 text; save it as UTF-8."),
        ("lr: !!python/object/apply:os.getcwd []\n", "The config {}, line 1: could not determine a constructor for the tag "
         "'tag:yaml.org,2002:python/object/apply:os.getcwd'; fix that line."),
    ],
)  # fmt: skip
def test_a_bad_file_says_where(written, text, sentence):
    path = written(text)
    fails(sentence.format(path), from_yaml, path)


def test_an_empty_file_and_a_missing_one(written, tmp_path):
    assert from_yaml(written("# nothing yet\n")) == {}
    path = tmp_path / "missing.yaml"
    fails(
        f"The config {path} cannot be read: No such file or directory; give the path of a YAML file.", from_yaml, path
    )


# Help and flags ----------------------------------------------------------------------------------------------------


def test_help_is_the_docstring_under_the_field():
    found = {described.name: described for described in describe(Algorithm)}
    assert list(found) == [f.name for f in fields(Algorithm)]
    assert found["learning_rate"].help == "Learning rate of the optimiser."
    assert found["entropy_coef"].help == "Weight of the entropy bonus; 20% of the loss at most."
    assert found["discount"].help == ""
    assert found["entropy_coef"].aliases == ("ent_coef", "entropy_cost", "entropy_coeff")
    assert found["entropy_coef"].is_coefficient
    assert found["target_kl"].is_coefficient
    assert not found["momentum"].is_coefficient
    assert found["sizes"].default == (64, 64)
    assert found["target_kl"].type_text == "a number or a schedule such as '0.03 -> 0.001 cosine', or none"
    assert found["optimiser"].type_text == "one of adam, adamw, muon"
    assert all(described.help for described in describe(NetworkConfig))


def test_several_threads_may_read_the_same_classes():
    """Python 3.11 cannot parse in two threads at once, and help texts are parsed from the source."""
    classes = settings_classes("ppo")
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            fields_module._docstrings.cache_clear()
            found = list(pool.map(fields_module._docstrings, classes * 4))
            assert found[: len(classes)] * 4 == found


def test_a_class_without_source_has_no_help():
    assert describe(make_dataclass("Bare", [("size", int, 3)]))[0].help == ""
    line = inspect.getsourcelines(Base)[1]  # a class of another file may claim the lines of one of this file
    space = {"dataclass": dataclass, "__name__": __name__}
    exec("\n" * (line - 1) + "@dataclass\nclass Elsewhere:\n    learning_rate: float = 0.5", space)
    assert describe(space["Elsewhere"])[0].help == ""


def test_fields_that_are_not_given_by_the_user_are_no_settings():
    derived = make_dataclass("Derived", [("size", int, 3), ("square", object, field(init=False, default=9))])
    assert [described.name for described in describe(derived)] == ["size"]


def test_a_child_s_docstring_goes_over_its_parent_s():
    @dataclass(frozen=True)
    class Child(Base):
        learning_rate: Coef = 1e-3
        """Smaller steps."""

    assert [described.help for described in describe(Child)] == ["Smaller steps.", "Where randomness comes from."]


def parser():
    made = Parser(prog="lehr train", allow_abbrev=False)
    made.add_argument("--debug", action="store_true")
    add_flags(made, [Run, Algorithm], ["run", "algorithm"])
    return made


def flags(*words):
    return given_flags(parser().parse_args(words))


def test_only_what_was_given_is_returned():
    assert flags() == {}
    assert flags("--debug", "--env", "CartPole-v1", "--total-steps=500k") == {
        "env": "CartPole-v1",
        "total_steps": "500k",
    }
    assert flags("--seed", "0") == {"seed": "0"}


def test_booleans_have_a_no():
    assert flags("--value-clipping") == {"value_clipping": True}
    assert flags("--no-value-clipping") == {"value_clipping": False}
    assert flags("--value_clipping") == {"value_clipping": True}


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        *(("--entropy-coef", "entropy_coef"), ("--entropy_coef", "entropy_coef"), ("--ent-coef", "ent_coef")),
        *(("--ent_coef_schedule", "ent_coef_schedule"), ("--entropy-coef-warmup-steps", "entropy_coef_warmup_steps")),
        *(("--gamma", "gamma"), ("--lr", "lr"), ("--preset", "preset"), ("--hidden", None)),
    ],
)
def test_every_spelling_is_a_flag(flag, key):
    found, unknown = parser().parse_known_args([flag, "x"])
    assert given_flags(found) == ({key: "x"} if key else {})
    assert unknown == ([] if key else [flag, "x"])


def test_help_is_read_only_when_it_is_shown():
    """The source of a class takes longer to parse than its settings; and Python 3.11 cannot parse in two threads."""

    @dataclass(frozen=True)
    class Own:
        size: int = 3
        """How large."""

    read = fields_module._docstrings.cache_info().misses
    made = Parser(prog="lehr train")
    add_flags(made, [Own], ["own"])
    assert build([Own], given_flags(made.parse_args(["--size", "4"]))) == (Own(4),)
    assert fields_module._docstrings.cache_info().misses == read
    assert "--size INTEGER How large. (default: 3)" in " ".join(made.format_help().split())
    assert fields_module._docstrings.cache_info().misses == read + 1


def test_the_help_shows_each_field_once_with_its_default():
    shown = " ".join(parser().format_help().split())
    assert "--entropy-coef SCHEDULE Weight of the entropy bonus; 20% of the loss at most. (default: 0.01)" in shown
    assert "--env TEXT The environment's name. (required)" in shown
    assert "--value-clipping, --no-value-clipping Whether values are clipped. (default: true)" in shown
    assert "--optimiser {adam,adamw,muon} The optax transformation. (default: adam)" in shown
    assert "--sizes LIST Dense layers. (default: 64,64)" in shown
    assert "--total-steps INTEGER The budget in env steps. (default: 1000000)" in shown
    assert "--run-dir TEXT Where the run is kept. (default: none)" in shown
    assert "(default: ())" not in shown
    assert "--preset NAME Preset for settings that are not given: classic, puffer." in shown
    assert shown.index("run: --env") < shown.index("algorithm: --preset")
    for hidden in ("ent-coef", "entropy_coef", "-schedule", "warmup-steps"):
        assert hidden not in shown


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--entropy-cof", "1"], "There is no option '--entropy-cof'; did you mean '--entropy-coef'?"),
        (["--ent-cof=1"], "There is no option '--ent-cof'; did you mean '--ent-coef'?"),
        (["--totl_steps", "1"], "There is no option '--totl_steps'; did you mean '--total-steps'?"),
        (["--no-value-clip"], "There is no option '--no-value-clip'; did you mean '--no-value-clipping'?"),
        (["-v"], "There is no option '-v'; see 'lehr train --help'."),
        (["--xyzzy"], "There is no option '--xyzzy'; see 'lehr train --help'."),
        (["stray"], "Unexpected argument 'stray'; see 'lehr train --help'."),
    ],
)
def test_an_unknown_flag_names_the_nearest(words, sentence):
    made = parser()
    fails(sentence, refuse_unknown, made, made.parse_known_args(words)[1])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--steps 1k", "'--steps': write --total-steps for the budget of the run, or --horizon for the steps of each"),
        ("--novelty-coef 1", "': it is a setting of the reward model novelty; add --reward-model novelty."),
        ("--anneal-lr", 'in Lehr: write --learning-rate "0.001 -> 0".'),
        ("--verbose", "'--verbose': --no-progress hides the progress bar."),
        ("--clip-vloss", "by clip_coef; write --value-clip-range 0.2, or none for no clipping."),
        ("--desired-kl 1", 'write --learning-rate "adaptive_kl(3e-4, target=0.01)"; --target-kl stops an update'),
        ("--episode-length 9", "belongs to the environment: --env-parameters episode_length=1000."),
        ("--eval-freq 9", "of all environments; write --evaluate-every, in env steps."),
        ("--optimizer-class x", "as in --optimiser adamw."),
        ("--share-features-extractor", ": --shared shares the whole torso"),
        ("--callback f", ": pass a function as progress_fn= to lehr.train"),
        ("--tensorboard false", "Unexpected argument 'false'; --tensorboard takes no value; write --no-tensorboard."),
        ("--wandb yes", "Unexpected argument 'yes'; --wandb takes no value; write --wandb."),
        ("--no-wandb 1", "Unexpected argument '1'; --no-wandb takes no value; write --wandb or --no-wandb."),
        ("--tensorboard=false", "--tensorboard takes no value; write --tensorboard or --no-tensorboard."),
    ],
)
def test_advice_on_a_flag_is_written_as_flags(words, sentence):
    made = Parser(prog="lehr train")
    add_flags(made, PPO, ["run", "ppo", "network"])
    with pytest.raises(InputError) as caught:
        refuse_unknown(made, made.parse_known_args(words.split())[1], words.split())
    assert sentence in str(caught.value)


def test_an_own_name_is_suggested_before_another_librarys():
    names = {"max_rejected": "max_rejected", "max_rejecteds": "other", "other": "other"}
    assert suggestion("max_rejectd", names, "") == "did you mean 'max_rejected'?"
    assert suggestion("max_rejecte", dict(reversed(names.items())), "") == "did you mean 'max_rejected'?"
    assert suggestion("gama", {"gamma": "discount", "discount": "discount"}, "") == "did you mean 'gamma'?"


def test_a_page_is_named_where_the_user_finds_it(tmp_path, monkeypatch):
    assert page("migration.md") == "docs/migration.md"
    monkeypatch.setattr("lehr.errors.__file__", str(tmp_path / "site-packages" / "lehr" / "errors.py"))
    assert re.fullmatch(r"https://.*/docs/migration\.md", page("migration.md"))


def test_known_flags_are_not_refused():
    refuse_unknown(parser(), [])


def test_the_command_line_goes_over_the_file_over_the_preset(written):
    path = written(
        "preset: puffer\nenv: CartPole-v1\nent_coef: 0.1\nent_coef_schedule: linear\nlr_schedule: linear\nsizes: [8]\n"
    )
    words = ["--entropy-coef", "0.2", "--sizes", "16,16", "--no-value-clipping"]
    run, config = build([Run, Algorithm], merge([Run, Algorithm], from_yaml(path), flags(*words)))
    assert run == Run("CartPole-v1")
    assert config == Algorithm(
        learning_rate="0.015 -> 0",
        entropy_coef="0.2 -> 0",
        optimiser="muon",
        sizes=(16, 16),
        value_clipping=False,
    )


def test_both_spellings_on_the_command_line_are_an_error():
    fails(
        "entropy_coef is given twice, as 'ent_coef' and as 'entropy_coef'; remove 'ent_coef'.",
        build,
        [Run, Algorithm],
        {"env": "x", **flags("--ent-coef", "1", "--entropy-coef", "2")},
    )


@dataclass(frozen=True)
class WithParameters:
    """A config that hands parameters on."""

    options: dict[str, Any] = field(default_factory=dict)
    """For something else."""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("backend=spring, length=500,friction=0.5", {"backend": "spring", "length": 500, "friction": 0.5}),
        ("strict=true,seed=none,steps=2M", {"strict": True, "seed": None, "steps": 2_000_000}),
        ("", {}),
        ({"nested": {"a": [1, 2]}}, {"nested": {"a": [1, 2]}}),
    ],
)
def test_parameters_for_others_are_names_and_values(given, expected, tmp_path):
    (config,) = build([WithParameters], {"options": given})
    assert config.options == expected
    to_yaml(tmp_path / "config.yaml", to_mapping(config))
    assert build([WithParameters], from_yaml(tmp_path / "config.yaml")) == (config,)


@pytest.mark.parametrize("given", ["spring", "=3", "a=1,b", 3, {1: 2}])
def test_parameters_without_a_name_are_refused(given):
    with pytest.raises(InputError, match=r"options is .*; give names and values such as backend=spring,friction=0.5"):
        build([WithParameters], {"options": given})
