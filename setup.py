"""The readme of the package: README.md, with absolute links, since a package page has no files beside it.

Everything else about the package is in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent


def absolute_links(text: str, repository: str) -> str:
    """Make the relative links in Markdown absolute: pictures to the files themselves, all others to their pages."""
    files = repository.replace("https://github.com/", "https://raw.githubusercontent.com/") + "/main/"
    text = re.sub(r"(!\[[^]]*\]\()(?!https?://)", rf"\g<1>{files}", text)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?://|#)", rf"\g<1>{repository}/blob/main/", text)


project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
readme = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
    long_description=absolute_links(readme, project["urls"]["Source"]),
    long_description_content_type="text/markdown",
)
