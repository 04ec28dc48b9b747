import importlib.util
import sys
from types import ModuleType

import pytest

import lehr
from lehr import algorithms, envs, plugins, rewards
from lehr.errors import InputError
from lehr.networks.network_config import NetworkConfig


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


@pytest.mark.parametrize(
    ("file", "elsewhere"),
    [
        ("mazes_of_mine.py", "mazes_of_mine.py"),
        ("tasks/one.py", "tasks/one.py"),
        ("tasks/one.py", "tasks/__init__.py"),
    ],
)
def test_a_file_that_python_would_import_from_elsewhere_is_refused(folder, file, elsewhere):
    found = folder.parent / "other" / elsewhere
    found.parent.mkdir(parents=True)
    found.write_text("raise SystemExit")
    (folder / file).write_text("")
    module = file.replace("/", ".").removesuffix(".py")
    assert plugins.with_modules(f"{file}:Maze") == f"{module}:Maze"
    sys.path.append(str(folder.parent / "other"))
    with pytest.raises(InputError) as raised:
        plugins.with_modules(f"{file}:Maze")
    assert str(raised.value) == (
        f"The file '{file}' cannot be imported as '{module}', because Python finds '{found}' first; choose another name "
        f"than '{module.partition('.')[0]}'."
    )


def test_other_files_of_a_folder_of_the_same_name_may_be_elsewhere(folder):
    (folder.parent / "other" / "tasks").mkdir(parents=True)
    (folder / "tasks" / "one.py").write_text("")
    sys.path.append(str(folder.parent / "other"))
    assert plugins.with_modules("tasks/one.py:Maze") == "tasks.one:Maze"


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("sys.py", "a module of Python itself"),
        ("os.py", "a module of Python itself"),
        ("code.py", f"'{importlib.util.find_spec('code').origin}'"),
        ("lehr.py", f"'{lehr.__file__}'"),
        ("of_a_notebook.py", "the module 'of_a_notebook'"),
    ],
)
def test_a_file_with_the_name_of_another_module_is_refused(folder, monkeypatch, file, found):
    monkeypatch.setitem(sys.modules, "of_a_notebook", ModuleType("of_a_notebook"))
    (folder / file).write_text("")
    with pytest.raises(InputError, match=f"because Python finds {found} first"):
        plugins.with_modules(f"{file}:Maze")


def test_a_file_with_the_name_of_a_suite_is_refused(folder):
    (folder / "gym.py").write_text("")
    with pytest.raises(InputError, match="has the name of a suite of environments, 'gym:'; rename it"):
        plugins.with_modules("--env=gym.py:Maze")


NAMED_BY_A_FILE = [
    (lambda text: envs.make(text), "environment"),
    (lambda text: algorithms.find(text), "algorithm"),
    (lambda text: rewards.find(text), "reward model"),
    (lambda text: NetworkConfig(torso=text), "torso"),
]


@pytest.mark.parametrize(("take", "what"), NAMED_BY_A_FILE)
def test_a_file_where_names_are_understood_is_not_imported(folder, take, what):
    (folder / "mazes_of_mine.py").write_text("raise SystemExit")
    sys.path.append(str(folder))
    with pytest.raises(InputError) as raised:
        take("./mazes_of_mine.py:Maze")
    assert str(raised.value) == (
        f"The {what} './mazes_of_mine.py:Maze' is named by a file; name it by its module, as in 'mazes_of_mine:Maze'."
    )


@pytest.mark.parametrize(("take", "what"), NAMED_BY_A_FILE)
def test_a_path_without_a_file_is_no_question_of_grammar(folder, take, what):
    for file in ("no/none.py", "my folder/none.py"):
        with pytest.raises(
            InputError, match=f"There is no file '{file}' for the {what} '{file}:Maze'; correct the path"
        ):
            take(f"{file}:Maze")
    with pytest.raises(InputError, match="There is no file"):
        take(f"{'no/' * 5000}none.py:Maze")


def test_the_suggested_name_of_a_class_can_be_imported(folder):
    (folder / "my-maze.py").write_text("")
    (folder / "a folder").mkdir()
    (folder / "a folder" / "mazes.py").write_text("")
    with pytest.raises(InputError, match="as in 'mazes_of_mine:MazesOfMine'"):
        envs.make("mazes_of_mine.py")
    with pytest.raises(InputError, match="'my-maze' is not a Python name; rename it, for example to 'my_maze'"):
        envs.make("my-maze.py")
    with pytest.raises(InputError, match="'a folder' is not a Python name; rename it, for example to 'a_folder'"):
        envs.make("a folder/mazes.py:Maze")


@pytest.mark.parametrize(("missing", "package"), [("gymnasium", "lehr[gym]"), ("no_such_package", "no_such_package")])
def test_a_package_that_the_user_s_module_needs_is_named(folder, monkeypatch, missing, package):
    (folder / "needy.py").write_text(f"import {missing}\nclass Maze: pass\n")
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(InputError) as found:
        plugins.import_object("needy:Maze", "environment")
    assert str(found.value) == (
        f"The environment 'needy:Maze' needs the package {missing}, which is not installed: pip install '{package}'."
    )
