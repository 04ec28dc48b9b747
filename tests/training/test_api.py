"""What a run does around its compiled program: rows, checkpoints, callbacks, stops, failures."""

import errno
import itertools
import json
import math
import re
import shlex
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax.experimental.compilation_cache import compilation_cache
from PIL import Image

import lehr
from lehr import cli
from lehr.envs import Environment, register, registry
from lehr.envs.builtin.classic import CartPole
from lehr.envs.wrappers import ActionRepeat
from lehr.errors import InputError
from lehr.report.loggers import JsonLines
from lehr.schedules import env_steps
from lehr.spaces import Box, Discrete
from lehr.training import checkpoint, iteration
from lehr.training.directory import RunDirectory, write_json
from lehr.training.loop import CHUNK_SECONDS, MOST_UPDATES, RunFailed, _next_count
from lehr.types import Timestep

STEPS = 4 * 8
"""Env steps of an update."""
COMMON: dict[str, Any] = {
    "num_envs": 4,
    "horizon": 8,
    "epochs": 1,
    "minibatches": 2,
    "hidden_sizes": (8,),
    "total_steps": STEPS * 40,
    "checkpoint_every": STEPS * 6,
    "evaluate_episodes": 3,
    "progress": False,
    "tensorboard": False,
}
SCHEDULES = {
    "learning_rate": "1e-3 -> 1e-5 exponential",
    "entropy_coef": "0.03 until 20%, 0.03 -> 0.001 cosine",
    "clip_range": "0.1 -> 0.2 over 5%, 0.2 -> 0.1",
    "discount": "0.9 at 0, 0.95 at 500, 0.99 at 1000",
    "value_coef": 0.7,
    "gae_lambda": "0.9 -> 0.8 polynomial(2) until 50%",
    "max_grad_norm": "0.5 -> 0.25 repeat 3",
}


@dataclass(frozen=True)
class NotANumber(Environment):
    """Endless; the reward is the action, but NaN from step `begin` of the run up to step `end`."""

    begin: int
    end: int
    observation_space = Box(0, 1, (1,))
    action_space = Discrete(2)

    def reset(self, key):
        return jnp.int32(0), jnp.zeros(1)

    def step(self, key, state, action):
        broken = (state >= self.begin) & (state < self.end)
        reward = jnp.where(broken, jnp.nan, action.astype(jnp.float32))
        no = jnp.asarray(False)
        return state + 1, Timestep(jnp.zeros(1), reward, no, no, {})


@pytest.fixture(scope="module", autouse=True)
def surroundings():
    """A registry of environments for these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registry", dict(registry._registry))
        # Each environment makes 8 steps in an update: those of updates 6 to 9 are not finite.
        register("Broken-v0")(lambda: NotANumber(40, 72))
        register("BrokenForGood-v0")(lambda: NotANumber(40, 10**9))
        yield


@pytest.fixture
def train(tmp_path):
    def run(env="CartPole-v1", name="run", **settings):
        return lehr.train("ppo", env, run_dir=tmp_path / name, **COMMON | settings)

    return run


@dataclass
class Watched:
    result: lehr.Result
    calls: list[tuple[int, dict[str, float], int]]
    """Of the progress function: env steps, metrics, and how often `iteration` had been traced by then."""
    traces: int


@pytest.fixture(scope="module")
def watched(tmp_path_factory, surroundings):
    """A run with several chunks, evaluations and checkpoints."""
    calls, traces = [], []
    original = iteration.iteration

    def counted(*arguments):
        traces.append(arguments)
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iteration, "iteration", counted)
        result = lehr.train(
            run_dir=tmp_path_factory.mktemp("watched"),
            progress_fn=lambda step, metrics: calls.append((step, metrics, len(traces))),
            **COMMON | SCHEDULES | {"evaluate_every": STEPS * 9, "tensorboard": True},
        )
    return Watched(result, calls, len(traces))


def rows_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def params_of(run):
    """The arrays of the newest parameters of a run, by path, as bytes."""
    leaves = jax.tree_util.tree_leaves_with_path(lehr.load(run).params)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def status_of(run):
    return RunDirectory(Path(run)).read_status()


# The program -------------------------------------------------------------------------------------------------------


def test_nothing_is_traced_after_the_first_update(watched):
    assert len(watched.calls) > 6
    assert watched.traces <= 1  # 0 where an equal program was traced before, in another test
    assert {traces for _, _, traces in watched.calls} == {watched.traces}


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of compiled programs that only this test writes to, found as a user's is."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    kept = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("LEHR_CACHE", str(tmp_path / "compiled"))
    jax.config.update("jax_compilation_cache_dir", None)
    jax.clear_caches()
    compilation_cache.reset_cache()
    yield tmp_path / "compiled"
    for name, value in kept.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_other_numbers_compile_no_other_program(train, own_cache):
    train(name="one", learning_rate="1e-3 -> 1e-4")
    before = sorted(own_cache.glob("jit_chunk*"))
    train(name="other", learning_rate="1e-2 -> 0 cosine", discount=0.9, seed=5, total_steps=STEPS * 17)
    assert sorted(own_cache.glob("jit_chunk*")) == before != []
    train(name="larger", num_envs=6)
    assert len(sorted(own_cache.glob("jit_chunk*"))) > len(before)


def test_a_chunk_grows_to_half_a_second_and_no_more():
    assert _next_count(1, math.inf) == 1
    assert _next_count(4, CHUNK_SECONDS / 10) == 10
    assert _next_count(4, CHUNK_SECONDS / 100) == 16
    assert _next_count(1000, 1e-9) == MOST_UPDATES
    assert _next_count(1000, 10 * CHUNK_SECONDS) == 1


# Metrics -----------------------------------------------------------------------------------------------------------


def test_every_update_has_one_row_and_the_first_is_one_of_them(watched):
    rows = rows_of(watched.result.run_dir)
    assert [row["update"] for row in rows] == list(range(1, 41))
    assert [row["env_steps"] for row in rows] == list(range(STEPS, STEPS * 41, STEPS))
    assert all("loss/total" in row for row in rows)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_coefficient_equals_its_schedule_on_the_clock(name, watched):
    """To the last bit but one: the tests of all algorithms compile as users do, and look at the last one too."""
    schedule = lehr.schedule(SCHEDULES[name], COMMON["total_steps"])
    value = jax.jit(lambda update: schedule(env_steps(update, STEPS)))
    expected = np.array([value(jnp.uint32(update)) for update in range(40)])
    np.testing.assert_array_max_ulp(watched.result.metrics[f"coef/{name}"].astype(np.float32), expected, maxulp=1)


def test_the_final_metrics_hold_the_coefficients_that_were_applied_last(watched):
    row = rows_of(watched.result.run_dir)[-1]
    applied = {name: value for name, value in row.items() if name.startswith("coef/")}
    assert len(applied) == len(SCHEDULES)
    assert {name: watched.result.final[name] for name in applied} == applied


def test_a_metric_that_is_not_measured_at_every_update_is_final_all_the_same(watched):
    returns = [row["episode/return"] for row in rows_of(watched.result.run_dir)]
    assert watched.result.final["episode/return"] == [value for value in returns if value != "NaN"][-1]


def test_time_grows_and_the_rate_fits_it(watched):
    elapsed, rate = (watched.result.metrics[f"time/{name}"] for name in ("elapsed", "steps_per_second"))
    assert (np.diff(elapsed) > 0).all()
    # The rate is that of the run so far, evaluations and checkpoints left out, since the run is shorter than the seconds
    # that are looked at: not below that of all its time, nor above that of its fastest updates.
    assert rate[-1] >= STEPS * len(rate) / elapsed[-1] * 0.999
    assert rate[-1] <= STEPS / np.diff(elapsed).min() * 1.001


def test_evaluations_come_at_their_updates_and_at_the_end(watched):
    rows = [row for row in rows_of(watched.result.run_dir) if "evaluate/return" in row]
    assert [row["update"] for row in rows] == [9, 18, 27, 36, 40]
    assert all({"evaluate/return_std", "evaluate/length", "evaluate/return_sampled"} < row.keys() for row in rows)
    last, result = rows[-1], watched.result
    key = iteration.derive(jax.random.key(0), "evaluate", 40)
    for name, greedy in (("evaluate/return", True), ("evaluate/return_sampled", False)):
        seen = lehr.acting.evaluation.Evaluator(result.env, result.policy.program, 3)(
            result.policy.learned, key, greedy
        )
        assert last[name] == float(seen.returns.mean())


def test_a_run_learns_the_same_with_and_without_evaluations(train):
    often, never = train(name="often", evaluate_every=STEPS), train(name="never", evaluate_episodes=0)
    assert "evaluate/return" in often.metrics
    assert not any(name.startswith("evaluate/") for name in never.metrics)
    assert params_of(often.run_dir) == params_of(never.run_dir)


# The directory -----------------------------------------------------------------------------------------------------


def test_the_learning_curve_of_a_run_is_drawn(train, drawn_curves):
    with Image.open(train(name="drawn").run_dir / "curve.png") as picture:
        assert picture.width == 1050
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 10


def test_a_run_directory_holds_everything_about_the_run(watched):
    run = watched.result.run_dir
    names = {path.name for path in run.iterdir()} - {"git.json"}
    assert names == {
        ".lock",
        "checkpoints",
        "config.yaml",
        "curve.png",
        "metrics.jsonl",
        "status.json",
        "tensorboard",
        "versions.json",
    }
    assert status_of(run)["status"] == "finished"
    learned = lehr.load(run).policy.learned
    jax.tree.map(np.testing.assert_array_equal, learned, watched.result.policy.learned)


def test_the_newest_checkpoints_and_the_best_are_kept(watched):
    evaluated = {row["update"]: row.get("evaluate/return", -1) for row in rows_of(watched.result.run_dir)}
    best = max(evaluated, key=lambda update: (evaluated[update], -update))
    assert checkpoint.steps(watched.result.run_dir / "checkpoints") == sorted({best, 30, 36, 40})


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_run_is_evaluated_in_another_environment_with_its_spaces(watched, wrapped):
    """Whose state the checkpoint does not have."""
    if not wrapped:
        pytest.importorskip("gymnasium")
    env = ActionRepeat(lehr.envs.make("CartPole-v1"), 2) if wrapped else "gym:CartPole-v1"
    run = watched.result.run_dir
    result = lehr.load(run, env=env)
    np.testing.assert_array_equal(
        result.policy(np.zeros(4, np.float32)), watched.result.policy(np.zeros(4, np.float32))
    )
    assert result.env_steps == watched.result.env_steps
    assert lehr.evaluate(run, env, episodes=2).returns.shape == (2,)
    with pytest.raises(InputError, match=r"The observations of Acrobot-v1 are in .* was not trained; give an env"):
        lehr.load(run, env="Acrobot-v1")


@pytest.mark.parametrize(
    ("env", "parameters"),
    [
        ("CartPole-v1", {"gravity": 12}),
        (CartPole, {"gravity": 12}),
        (lehr.envs.make("CartPole-v1"), {}),
        (lehr.envs.make("CartPole-v1", gravity=11.0), {"gravity": 11.0}),
        ("gym:CartPole-v1", {}),
    ],
    ids=["name", "class", "object", "another object", "another name"],
)
def test_the_config_of_a_loaded_run_is_that_of_the_environment_that_was_made(watched, tmp_path, env, parameters):
    if env == "gym:CartPole-v1":
        pytest.importorskip("gymnasium")
    run = shutil.copytree(watched.result.run_dir, tmp_path / "run")
    settings = yaml.safe_load((run / "config.yaml").read_text()) | {"env_parameters": {"gravity": 12}}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    checkpoint.amend(run / "checkpoints", lambda meta: meta | {"settings": settings})
    result = lehr.load(run, env)
    assert (result.config["env"], result.config["env_parameters"]) == (
        "gym:CartPole-v1" if env == "gym:CartPole-v1" else "CartPole-v1",
        parameters,
    )


def test_loading_gives_what_training_gave(watched):
    result, loaded = watched.result, lehr.load(watched.result.run_dir)
    plain = [jax.random.key_data(tree.state.key) for tree in (result, loaded)]
    assert plain[0].tolist() == plain[1].tolist()
    for one, other in zip(*map(jax.tree.leaves, (result.state, loaded.state)), strict=True):
        assert one.dtype == other.dtype
        assert one is not other
    jax.tree.map(np.testing.assert_array_equal, loaded.params, result.params)
    jax.tree.map(np.testing.assert_array_equal, loaded.state.actor, result.state.actor)
    assert (loaded.config, loaded.algorithm, loaded.env) == (result.config, "ppo", result.env)
    assert loaded.final == result.final
    obs = np.ones((5, 4), np.float32)
    assert loaded.policy(obs).tolist() == result.policy(obs).tolist()


def test_a_result_is_shown_in_a_few_lines(watched):
    result = watched.result
    shown = str(result).splitlines()
    assert shown[0] == f"Result of ppo on {result.config['env']}"
    assert shown[1] == f"  env steps  {int(result.final['env_steps']):,} of {result.config['total_steps']:,}"
    assert shown[2] == f"  return     {result.final['evaluate/return']:.6g} (evaluate/return)"
    assert shown[3:] == [f"  run_dir    {result.run_dir}"]
    assert len(repr(result.state)) < 100


def test_two_runs_of_one_seed_are_the_same_and_of_two_seeds_are_not(train):
    one, same, other = (train(name=f"{number}", seed=number // 2) for number in range(3))
    timeless, also = (
        [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows_of(run.run_dir)]
        for run in (one, same)
    )
    assert timeless == also
    assert rows_of(one.run_dir)[0]["loss/total"] != rows_of(other.run_dir)[0]["loss/total"]


def test_the_project_of_wandb_is_a_setting(train, monkeypatch):
    def named(directory, config, project):
        raise lehr.InputError(f"the project is {project}")

    monkeypatch.setattr("lehr.training.run_record.WeightsAndBiases", named)
    with pytest.raises(lehr.InputError, match="the project is mine"):
        train(wandb=True, wandb_project="mine")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"hidden": 3}, "There is no setting 'hidden'"),
        ({"env": "CartPole-v7"}, "There is no environment named 'CartPole-v7'"),
        ({"minibatching": "prioritised", "minibatches": 8}, "4 segments cannot fill 8 minibatches"),
        ({"entropy_coef": -1}, "entropy_coef"),
        ({"wandb": True}, "pip install wandb"),
        ({"target_return": 100, "evaluate_episodes": 0}, "target_return is 100, but evaluate_episodes is 0"),
        ({"total_steps": 0}, "total_steps is 0"),
        ({"from_run": "nowhere"}, "There is no run 'nowhere'"),
    ],
)
def test_a_run_that_cannot_begin_leaves_nothing_behind(settings, sentence, train, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(lehr.InputError, match=sentence):
        train(**settings)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    with pytest.raises(lehr.InputError, match=sentence):
        train(**settings)
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]  # what the user made stays, empty and not locked
    with RunDirectory(tmp_path / "run"):
        pass


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        (CartPole, "CartPole is an environment; name the algorithm first: lehr.train('ppo', CartPole)."),
        (
            "lehr.envs.builtin.classic:CartPole",
            "'lehr.envs.builtin.classic:CartPole' is an environment; name the algorithm first: lehr.train('ppo', "
            "'lehr.envs.builtin.classic:CartPole'), or 'lehr train ppo --env lehr.envs.builtin.classic:CartPole'.",
        ),
    ],
    ids=["class", "name"],
)
def test_an_environment_in_place_of_the_algorithm(algorithm, sentence):
    with pytest.raises(lehr.InputError) as caught:
        lehr.train(algorithm)
    assert str(caught.value) == sentence


def test_a_directory_in_use_is_left_alone(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("all of it")
    with pytest.raises(lehr.InputError, match="is not empty"):
        train()
    assert (tmp_path / "run" / "thesis.tex").read_text() == "all of it"


# Callbacks ---------------------------------------------------------------------------------------------------------


def test_the_progress_function_sees_growing_steps_up_to_the_end_and_the_metrics_of_that_step(watched):
    steps = [step for step, _, _ in watched.calls]
    assert all(before < after for before, after in itertools.pairwise(steps))
    assert steps[-1] == COMMON["total_steps"]
    rows = {row["env_steps"]: row for row in rows_of(watched.result.run_dir)}
    for step, metrics, _ in watched.calls:
        assert metrics["env_steps"] == step
        assert metrics["loss/total"] == rows[step]["loss/total"]
    evaluated = {step for step, row in rows.items() if "evaluate/return" in row}
    assert evaluated <= set(steps)
    for step, metrics, _ in watched.calls:
        assert step not in evaluated or metrics["evaluate/return"] == rows[step]["evaluate/return"]


@pytest.mark.parametrize("answer", [True, np.True_])
def test_a_progress_function_that_returns_true_stops_the_run(answer, train):
    result = train(progress_fn=lambda step, metrics: answer)
    status = status_of(result.run_dir)
    assert (status["status"], status["reason"]) == ("stopped", "progress_fn returned True")
    assert 0 < result.state.updates < 40
    assert len(rows_of(result.run_dir)) == result.state.updates
    jax.tree.map(np.testing.assert_array_equal, lehr.load(result.run_dir).params, result.params)


def test_other_answers_of_a_progress_function_do_not_stop_the_run(train):
    seen = {}
    assert train(progress_fn=seen.setdefault).state.updates == 40
    assert seen


def test_a_run_stops_when_an_evaluation_reaches_the_target(train):
    result = train("Probe-ConstantReward-v0", evaluate_every=STEPS * 7, target_return=1.0)
    assert result.state.updates == 7
    status = status_of(result.run_dir)
    assert (status["status"], status["reason"]) == ("stopped", "reached the target return 1")
    assert result.final["evaluate/return"] == 1.0


def test_a_target_alone_is_looked_at_with_every_checkpoint(train):
    assert train("Probe-ConstantReward-v0", target_return=1.0).state.updates == 6


def test_a_target_that_is_not_reached_stops_nothing(train):
    result = train("Probe-ConstantReward-v0", evaluate_every=STEPS * 7, target_return=1.5)
    assert status_of(result.run_dir)["status"] == "finished"


def test_a_run_works_beside_the_main_thread(train):
    results = []
    thread = threading.Thread(target=lambda: results.append(train()))
    thread.start()
    thread.join()
    assert results[0].state.updates == 40


# Numbers that are not finite ---------------------------------------------------------------------------------------

BROKEN: dict[str, Any] = {"evaluate_episodes": 0, "learning_rate": 1e-3, "entropy_coef": 0.02}


def test_a_run_survives_updates_that_are_not_finite_and_names_them(train, caplog):
    result = train("Broken-v0", **BROKEN)
    assert status_of(result.run_dir)["status"] == "finished"
    assert int(result.state.rejected) == 4
    assert len(caplog.messages) == 4
    for update, message in zip(range(6, 10), caplog.messages, strict=True):
        assert message.startswith(f"Update {update} was not applied: ")
        assert "loss/total is nan" in message
        assert "entropy_coef=0.02" in message
        assert "learning_rate=0.001" in message
    assert result.metrics["update/rejected"].tolist() == [0] * 5 + [1, 2, 3] + [4] * 32
    assert np.isnan(result.metrics["loss/total"][5:9]).all()
    assert np.isfinite(result.metrics["loss/total"][9:]).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.params))


def test_messages_go_above_the_bar_where_there_is_one(train, capsys, caplog):
    train("Broken-v0", progress=True, **BROKEN)
    assert capsys.readouterr().err.count("was not applied") == 4
    assert caplog.messages == []


def test_too_many_such_updates_stop_the_run_with_the_last_good_state_saved(train, tmp_path, caplog):
    with pytest.raises(RunFailed, match=r"4 updates were non-finite, more than max_rejected=3; the last good state"):
        train("BrokenForGood-v0", max_rejected=3, **BROKEN)
    status = status_of(tmp_path / "run")
    assert status["status"] == "failed"
    assert status["reason"].startswith("RunFailed: 4 updates")
    assert len(caplog.messages) == 4  # not one for each update of the chunk
    good = train("BrokenForGood-v0", "good", total_steps=STEPS * 5, **BROKEN)
    assert params_of(tmp_path / "run") == params_of(good.run_dir)
    assert params_of(tmp_path / "run") != params_of(train("Broken-v0", "more", total_steps=STEPS * 4, **BROKEN).run_dir)


def test_a_run_that_failed_so_is_resumed_without_a_gap(train, tmp_path):
    whole = train("Broken-v0", "whole", **BROKEN)
    with pytest.raises(RunFailed):
        train("Broken-v0", max_rejected=2, **BROKEN)
    done = lehr.load(tmp_path / "run").state.updates
    assert [row["update"] for row in rows_of(tmp_path / "run")] == list(range(1, done + 1))
    lehr.resume(tmp_path / "run", max_rejected=10)
    assert params_of(tmp_path / "run") == params_of(whole.run_dir)
    assert [row["loss/total"] for row in rows_of(tmp_path / "run")] == whole_losses(whole)
    assert status_of(tmp_path / "run")["status"] == "finished"


def whole_losses(result):
    return [row["loss/total"] for row in rows_of(result.run_dir)]


def test_an_evaluation_that_is_not_a_number_is_not_the_best(train, monkeypatch):
    monkeypatch.setattr("lehr.acting.evaluation.MOST_STEPS", 50)
    result = train(
        "Broken-v0", **BROKEN | {"evaluate_episodes": 2, "evaluate_every": STEPS * 10, "total_steps": STEPS * 20}
    )
    _, meta, _ = checkpoint.newest(result.run_dir / "checkpoints", result.state.saved)
    assert meta["best"] is None


# Failures ----------------------------------------------------------------------------------------------------------


def test_an_error_in_the_progress_function_is_raised_after_everything_is_saved(train, tmp_path, monkeypatch):
    whole = train(name="whole")
    monkeypatch.setattr("lehr.training.loop._next_count", lambda *_: 1)

    def fails(step, metrics):
        return 1 / 0 if step > STEPS * 9 else None

    with pytest.raises(ZeroDivisionError, match="division by zero"):
        train(progress_fn=fails, checkpoint_every=COMMON["total_steps"])
    status = status_of(tmp_path / "run")
    assert (status["status"], status["reason"]) == ("failed", "ZeroDivisionError: division by zero")
    done = int(lehr.load(tmp_path / "run").state.updates)
    assert done in (10, 11)  # an update may have been under way
    assert len(rows_of(tmp_path / "run")) == done
    lehr.resume(tmp_path / "run")
    assert params_of(tmp_path / "run") == params_of(whole.run_dir)
    assert [row["loss/total"] for row in rows_of(tmp_path / "run")] == whole_losses(whole)


def full_after(method, calls, times):
    """The method, on a disk that is full after some calls."""

    def write(*arguments, **named):
        calls.append(arguments)
        if len(calls) > times:
            raise OSError(errno.ENOSPC, "No space left on device")
        return method(*arguments, **named)

    return write


@pytest.mark.parametrize(
    ("owner", "name", "times"), [(JsonLines, "flush", 9), (np, "savez", 3), (JsonLines, "log", 20)]
)
def test_a_full_disk_fails_the_run_with_a_sentence_and_loses_nothing(owner, name, times, train, tmp_path, monkeypatch):
    whole = train(name="whole")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full_after(getattr(owner, name), [], times))
        with pytest.raises(
            RunFailed,
            match=r"Cannot write the run '.*': No space left on device; once that is fixed, resume it from update",
        ):
            train()
    status = status_of(tmp_path / "run")
    assert status["status"] == "failed"
    assert "No space left on device" in status["reason"]
    assert 0 < lehr.load(tmp_path / "run").state.updates < 40
    lehr.resume(tmp_path / "run")
    assert params_of(tmp_path / "run") == params_of(whole.run_dir)
    assert [row["loss/total"] for row in rows_of(tmp_path / "run")] == whole_losses(whole)


def test_a_disk_that_takes_no_status_either_does_not_hide_the_reason(train, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "flush", full_after(JsonLines.flush, [], 9))
        patch.setattr(
            "lehr.training.directory.write_json",
            full_after(write_json, [], len(["status", "versions", "git", "running"])),
        )
        with pytest.raises(RunFailed, match="No space left on device"):
            train()
    lehr.resume(tmp_path / "run")
    assert status_of(tmp_path / "run")["status"] == "finished"


def test_a_directory_that_cannot_be_made_is_a_mistake_in_the_input(train, tmp_path, monkeypatch):
    with pytest.raises(lehr.InputError, match=r"Cannot write the run '/proc/none/run': No such file"):
        lehr.train(run_dir="/proc/none/run", **COMMON)
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full_after(np.savez, [], 0))
        with pytest.raises(lehr.InputError, match=r"Cannot write the run '.*': No space left on device"):
            train()
    assert list(tmp_path.iterdir()) == []
    train()


def test_a_read_only_run_cannot_be_resumed_but_read(train, tmp_path, monkeypatch):
    train(progress_fn=lambda step, metrics: True)
    opened = Path.open

    def read_only(self, mode="r", *arguments, **named):
        if set(mode) & set("wax+"):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(self, mode, *arguments, **named)

    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(lehr.InputError, match=r"Cannot write the run '.*': Read-only file system"):
        lehr.resume(tmp_path / "run")
    assert lehr.load(tmp_path / "run").state.updates > 0


# The page ----------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "runs.md").read_text(encoding="utf-8")


def table_of(title):
    """The first column of the table under a heading, without a folder's slash."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [name.rstrip("/") for name in re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)]


@pytest.mark.slow
def test_every_block_and_command_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"evaluate_episodes": 5, "num_envs": 8, "horizon": 32, "hidden_sizes": (8,), "progress": False}
    original = lehr.training.api.train

    def train(*arguments, **settings):
        extra = {"progress": False} if settings.get("from_run") else small
        return original(*arguments, **extra | settings)

    monkeypatch.setattr(lehr.training.api, "train", train)
    namespace: dict[str, Any] = {}
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 8
    for language, block in blocks:
        if language == "python":
            exec(compile(block, "runs.md", "exec"), namespace)
            continue
        for line in block.splitlines():
            program, *words = shlex.split(line)
            assert (program, cli.main(words)) == ("lehr", 0), line
    assert lehr.load("runs/first").state.updates * 8 * 32 >= 30_000
    assert status_of("runs/target")["status"] == "stopped"


def test_the_page_names_every_file_of_a_run(watched):
    found = {path.name for path in watched.result.run_dir.iterdir()}
    assert sorted(table_of("The directory")) == sorted(found | {"git.json"})


@pytest.mark.slow
def test_the_page_names_every_metric(train):
    everything = {"preset": "puffer", "minibatches": 2, "target_kl": 0.1, "total_steps": STEPS * 2}
    names = {name for name in train("Pendulum-v1", **everything).metrics if not name.startswith("coef/")}
    assert "environment/broken_masks" not in names  # only of environments with masks
    assert sorted(table_of("The metrics")) == sorted(names | {"coef/<name>", "environment/broken_masks"})


# Environments that are broken ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong(Environment):
    """Does what its fault says."""

    fault: str = ""
    observation_space = Box(-1, 1, (2,))
    action_space = Discrete(2)

    def reset(self, key):
        return jnp.int32(0), jnp.zeros(2)

    def step(self, key, state, action):
        if self.fault == "raises":
            raise OSError("the simulator is gone")
        obs = jnp.zeros(3 if self.fault == "shape" else 2)
        reward = jnp.int32(1) if self.fault == "dtype" else jnp.float32(1)
        if self.fault == "nan":
            reward = jnp.where(state >= 12, jnp.nan, reward)
        return state + 1, Timestep(obs, reward, jnp.bool(False), jnp.bool(False), {})


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("raises", "Cannot train on the environment tests.training.test_api:Wrong. step(key, state, action) raised"),
        (
            "shape",
            "Cannot train on the environment tests.training.test_api:Wrong. The observation of step is float32[3]",
        ),
        ("dtype", "Cannot train on the environment tests.training.test_api:Wrong. reward of step is int32[]"),
    ],
)
def test_an_environment_that_is_wrong_is_refused_before_anything_is_compiled(fault, sentence, train, tmp_path):
    with pytest.raises(InputError) as error:
        train(Wrong(fault))
    assert str(error.value).startswith(sentence)
    assert not (tmp_path / "run").exists()


def test_numbers_that_are_not_finite_are_laid_at_the_environments_door(train, caplog):
    with pytest.raises(RunFailed, match="3 updates were non-finite"):
        train(Wrong("nan"), max_rejected=2, **BROKEN)
    assert "the environment tests.training.test_api:Wrong returned" in caplog.messages[0]
    assert "non-finite rewards, so" in caplog.messages[0]


def test_settings_that_could_not_be_read_again_are_refused_before_anything_is_written(train, tmp_path):
    pairs = [[step, 1e-3 / (step + 1)] for step in range(4000)]
    with pytest.raises(InputError, match="learning_rate takes"):
        train(learning_rate=pairs)
    assert not (tmp_path / "run" / "config.yaml").exists()
    assert not [*tmp_path.glob("run/checkpoints/0*")]
    with pytest.raises(InputError, match="parameters takes"):
        lehr.sweep(
            {
                "algorithm": "ppo",
                "parameters": {"clip_range": [0.1 + number / 1e5 for number in range(7000)]},
                "sampler": "grid",
            },
            out=tmp_path / "sweep",
            progress=False,
        )
    assert not (tmp_path / "sweep").exists()
