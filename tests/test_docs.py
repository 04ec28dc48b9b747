"""The pages: their Python runs, their commands work, their links lead somewhere, their tables are true."""

import contextlib
import doctest
import io
import re
import runpy
import shlex
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import lehr
from lehr import algorithms
from lehr.algorithms.vocabulary import coefficients
from lehr.cli import main
from lehr.config import describe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES_OF_ALGORITHMS = {name: ROOT / "docs" / f"{name}.md" for name in algorithms.names()}
figures = runpy.run_path(str(ROOT / "docs" / "figures.py"))
COMMAND_LINES = [arguments for page in PAGES for arguments in figures["commands"](page)]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def has_ratio(algorithm):
    return any(field.name == "train_ratio" for field in describe(algorithms.find(algorithm).Config))


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "schedules.md"], ids=lambda page: page.name)
def test_python_of_the_pages(page):
    found = [block for block in blocks(page, "python") if block.startswith(">>> ")]
    assert found
    # What the reader of a PyTorch loop has already:
    names = {"policy_loss": 0.0, "entropy": 1.0, "optimizer": SimpleNamespace(param_groups=[{"lr": 0.0}])}
    test = doctest.DocTestParser().get_doctest("\n".join(found), names, page.name, str(page), 0)
    report = io.StringIO()
    failed, tried = doctest.DocTestRunner().run(test, out=report.write)
    assert tried >= len(found)
    assert not failed, report.getvalue()


@pytest.mark.parametrize(
    "page",
    [
        ROOT / "README.md",
        *(
            pytest.param(page, marks=pytest.mark.long if has_ratio(name) else pytest.mark.slow)
            for name, page in PAGES_OF_ALGORITHMS.items()
        ),
    ],
    ids=lambda page: page.name,
)
@pytest.mark.usefixtures("compiled_quickly")
def test_training_shown_in_the_pages(page, tmp_path, monkeypatch):
    """The block as it is shown, with a smaller budget, and with fewer gradient steps where there is a ratio of them."""
    (block,) = [block for block in blocks(page, "python") if "lehr.train" in block]
    assert "150_000" in block
    monkeypatch.chdir(tmp_path)
    names = {"observation": np.zeros(4, np.float32), "key": __import__("jax").random.key(0)}
    ratio = ", train_ratio=4" if page.stem in algorithms.names() and has_ratio(page.stem) else ""
    exec(block.replace("150_000", f"5_000, evaluate_episodes=2, progress=False{ratio}"), names)
    assert names["action"] in (0, 1)
    assert names["result"].config["entropy_coef"] == "0.03 -> 0.001 cosine"


@pytest.mark.parametrize("arguments", COMMAND_LINES, ids=" ".join)
def test_schedule_commands_of_the_pages(capsys, tmp_path, arguments):
    shown = arguments.copy()
    if "--plot" in shown:
        place = shown.index("--plot") + 1
        kept = ROOT / shown[place]
        shown[place] = str(tmp_path / kept.name)
    assert main(shown) == 0
    if "--plot" in shown:
        written = Path(shown[place]).read_text(encoding="utf-8")
        words = re.findall(r"<text[^>]*>([^<]+)", written)
        assert words == re.findall(r"<text[^>]*>([^<]+)", kept.read_text(encoding="utf-8")), "run make figures"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_console_output_of_the_pages(page):
    for block in blocks(page, "console"):
        command, _, shown = block.partition("\n")
        if shown:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                main(shlex.split(command)[2:])
            assert printed.getvalue() == shown


def headings(page):
    titles = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_the_pages(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        file, _, heading = target.partition("#")
        led_to = page.parent / file if file else page
        assert led_to.is_file()
        assert not heading or heading in headings(led_to)


def test_every_picture_is_shown_in_a_page():
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())
    }
    assert {path.resolve() for path in (ROOT / "docs" / "img").iterdir()} == shown


def test_texts_of_the_pages_parse():
    texts = [text for page in PAGES for text in re.findall(r"^\| `([^`]+)` \| [^|]+ \|$", page.read_text(), re.M)]
    schedules = [text for text in texts if "->" in text or text[0].isdigit()]
    assert len(schedules) > 20
    for text in schedules:
        lehr.schedule(text, total_steps=10_000_000)


def test_table_of_coefficients_in_the_page():
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    for entry in coefficients().values():
        aliases = ", ".join(f"`{alias}`" for alias in entry.aliases)
        assert f"\n| `{entry.name}` | {aliases} | {entry.range_text} | {entry.summary} |\n" in page


@pytest.mark.parametrize("algorithm", PAGES_OF_ALGORITHMS)
def test_defaults_in_the_page_of_an_algorithm(algorithm):
    page = PAGES_OF_ALGORITHMS[algorithm].read_text(encoding="utf-8")
    config = algorithms.find(algorithm).Config
    for field in describe(config):
        assert f"`{field.name}`" in page or f"{field.name}=" in page, field.name
    defaults = {field.name: field.default for field in fields(config)}
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", page, re.M)
    assert len(rows) >= 6
    for name, shown in rows:
        default = defaults[name]
        assert shown.strip("`") == ("none" if default is None else str(default)), name


@pytest.mark.parametrize("folder", ["README.md", "docs/results.md"])
def test_measured_figures_stand_with_their_command(folder):
    page = (ROOT / folder).read_text(encoding="utf-8")
    for script in re.findall(r"python (bench/\w+\.py)", page):
        assert (ROOT / script).is_file()
    assert "ANNEALING" not in page
    assert "REFERENCES" not in page
