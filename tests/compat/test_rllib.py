"""The callback for RLlib: with the real package, what it sets is what updates use."""

import importlib
import logging
import subprocess
import sys
import warnings
from collections import defaultdict

import numpy as np
import pytest

import lehr
from lehr.algorithms.vocabulary import coefficient, coefficients
from lehr.compat.rllib import NAMES, Scheduling, schedules


def theirs(module):
    """A module of theirs, with what it deprecates left to them."""
    pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(module, exc_type=ImportError)


theirs("ray.rllib")
ppo = theirs("ray.rllib.algorithms.ppo")
Algorithm = theirs("ray.rllib.algorithms.algorithm").Algorithm
advantages = theirs("ray.rllib.connectors.learner.general_advantage_estimation")
compute_value_targets = advantages.compute_value_targets
DefaultModelConfig = theirs("ray.rllib.core.rl_module.default_model_config").DefaultModelConfig
theirs("torch").set_num_threads(1)
logging.getLogger("ray.rllib").setLevel(logging.ERROR)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

ROLLOUT = 32
BUDGET = 4 * ROLLOUT
CLOCKS = [0, 32, 64, 96]
MODULE = "default_policy"
ENTROPY, RATE = "0.02 -> 0.002 cosine", "1e-3 -> 1e-4"
EACH = {
    "lr": RATE,
    "entropy_coeff": ENTROPY,
    "vf_loss_coeff": "1 -> 0.5",
    "clip_param": "0.3 -> 0.1",
    "vf_clip_param": "20 -> 10",
    "grad_clip": "1 -> 0.5",
    "kl_target": "0.02 -> 0.01",
    "gamma": "0.9 -> 0.99",
    "lambda_": "0.8 -> 0.95",
}


def config_of(*callbacks, **training):
    """The config of a small algorithm: one epoch, one minibatch, so that what RLlib logs of a loss is that loss."""
    size = {"train_batch_size_per_learner": ROLLOUT, "minibatch_size": None, "num_epochs": 1}
    config = ppo.PPOConfig().environment("CartPole-v1").debugging(seed=0, log_sys_usage=False)
    config = config.env_runners(num_env_runners=0).rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[8]))
    return config.training(**size | training).callbacks(list(callbacks))


def build(config):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return config.build_algo()


class Watched:
    """An algorithm, what each of its updates used, and its results."""

    def __init__(self, algorithm, monkeypatch):
        self.algorithm, self.used, self.results = algorithm, [], []
        learner = algorithm.learner_group._learner
        loss, clip, adapt = learner.compute_loss_for_module, learner._get_clip_function, learner._update_module_kl_coeff
        apply, update = learner.apply_gradients, learner.update

        def updating(*given, **more):
            self.used.append(defaultdict(set))
            return update(*given, **more)

        def losing(*, module_id, config, **more):
            for name in ("vf_loss_coeff", "clip_param", "vf_clip_param"):
                self.see(name, getattr(config, name))
            self.see("entropy_coeff", learner.entropy_coeff_schedulers_per_module[module_id].get_current_value())
            self.see("kl_coeff", learner.curr_kl_coeffs_per_module[module_id])
            return loss(module_id=module_id, config=config, **more)

        def clipping():
            def clipped(gradients, *, grad_clip, **more):
                self.see("grad_clip", grad_clip)
                return clip()(gradients, grad_clip=grad_clip, **more)

            return clipped

        def applying(gradients):
            for optimizer in learner._named_optimizers.values():
                for group in optimizer.param_groups:
                    self.see("lr", group["lr"])
            return apply(gradients)

        def adapting(*, config, **more):
            self.see("kl_target", config.kl_target)
            return adapt(config=config, **more)

        def targeting(*, gamma, lambda_, **more):
            self.see("gamma", gamma)
            self.see("lambda_", lambda_)
            return compute_value_targets(gamma=gamma, lambda_=lambda_, **more)

        learner.update, learner.compute_loss_for_module, learner.apply_gradients = updating, losing, applying
        learner._get_clip_function, learner._update_module_kl_coeff = clipping, adapting
        monkeypatch.setattr(advantages, "compute_value_targets", targeting)

    def see(self, name, value):
        self.used[-1][name].add(float(value))

    def train(self, iterations=4):
        for _ in range(iterations):
            self.results.append(self.algorithm.train())
        return self

    def column(self, name):
        """The one value that each update used."""
        return [value for update in self.used for (value,) in [update[name]]]

    def logged(self, name):
        return [result["schedule"][name] for result in self.results]


@pytest.fixture
def watch(monkeypatch):
    algorithms = []

    def watched(made):
        algorithms.append(made if isinstance(made, Algorithm) else build(made))
        return Watched(algorithms[-1], monkeypatch)

    yield watched
    for algorithm in algorithms:
        algorithm.stop()


def by_hand(spec, clocks=CLOCKS, budget=BUDGET):
    return [lehr.schedule(spec, budget)(clock) for clock in clocks]


# What is applied -------------------------------------------------------------------------------------------------


def test_every_coefficient_is_logged_and_used_as_scheduled(watch):
    run = watch(config_of(schedules(total_timesteps=BUDGET, **EACH))).train()
    for name, spec in EACH.items():
        assert run.logged(name) == run.column(name) == by_hand(spec), name
    told = [result["learners"][MODULE] for result in run.results]
    assert [row["default_optimizer_learning_rate"] for row in told] == by_hand(RATE)
    assert [row["curr_entropy_coeff"] for row in told] == by_hand(ENTROPY)


def test_all_gradient_steps_of_an_update_share_one_value(watch):
    config = config_of(schedules(total_timesteps=BUDGET, lr=RATE, entropy_coeff=ENTROPY))
    run = watch(config.training(num_epochs=3, minibatch_size=16)).train(3)
    assert run.column("lr") == by_hand(RATE)[:3]
    assert run.column("entropy_coeff") == by_hand(ENTROPY)[:3]


def test_the_loss_is_weighted_by_the_scheduled_coefficients(watch):
    """RLlib logs the parts of its loss and their sum."""
    weights = {"vf_loss_coeff": "1 -> 0.25", "entropy_coeff": "0.5 -> 0.1", "kl_coeff": "50 -> 10"}
    fixed = {"lr": 0.05, "num_epochs": 2, "vf_clip_param": 0.5}
    run = watch(config_of(schedules(total_timesteps=BUDGET, **weights), **fixed)).train()
    value, entropy, divergence = (by_hand(spec) for spec in weights.values())
    for index, row in enumerate(result["learners"][MODULE] for result in run.results):
        parts = (
            row["policy_loss"],
            value[index] * row["vf_loss"],
            -entropy[index] * row["entropy"],
            divergence[index] * row["mean_kl_loss"],
        )
        assert min(map(abs, parts)) > 1e-4
        np.testing.assert_allclose(row["total_loss"], sum(parts), rtol=1e-5, atol=1e-6)


def test_a_weight_of_the_divergence_is_not_adapted(watch):
    run = watch(config_of(schedules(total_timesteps=BUDGET, kl_coef="0.3 -> 0.1"))).train()
    np.testing.assert_allclose(run.column("kl_coeff"), by_hand("0.3 -> 0.1"), rtol=1e-6)
    assert run.logged("kl_coeff") == by_hand("0.3 -> 0.1")


def test_updates_within_an_iteration_follow_the_clock(watch):
    config = config_of(schedules(total_timesteps=BUDGET, lr=RATE))
    run = watch(config.reporting(min_sample_timesteps_per_iteration=2 * ROLLOUT)).train(2)
    assert run.column("lr") == by_hand(RATE)
    assert run.logged("lr") == by_hand(RATE)[1::2]  # of the last


def test_a_module_with_a_config_of_its_own_has_the_values_too(watch):
    config = config_of(schedules(total_timesteps=BUDGET, clip_param="0.3 -> 0.1", entropy_coeff=ENTROPY))
    overrides = {MODULE: ppo.PPOConfig.overrides(vf_loss_coeff=0.5)}
    run = watch(config.multi_agent(algorithm_config_overrides_per_module=overrides)).train()
    assert run.column("clip_param") == by_hand("0.3 -> 0.1")
    assert run.column("entropy_coeff") == by_hand(ENTROPY)
    assert run.column("vf_loss_coeff") == [0.5] * 4


@pytest.mark.parametrize(
    "spec",
    [
        0.005,
        {"shape": "cosine", "start": 0.02, "end": 0.002},
        [[0, 0.02], [32, 0.01], [64, 0.0]],
        lehr.schedules.linear(0.02, 0.0, over="50%"),
        lambda step: 0.02 / (1 + step),
    ],
    ids=["number", "mapping", "pairs", "schedule", "function"],
)
def test_a_coefficient_is_whatever_a_schedule_is(spec, watch):
    run = watch(config_of(schedules(total_timesteps=BUDGET, entropy_cost=spec))).train(2)
    assert run.logged("entropy_coeff") == run.column("entropy_coeff") == by_hand(spec)[:2]


def test_a_schedule_in_steps_needs_no_budget():
    for spec in (0.01, "0.02 -> 0.01 over 100", [[0, 0.02], [64, 0.01]]):
        assert schedules(lr=spec).schedules["lr"] == lehr.schedule(spec)


@pytest.mark.parametrize("name", NAMES.values())
def test_every_name_of_lehrs_stands_for_theirs(name):
    own = coefficient(name).name
    assert NAMES[own] == name
    assert hasattr(ppo.PPOConfig(), name)
    for known in (name, own, *coefficients()[own].aliases):
        assert list(schedules(**{known: 0.5}).schedules) == [name]


# Beside others -----------------------------------------------------------------------------------------------------


class Reads(theirs("ray.rllib.callbacks.callbacks").RLlibCallback):
    """Another callback, which reads the results."""

    def on_train_result(self, *, algorithm, result, **_):
        result["read"] = result["schedule"]["lr"]


def test_it_stands_in_a_list_with_others(watch):
    first, second = schedules(total_timesteps=BUDGET, lr=RATE), schedules(total_timesteps=BUDGET, ent_coef=ENTROPY)
    run = watch(config_of(Reads, first, second)).train()
    assert [result["read"] for result in run.results] == run.column("lr") == by_hand(RATE)
    assert run.column("entropy_coeff") == by_hand(ENTROPY)
    _, rate, entropy = run.algorithm.callbacks
    assert rate.values == {"lr": by_hand(RATE)[-1]}
    assert entropy.values == {"entropy_coeff": by_hand(ENTROPY)[-1]}


def test_what_is_not_scheduled_stays_with_the_config(watch):
    config = config_of(schedules(total_timesteps=BUDGET, clip_param="0.3 -> 0.1"), gamma=0.9, lr=[[0, 0.1], [64, 0.2]])
    run = watch(config).train(2)
    assert run.column("gamma") == [0.9, 0.9]
    assert run.column("lr") == pytest.approx([0.1, 0.15])
    assert run.algorithm.config.clip_param == 0.3


def test_the_class_goes_to_other_processes():
    """As RLlib sends it to its runners and into its checkpoints."""
    made = schedules(total_timesteps=BUDGET, lr=RATE, entropy_coeff=lambda step: 0.5**step)
    code = (
        "import sys, ray.cloudpickle as pickle\n"
        "callback = pickle.loads(sys.stdin.buffer.read())()\n"
        "print(callback.schedules['lr'](32), callback.schedules['entropy_coeff'](2))"
    )
    pickled = theirs("ray.cloudpickle").dumps(made)
    shown = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, check=True).stdout
    assert shown.split() == [str(by_hand(RATE)[1]).encode(), b"0.25"]


def test_algorithms_of_one_config_are_apart(watch):
    config = config_of(schedules(total_timesteps=BUDGET, lr=RATE))
    first = watch(config.copy()).train(2)
    second = watch(config.copy()).train(1)
    assert [*first.column("lr"), *second.column("lr")] == by_hand(RATE, [0, 32, 0])


# Stop and go on --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["from_checkpoint", "restore_from_path", "restore"])
def test_a_restored_algorithm_goes_on_where_its_schedules_were(way, watch, tmp_path):
    config = config_of(schedules(total_timesteps=BUDGET, **EACH))
    first = watch(config.copy()).train(2)
    path = str(tmp_path / "half")
    if way == "restore":
        first.algorithm.save(path)
    else:
        first.algorithm.save_to_path(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "from_checkpoint":
            algorithm = Algorithm.from_checkpoint(path)
        else:
            algorithm = config.copy().build_algo()
            getattr(algorithm, way)(path)
    second = watch(algorithm).train(2)
    for name, spec in EACH.items():
        assert first.column(name) + second.column(name) == by_hand(spec), name
        assert first.logged(name) + second.logged(name) == by_hand(spec), name


# Mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "schedules was given no coefficient; give at least one, for example entropy_coeff='0.01 -> 0'."),
        ({"entropy_coefff": 0.1}, "schedules knows no coefficient 'entropy_coefff'; did you mean 'entropy_coeff'?"),
        ({"vf_clip_para": 1.0}, "schedules knows no coefficient 'vf_clip_para'; did you mean 'vf_clip_param'?"),
        ({"damping": 1.0}, "schedules knows no coefficient 'damping'; known: learning_rate, lr"),
        ({"clip_range_vf": 0.2}, "RLlib has no clip_range_vf, which keeps a value close to the rollout's"),
        ({"lr": 0.1, "learning_rate": 0.2}, "lr is given twice, as lr and learning_rate; remove one."),
        ({"lr": "0.1 ->"}, "expected a value after '->', but the schedule ends here"),
        ({"lr": "adaptive_kl(3e-4)"}, "lr is 'adaptive_kl(value=0.0003)', which adapts to a metric"),
        ({"lr": "1e-3 -> 0"}, "lr is '0.001 -> 0', which cannot be checked without the budget; give total_timesteps"),
        ({"lr": lambda step: 0.1}, "which cannot be checked without the budget; give total_timesteps"),
        ({"kl_coeff": 0.1, "kl_target": 0.1}, "kl_coeff and kl_target are both scheduled"),
        ({"lr": 0.1, "total_timesteps": "1M"}, "total_timesteps is '1M'; it must be a number of env steps"),
        (
            {"lr": 0.1, "total_timesteps": 0},
            "total_timesteps is 0; the budget must be finite, above 0 and at most 2^48 env steps",
        ),
        (
            {"gamma": "0.9 -> 1.1", "total_timesteps": 100},
            "gamma is '0.9 -> 1.1 over 100', which reaches 1.1; it must stay in [0, 1] at every step.",
        ),
        ({"clip_coef": "0.2 -> 0", "total_timesteps": 100}, "clip_coef is '0.2 -> 0 over 100', which reaches 0"),
        ({"vf_clip_param": 0}, "vf_clip_param is '0', which reaches 0; it must stay in (0, ∞)"),
        ({"lr": lambda step: 50 - step, "total_timesteps": 100}, "which reaches -50"),
    ],
)
def test_a_mistake_in_what_is_given(given, sentence):
    with pytest.raises(lehr.InputError) as raised:
        schedules(**given)
    assert sentence in str(raised.value)


def old(config):
    return config.api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False)


def overridden(config):
    return config.multi_agent(algorithm_config_overrides_per_module={MODULE: ppo.PPOConfig.overrides(lr=0.1)})


def unregistered(config):
    class Own(config.get_default_learner_class()):
        def configure_optimizers_for_module(self, module_id, config=None):
            params = self.get_parameters(self.module[module_id])
            optimizer = importlib.import_module("torch").optim.SGD(params, lr=0.1)
            self.register_optimizer(module_id=module_id, optimizer=optimizer, params=params)

    return config.learners(learner_class=Own)


@pytest.mark.parametrize(
    ("given", "change", "sentence"),
    [
        ({"lr": 0.1}, lambda config: config.training(lr=[[0, 0.1], [9, 0.2]]), "the config's own schedule [[0, 0.1],"),
        ({"lr": 0.1}, lambda config: config.experimental(_torch_lr_scheduler_classes=[object]), "_torch_lr_scheduler"),
        ({"lr": 0.1}, overridden, "lr is scheduled, and the config's override for the module 'default_policy' sets it"),
        ({"lr": 0.1}, unregistered, "default_policy_default_optimizer was registered without a learning rate"),
        ({"kl_coeff": 0.1}, lambda config: config.training(use_kl_loss=False), "with use_kl_loss=False PPO does not"),
        ({"vf_coef": 0.1}, lambda config: config.training(use_critic=False), "with use_critic=False PPO does not use"),
        (
            {"gamma": 0.9},
            lambda config: config.learners(add_default_connectors_to_learner_pipeline=False),
            "gamma is scheduled, but the learner has no GeneralAdvantageEstimation to set it in",
        ),
    ],
    ids=["pairs", "scheduler", "override", "optimiser", "kl", "critic", "connectors"],
)
def test_a_mistake_is_found_before_training(given, change, sentence):
    with pytest.raises(lehr.InputError) as raised:
        build(change(config_of(schedules(**given))))
    assert sentence in str(raised.value)


def test_it_may_stand_inside_a_callback_of_theirs(watch):
    made = theirs("ray.rllib.algorithms.callbacks").make_multi_callbacks([Reads, schedules(lr=0.1)])
    run = watch(config_of(made)).train(1)
    assert run.column("lr") == [0.1]


def test_two_schedules_of_one_coefficient_are_refused():
    with pytest.raises(lehr.InputError, match=r"lr is scheduled, and another schedules\(...\) among the callbacks"):
        build(config_of(schedules(lr=0.1), schedules(learning_rate=0.2)))


def test_the_class_itself_has_no_schedules():
    with pytest.raises(lehr.InputError, match=r"use the class that schedules\(lr='3e-4 -> 0'\) returns"):
        build(config_of(Scheduling))


def test_the_old_stack_is_refused():
    config = old(ppo.PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0))
    with pytest.raises(lehr.InputError, match="given to PPO on RLlib's old API stack"):
        build(config.callbacks(schedules(lr=0.1)))


def test_algorithms_that_update_beside_their_rollouts_are_refused():
    impala = theirs("ray.rllib.algorithms.impala")
    config = impala.IMPALAConfig().environment("CartPole-v1").env_runners(num_env_runners=0).learners(num_learners=0)
    with pytest.raises(lehr.InputError, match="given to IMPALA; it sets the coefficients of PPO"):
        build(config.callbacks(schedules(lr=0.1)))
