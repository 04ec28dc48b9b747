"""The examples: each runs as a script and by its command, does what it says, and gets what built-in things get."""

import csv
import importlib
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lehr
from lehr import algorithms, rewards
from lehr.cli import main
from lehr.envs import check_env, registry
from lehr.errors import InputError
from lehr.maths.optimise import Optimiser
from lehr.spaces import Spaces
from lehr.testing import check_algorithm
from lehr.types import Rollout

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("own_*.py"))
SMALL = {"num_envs": 4, "horizon": 8, "evaluate_episodes": 2, "tensorboard": False, "progress": False}
PPO = {**SMALL, "epochs": 2, "minibatches": 2}
UPDATES = 12
STEPS = UPDATES * 32


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    """Runs are written to an empty directory, and the examples can be imported as from a clone of the repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])


def imported(name):
    return importlib.import_module(f"examples.own_{name}")


def run_script(name, monkeypatch, **settings):
    """What a script defines, with a smaller budget for its training."""
    train = lehr.train
    with monkeypatch.context() as patched:
        patched.setattr(lehr, "train", lambda *what, **given: train(*what, run_dir="run", **{**given, **settings}))
        return runpy.run_path(str(ROOT / "examples" / f"own_{name}.py"), run_name="__main__")


def identical(one, other):
    return jax.tree.all(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), one, other))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if line.strip()]) < 60
    assert f"Run it with `python examples/{path.name}`, or\n`lehr train " in text


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem == "own_controller" else pytest.mark.slow)
        for path in EXAMPLES
    ],
)
def test_the_command_of_an_example_works(path, capsys):
    command = re.search(r"`lehr (train [^`]+)`", path.read_text(encoding="utf-8"))
    sizes = SMALL if "Reinforce" in command[1] else PPO
    words = [*shlex.split(command[1]), "--no-tensorboard", "--no-progress", "--total-steps", "64", "--run-dir", "run"]
    for name, value in sizes.items():
        if value is not False:
            words += [f"--{name.replace('_', '-')}", str(value)]
    assert main(words) == 0, capsys.readouterr().err
    assert Path("run", "metrics.jsonl").is_file()
    assert f"examples.{path.stem}:" in Path("run", "config.yaml").read_text()


# The algorithm ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_algorithm_learns_as_a_script(monkeypatch, capsys):
    small = {"evaluate_episodes": 20, "tensorboard": False, "progress": False}
    result = run_script("algorithm", monkeypatch, total_steps=150_000, **small)["result"]
    assert result.final["evaluate/return"] > 100, "a random policy gets about 20"
    assert capsys.readouterr().out.startswith("Mean return of 100 episodes: ")
    applied, steps = result.metrics["coef/baseline_coef"], result.metrics["env_steps"]
    before = np.concatenate([[0], steps[:-1]])
    np.testing.assert_allclose(applied, np.minimum(before / 30_000, 1), rtol=1e-5)
    with pytest.raises(
        InputError, match="was <object Reinforce>, which cannot be saved in a file; pass it as algorithm="
    ):
        lehr.load(result.run_dir)


def test_the_algorithm_keeps_what_is_promised_of_every_algorithm():
    assert check_algorithm(imported("algorithm").Reinforce, learns=True) == []


@pytest.fixture
def copied(tmp_path):
    """The example as a user's own file, in the directory that commands are called in."""
    shutil.copy(ROOT / "examples" / "own_algorithm.py", tmp_path)
    yield "own_algorithm:Reinforce"
    sys.modules.pop("own_algorithm", None)


def test_the_algorithm_on_the_command_line(copied, capsys):
    flags = ["--num-envs", "4", "--horizon", "8", "--evaluate-episodes", "0", "--no-tensorboard", "--no-progress"]
    train = ["train", copied, "--env", "CartPole-v1", "--total-steps", str(STEPS), "--run-dir", "run", *flags]
    assert main([*train, "--baseline-coef", "1 -> 2"]) == 2
    assert (
        "baseline_coef is '1 -> 2 over 384', which reaches 2; it must stay in [0, 1] at every step"
        in capsys.readouterr().err
    )
    assert main([*train, "--baseline-weight", "1 -> 0"]) == 0
    sys.modules.pop("own_algorithm")

    assert main(["eval", "run", "--episodes", "2"]) == 2
    assert "has algorithm: own_algorithm:Reinforce, which would run code from" in capsys.readouterr().err
    assert "own_algorithm" not in sys.modules
    assert main(["eval", "run", "--episodes", "2", "--trust"]) == 0
    assert "2 episodes of CartPole-v1, greedy actions, after 384 env steps" in capsys.readouterr().out
    result = lehr.load("run", trust=True)
    assert (result.algorithm, result.config["baseline_coef"]) == (copied, "1 -> 0")
    np.testing.assert_allclose(result.metrics["coef/baseline_coef"], 1 - np.arange(UPDATES) / UPDATES, rtol=1e-6)
    with pytest.raises(SystemExit):
        main(["train", copied, "--help"])
    assert "Share of the value that is subtracted from the return" in " ".join(capsys.readouterr().out.split())


def test_the_algorithm_resumes_bit_for_bit(monkeypatch):
    algorithm = imported("algorithm").Reinforce
    given = {**SMALL, "total_steps": STEPS, "baseline_coef": "0 -> 1"}
    whole = lehr.train(algorithm, "CartPole-v1", run_dir="whole", **given)
    half = lehr.train(algorithm, "CartPole-v1", run_dir="half", progress_fn=lambda steps, metrics: True, **given)
    assert 0 < int(half.state.updates) < UPDATES
    assert int(lehr.load("half").state.updates) < UPDATES, "its code runs in this process already"
    with monkeypatch.context() as elsewhere:
        elsewhere.delitem(sys.modules, "examples.own_algorithm")
        for call in (lehr.resume, lehr.load):
            with pytest.raises(InputError, match=r"has algorithm: examples.own_algorithm:Reinforce, .*if you trust it"):
                call("half")
    resumed = lehr.resume("half")
    assert int(resumed.state.updates) == UPDATES
    assert identical(resumed.params, whole.params)
    assert identical(resumed.state.learner, whole.state.learner)
    assert identical(resumed.metrics["coef/baseline_coef"], whole.metrics["coef/baseline_coef"])


# The others ------------------------------------------------------------------------------------------------------------


def test_the_network_is_the_one_that_learns(monkeypatch):
    result = run_script("network", monkeypatch, **PPO, total_steps=64)["result"]
    same = lehr.train("ppo", "CartPole-v1", torso=imported("network").Fourier, learning_rate=0, total_steps=64, **PPO)

    def frequencies(run):
        leaves = jax.tree_util.tree_leaves_with_path(run.params)
        return [leaf for path, leaf in leaves if "'frequencies'" in jax.tree_util.keystr(path) and leaf.ndim == 2]

    assert [kernel.shape for kernel in frequencies(result)] == [(4, 32)] * 2, "the actor's and the critic's"
    for learned, first in zip(frequencies(result), frequencies(same), strict=True):
        assert 0 < float(jnp.abs(learned - first).max()) < 0.1


def test_the_reward_model_counts_and_its_weight_is_scheduled(monkeypatch):
    result = run_script("reward_model", monkeypatch, **PPO, total_steps=STEPS)["result"]
    seen = result.metrics["novelty/cells_seen"]
    assert 0 < seen[0] <= seen[-1] < 256
    assert (np.diff(seen) >= 0).all()
    visits = np.asarray(result.state.reward_model.params)
    assert (visits.sum(), (visits > 0).sum()) == (STEPS, seen[-1])
    np.testing.assert_allclose(result.metrics["coef/novelty_coef"], 1 - np.arange(UPDATES) / UPDATES, rtol=1e-6)


def test_the_bonus_falls_with_the_visits():
    novelty = imported("reward_model")
    env = lehr.envs.make("MountainCar-v0")
    model = novelty.Novelty.build(Spaces(env.observation_space, env.action_space), novelty.NoveltySettings())
    obs = jnp.array([[[-1.2, -0.07]], [[0.59, 0.069]], [[-1.2, 0.069]]])
    assert jax.vmap(model.cell)(obs[:, 0]).tolist() == [0, 255, 240]
    rollout = Rollout(obs, *[None] * 2, jnp.zeros((3, 1)), *[None] * 7)
    learner = model.init(jax.random.key(0), rollout)
    learner = learner._replace(params=learner.params.at[255].set(3.0))
    assert model.reward(learner, rollout, {"novelty_coef": 0.5}).tolist() == [[0.5], [0.25], [0.5]]


def test_the_controller_follows_the_return_and_is_asked_for_again(monkeypatch):
    found = run_script("controller", monkeypatch, **PPO, total_steps=STEPS)
    metrics = found["result"].metrics
    expected = [0.05]
    for episode_return in metrics["episode/return"][:-1]:
        expected.append(expected[-1] if np.isnan(episode_return) else 0.05 * (1 - episode_return / 500))
    np.testing.assert_allclose(metrics["coef/entropy_coef"], expected, rtol=1e-5)
    assert len(set(expected)) > 2
    assert found["result"].config["entropy_coef"] == "<object UntilGoal>"
    with pytest.raises(
        InputError, match="entropy_coef was an object, <object UntilGoal>, which cannot be saved in a file; pass"
    ):
        lehr.resume("run", total_steps=2 * STEPS)
    again = lehr.resume("run", total_steps=2 * STEPS, entropy_coef=found["UntilGoal"](goal=500))
    assert int(again.state.updates) == 2 * UPDATES


def test_a_run_with_the_controller_resumes_bit_for_bit_from_its_text(monkeypatch):
    controller = imported("controller").UntilGoal(goal=500)
    given = {**PPO, "total_steps": STEPS, "entropy_coef": controller}
    whole = lehr.train("ppo", "CartPole-v1", run_dir="whole", **given)
    half = lehr.train("ppo", "CartPole-v1", run_dir="half", progress_fn=lambda steps, metrics: True, **given)
    assert 0 < int(half.state.updates) < UPDATES
    assert half.config["entropy_coef"] == "examples.own_controller:UntilGoal(goal=500)"
    with monkeypatch.context() as elsewhere:
        elsewhere.delitem(sys.modules, "examples.own_controller")
        with pytest.raises(InputError, match=r"has entropy_coef: examples.own_controller:UntilGoal.goal=500., which"):
            lehr.resume("half")
    resumed = lehr.resume("half")
    assert identical(resumed.params, whole.params)
    assert identical(resumed.metrics["coef/entropy_coef"], whole.metrics["coef/entropy_coef"])


def test_the_logger_writes_a_row_for_each_update(monkeypatch, capsys):
    result = run_script("logger", monkeypatch, **PPO, total_steps=STEPS)["result"]
    title, *lines = (result.run_dir / "metrics.csv").read_text().splitlines()
    assert title == "# ppo on CartPole-v1"
    rows = list(csv.DictReader(lines))
    for name in ("env_steps", "coef/learning_rate", "episode/return"):
        np.testing.assert_array_equal([float(row[name]) for row in rows], result.metrics[name])


@pytest.mark.slow
def test_the_environment_rewards_who_moves_under_the_ball(monkeypatch):
    found = run_script("environment", monkeypatch, **PPO, total_steps=STEPS)
    lengths = found["result"].metrics["episode/length"]
    assert set(lengths[~np.isnan(lengths)]) == {10.0}
    for columns in (2, 5, 7):
        env = imported("environment").Catch(columns=columns)
        assert check_env(env, num_steps=30) == []
        state, _ = env.reset(jax.random.key(columns))
        for step in range(env.rows):
            state, timestep = env.step(None, state, jnp.sign(state.ball - state.paddle) + 1)
            assert bool(timestep.terminated) == (step == env.rows - 1)
        assert float(timestep.reward) == 1.0
    state, _ = env.reset(jax.random.key(0))
    for _ in range(env.rows):
        state, timestep = env.step(None, state, jnp.where(state.ball > env.columns // 2, 0, 2))
    assert float(timestep.reward) == -1.0


def test_the_optimiser_and_the_activation_compute_what_they_say(monkeypatch):
    found = run_script("optimiser", monkeypatch, **PPO, total_steps=64)
    assert found["result"].config["optimiser"] == "<function decayed_adam>"
    assert found["result"].config["activation"] == "<function squared_relu>"
    assert found["squared_relu"](jnp.array([-1.0, 3.0])).tolist() == [0.0, 9.0]
    optimiser, params = Optimiser(found["decayed_adam"]), {"kernel": jnp.array([5.0, 5.0, 5.0])}
    gradients = {"kernel": jnp.array([0.0, 0.05, 7.0])}
    step = optimiser.improve(params, optimiser.init(params), gradients, 0.1, None)
    np.testing.assert_allclose(step.params["kernel"][0], 5.0 * (1 - 0.1 * 1e-4), rtol=1e-7)
    np.testing.assert_allclose(optax.tree.get(step.state, "mu")["kernel"], [0, 0.1 * 0.05, 0.1 * 0.1], rtol=1e-6)


# The page --------------------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_code_of_the_page_is_that_of_the_examples_or_runs(monkeypatch):
    train, names, shown = lehr.train, {}, set()

    def quick_train(algorithm, *arguments, total_steps, **given):
        assert total_steps >= 100_000
        return train(algorithm, *arguments, total_steps=64, **(PPO if algorithm == "ppo" else SMALL), **given)

    monkeypatch.setattr(lehr, "train", quick_train)
    for block in blocks("python"):
        first, _, rest = block.partition("\n")
        if first.startswith("# examples/"):
            assert rest in (ROOT / first.removeprefix("# ")).read_text(encoding="utf-8"), first
            shown.add(first.removeprefix("# examples/"))
        else:
            exec(block.replace(", learns=True", ""), names)  # that is tested above
    assert names["result"].config["env"] == "examples.own_environment:Catch"
    assert len(shown) == 5


def test_the_page_names_every_example_and_the_entry_points():
    assert {f"../examples/{path.name}" for path in EXAMPLES} == set(re.findall(r"\]\((\.\./examples/[^)]+)\)", PAGE))
    (written,) = blocks("toml")
    groups = tomllib.loads(written)["project"]["entry-points"]
    assert list(groups) == [algorithms.GROUP, rewards.GROUP, registry.GROUP]
    commands = {command for block in blocks("sh") for command in block.splitlines()}
    for path in EXAMPLES:
        command = re.search(r"`(lehr train [^`]+)`", path.read_text(encoding="utf-8"))[1].replace("\n", " ")
        reference = re.search(r"examples\.\w+:\w+", command)[0]
        assert command in commands or reference in PAGE, command


def test_other_pages_lead_to_this_one():
    assert "(docs/extend.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(extend.md" in (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
