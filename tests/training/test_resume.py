"""A run that is stopped in any way, and resumed, ends like a run that never was: bit for bit."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest

import lehr
from lehr.cli import main
from lehr.report.loggers import jsonl, ledger
from lehr.training import api, checkpoint, settings_file
from lehr.training import directory as directory_module
from lehr.training.directory import RunDirectory
from lehr.training.loop import Loop
from lehr.training.plan import make_plan
from tests.training.test_checkpoint import Killed, dying

COMMON = {
    "num_envs": 4,
    "horizon": 8,
    "epochs": 2,
    "minibatches": 2,
    "hidden_sizes": [8],
    "total_steps": 32 * 60,
    "checkpoint_every": 32 * 5,
    "evaluate_every": 32 * 12,
    "evaluate_episodes": 3,
    "progress": False,
    "tensorboard": False,
    "entropy_coef": "0.03 until 20%, 0.03 -> 0.001 cosine",
}
VARIANTS = {
    "feed-forward": {"env": "CartPole-v1", "clip_range": "0.2 -> 0.1"},
    "recurrent": {
        "env": "CartPole-Hidden-v1",
        "preset": "puffer",
        "torso": "mingru",
        "recurrent_size": 8,
        "minibatches": 2,
    },
    "normalising": {"env": "Pendulum-v1", "normalise_observations": True, "normalise_rewards": True},
    "controlled": {
        "env": "Acrobot-v1",
        "entropy_coef": "auto(target_entropy=0.5, rate=0.1)",
        "learning_rate": "adaptive_kl(1e-3)",
    },
}
KILLS = 5  # of each variant: 20 in all

# A process that trains, or resumes, and is given a signal at one moment. Places are counted from the loop's begin, so
# that a resumed process is killed later than the one before.
CHILD = """
import json, os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import lehr
from lehr.training import checkpoint
from lehr.training import loop
from lehr.report.loggers import JsonLines

order = json.loads(sys.argv[1])
begun = []

def die():
    os.kill(os.getpid(), order["signal"])

def before(owner, name, count, first=die):
    original, calls = getattr(owner, name), []
    def counted(*arguments, **named):
        calls.extend(begun)
        if len(calls) == count:
            first(*arguments) if first is not die else die()
        return original(*arguments, **named)
    setattr(owner, name, counted)

def torn(self, row):
    self._file.write(json.dumps({name: value for name, value in row.items() if value == value})[:100])
    self._file.flush()
    die()

def later(*_):
    def wait():
        time.sleep(order["seconds"])
        die()
    threading.Thread(target=wait, daemon=True).start()

compile = loop.Loop._compile

def begin(self):
    compile(self)
    begun.append(1)
    if order["place"] == "chunk":
        before(type(self.runner), "advance", order["count"], later)

loop.Loop._compile = begin
places = {
    "fsync": (os, "fsync"),
    "savez": (np, "savez"),
    "rename": (Path, "rename"),
    "discard": (checkpoint, "_discard"),
    "evaluate": (loop.Loop, "_evaluate"),
    "report": (loop.Loop, "_report"),
    "row": (JsonLines, "log"),
    "flush": (JsonLines, "flush"),
}
if order["place"] in places:
    before(*places[order["place"]], order["count"])
if order["place"] == "torn":
    before(JsonLines, "log", order["count"], torn)
if order["place"] == "compile":
    loop.Loop._compile = lambda self: (die(), compile(self))[1]
if Path(order["run"], "config.yaml").exists():
    lehr.resume(order["run"])
else:
    lehr.train("ppo", run_dir=order["run"], **order["settings"])
"""
PLACES = {  # the most calls that are waited for: at most two checkpoints' worth
    "chunk": 6,
    "fsync": 8,
    "savez": 2,
    "rename": 2,
    "discard": 1,
    "evaluate": 1,
    "report": 6,
    "row": 10,
    "flush": 6,
    "torn": 10,
    "compile": 1,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Compiled programs of processes that are killed, which may leave half of one."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def child(cache):
    def run(path, settings, place="", count=0, seconds=0.0, sent=signal.SIGKILL):
        order = {"run": str(path), "settings": settings, "place": place, "count": count, "seconds": seconds}
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", CHILD, json.dumps(order | {"signal": int(sent)})],
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A feed-forward run that was never stopped, made in this process."""
    return lehr.train(run_dir=tmp_path_factory.mktemp("whole"), **COMMON, **VARIANTS["feed-forward"]).run_dir


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The feed-forward run, stopped at update 25, where it has a checkpoint."""
    path = tmp_path_factory.mktemp("half")
    stop = {"progress_fn": lambda step, metrics: step >= 32 * 25}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lehr.training.loop._next_count", lambda *_: 5)
        lehr.train(run_dir=path, **COMMON | VARIANTS["feed-forward"] | stop)
    assert checkpoint.steps(path / "checkpoints")[-1] == 25
    return path


def newest_of(run_dir):
    return max(path for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit())


def best_of(run_dir):
    meta = json.loads((newest_of(run_dir) / "meta.json").read_text())["meta"]
    return meta["best"], meta["best_update"]


def saved_arrays(run_dir):
    """Every leaf of the newest checkpoint by its path, read without the library."""
    newest = newest_of(run_dir)
    leaves = json.loads((newest / "meta.json").read_text())["leaves"]
    with np.load(newest / "state.npz") as archive:
        return {leaf["path"]: archive[f"arr_{number}"] for number, leaf in enumerate(leaves) if "chunks" not in leaf}


def rows_of(run_dir):
    """The rows of the metrics without those that tell the time."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def assert_same_run(one, other):
    here, there = saved_arrays(one), saved_arrays(other)
    assert here.keys() == there.keys()
    assert {".learner", ".actor"} < {path[: path.index(".", 1)] if "." in path[1:] else path for path in here}
    for path, array in here.items():
        assert array.tobytes() == there[path].tobytes(), path
    assert rows_of(one) == rows_of(other)
    assert [row["update"] for row in rows_of(one)] == list(range(1, 61))
    assert best_of(one) == best_of(other)
    assert checkpoint.steps(one / "checkpoints") == checkpoint.steps(other / "checkpoints")
    assert RunDirectory(one).read_status()["status"] == RunDirectory(other).read_status()["status"]


# Killed ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_killed_at_random_moments_equals_one_that_was_not(variant, child, tmp_path):
    draw = random.Random(variant)
    settings = COMMON | VARIANTS[variant]
    whole = child(tmp_path / "whole", settings)
    assert whole.returncode == 0, whole.stderr
    places = draw.sample(sorted(PLACES), KILLS)
    for place in places:
        count = draw.randint(1, PLACES[place])
        stopped = child(tmp_path / "killed", settings, place, count, seconds=draw.uniform(0, 0.02))
        assert stopped.returncode == -signal.SIGKILL, (place, count, stopped.stderr)
        assert RunDirectory(tmp_path / "killed").read_status()["status"] == "running"
    ended = child(tmp_path / "killed", settings)
    assert ended.returncode == 0, ended.stderr
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def fate(path):
    """What can be done with a directory."""
    if not (path / "status.json").exists():
        return "not a run yet"
    try:
        settings_file.read(RunDirectory.open(path)).check()
    except lehr.InputError as error:
        return "start" if "before its first checkpoint; start it again in the same directory" in str(error) else error
    return "resume"


@pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning")  # as in a kill
def test_a_run_killed_while_it_begins_is_no_dead_end(tmp_path, monkeypatch):
    """Before each operation on files: either it can be resumed, or be started again in the same directory."""
    settings = COMMON | VARIANTS["feed-forward"] | {"total_steps": 32, "evaluate_episodes": 0}
    plan = make_plan("ppo", settings)
    operations = [(Path, "replace"), (Path, "rename"), (os, "fsync"), (Path, "mkdir")]
    endings = []
    for fatal in range(100):
        path, countdown, killed = tmp_path / str(fatal), iter(range(fatal)), False
        path.mkdir()
        with monkeypatch.context() as patch:
            for owner, name in operations:
                patch.setattr(owner, name, dying(getattr(owner, name), countdown))
            patch.setattr(shutil, "rmtree", lambda *_, **options: None)  # nobody tidies up after a kill
            try:
                with RunDirectory.create(path) as directory:
                    api._begin(plan, directory, None).record.close()
            except Killed:
                killed = True
        directory_module._locked.clear()  # as at the end of a process
        if not killed:
            break
        endings.append(ending := fate(path))
        if not (path / "config.yaml").exists():  # what the scripts in docs/scale.md ask, to start the run or resume it
            RunDirectory.create(path).unlock()
        else:
            assert ending == "resume"
    assert not killed
    places = [endings.index(ending) for ending in ("not a run yet", "start", "resume")]
    assert places == sorted(places)
    assert len(set(endings)) == 3


def test_a_fork_killed_before_its_settings_are_written_can_be_started_again(tmp_path):
    """Its first checkpoint is that of the update at which the original run was."""
    RunDirectory.create(tmp_path / "run").unlock()
    (tmp_path / "run/checkpoints/000000000020").mkdir(parents=True)
    RunDirectory.create(tmp_path / "run").unlock()
    (tmp_path / "run/checkpoints/000000000040").mkdir()  # it has made updates
    with pytest.raises(lehr.InputError, match="is not empty; resume its run"):
        RunDirectory.create(tmp_path / "run")


def test_resume_on_the_command_line_says_that_there_is_nothing_to_resume(tmp_path, capsys):
    RunDirectory.create(tmp_path / "run").unlock()
    assert main(["resume", str(tmp_path / "run")]) == 2
    assert "ended before its first checkpoint; start it again in the same directory" in capsys.readouterr().err


def test_a_run_without_a_config_is_resumed_from_its_checkpoint(half, whole, tmp_path):
    run = shutil.copytree(half, tmp_path / "run")
    (run / "config.yaml").unlink()
    assert main(["resume", str(run)]) == 0
    assert_same_run(run, whole)
    assert (run / "config.yaml").read_text() == (whole / "config.yaml").read_text()


# Signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_saves_and_stops_and_the_resumed_run_equals_one_that_was_not_stopped(child, whole, tmp_path):
    settings, run = COMMON | VARIANTS["feed-forward"], RunDirectory(tmp_path / "run")
    updates = []
    for number, place in ((signal.SIGTERM, "chunk"), (signal.SIGINT, "report"), (signal.SIGTERM, "compile")):
        stopped = child(run.path, settings, place, 4, sent=number)
        assert (stopped.returncode, stopped.stderr) == (0, "")
        status = run.read_status()
        assert (status["status"], status["reason"]) == ("stopped", f"signal {number.name}")
        updates.append(max(checkpoint.steps(run.checkpoints)))
        assert rows_of(run.path)[-1]["update"] == updates[-1]  # all that was computed is written down
    assert 0 < updates[0] < updates[1] == updates[2] < 60
    assert child(run.path, settings).returncode == 0
    assert_same_run(run.path, whole)


@pytest.mark.slow
def test_a_signal_while_a_new_run_is_compiled_leaves_a_run_that_can_be_resumed(child, whole, tmp_path):
    settings, run = COMMON | VARIANTS["feed-forward"], RunDirectory(tmp_path / "run")
    stopped = child(run.path, settings, "compile", sent=signal.SIGINT)
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert run.read_status()["status"] == "stopped"
    assert rows_of(run.path) == []
    assert child(run.path, settings).returncode == 0
    assert_same_run(run.path, whole)


def test_handlers_of_signals_are_given_back(whole):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    lehr.resume(whole)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# In this process ---------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path):
    """A function that trains the feed-forward run until after an update."""

    def train(update, name="run", **settings):
        path = tmp_path / name
        lehr.train(
            run_dir=path,
            progress_fn=lambda step, metrics: step >= 32 * update,
            **COMMON | VARIANTS["feed-forward"] | settings,
        )
        return path

    return train


@pytest.mark.parametrize("damage", ["state.npz", "meta.json"])
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_it_used(damage, stopped, whole, caplog):
    path = stopped(23)
    found = checkpoint.steps(path / "checkpoints")
    file = path / "checkpoints" / f"{found[-1]:012d}" / damage
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    lehr.resume(path)
    (message,) = caplog.messages
    assert str(file) in message
    assert "is damaged" in message
    assert_same_run(path, whole)


def test_the_best_of_before_stays_the_best(stopped):
    path = stopped(23, env="Probe-ConstantReward-v0")  # every evaluation is worth 1, so the first is the best
    lehr.resume(path)
    assert best_of(path) == (1.0, 12)
    assert checkpoint.steps(path / "checkpoints") == [12, 50, 55, 60]


def test_chunks_of_other_lengths_give_the_same_run(stopped, whole, monkeypatch):
    monkeypatch.setattr("lehr.training.loop._next_count", lambda *_: 1)
    assert_same_run(stopped(60), whole)


def test_a_finished_run_stays_as_it_is(whole, caplog):
    before = (whole / "metrics.jsonl").read_bytes(), saved_arrays(whole).keys()
    assert lehr.resume(whole).state.updates == 60
    assert "The run is already finished, and nothing is left to train" in caplog.text
    assert ((whole / "metrics.jsonl").read_bytes(), saved_arrays(whole).keys()) == before
    assert RunDirectory(whole).read_status()["status"] == "finished"


def test_a_smaller_budget_shortens_schedules(stopped, caplog):
    lehr.resume(stopped(20, total_steps=32 * 60), total_steps=32 * 30, progress=False)
    assert "from 1920 to 960 env steps: schedules relative to the budget are shortened to the new one" in caplog.text


@pytest.mark.parametrize("progress", [True, False])
def test_a_longer_budget_extends_a_run_and_binds_shares_anew(stopped, capsys, caplog, progress):
    path = stopped(60, clip_range="0.2 -> 0.1 over 960", total_steps=32 * 20)
    before = rows_of(path)
    lehr.resume(path, total_steps=32 * 40, progress=progress)
    told = capsys.readouterr().err if progress else caplog.text
    told = " ".join(told.split())
    assert "The budget changes from 640 to 1280 env steps: schedules relative to the budget are stretched to" in told
    assert "already finished" not in told
    rows = rows_of(path)
    assert rows[:20] == before
    assert len(rows) == 40
    for row in rows[20:]:
        clock = row["env_steps"] - 32
        bound, fixed = (
            np.float32(lehr.schedule(text, 1280)(clock)) for text in (COMMON["entropy_coef"], "0.2 -> 0.1 over 960")
        )
        np.testing.assert_allclose(row["coef/entropy_coef"], bound, rtol=1e-6)
        np.testing.assert_allclose(row["coef/clip_range"], fixed, rtol=1e-6)
    assert lehr.load(path).config["total_steps"] == 1280


def test_a_budget_below_what_was_done_is_refused(whole):
    with pytest.raises(lehr.InputError, match=r"total_steps is 320, but .* has already made 1920 env steps"):
        lehr.resume(whole, total_steps=320)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"seed": 1}, r"seed is 1, but a resumed run keeps its seed \(0\); drop the option"),
        (
            {"horizon": 16},
            "An update has 64 env steps with these settings, but the run's 60 updates so far had 32 each",
        ),
        ({"action_repeat": 2}, "would jump"),
        ({"num_envs": 8}, "does not match"),
        ({"hidden_sizes": [16]}, "does not match"),
    ],
)
def test_a_resumed_run_refuses_what_would_make_it_another_run(settings, sentence, whole):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(lehr.InputError, match=sentence):
        lehr.resume(whole, **settings)
    assert {path: path.read_bytes() for path in before} == before
    lehr.resume(whole)  # and it is not locked


def test_a_coefficient_that_is_a_function_is_asked_for_again(stopped, tmp_path):
    path = stopped(10, clip_range=lambda step: 0.2)
    with pytest.raises(lehr.InputError, match="clip_range was a function"):
        lehr.resume(path)
    assert lehr.load(path).config["clip_range"].startswith("<function")
    assert lehr.resume(path, clip_range=lambda step: 0.2).state.updates == 60
    fork = lehr.train(from_run=path, run_dir=tmp_path / "fork", total_steps=32 * 62, clip_range=0.1)
    assert fork.final["coef/clip_range"] == np.float32(0.1)


def test_a_config_is_never_half_written(stopped, monkeypatch):
    path = stopped(10)
    before = (path / "config.yaml").read_text()

    def torn(file, mapping):
        Path(file).write_text("algorithm: p")
        raise KeyboardInterrupt

    monkeypatch.setattr("lehr.config.to_yaml", torn)
    with pytest.raises(KeyboardInterrupt):
        lehr.resume(path, total_steps=32 * 70)
    assert (path / "config.yaml").read_text() == before


# Forks -------------------------------------------------------------------------------------------------------------


def test_a_fork_begins_with_the_origin_and_goes_on_by_its_clock(stopped, tmp_path, monkeypatch):
    origin = stopped(23)
    begun = []
    run = Loop.run
    monkeypatch.setattr(Loop, "run", lambda self: begun.append(saved_arrays(self.directory.path)) or run(self))
    fork = lehr.train(from_run=origin, run_dir=tmp_path / "fork", entropy_coef="0.5 -> 0.25", seed=7)
    there = saved_arrays(origin)
    for path, array in begun[0].items():
        assert path == ".key" or array.tobytes() == there[path].tobytes(), path
    first, last = rows_of(fork.run_dir)[0], rows_of(fork.run_dir)[-1]
    assert first["update"] == int(there[".updates"]) + 1
    assert last["update"] == 60
    clock = first["env_steps"] - 32
    np.testing.assert_allclose(first["coef/entropy_coef"], 0.5 - 0.25 * clock / 1920, rtol=1e-6)
    assert fork.config["clip_range"] == "0.2 -> 0.1"


def test_a_fork_that_changes_nothing_equals_the_resumed_run(stopped, tmp_path, whole):
    fork = lehr.train(from_run=stopped(23), run_dir=tmp_path / "fork")
    here, there = saved_arrays(fork.run_dir), saved_arrays(whole)
    assert {path for path in here if here[path].tobytes() != there[path].tobytes()} == set()
    assert rows_of(fork.run_dir) == rows_of(whole)[-len(rows_of(fork.run_dir)) :]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"hidden_sizes": [16]}, r"With these settings \.learner\.params.* is float32\[.*16.*\], but in .* it is"),
        ({"num_envs": 8}, "With these settings .* a fork may change coefficients"),
        ({"optimiser": "sgd"}, r"\.learner\.optimiser.* absent"),
        ({"normalise_observations": True}, r"\.observation_statistics.* absent"),
        ({"env": "Acrobot-v1"}, "With these settings"),
        ({"horizon": 4}, "its clock would jump"),
        ({"total_steps": 1920}, "total_steps is 1920, but .* give more"),
        ({"entropy_coef": -1}, "entropy_coef"),
        ({"algorithm": "a2c"}, "is a run of ppo, not of a2c; a fork keeps the algorithm"),
    ],
)
def test_a_fork_that_does_not_fit_says_so_and_leaves_nothing_behind(settings, sentence, whole, tmp_path):
    with pytest.raises(lehr.InputError, match=sentence):
        lehr.train(from_run=whole, run_dir=tmp_path / "fork", **({"total_steps": 32 * 70} | settings))
    assert list(tmp_path.iterdir()) == []


def test_rows_of_a_torn_or_later_end_are_cut_before_a_resume(stopped, whole):
    path = stopped(23)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 999, "env_steps": 1}\n{"update": 24, "env_st')
    lehr.resume(path)
    assert jsonl.read(path / "metrics.jsonl")["update"].max() == 60
    assert_same_run(path, whole)


# Memory: stored rollouts, a replay -----------------------------------------------------------------------------------

PPG = COMMON | {"env": "CartPole-v1", "policy_updates": 4, "total_steps": 32 * 12, "evaluate_episodes": 0}
PPG = {name: value for name, value in PPG.items() if name not in ("evaluate_every", "epochs", "minibatches")}


@pytest.fixture
def ppg(tmp_path, monkeypatch):
    """A function that trains PPG with all of its memory in chunks, to the end or until after an update."""
    monkeypatch.setattr("lehr.training.chunks.LEAST", 0)

    def train(name, until=12, **settings):
        monkeypatch.setattr("lehr.training.loop._next_count", lambda *_: 1)
        stop = {"progress_fn": lambda step, metrics: step >= 32 * until, "run_dir": tmp_path / name}
        return lehr.train("ppg", **PPG | settings | stop)

    return train


def same_state(one, other):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(one.params)] == [
        np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(other.params)
    ]


def test_a_run_with_its_memory_in_chunks_resumes_exactly(ppg, tmp_path):
    whole = ppg("whole")
    half = ppg("half", until=6)  # in the midst of a policy phase
    assert int(half.state.learner.auxiliary.filled) == int(half.state.updates) - 4 in (2, 3)
    assert len(list((tmp_path / "half" / "checkpoints" / "memory").iterdir())) >= 3
    assert not any(".memory" in path for path in saved_arrays(tmp_path / "half") if path.endswith("target"))
    resumed = lehr.resume(tmp_path / "half")
    assert same_state(resumed, whole)
    assert rows_of(tmp_path / "half") == rows_of(tmp_path / "whole")


def test_a_run_without_its_memory_says_so_and_starts_with_an_empty_one(ppg, tmp_path, caplog):
    half = ppg("half", until=6, checkpoint_replay="off")
    assert "checkpoint_replay is off: checkpoints leave out the replay and stored rollouts" in caplog.text
    assert not (tmp_path / "half" / "checkpoints" / "memory").exists()
    caplog.clear()
    loaded = lehr.load(tmp_path / "half").state.learner
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(loaded.memory))
    assert int(loaded.auxiliary.filled) == 0 < int(half.state.learner.auxiliary.filled)
    resumed = lehr.resume(tmp_path / "half", progress_fn=lambda *_: True)
    assert "has no replay or stored rollouts: the run goes on with empty ones" in caplog.text
    new = int(resumed.state.updates) - int(half.state.updates)
    assert int(resumed.state.learner.auxiliary.filled) == new in (1, 2)


def test_a_run_whose_memory_is_damaged_can_go_on_without_it(ppg, tmp_path, caplog):
    half = ppg("half", until=6, keep_checkpoints=1)
    for chunk in (tmp_path / "half" / "checkpoints" / "memory").iterdir():
        chunk.write_bytes(b"?" * chunk.stat().st_size)
    with pytest.warns(UserWarning, match=r"The memory of the checkpoint .* is damaged"):
        assert same_state(lehr.load(tmp_path / "half"), half)  # the policy does not need it
    with pytest.raises(checkpoint.CheckpointError, match="None of the 1 checkpoints"):
        lehr.resume(tmp_path / "half")
    assert "To go on without it, resume with checkpoint_replay off" in caplog.text
    resumed = lehr.resume(tmp_path / "half", checkpoint_replay=False, progress_fn=lambda *_: True)
    new = int(resumed.state.updates) - int(half.state.updates)
    assert int(resumed.state.learner.auxiliary.filled) == new in (1, 2)
    assert resumed.config["checkpoint_replay"] == "off"


# Damaged settings --------------------------------------------------------------------------------------------------


def edited(run, text):
    (run / "config.yaml").write_text(text)
    return run


def test_a_cut_config_is_an_error_that_names_what_is_missing(half, tmp_path):
    run = shutil.copytree(half, tmp_path / "run")
    text = (run / "config.yaml").read_text()
    kept = [line for line in text.splitlines(keepends=True) if not line.startswith(("entropy_coef:", "horizon:"))]
    edited(run, "".join(kept).replace("value_coef: 0.5", "value_coef: 0.25"))
    sentence = (
        r"config\.yaml' does not have the settings of the run: horizon is missing \(it was 8\), "
        r"entropy_coef is missing \(it was \"0\.03 until 20%, 0\.03 -> 0\.001 cosine\"\), value_coef is 0\.25 "
        r"\(it was 0\.5\)\. Delete"
    )
    for call in (lehr.resume, lehr.load, lambda run: lehr.train(from_run=run, run_dir=tmp_path / "fork")):
        with pytest.raises(lehr.InputError, match=sentence):
            call(run)
    assert not (tmp_path / "fork").exists()
    with pytest.raises(lehr.InputError, match=r"the run: value_coef is 0\.25"):  # the others are given on purpose
        lehr.resume(run, **{"ent-coef": 0.01, "horizon": 8})


@pytest.mark.parametrize("length", [0, 10, 100, 400, 700])
def test_no_cut_config_goes_on_with_defaults(half, tmp_path, length):
    run = shutil.copytree(half, tmp_path / "run")
    text = (run / "config.yaml").read_text()
    assert length < len(text) - 50
    with pytest.raises(lehr.InputError, match=r"does not have the settings of the run|config\.yaml, line"):
        lehr.load(edited(run, text[:length]))


def test_settings_that_are_given_on_purpose_may_differ_and_a_deleted_config_is_written_again(half, whole, tmp_path):
    run = shutil.copytree(half, tmp_path / "run")
    text = (run / "config.yaml").read_text()
    edited(run, text.replace("clip_range: 0.2 -> 0.1", "clip_range: 0.3"))
    result = lehr.resume(run, clip_range=0.15, progress_fn=lambda *_: True)
    assert result.metrics["coef/clip_range"][-1] == np.float32(0.15)
    assert lehr.load(run).config["clip_range"] == 0.15
    (run / "config.yaml").unlink()
    lehr.resume(run, clip_range="0.2 -> 0.1")
    assert (run / "config.yaml").read_text() == text
    assert RunDirectory(run).read_status()["status"] == "finished"


def test_a_config_without_its_checkpoint_or_its_algorithm_is_explained(half, tmp_path):
    run = shutil.copytree(half, tmp_path / "run")
    checkpoint.amend(run / "checkpoints", lambda meta: {name: meta[name] for name in meta if name != "settings"})
    text = (run / "config.yaml").read_text()
    assert lehr.load(run).config["horizon"] == 8  # a run of an older version
    with pytest.raises(lehr.InputError, match=r"config\.yaml' has no 'algorithm'; restore the file"):
        lehr.load(edited(run, text.replace("algorithm: ppo", "")))


def test_a_kill_while_settings_change_leaves_a_run_that_resumes(half, tmp_path, monkeypatch):
    """Before each of the operations on files that change the settings."""
    operations = [(Path, "replace"), (os, "fsync")]
    seen = set()
    for fatal in range(100):
        run = shutil.copytree(half, tmp_path / str(fatal))
        countdown = iter(range(fatal))
        finished = True
        with monkeypatch.context() as patch, RunDirectory(run) as directory:
            for owner, name in operations:
                patch.setattr(owner, name, dying(getattr(owner, name), countdown))
            mapping = settings_file.read(directory).values | {"max_rejected": 77}
            try:
                settings_file.write(directory, mapping)
            except Killed:
                finished = False
        found = settings_file.read(RunDirectory(run))
        assert not found.differences
        seen.add(found.values["max_rejected"])
        checkpoint.newest(run / "checkpoints", lehr.load(run).state.saved, report=pytest.fail) if finished else None
        if finished:
            break
    assert finished
    assert seen == {10, 77}
    assert "settings_before" not in checkpoint.latest_meta(run / "checkpoints")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("env_steps", "800"), ("env_steps", -32), ("elapsed", None), ("best", "high"), ("best_update", [1])),
        *(("data", []), ("data", {"a": 1}), ("waiting", {"a": 3}), ("waiting", {"a": [1, "b"]})),
    ],
)
def test_metadata_that_no_run_writes_is_refused_in_one_sentence(half, tmp_path, name, value):
    run = shutil.copytree(half, tmp_path / "run")
    checkpoint.amend(run / "checkpoints", lambda meta: meta | {name: value})
    with pytest.raises(lehr.InputError, match=f"update 25 in .* is not one of a run: its metadata has no valid {name}"):
        lehr.load(run)


def test_metadata_without_data_is_resumed(half, tmp_path):
    run = shutil.copytree(half, tmp_path / "run")
    checkpoint.amend(run / "checkpoints", lambda meta: meta | {"data": None})
    assert lehr.resume(run).state.updates > 25


@pytest.mark.parametrize("marks", [None, 5, {}, {"marks": "ab"}, {"marks": [[25, 25, -5, 0]]}, {"marks": [[2], [1]]}])
def test_a_ledger_that_no_run_writes_counts_as_none(marks):
    assert ledger.Ledger.from_json(marks) is None


# Damaged metrics ---------------------------------------------------------------------------------------------------


def cut(lines):
    return [*lines[:18], lines[18][:50]]


def flip_a_bracket(lines):
    return [*lines[:2], b"[" + lines[2][1:], *lines[3:]]


def flip_a_digit(lines):
    return [*lines[:2], lines[2].replace(b'"env_steps": 96', b'"env_steps": 97'), *lines[3:]]


def zero(lines):
    return [*lines[:6], bytes(len(b"".join(lines[6:9]))), *lines[9:]]


DAMAGES = {
    cut: ([*range(1, 19)], "7 of its 25 rows up to update 25 are missing (updates 19-25)"),
    flip_a_bracket: ([1, 2, *range(4, 26)], "1 of its 25 rows up to update 25 is missing (updates 3)"),
    flip_a_digit: ([*range(1, 26)], "values in the rows of updates 1-5 were changed"),
    zero: ([*range(1, 7), *range(11, 26)], "4 of its 25 rows up to update 25 are missing (updates 7-10)"),
    (lambda lines: lines[:3] + lines[5:]): (
        [1, 2, 3, *range(6, 26)],
        "2 of its 25 rows up to update 25 are missing (updates 4-5)",
    ),
    (lambda lines: None): ([], "25 of its 25 rows up to update 25 are missing (updates 1-25)"),
    (lambda lines: []): ([], "25 of its 25 rows up to update 25 are missing"),
    (lambda lines: [lines[0], b"what\n", *lines[1:]]): ([*range(1, 26)], "it has lines that are not rows"),
}


@pytest.mark.parametrize(
    "damage",
    [one if number < 3 else pytest.param(one, marks=pytest.mark.slow) for number, one in enumerate(DAMAGES)],
)
def test_metrics_that_were_damaged_before_a_resume_are_reported_and_kept_aside(damage, half, whole, tmp_path, caplog):
    run, (left, sentence) = tmp_path / "run", DAMAGES[damage]
    shutil.copytree(half, run)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    damaged = damage(lines)
    if damaged is None:
        (run / "metrics.jsonl").unlink()
    else:
        (run / "metrics.jsonl").write_bytes(b"".join(damaged))
    result = lehr.resume(run, progress_fn=lambda *_: True)
    (message,) = caplog.messages
    assert sentence in message
    assert str(run / "metrics.jsonl") in message
    new = int(result.state.updates) - 25
    assert result.metrics["update"].tolist() == [*left, *range(26, 26 + new)]
    assert rows_of(run)[-new:] == rows_of(whole)[25 : 25 + new]
    aside = run / "metrics.damaged-1.jsonl"
    if damaged:
        assert aside.name in message
        assert aside.read_bytes() == b"".join(damaged)
    else:
        assert not aside.exists()
    lehr.resume(run, progress_fn=lambda *_: True)  # says nothing more: the checkpoint knows what is left
    assert len(caplog.messages) == 1


def test_damage_is_reported_once_even_if_the_run_is_killed_right_away(half, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(half, run)
    os.truncate(run / "metrics.jsonl", 5000)
    for _ in range(2):
        directory = RunDirectory(run)
        with directory:
            algorithm, saved = api._settings(directory, None, trust=False)
            Loop(make_plan(algorithm, saved), directory, resumes=True).record.close()
    assert len(caplog.messages) == 1
    shutil.rmtree(newest_of(run))  # the checkpoint before knows it too
    lehr.resume(run)
    assert len(caplog.messages) == 1
    assert [path.name for path in run.glob("metrics.*")].count("metrics.damaged-1.jsonl") == 1


def test_thinned_metrics_that_lost_a_row_are_noticed(tmp_path):
    """Rows are counted as written, not as updates."""
    path, said = tmp_path / "metrics.jsonl", []
    log, known = jsonl.JsonLines(path), ledger.Ledger((ledger.Mark(0),))
    for update in range(10, 210, 10):
        log.log({"update": update, "x": 0.1})
        if update % 50 == 0:
            known = known.add(log.mark._replace(update=update))
    log.close()
    whole = path.read_bytes()
    assert ledger.restore(path, known, said.append) is known
    assert (known.now.rows, known.now.size, known.now.crc32) == (20, len(whole), zlib.crc32(whole))
    path.write_bytes(whole.replace(b'{"update": 70, "x": 0.1}\n', b""))
    found = ledger.restore(path, known, said.append)
    (sentence,) = said
    assert "1 of its 20 rows up to update 200 is missing (updates 1 of 51-100)" in sentence
    assert found.now.rows == 19
    assert ledger.restore(path, ledger.Ledger.from_json(json.loads(json.dumps(found.to_json()))), pytest.fail) == found


def test_the_ledger_stays_small(tmp_path):
    known = ledger.Ledger((ledger.Mark(0),))
    for update in range(1, 1000):
        known = known.add(ledger.Mark(update, update, 10 * update, update))
        assert len(known.marks) <= 65
        assert known.now.update == update
    assert known.until(999) == known
    assert known.until(1) is None


def test_metrics_are_on_the_disk_before_the_checkpoint_that_counts_them(half, tmp_path, monkeypatch):
    order, fsync, rename = [], os.fsync, Path.rename
    name_of = lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda file: order.append(Path(name_of(file)).name) or fsync(file))
    monkeypatch.setattr(Path, "rename", lambda old, new: order.append(f"-> {Path(new).name}") or rename(old, new))
    run = tmp_path / "run"
    shutil.copytree(half, run)
    lehr.resume(run, total_steps=32 * 26)
    place = order.index("-> 000000000026")
    assert "metrics.jsonl" in order[:place]
    assert {"status.json.tmp", "config.tmp"} <= set(order[:place])
    assert order[: order.index("config.tmp") + 3].count("run") >= 1  # the name too
