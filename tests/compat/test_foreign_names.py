"""Every setting of other libraries' algorithms is accepted, converted or answered by a sentence of our own."""

import ast
import importlib
import importlib.util
import inspect
import warnings
from pathlib import Path

import pytest

from lehr import algorithms, rewards
from lehr.cli import Parser
from lehr.config import add_flags, build, refuse_unknown
from lehr.config.build import spellings_of
from lehr.errors import InputError
from lehr.training.foreign_settings import OTHERS
from lehr.training.plan import settings_classes

ARGUMENTS_OF_TRAIN = {"algorithm", "env", "progress_fn", "run_dir", "from_run", "seeds", "trust", "distributed"}
"""Arguments of `lehr.train` that are no settings."""

CLEANRL = """exp_name seed torch_deterministic cuda track wandb_project_name wandb_entity capture_video save_model
upload_model hf_entity env_id total_timesteps learning_rate num_envs num_steps anneal_lr gamma gae_lambda
num_minibatches update_epochs norm_adv clip_coef clip_vloss ent_coef vf_coef max_grad_norm target_kl batch_size
minibatch_size num_iterations"""
"""`Args` of ppo.py and ppo_continuous_action.py."""

PUREJAXRL = """LR NUM_ENVS NUM_STEPS TOTAL_TIMESTEPS UPDATE_EPOCHS NUM_MINIBATCHES GAMMA GAE_LAMBDA CLIP_EPS ENT_COEF
VF_COEF MAX_GRAD_NORM ACTIVATION ENV_NAME ANNEAL_LR NORMALIZE_ENV DEBUG NUM_UPDATES MINIBATCH_SIZE"""
"""The config of ppo.py, ppo_continuous_action.py and ppo_rnn.py, and what they compute from it."""

RSL_RL = """class_name num_learning_epochs num_mini_batches clip_param gamma lam value_loss_coef entropy_coef
learning_rate max_grad_norm optimizer use_clipped_value_loss schedule desired_kl normalize_advantage_per_mini_batch device
rnd_cfg symmetry_cfg multi_gpu_cfg share_cnn_encoders actor critic storage
seed num_steps_per_env max_iterations empirical_normalization obs_groups clip_actions check_for_nan save_interval
experiment_name run_name logger neptune_project wandb_project wandb_tags upload_model resume load_run load_checkpoint
policy torch_compile_mode
init_noise_std noise_std_type state_dependent_std actor_obs_normalization critic_obs_normalization actor_hidden_dims
critic_hidden_dims activation rnn_type rnn_hidden_dim rnn_hidden_size rnn_num_layers
hidden_dims obs_normalization stochastic distribution_cfg cnn_cfg init_std std_type"""
"""PPO, the runner, and the models: of rsl_rl 2 to 5, as Isaac Lab and mjlab configure them."""

RLLIB = (
    *("training", "environment", "env_runners", "learners", "framework", "resources", "callbacks", "evaluation"),
    *("multi_agent", "reporting", "debugging", "fault_tolerance", "rl_module"),
)
"""Methods of RLlib's AlgorithmConfig, whose arguments are settings."""


def theirs(module):
    pytest.importorskip(module.partition(".")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(module, exc_type=ImportError)


def arguments(*functions):
    """The names of what can be passed, without what is private."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = [one for function in functions for one in inspect.signature(function).parameters.values()]
    return [one.name for one in found if one.name != "self" and one.name[0] != "_" and one.kind not in variable]


def answer(name, algorithm="ppo", value=1):
    """What is said about a setting: empty if it is accepted with this or some other value."""
    try:
        build(settings_classes(algorithm), {name: value})
    except InputError as error:
        return str(error) if f"no setting {name!r}" in str(error) else ""
    return ""


def check(names, algorithm="ppo"):
    assert len(names) > 10
    said = {name: answer(name, algorithm) for name in names if name not in ARGUMENTS_OF_TRAIN}
    unanswered = {name: text for name, text in said.items() if "did you mean" in text or "migration.md" in text}
    assert not unanswered, "\n".join(unanswered.values())


@pytest.mark.parametrize("names", [CLEANRL, PUREJAXRL, RSL_RL], ids=["cleanrl", "purejaxrl", "rsl_rl"])
def test_the_names_of_libraries_without_a_package(names):
    check(names.split())


@pytest.mark.parametrize(("theirs_called", "algorithm"), [("PPO", "ppo"), ("A2C", "a2c")])
def test_the_names_of_stable_baselines3(theirs_called, algorithm):
    cls = getattr(theirs("stable_baselines3"), theirs_called)
    check(arguments(cls.__init__, cls.learn), algorithm)


@pytest.mark.parametrize(
    ("theirs_called", "algorithm"), [("RecurrentPPO", "recurrent_ppo"), ("TRPO", "trpo"), ("MaskablePPO", "ppo")]
)
def test_the_names_of_sb3_contrib(theirs_called, algorithm):
    cls = getattr(theirs("sb3_contrib"), theirs_called)
    check(arguments(cls.__init__), algorithm)


def test_the_names_around_stable_baselines3():
    """Parts of `policy_kwargs`, and what makes and wraps environments."""
    policies = theirs("stable_baselines3.common.policies")
    environments = theirs("stable_baselines3.common.env_util")
    wrappers = theirs("stable_baselines3.common.vec_env")
    made = (policies.ActorCriticPolicy.__init__, environments.make_vec_env)
    check([*arguments(*made), *arguments(wrappers.VecNormalize.__init__)])


def test_the_names_of_brax():
    check(arguments(theirs("brax.training.agents.ppo.train").train))


def test_the_names_of_rllib():
    """Read from its files, as it does not import without all of its packages."""
    folder = importlib.util.find_spec("ray")
    if folder is None:
        pytest.skip("Ray is not installed")
    root = Path(folder.submodule_search_locations[0]) / "rllib"
    names = []
    for file in ("algorithms/algorithm_config.py", "algorithms/ppo/ppo.py"):
        for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name in RLLIB:
                names += [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
    for node in ast.walk(ast.parse((root / "core/rl_module/default_model_config.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    assert {"use_kl_loss", "grad_clip_by", "explore", "num_learners", "max_seq_len"} <= set(names)
    check([name for name in dict.fromkeys(names) if name != "self" and name[0] != "_"])


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("environment", "CartPole-v1", ": write env, as in env='CartPole-v1'; in Python"),
        ("schedule", "adaptive", "for adaptive write learning_rate='adaptive_kl(1e-3, target=0.01)'"),
        ("normalize_images", True, "images of bytes are always divided by 255"),
        ("stats_window_size", 100, "the logged return is the mean over the episodes since"),
        ("num_resets_per_eval", 1, "episodes always start from new states; drop it"),
        ("rollout_buffer_class", dict, "Lehr has one kind of rollout"),
        ("observation_filter", "MeanStdFilter", "for MeanStdFilter write normalise_observations=True"),
        ("max_seq_len", 20, "train recurrent_ppo, with window=20"),
        ("restore_params", {}, "lehr.compat.brax.train reads what Brax has saved"),
    ],
)
def test_names_that_look_like_others_are_not_mistaken(name, value, sentence):
    assert sentence in answer(name, value=value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--environment CartPole-v1", "'--environment': write --env, as in --env CartPole-v1; in Python"),
        ("--schedule adaptive", 'for adaptive write --learning-rate "adaptive_kl(1e-3, target=0.01)"'),
        ("--run-evals", ": --evaluate-episodes 0 turns evaluation off."),
        ("--rms-prop-eps 1e-5", "write --optimiser rmsprop with --optimiser-options eps=1e-5."),
        ("--num-learners 2", "; --devices 1 limits it to one."),
        ("--action-mask-key mask", ": a mask is found by action_mask, its name in the observation"),
        ("--max-seq-len 20", "with --window 20 for sequences"),
    ],
)
def test_the_answers_as_flags(words, sentence):
    made = Parser(prog="lehr train")
    add_flags(made, settings_classes("ppo")[:3], ["run", "ppo", "network"])
    with pytest.raises(InputError) as caught:
        refuse_unknown(made, made.parse_known_args(words.split())[1], words.split())
    assert sentence in str(caught.value)


def test_no_answer_hides_that_another_algorithm_has_the_setting():
    found = [*map(rewards.find, rewards.BUILT_IN), *map(algorithms.find, algorithms.names())]
    for one in found:
        assert not OTHERS.keys() & spellings_of([one.Config]).keys()


def built(**given):
    return {name: value for part in build(settings_classes("ppo"), given) for name, value in vars(part).items()}


def test_one_switch_for_observations_and_rewards():
    for given, expected in ((True, True), ("false", False)):
        found = built(NORMALIZE_ENV=given)
        assert (found["normalise_observations"], found["normalise_rewards"]) == (expected, expected)
    with pytest.raises(InputError, match="normalize_env is True, which means normalise_rewards=True, but"):
        built(NORMALIZE_ENV=True, normalise_rewards=False)


def test_one_switch_for_each_network():
    both = dict.fromkeys(("actor_obs_normalization", "critic_obs_normalization"))
    for given in (True, False):
        assert built(**dict.fromkeys(both, given))["normalise_observations"] is given
    assert built(critic_obs_normalization=False)["normalise_observations"] is False
    for given in ({"actor_obs_normalization": True}, {**dict.fromkeys(both, "true"), "critic_obs_normalization": "no"}):
        with pytest.raises(InputError, match="Lehr normalises what actor and critic see alike: write"):
            built(**given)


def test_two_names_that_decide_one_setting_must_agree():
    assert built(batch_size=64, minibatch_size=64)["minibatches"] == 32
    with pytest.raises(InputError, match="which means minibatches=64, but batch_size means 32; remove one of them"):
        built(batch_size=64, minibatch_size=32)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        *(("enviroment_parameters", "env_parameters"), ("num_env", "num_envs"), ("learning_rat", "learning_rate")),
        *(("normalise_observation", "normalise_observations"), ("lognstd_init", "log_std_init")),
        *(("evaluate_episode", "evaluate_episodes"), ("checkpoint_evry", "checkpoint_every"), ("devics", "devices")),
    ],
)
def test_a_typo_still_gets_the_right_suggestion(typo, meant):
    assert f"did you mean {meant!r}" in answer(typo)
