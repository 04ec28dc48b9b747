"""The report of a sweep: one HTML page that holds everything it needs and asks the network for nothing.

The page is `page/page.html` with the style, the scripts and the data put in. Its security policy lets run the two
scripts whose hashes it names and forbids every request, so a title that is not what it seems can do nothing.
"""

import base64
import contextlib
import functools
import gzip
import hashlib
import html
import importlib
import json
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np

from lehr.errors import InputError
from lehr.files import replaced
from lehr.sweeps.headline import facts, verdict
from lehr.sweeps.importance import load_packages
from lehr.sweeps.ranking import Ranking, rank
from lehr.sweeps.report_data import Studied, command, report_data
from lehr.sweeps.results import Results

_SCRIPTS = ("shared.js", "charts.js", "panels.js", "coordinates.js", "table.js", "page.js")
"""The page's own scripts, put together in this order as one module."""


def prepare_report() -> None:
    """Load what a report needs, which takes a second, so that `write_report` is faster."""
    with contextlib.suppress(InputError):  # write_report tells what is missing
        _library()
        load_packages()


def write_report(results: Results, path: Path, known: Studied | None = None) -> None:
    """Write the report of a sweep as one self-contained HTML file. It needs the extra `sweeps`.

    Args:
        results: of the sweep.
        path: the file.
        known: what `study` found already.
    """
    library = _library()
    if not results.scores.size:
        raise InputError("The sweep has no configurations to report; train it first.")
    page = _page(results, rank(results), library, known)
    with replaced(Path(path)) as file:
        file.write(page.encode("utf-8", "replace"))


def _page(results: Results, ranking: Ranking, library: "Library", known: Studied | None) -> str:
    script = "\n".join(_part(name) for name in _SCRIPTS)
    # The charts' library writes its shaders' callers as code, hence unsafe-eval: for these two scripts alone.
    policy = (
        f"default-src 'none'; script-src {library.hash} {_hash(script)} 'unsafe-eval'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return Template(_part("page.html")).substitute(
        policy=policy,
        style=_part("page.css"),
        title=_text(results.title),
        env=_text(results.env),
        algorithm=_text(results.algorithm),
        verdict=_text(verdict(ranking)),
        facts="\n".join(
            f'<div class="fact"><dt>{_text(fact.name)}</dt><dd class="number">{_text(fact.number)}</dd>'
            f'<dd class="meaning">{_text(fact.meaning)}</dd></div>'
            for fact in facts(results, ranking)
        ),
        # A line of it may end before a flag, not at any of its hyphens.
        command="" if np.isnan(ranking.worst) else _text(command(results, ranking.winner)).replace(" --", " <wbr>--"),
        notes="\n".join(
            f"<div><dt>{_text(name)}</dt><dd>{_text(note)}</dd></div>" for name, note in results.notes.items()
        ),
        data=_json(report_data(results, ranking, known)),
        library=library.compressed,
        script=script,
    )


def _text(text: Any) -> str:
    return html.escape(str(text))


def _json(value: Any) -> str:
    """JSON that may stand in a script element: it holds neither tags nor comments."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _part(name: str) -> str:
    return resources.files("lehr.sweeps").joinpath("page", name).read_text(encoding="utf-8")


class Library(NamedTuple):
    """The library that draws the charts, plotly.js, as the Python package carries it."""

    hash: str
    """Of its source, for the page's security policy."""
    compressed: str
    """Its source, compressed, as text."""


@functools.cache
def _library() -> Library:
    try:
        source = importlib.import_module("plotly.offline").get_plotlyjs()
    except ImportError:
        raise InputError(
            "The report of a sweep needs plotly, which is not installed; run pip install 'lehr[sweeps]'."
        ) from None
    return Library(_hash(source), base64.b64encode(gzip.compress(source.encode(), 9, mtime=0)).decode())
