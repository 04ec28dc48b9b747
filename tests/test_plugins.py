import sys

import pytest

from lehr import plugins
from lehr.errors import InputError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, where Python does not look for modules."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    work = tmp_path / "work"
    (work / "tasks").mkdir(parents=True)
    (work / "mazes_of_mine.py").write_text("")
    monkeypatch.chdir(work)
    return work


def test_a_file_is_found_through_links(folder):
    (folder.parent / "link").symlink_to(folder)
    (folder.parent / "shared").mkdir()
    (folder.parent / "shared" / "one.py").write_text("")
    (folder / "linked").symlink_to(folder.parent / "shared")
    for name in ("mazes_of_mine", "linked.one"):
        file = f"{folder.parent}/link/{name.replace('.', '/')}.py"
        assert plugins.with_modules(f"--env={file}:Maze") == f"--env={name}:Maze"
    with pytest.raises(InputError, match="is outside the working directory"):
        plugins.with_modules("../shared/one.py:Maze")


def test_the_file_of_a_package_is_named_as_the_package(folder):
    (folder / "tasks" / "__init__.py").write_text("")
    assert plugins.with_modules("tasks/__init__.py:Maze") == "tasks:Maze"


@pytest.mark.parametrize(("name", "better"), [("my-maze", "my_maze"), ("2d", "_2d")])
def test_a_file_that_python_cannot_import_gets_another_name(folder, name, better):
    (folder / f"{name}.py").write_text("")
    with pytest.raises(InputError, match=f"'{name}' is not a Python name; rename it, for example to '{better}'"):
        plugins.with_modules(f"{name}.py:Maze")
