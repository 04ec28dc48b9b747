"""Links in a run directory: a stranger's could point to any file of the user's, and none is written through."""

import os
import shutil

import pytest

import lehr
from lehr.cli import main
from lehr.errors import InputError
from lehr.files import open_in_place, replaced
from tests.small import SMALL


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run that can be extended."""
    return lehr.train(
        "ppo", "CartPole-v1", total_steps=32, run_dir=tmp_path_factory.mktemp("links") / "run", **SMALL
    ).run_dir


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def link(path, target):
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


REPLACED = ("play.gif", "curve.png", "status.json", "status.json.tmp", "config.tmp", "play.gif.tmp", "curve.png.tmp")


@pytest.mark.parametrize("dangling", [False, True])
def test_files_are_written_anew_and_links_are_not_followed(run, tmp_path, dangling):
    victims = tmp_path / "victims"
    victims.mkdir()
    status = (run / "status.json").read_text()
    for name in REPLACED:
        if not dangling or name == "status.json":  # without a status it is no run
            (victims / name).write_text(status)
        link(run / name, victims / name)
    (victims / "folder").mkdir()
    (victims / "folder" / "precious").write_text("mine")
    (run / "checkpoints" / "000000000002.tmp").symlink_to(victims / "folder")
    before = contents(victims)
    lehr.resume(run, total_steps=64)
    assert main(["play", str(run), "--max-steps", "3"]) == 0
    assert contents(victims) == before
    for name in ("play.gif", "curve.png", "status.json"):
        assert (run / name).is_file()
        assert not (run / name).is_symlink()
    assert not [path for path in run.rglob("*") if path.name.endswith(".tmp")]
    assert (run / "play.gif").read_bytes()[:3] == b"GIF"
    assert (run / "curve.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock", "tensorboard", "checkpoints", "wandb"])
def test_what_cannot_be_written_anew_must_not_be_a_link(run, tmp_path, name):
    victim = tmp_path / "victim"
    if (run / name).exists():
        shutil.move(run / name, victim)
    else:
        victim.mkdir()
        (victim / "precious").write_text("mine")
    (run / name).symlink_to(victim)
    before = contents(victim) if victim.is_dir() else victim.read_bytes()
    with pytest.raises(InputError, match=rf"{name}' is a link, and a run does not write through links; replace it by"):
        lehr.resume(run, total_steps=64, tensorboard=True)
    assert (contents(victim) if victim.is_dir() else victim.read_bytes()) == before


def test_a_lock_that_waits_in_a_new_directory_is_not_followed_either(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(InputError, match=r"\.lock' is a link"):
        lehr.train("ppo", run_dir=tmp_path / "run", total_steps=32, **SMALL)
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_checkpoint_that_is_a_link_does_not_count(run, tmp_path):
    newest = run / "checkpoints" / "000000000001"
    shutil.move(newest, tmp_path / "elsewhere")
    newest.symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path / "elsewhere")
    assert int(lehr.load(run).state.updates) == 0
    lehr.resume(run, max_rejected=3)  # changes the metadata of checkpoints
    assert contents(tmp_path / "elsewhere") == before


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(TypeError), replaced(tmp_path / "a") as file:
        file.write("text instead of bytes")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_other_errors_of_opening_stay_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_in_place(tmp_path / "missing" / "a", "a")
