"""The files of a sweep, also if they are damaged or come from a stranger."""

import json
import shutil

import pytest

import lehr
from lehr.errors import InputError
from lehr.sweeps.directory import SweepDirectory


@pytest.fixture
def copy(swept, tmp_path):
    """A copy of the finished sweep, to be damaged."""
    return SweepDirectory(shutil.copytree(swept.directory, tmp_path / "copy"))


def change(directory, **changes):
    """Change the first member of the first wave, or the wave's size."""
    path = directory.path / "waves.json"
    waves = json.loads(path.read_text())
    for name, value in changes.items():
        (waves[0] if name == "size" else waves[0]["members"][0])[name] = value
    path.write_text(json.dumps(waves))


def test_waves_are_read_as_they_were_written(copy, swept):
    waves = copy.read_waves()
    assert waves == SweepDirectory(swept.directory).read_waves()
    copy.write_waves(waves)
    assert copy.read_waves() == waves
    assert [member.number for wave in waves for member in wave.members] == list(range(12))


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 10**12},
        {"size": 1},
        {"size": 8.0},
        {"size": "8"},
        {"number": "0"},
        {"seed": 1.5},
        {"settings": []},
        {"point": None},
        {"fresh": 1},
        {"other": 1},
    ],
    ids=str,
)
def test_waves_that_no_sweep_writes_are_one_sentence(copy, changes):
    change(copy, **changes)
    with pytest.raises(InputError, match=r"waves\.json' is damaged \(.*\); restore it from a copy\."):
        lehr.load_sweep(copy.path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"size": 1}', "null", "[[]]"])
def test_text_that_is_no_waves_is_one_sentence(copy, text):
    (copy.path / "waves.json").write_text(text)
    with pytest.raises(InputError, match="is damaged"):
        lehr.load_sweep(copy.path)


def test_members_run_no_code_that_the_sweep_file_may_not_name(copy, swept, tmp_path, monkeypatch):
    """The definition is harmless; a stranger has changed the settings of a member."""
    module = tmp_path / "stranger.py"
    module.write_text("raise SystemExit('the code of a stranger ran')")
    monkeypatch.syspath_prepend(tmp_path)
    change(copy, settings={**swept.definition.settings, "env": "stranger:Maze"})
    for use in (lehr.load_sweep, lehr.resume_sweep, lambda path: lehr.pick(path, 0, out=tmp_path / "run")):
        with pytest.raises(InputError, match=r"stranger:Maze.*trust"):
            use(copy.path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", [None, "", "{}", "[]"])
def test_a_sweep_whose_status_cannot_be_read_is_not_finished(copy, text):
    (copy.path / "status.json").unlink()
    if text is not None:
        (copy.path / "status.json").write_text(text)
    assert not lehr.load_sweep(copy.path).is_finished
    assert lehr.resume_sweep(copy.path, progress=False).is_finished
    assert lehr.load_sweep(copy.path).is_finished


def test_a_sweep_is_not_overwritten(copy):
    with pytest.raises(InputError, match=r"There is a sweep in .* already; add --resume"):
        SweepDirectory.create(copy.path)


def test_a_directory_without_a_sweep_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match=r"has no sweep\.yaml; give a directory written by 'lehr sweep'\."):
        SweepDirectory.open(tmp_path)
