"""The package: built, installed from its wheel in an environment of its own, and fit for a package page."""

import contextlib
import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lehr

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def run(*command, cwd):
    """Run a program that sees none of this checkout, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The directory with the sdist, built from a copy of the checkout, and the wheel, built from the sdist."""
    out, source = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src" / "lehr", source / "src" / "lehr", ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-c", BUILD, "build_sdist", out, cwd=source)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(source / "unpacked", filter="data")
    (unpacked,) = (source / "unpacked").iterdir()
    run(sys.executable, "-c", BUILD, "build_wheel", out, cwd=unpacked)
    return out


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(built, tmp_path):
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    offline = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", python, *offline, wheel, cwd=tmp_path)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    # What Lehr needs comes from the environment of the tests; a line in a .pth adds no editable installs of that one.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    place = run(python, "-c", "import lehr; print(lehr.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(tmp_path)
    assert run(python.parent / "lehr", "--version", cwd=tmp_path) == f"lehr {lehr.__version__}\n"
    assert "Proximal policy optimisation" in run(python, "-m", "lehr", "list", "algorithms", cwd=tmp_path)


def required(requirements):
    """The names of all distributions that these requirements bring with them, as far as they are installed."""
    todo, seen = [(text, "") for text in requirements], set()
    while todo:
        text, extra = todo.pop()
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        for part in {"", *wanted.extras} - {known for name, known in seen if name == canonicalize_name(wanted.name)}:
            seen.add((canonicalize_name(wanted.name), part))
            with contextlib.suppress(metadata.PackageNotFoundError):
                todo += [(text, part) for text in metadata.requires(wanted.name) or []]
    return {name for name, _ in seen}


HIDING = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""
EXPORTING = """
import jax, jax.export
from lehr.acting import export
jax.export.export(jax.jit(lambda x: x))(jax.ShapeDtypeStruct((), "float32")).serialize()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "code"),
    [(None, EXPORTING), ("gymnax", "import gymnax"), ("pgx", "import pgx")],
    ids=["core", "gymnax", "pgx"],
)
def test_what_lehr_asks_for_suffices(extra, code, tmp_path):
    """Packages that are installed here for other reasons are hidden, as in a fresh environment."""
    extras = PROJECT["optional-dependencies"]
    if extra is not None and importlib.util.find_spec(extra) is None:
        pytest.skip(f"{extra} is not installed")
    asked = required([*PROJECT["dependencies"], *extras.get(extra, [])]) | {"lehr"}
    found = metadata.packages_distributions().items()
    hidden = [module for module, names in found if not asked & {canonicalize_name(name) for name in names}]
    assert {"pytest", "hypothesis"} <= set(hidden)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", HIDING + code, ",".join(hidden)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_everything_is_in_the_wheel(built):
    (wheel,) = built.glob("*.whl")
    here = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "lehr").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert any(name.startswith("lehr/sweeps/page/") for name in here)
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.startswith("lehr/")} == here


def test_the_package_page(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        page = email.message_from_bytes(archive.read(name))
    assert page["Version"] == lehr.__version__
    assert page["Description-Content-Type"] == "text/markdown"
    text = page.get_payload()
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", text)
    assert len(links) == len(re.findall(r"\]\(", (ROOT / "README.md").read_text(encoding="utf-8")))
    for picture, target in links:
        begin = (
            "https://raw.githubusercontent.com/lehr-rl/lehr/main/"
            if picture
            else f"{PROJECT['urls']['Source']}/blob/main/"
        )
        if "lehr-rl/lehr" in target:
            assert (ROOT / target.removeprefix(begin).partition("#")[0]).is_file(), target
        else:
            assert target.startswith(("https://", "#")), target


def test_one_version_everywhere():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {lehr.__version__}\n" in citation
    assert PROJECT["version"] == lehr.__version__
    assert f'repository-code: "{PROJECT["urls"]["Source"]}"' in citation


def test_the_readme_lists_every_extra():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = {name for row in re.findall(r"^\| `lehr\[(\S+)\]`", readme, re.MULTILINE) for name in row.split(",")}
    assert listed == PROJECT["optional-dependencies"].keys() - {"dev", "docs"}
