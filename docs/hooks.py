"""What `make docs` adds to the pages: files from outside docs/, and what is read from the code.

A comment such as `<!-- commands -->` in a page is where the generated part goes.
"""

import os
import posixpath
import re
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from lehr import algorithms
from lehr.algorithms.vocabulary import coefficients
from lehr.cli import COMMANDS, make_parsers

ROOT = Path(__file__).resolve().parent.parent
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
FROM_OUTSIDE = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "installation.md": "README.md#installation",
}
"""Pages of the site that are files outside docs/, or a section of one."""
PAGE_OF = {file: page for page, file in FROM_OUTSIDE.items()} | {"README.md": "index.md"}
WIDTH = 80
"""Columns of the help texts."""
WITHOUT_SIDEBARS = ("index.md", "gallery.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are outside docs/."""
    for page, file in FROM_OUTSIDE.items():
        name, _, section = file.partition("#")
        text = (ROOT / name).read_text(encoding="utf-8")
        if section:
            title = section.capitalize()
            text = f"# {title}\n" + text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in what is generated, and lead links to files outside docs/ to their page, or to the repository."""
    for name, write in GENERATED.items():
        marker = f"<!-- {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, write())
    here = page.file.src_uri
    if here in WITHOUT_SIDEBARS:
        page.meta["hide"] = ["navigation", "toc"]
    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", lambda link: f"]({_target(here, link[1], link[2] or '')})", markdown)


def _target(page: str, target: str, anchor: str) -> str:
    """Where a link from a page leads on the site."""
    if ":" in target:
        return target + anchor
    base = "." if page in FROM_OUTSIDE else posixpath.dirname(f"docs/{page}")
    file = posixpath.normpath(posixpath.join(base, target))
    if file.startswith("docs/"):
        found = file.removeprefix("docs/")
    elif file + anchor in PAGE_OF:
        found, anchor = PAGE_OF[file + anchor], ""
    elif file in PAGE_OF:
        found = PAGE_OF[file]
    elif file.startswith("examples/") and file.endswith(".py"):
        found, anchor = "examples.md", f"#{posixpath.basename(file).replace('.', '')}"
    elif (ROOT / file).exists():
        return f"{SOURCE}/blob/main/{file}{anchor}"
    else:
        return target + anchor  # broken: MkDocs says so
    return posixpath.relpath(found, posixpath.dirname(page) or ".") + anchor


def _commands() -> str:
    """The help of each command, and of `train` with each algorithm."""
    os.environ["COLUMNS"] = str(WIDTH)
    parts = []
    for name in COMMANDS:
        parts.append(f"## lehr {name}\n\n{_help(name)}")
        if name == "train":
            parts += [f"### lehr train {algorithm}\n\n{_help(name, algorithm)}" for algorithm in algorithms.names()]
    return "\n\n".join(parts)


def _help(name: str, *words: str) -> str:
    text = make_parsers([name, *(words or ["--help"])])[0][name].format_help()
    return f"```text\n{text}```"


def _coefficients() -> str:
    """A table of the coefficients, and one of their defaults in each algorithm."""
    known = coefficients()
    lines = ["| name | range | meaning | other names |", "|---|---|---|---|"]
    for entry in known.values():
        aliases = ", ".join(f"`{alias}`" for alias in entry.aliases)
        lines.append(f"| `{entry.name}` | {entry.range_text} | {entry.summary} | {aliases} |")
    names = algorithms.names()
    defaults = {name: {field.name: field.default for field in fields(algorithms.find(name).Config)} for name in names}
    lines += ["", "## Defaults", "", f"| name | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for coefficient in known:
        cells = [_default(defaults[name].get(coefficient, "")) for name in names]
        if any(cells):
            lines.append(f"| `{coefficient}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _default(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else str(value)
    return f"`{text}`" if text else ""


def _examples() -> str:
    """The scripts, each under its name."""
    parts = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        parts.append(f"## {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```")
    return "\n\n".join(parts)


GENERATED: dict[str, Callable[[], str]] = {
    "commands": _commands,
    "coefficients": _coefficients,
    "examples": _examples,
}
