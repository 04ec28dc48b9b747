"""The run directory: nobody's files are overwritten, one process writes, and anybody can read."""

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from lehr.errors import InputError
from lehr.files import write_text
from lehr.training.directory import RunDirectory, default_path, git_state

HOLDS_THE_LOCK = """
import sys
from lehr.training.directory import RunDirectory
with RunDirectory.open(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make(path):
    with RunDirectory.create(path) as run:
        return run


# Creation ----------------------------------------------------------------------------------------------------------


def test_a_new_run_has_its_versions_and_its_status(tmp_path):
    run = make(tmp_path / "deep" / "run")
    assert run.read_status() | {"time": ""} == {"status": "running", "reason": "", "time": ""}
    versions = json.loads(run.versions.read_text())
    assert versions["jax"] == jax.__version__
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["devices"] == [device.device_kind for device in jax.devices()]
    assert {"lehr", "jaxlib", "numpy", "platform", "backend"} <= set(versions)
    assert {path.name for path in (run.config, run.metrics, run.checkpoints, run.tensorboard, run.curve)} == {
        *("config.yaml", "metrics.jsonl", "checkpoints", "tensorboard", "curve.png")
    }


def test_no_file_names_a_place_of_this_machine(tmp_path):
    run = make(tmp_path / "run")
    run.write_status("finished")
    text = "".join(path.read_text() for path in run.path.iterdir())
    assert text
    assert str(tmp_path) not in text
    assert str(Path.cwd()) not in text


def test_a_directory_with_anything_in_it_is_refused_and_left_alone(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(InputError, match=r"^The directory '.*' is not empty; give another directory"):
        RunDirectory.create(tmp_path)
    assert os.listdir(tmp_path) == ["precious.txt"]
    run = make(tmp_path / "run")
    run.config.write_text("algorithm: ppo")
    with pytest.raises(InputError, match=r"^The directory '.*' is not empty; resume its run, or give another"):
        RunDirectory.create(run.path)
    with RunDirectory.open(run.path):  # the refusal did not keep the lock
        pass


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match="it is a file; give another directory"):
            RunDirectory.create(path)


def test_a_start_that_was_killed_before_its_first_file_can_be_repeated(tmp_path):
    (tmp_path / ".lock").write_text("123")
    assert make(tmp_path).read_status()["status"] == "running"


def test_a_run_that_was_killed_before_its_first_checkpoint_can_be_started_again(tmp_path):
    run = make(tmp_path / "run")
    run.metrics.touch()
    (run.checkpoints / "000000000000.tmp").mkdir(parents=True)
    run.tensorboard.mkdir()
    (run.tensorboard / "events.out.tfevents.1").touch()
    assert make(run.path).read_status()["status"] == "running"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("checkpoints/mine", "x"),
        ("metrics.jsonl", "x"),
        ("notes.txt", "x"),
        ("tensorboard/mine", "x"),
        ("status.json", "mine"),
        ("status.json", "[]"),
        ("status.json", '{"status": "finished"}'),
    ],
)
def test_files_of_somebody_else_are_no_run_that_was_killed(tmp_path, name, text):
    run = make(tmp_path / "run")
    (run.path / name).parent.mkdir(exist_ok=True)
    (run.path / name).write_text(text)
    with pytest.raises(InputError, match="is not empty; give another directory"):
        RunDirectory.create(run.path)
    assert (run.path / name).read_text() == text


def test_default_names_are_readable_and_free(tmp_path):
    assert default_path("<object Mine>", "CartPole-v1", 0, tmp_path).name.startswith("object-Mine-")
    first = default_path("ppo", "ALE/Pong-v5", 3, tmp_path)
    assert re.fullmatch(r"ppo-ALE-Pong-v5-s3-\d{8}-\d{6}", first.name)
    assert first.parent == tmp_path
    for _ in range(5):
        make(default_path("ppo", "CartPole-v1", 0, tmp_path))
    assert len(list(tmp_path.iterdir())) == 5


# Git ---------------------------------------------------------------------------------------------------------------


def git(directory, *words):
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", *identity, *words], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.usefixtures("_in_tmp_path")
def test_the_commit_and_changes_of_tracked_files_are_told(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert json.loads(make("runs/a").git.read_text()) == {"commit": commit, "dirty": False}
    assert git_state() == {"commit": commit, "dirty": False}  # the run's own files are no change of the code
    (tmp_path / "code.py").write_text("2")
    assert git_state() == {"commit": commit, "dirty": True}


@pytest.mark.usefixtures("_in_tmp_path")
def test_without_a_repository_or_git_there_is_no_git_file(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert not make("a").git.exists()
    git(tmp_path, "init")
    assert git_state() is None  # a repository without a commit
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not make("b").git.exists()


# Finding a run -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_in_tmp_path")
def test_a_run_is_found_by_its_directory_and_by_its_name(tmp_path):
    make("runs/first")
    os.mkdir("first")  # an unrelated directory of the same name is not taken for the run
    for path in ("first", "runs/first", tmp_path / "runs" / "first"):
        assert RunDirectory.open(path).path.resolve() == tmp_path / "runs" / "first"


@pytest.mark.usefixtures("_in_tmp_path")
def test_what_is_not_a_run_is_explained():
    with pytest.raises(
        InputError, match=r"There is no run 'first', neither .* under 'runs'; and 'runs' contains no runs\."
    ):
        RunDirectory.open("first")
    make("runs/first")
    with pytest.raises(InputError, match=r"There is no run 'firts', .*; did you mean 'first'\?"):
        RunDirectory.open("firts")
    with pytest.raises(InputError, match=r"There is no run 'runs/firts', .*; did you mean 'first'\?$"):
        RunDirectory.open("runs/firts")
    make("elsewhere/second")
    with pytest.raises(InputError, match=r"There is no run 'elsewhere/secnd', .*; did you mean 'elsewhere/second'\?$"):
        RunDirectory.open("elsewhere/secnd")
    with pytest.raises(InputError, match=r"; known: first$"):
        RunDirectory.open("xyzzy")
    with pytest.raises(InputError, match=r"; known: elsewhere/second$"):
        RunDirectory.open("elsewhere/xyzzy")
    os.mkdir("other")
    with pytest.raises(InputError, match=r"'other' is not a run: it has no status\.json"):
        RunDirectory.open("other")


@pytest.mark.usefixtures("_in_tmp_path")
def test_of_many_runs_the_newest_are_listed():
    for number in range(7):
        make(f"runs/ppo-{number}")
        os.utime(f"runs/ppo-{number}/status.json", (number, number))
    listed = r"'runs'; the newest are ppo-6, ppo-5, ppo-4, ppo-3, ppo-2; 'lehr list runs' shows all 7\.$"
    with pytest.raises(InputError, match=listed):
        RunDirectory.open("runs/xyzzy")
    with pytest.raises(InputError, match=r"did you mean 'ppo-6'\?$"):
        RunDirectory.open("ppo")


# Status and files --------------------------------------------------------------------------------------------------


def test_the_status_is_replaced_as_a_whole(tmp_path, monkeypatch):
    run = make(tmp_path / "run")
    run.write_status("failed", "the loss is NaN")
    assert run.read_status()["status"] == "failed"
    assert run.read_status()["reason"] == "the loss is NaN"

    def killed(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        run.write_status("finished")
    assert run.read_status()["status"] == "failed"


def test_text_is_written_in_utf8(tmp_path):
    write_text(tmp_path / "a", "γ λ\n")
    assert (tmp_path / "a").read_bytes() == "γ λ\n".encode()
    assert os.listdir(tmp_path) == ["a"]


# The lock ----------------------------------------------------------------------------------------------------------


def test_a_run_that_another_process_writes_is_refused_until_that_dies(tmp_path):
    run = make(tmp_path / "run")
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_LOCK, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        try:
            assert child.stdout.readline() == "locked\n"
            with pytest.raises(InputError, match=f"Process {child.pid} is writing the run '.*'; wait until it ends"):
                run.lock()
            assert run.read_status()["status"] == "running"  # reading needs no lock
            assert run.is_locked()
        finally:
            child.kill()
    assert not run.is_locked()
    with run:
        assert (run.path / ".lock").read_text() == str(os.getpid())


def test_a_run_that_this_process_writes_is_refused_too(tmp_path):
    with RunDirectory.create(tmp_path / "run") as run:
        run.lock()  # the holder may ask again
        other = RunDirectory.open(tmp_path / "run" / ".." / "run")
        assert other.is_locked()
        with pytest.raises(InputError, match=r"This process is already writing the run '.*'; wait until it ends"):
            other.lock()
    with other:
        pass


@pytest.mark.parametrize(("code", "refused"), [(errno.ENOSYS, False), (errno.ENOLCK, False), (errno.EIO, True)])
def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch, code, refused):
    def fails(file, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", fails)
    if refused:
        with pytest.raises(OSError, match=os.strerror(code)):
            RunDirectory.create(tmp_path / "run")
    else:
        run = make(tmp_path / "run")
        assert run.read_status()["status"] == "running"
        assert run.is_locked()  # for all that is known
