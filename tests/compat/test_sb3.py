"""The callback for Stable-Baselines3: with the real package, what it sets is what training uses."""

import base64
import importlib
import json
import warnings
import zipfile

import numpy as np
import pytest

import lehr
from lehr.algorithms.vocabulary import coefficient, coefficients
from lehr.compat.sb3 import ATTRIBUTES, ScheduleCallback


def theirs(module):
    """A module of theirs, with what it deprecates left to them."""
    pytest.importorskip("stable_baselines3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(module)


sb3 = theirs("stable_baselines3")
contrib = theirs("sb3_contrib")
callbacks = theirs("stable_baselines3.common.callbacks")
loggers = theirs("stable_baselines3.common.logger")
gymnasium = importlib.import_module("gymnasium")
torch = importlib.import_module("torch")
torch.set_num_threads(1)

pytestmark = pytest.mark.slow

STEPS, ENVS = 16, 2
ROLLOUT = STEPS * ENVS
BUDGET = 4 * ROLLOUT
CLOCKS = [0, 32, 64, 96]
ENTROPY, RATE = "0.02 -> 0.002 cosine", "1e-3 -> 1e-4"


class Rows(loggers.KVWriter):
    """Keeps what SB3 logs, a dict for each time it writes."""

    def __init__(self):
        self.rows = []

    def write(self, key_values, key_excluded, step=0):
        self.rows.append(dict(key_values))

    def close(self):
        pass

    def column(self, name):
        return [row[name] for row in self.rows if name in row]


def environment():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return theirs("stable_baselines3.common.env_util").make_vec_env("CartPole-v1", n_envs=ENVS, seed=0)


def masked():
    return theirs("sb3_contrib.common.envs").InvalidActionEnvDiscrete(dim=4, n_invalid_actions=1)


def model_of(kind=None, **settings):
    """A small model: one epoch, one minibatch, so that what SB3 logs of a loss is that loss."""
    kind = kind or sb3.PPO
    env = masked() if kind is contrib.MaskablePPO else environment()
    policy = "MlpLstmPolicy" if kind is contrib.RecurrentPPO else "MlpPolicy"
    settings |= {} if kind is sb3.A2C else {"batch_size": ROLLOUT}
    settings |= {} if kind in (sb3.A2C, contrib.TRPO) else {"n_epochs": 1}
    steps = STEPS * ENVS // env.num_envs if hasattr(env, "num_envs") else ROLLOUT
    model = kind(policy, env, n_steps=steps, seed=0, device="cpu", policy_kwargs={"net_arch": [8]}, **settings)
    return watched(model)


def watched(model):
    rows = Rows()
    model.set_logger(loggers.Logger(folder=None, output_formats=[rows]))
    model.rows, model.seen = rows, []
    train = model.train

    def watching():
        train()
        rate = {group["lr"] for group in model.policy.optimizer.param_groups}
        model.seen.append((rate, model.rollout_buffer.gamma, model.rollout_buffer.gae_lambda))

    model.train = watching
    return model


def by_hand(spec, clocks=CLOCKS, budget=BUDGET):
    return [lehr.schedule(spec, budget)(clock) for clock in clocks]


def learn(model, callback, total=BUDGET, **more):
    return model.learn(total, callback=callback, log_interval=1, **more)


# What is applied -------------------------------------------------------------------------------------------------

EACH = {
    "PPO": {"ent_coef": ENTROPY, "vf_coef": "1 -> 0.5", "clip_range": "0.3 -> 0.1", "clip_range_vf": "0.2 -> 0.1"},
    "A2C": {"ent_coef": ENTROPY, "vf_coef": "1 -> 0.5"},
    "RecurrentPPO": {"ent_coef": ENTROPY, "clip_range": "0.3 -> 0.1", "target_kl": "0.1 -> 0.05"},
    "MaskablePPO": {"ent_coef": ENTROPY, "clip_range": "0.3 -> 0.1", "max_grad_norm": "1 -> 0.5"},
    "TRPO": {
        "target_kl": "0.02 -> 0.005",
        "cg_damping": "0.2 -> 0.1 exponential",
        "line_search_shrinking_factor": "0.9 -> 0.7",
    },
}


@pytest.mark.parametrize("name", EACH)
def test_each_algorithm_logs_and_uses_the_scheduled_values(name):
    model = model_of(getattr(sb3, name, None) or getattr(contrib, name))
    specs = {"learning_rate": RATE, "gamma": "0.9 -> 0.99", "gae_lambda": "0.8 -> 0.95", **EACH[name]}
    learn(model, ScheduleCallback(**specs))
    for attribute, spec in specs.items():
        assert model.rows.column(f"schedule/{attribute}") == by_hand(spec), attribute
    wanted = zip(*(by_hand(specs[one]) for one in ("learning_rate", "gamma", "gae_lambda")), strict=True)
    assert model.seen == [({rate}, discount, mix) for rate, discount, mix in wanted]
    # SB3 writes what it says of an update in the row after it.
    assert model.rows.column("train/learning_rate") == by_hand(RATE)[:3]
    for attribute in {"clip_range", "clip_range_vf"} & set(specs):
        assert model.rows.column(f"train/{attribute}") == by_hand(specs[attribute])[:3]


def test_the_loss_is_weighted_by_the_scheduled_coefficients():
    """SB3 logs the parts of its loss and their sum; with one of two weights at 0, the other can be found from them."""
    for given, fixed, parts in (
        ({"ent_coef": ENTROPY}, {"vf_coef": 0.0}, "train/entropy_loss"),
        ({"vf_coef": "1 -> 0.25"}, {"ent_coef": 0.0}, "train/value_loss"),
    ):
        model = model_of(**fixed)
        learn(model, ScheduleCallback(**given))
        ((attribute, spec),) = given.items()
        columns = (model.rows.column(name) for name in ("train/loss", "train/policy_gradient_loss", parts))
        weights = [(total - policy) / part for total, policy, part in zip(*columns, strict=True)]
        np.testing.assert_allclose(weights, by_hand(spec)[:3], rtol=1e-4, err_msg=attribute)


class Shortened(gymnasium.Wrapper):
    """Cut after five steps."""

    def reset(self, **more):
        self.count = 0
        return self.env.reset(**more)

    def step(self, action):
        obs, reward, terminated, _, info = self.env.step(action)
        self.count += 1
        return obs, reward, terminated, self.count >= 5, info


def test_the_discount_and_lambda_reach_returns_and_time_limits():
    class Recomputes(callbacks.BaseCallback):
        """Advantages by the textbook's double loop, rewards at a time limit by the value of what was cut off."""

        def _on_rollout_start(self):
            self.rewards = []

        def _on_step(self):
            rewards = np.array(self.locals["rewards"], float)
            for index, info in enumerate(self.locals["infos"]):
                if info.get("TimeLimit.truncated"):
                    seen, _ = self.model.policy.obs_to_tensor(info["terminal_observation"])
                    with torch.no_grad():
                        rewards[index] += discounts[len(found)] * self.model.policy.predict_values(seen).item()
            self.rewards.append(rewards)
            return True

        def _on_rollout_end(self):
            buffer, discount, mix = self.model.rollout_buffer, discounts[len(found)], mixes[len(found)]
            rewards, values = np.array(self.rewards), buffer.values
            following = np.concatenate([values[1:], self.locals["values"].numpy().reshape(1, -1)])
            going_on = 1.0 - np.concatenate([buffer.episode_starts[1:], [self.locals["dones"]]])
            deltas = rewards + discount * going_on * following - values
            advantages = np.zeros_like(deltas)
            for start in range(STEPS):
                weight = np.ones(deltas.shape[1])
                for step in range(start, STEPS):
                    advantages[start] += weight * deltas[step]
                    weight = weight * discount * mix * going_on[step]
            np.testing.assert_allclose(buffer.rewards, rewards, rtol=1e-5)
            np.testing.assert_allclose(buffer.advantages, advantages, rtol=1e-4, atol=1e-4)
            found.append(advantages)

    discounts, mixes, found = by_hand("0.5 -> 0.9"), by_hand("0.2 -> 0.8"), []
    model = model_of()
    model.set_env(
        theirs("stable_baselines3.common.env_util").make_vec_env(
            "CartPole-v1", n_envs=ENVS, seed=0, wrapper_class=Shortened
        )
    )
    learn(model, [Recomputes(), ScheduleCallback(gamma="0.5 -> 0.9", lam="0.2 -> 0.8")])
    assert len(found) == 4


@pytest.mark.parametrize(
    "spec",
    [
        0.005,
        {"shape": "cosine", "start": 0.02, "end": 0.002},
        [[0, 0.02], [64, 0.01], [128, 0.0]],
        lehr.schedules.linear(0.02, 0.0, over="50%"),
        lambda step: 0.02 / (1 + step),
    ],
    ids=["number", "mapping", "pairs", "schedule", "function"],
)
def test_a_coefficient_is_whatever_a_schedule_is(spec):
    model = model_of()
    learn(model, ScheduleCallback(entropy_cost=spec))
    assert model.rows.column("schedule/ent_coef") == by_hand(spec)


@pytest.mark.parametrize("attribute", ATTRIBUTES.values())
def test_every_name_of_lehrs_stands_for_theirs(attribute):
    own = coefficient(attribute).name
    assert ATTRIBUTES[own] == attribute
    for name in (attribute, own, *coefficients()[own].aliases):
        assert list(ScheduleCallback(**{name: 0.5})._given) == [attribute]


# Beside others -----------------------------------------------------------------------------------------------------


def test_it_lives_with_other_callbacks_and_with_schedules_of_sb3():
    model = model_of(learning_rate=lambda left: 1e-3 * left, clip_range=lambda left: 0.1 + 0.2 * left)
    calls = []
    others = [
        callbacks.EvalCallback(environment(), eval_freq=STEPS, n_eval_episodes=1, verbose=0, warn=False),
        callbacks.LambdaCallback(on_rollout_start=lambda: calls.append(model.ent_coef))
        if hasattr(callbacks, "LambdaCallback")
        else callbacks.CallbackList([]),
    ]
    learn(model, callbacks.CallbackList([ScheduleCallback(ent_coef=ENTROPY), *others]))
    assert model.rows.column("schedule/ent_coef") == by_hand(ENTROPY)
    left = [1 - clock / BUDGET for clock in (32, 64, 96, 128)]  # SB3 counts the steps after the rollout
    assert [rate for (rate,), _, _ in model.seen] == pytest.approx([1e-3 * share for share in left])
    assert model.rows.column("train/clip_range") == pytest.approx([0.1 + 0.2 * share for share in left[:3]])
    assert model.rows.column("eval/mean_reward")
    # An evaluation amid a rollout writes a row of its own; the values are in that of the rollout.
    assert [row["time/total_timesteps"] for row in model.rows.rows if "schedule/ent_coef" in row] == [32, 64, 96, 128]


@pytest.mark.parametrize(("own", "followed"), [(0.99, True), (0.9, False)])
def test_rewards_are_normalised_with_the_discount_where_they_were(own, followed):
    normalised = theirs("stable_baselines3.common.vec_env").VecNormalize(environment(), gamma=own)
    model = watched(sb3.PPO("MlpPolicy", normalised, n_steps=STEPS, batch_size=ROLLOUT, n_epochs=1, device="cpu"))
    learn(model, ScheduleCallback(gamma="0.9 -> 0.98"))
    assert model.gamma == by_hand("0.9 -> 0.98")[-1]
    assert normalised.gamma == (model.gamma if followed else own)


def test_a_callback_can_be_used_again():
    callback = ScheduleCallback(ent_coef=ENTROPY)
    for budget in (BUDGET, 2 * ROLLOUT):
        model = model_of()
        learn(model, callback, total=budget)
        assert model.rows.column("schedule/ent_coef") == by_hand(ENTROPY, range(0, budget, ROLLOUT), budget)


def test_the_model_keeps_the_values_of_its_last_update():
    model = model_of()
    callback = ScheduleCallback(ent_coef=ENTROPY, learning_rate=RATE, clip_range="0.3 -> 0.1")
    learn(model, callback)
    last = [by_hand(spec)[-1] for spec in (ENTROPY, RATE, "0.3 -> 0.1")]
    assert [model.ent_coef, model.learning_rate, model.clip_range(0.5)] == last
    assert callback.values == {"ent_coef": last[0], "learning_rate": last[1], "clip_range": last[2]}
    learn(model, None, total=ROLLOUT, reset_num_timesteps=False)
    assert model.seen[-1][0] == {last[1]}


# Stop and go on --------------------------------------------------------------------------------------------------


def test_saved_loaded_and_continued_the_schedule_goes_on(tmp_path):
    specs = {"ent_coef": ENTROPY, "learning_rate": RATE, "gamma": "0.9 -> 0.99", "clip_range": "0.3 -> 0.1"}
    whole = model_of()
    learn(whole, ScheduleCallback(**specs))
    first = model_of()
    learn(first, ScheduleCallback(total_timesteps=BUDGET, **specs), total=2 * ROLLOUT)
    rows, seen = first.rows.rows, first.seen
    del first.rows, first.seen, first.train
    first.save(tmp_path / "half")
    second = watched(sb3.PPO.load(tmp_path / "half", env=environment(), device="cpu"))
    assert [second.ent_coef, second.learning_rate, second.rollout_buffer.gamma, second.clip_range(1.0)] == [
        by_hand(spec)[1] for spec in specs.values()
    ]
    learn(second, ScheduleCallback(**specs), total=2 * ROLLOUT, reset_num_timesteps=False)
    for name in specs:
        logged = [row[f"schedule/{name}"] for row in rows] + second.rows.column(f"schedule/{name}")
        assert logged == whole.rows.column(f"schedule/{name}") == by_hand(specs[name])
    assert seen + second.seen == whole.seen


def test_a_file_of_the_model_holds_nothing_of_lehrs(tmp_path):
    model = sb3.PPO("MlpPolicy", environment(), n_steps=STEPS, batch_size=ROLLOUT, n_epochs=1, device="cpu")
    learn(model, ScheduleCallback(learning_rate=RATE, clip_range="0.3 -> 0.1", clip_range_vf=0.2), total=ROLLOUT)
    model.save(tmp_path / "model")
    with zipfile.ZipFile(tmp_path / "model.zip") as file:
        entries = json.loads(file.read("data")).values()
    pickled = [base64.b64decode(entry[":serialized:"]) for entry in entries if ":serialized:" in str(entry)]
    assert len(pickled) > 3
    assert not any(b"lehr" in piece for piece in pickled)


# Mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "ScheduleCallback was given no coefficient; give at least one, for example ent_coef='0.01 -> 0'."),
        ({"ent_coeff": 0.1, "end_coef": 0.1}, "knows no coefficient 'ent_coeff'; did you mean 'ent_coef'"),
        ({"rho_clip": 1.0}, "knows no coefficient 'rho_clip'"),
        ({"ent_coef": 0.1, "entropy_coef": 0.2}, "ent_coef is given twice, as ent_coef and entropy_coef"),
        ({"ent_coef": "0.1 ->"}, "expected a value after '->', but the schedule ends here"),
        (
            {"learning_rate": "adaptive_kl(3e-4)"},
            "learning_rate is 'adaptive_kl(value=0.0003)', which adapts to a metric",
        ),
        ({"ent_coef": 0.1, "total_timesteps": "1M"}, "total_timesteps is '1M'; it must be a number of env steps"),
        (
            {"ent_coef": 0.1, "total_timesteps": 0},
            "total_timesteps is 0; the budget must be finite, above 0 and at most 2^48 env steps",
        ),
    ],
    ids=["none", "unknown", "not theirs", "twice", "text", "controller", "budget", "no budget"],
)
def test_a_mistake_in_what_is_given(given, sentence):
    with pytest.raises(lehr.InputError) as raised:
        ScheduleCallback(**given)
    assert sentence in str(raised.value)


def test_a_schedule_of_theirs_belongs_to_the_model():
    schedule_class = getattr(theirs("stable_baselines3.common.utils"), "LinearSchedule", None)
    if schedule_class is None:
        pytest.skip("this version has functions only")
    with pytest.raises(
        lehr.InputError, match="a function of the remaining progress, but a function given here is called"
    ):
        ScheduleCallback(learning_rate=schedule_class(1e-3, 0.0, 1.0))


def test_a_function_of_theirs_belongs_to_the_model():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = theirs("stable_baselines3.common.utils").get_linear_fn(1e-3, 0.0, 1.0)
    with pytest.raises(
        lehr.InputError, match="a function of the remaining progress, but a function given here is called"
    ):
        ScheduleCallback(learning_rate=made)


@pytest.mark.parametrize(
    ("kind", "given", "sentence"),
    [
        ("A2C", {"clip_range": 0.2}, "A2C has no clip_range to schedule; known: learning_rate, ent_coef"),
        ("TRPO", {"ent_coef": 0.1}, "TRPO has no ent_coef to schedule"),
        ("PPO", {"damping": 0.1}, "PPO has no cg_damping to schedule"),
        ("PPO", {"gamma": "0.9 -> 1.1"}, "gamma is '0.9 -> 1.1 over 128', which reaches 1.1; it must stay in [0, 1]"),
        ("PPO", {"ent_coef": lambda step: 64 - step}, "which reaches -64"),
        ("PPO", {"clip_coef": "0.2 -> 0"}, "clip_coef is '0.2 -> 0 over 128', which reaches 0"),
        (
            "PPO",
            {"clip_coef": lambda left: 0.1 + 0.2 * left},
            "reaches 25.7: a function given here is called with env steps, not with",
        ),
        (
            "A2C",
            {"lr": lambda left: 0.03 * left},
            "reaches 3.84: a function given here is called with env steps, not with the remaining progress",
        ),
    ],
)
def test_a_mistake_is_found_before_training(kind, given, sentence):
    model = model_of(getattr(sb3, kind, None) or getattr(contrib, kind))
    with pytest.raises(lehr.InputError) as raised:
        learn(model, ScheduleCallback(**given))
    assert sentence in str(raised.value)
    assert model.num_timesteps == 0


def test_algorithms_without_rollouts_are_refused():
    model = sb3.DQN("MlpPolicy", environment(), buffer_size=100, device="cpu")
    with pytest.raises(lehr.InputError, match="given to DQN, which is not an on-policy algorithm"):
        model.learn(10, callback=ScheduleCallback(gamma=0.9))


def test_nested_it_says_where_it_belongs_and_there_it_works():
    callback = ScheduleCallback(ent_coef=ENTROPY)
    with pytest.raises(lehr.InputError, match="ScheduleCallback is inside EveryNTimesteps"):
        learn(model_of(), callbacks.EveryNTimesteps(10, callback))
    on_best = callbacks.EvalCallback(environment(), callback, eval_freq=STEPS, n_eval_episodes=1, verbose=0, warn=False)
    with pytest.raises(lehr.InputError, match="ScheduleCallback is inside EvalCallback"):
        learn(model_of(), on_best)
    model = model_of()
    learn(model, callback)
    assert model.rows.column("schedule/ent_coef") == by_hand(ENTROPY)
    on_best.best_mean_reward = -np.inf
    with pytest.raises(
        lehr.InputError, match="ScheduleCallback is inside EvalCallback"
    ):  # also after a training of its own
        learn(model_of(), on_best)
