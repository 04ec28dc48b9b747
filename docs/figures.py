"""Redraw the schedule plots in the docs: run every `lehr schedule ... --plot FILE` command on the pages."""

import contextlib
import os
import re
import shlex
from pathlib import Path

from lehr.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "schedules.md")


def commands(page: Path) -> list[list[str]]:
    """The arguments of each `lehr` command in a page's console blocks."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith("$ lehr ")]


def draw() -> None:
    """Run the commands that save a figure from the repository root, as a reader would."""
    os.chdir(ROOT)
    for page in PAGES:
        for arguments in commands(page):
            if "--plot" not in arguments:
                continue
            with open(os.devnull, "w", encoding="utf-8") as silence, contextlib.redirect_stdout(silence):
                code = main(arguments)
            if code:
                raise SystemExit(f"{page.name}: lehr {shlex.join(arguments)} failed")
            print(arguments[arguments.index("--plot") + 1])


if __name__ == "__main__":
    draw()
