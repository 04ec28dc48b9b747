"""The site: it builds without a warning, no link is broken, and every page loads in a browser without errors."""

import functools
import http.server
import json
import os
import posixpath
import re
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin

import numpy as np
import pytest

import lehr
from lehr import algorithms
from lehr.algorithms.vocabulary import coefficients
from lehr.cli import COMMANDS
from tests.browser import CHROMIUM, Browser
from tests.random_schedules import texts

ROOT = Path(__file__).parent.parent
pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The directory of the site, built as `make docs` does, without a way to the network."""
    out = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, **nowhere, "PYTHONPATH": paths, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Page(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loaded, self.anchors = [], [], {"", "__top"}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("prev", "next", "canonical"):
            self.loaded.append(given["href"])
        elif tag in ("script", "img", "iframe") and given.get("src"):
            self.loaded.append(given["src"])


@pytest.fixture(scope="module")
def pages(site):
    """By address, without the 404 page, whose links are those of a server's root."""
    found = {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(found) > 35
    return found


def test_no_link_is_broken(site, pages):
    broken = []
    for name, page in pages.items():
        for link in page.links:
            if link.startswith(("https://", "mailto:")):
                continue
            target, _, anchor = urljoin(f"/{name}", link).lstrip("/").partition("#")
            target = posixpath.join(target, "index.html") if target == "" or target.endswith("/") else target
            if target in pages:
                if unquote(anchor) not in pages[target].anchors:
                    broken.append(f"{name}: {link}")
            elif not (site / target).is_file():
                broken.append(f"{name}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(site, pages):
    for name, page in pages.items():
        for address in page.loaded:
            assert not re.match(r"(\w+:)?//", address), f"{name}: {address}"
            assert (site / urljoin(f"/{name}", address).lstrip("/")).is_file(), f"{name}: {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(.?(https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet


def test_the_reference_is_complete(pages):
    documented = pages["reference/api/index.html"].anchors
    assert {f"lehr.{name}" for name in lehr.__all__ if name not in ("__version__", "envs")} <= documented
    assert {"lehr.envs.make", "lehr.spaces.Box"} <= pages["reference/environments/index.html"].anchors
    assert {"lehr.algorithms.base.Algorithm.learn"} <= pages["reference/extending/index.html"].anchors
    sections = pages["reference/commands/index.html"].anchors
    assert {f"lehr-{name}" for name in COMMANDS} | {f"lehr-train-{name}" for name in algorithms.names()} <= sections


def test_no_formula_is_left_as_latex(site):
    """The pages write formulas as text; nothing here would draw LaTeX in a docstring."""
    for path in (site / "reference").rglob("*.html"):
        text = re.sub(r"<[^>]*>", "", path.read_text(encoding="utf-8"))
        assert not re.search(r"\$[^$\n]+\$", text), path


def test_the_table_of_coefficients_is_filled_in(site):
    text = (site / "reference" / "coefficients" / "index.html").read_text(encoding="utf-8")
    rows = re.findall(r"<td><code>(\w+)</code></td>", text)
    assert set(rows) >= set(coefficients())


# In a browser ------------------------------------------------------------------------------------------------------

WIDE, NARROW = 1400, 390
LOADED = "document.readyState === 'complete'"
PICTURES = "[...document.images].filter((each) => each.complete && !each.naturalWidth).map((each) => each.src)"
browser_needed = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, such as Debian's package chromium")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(site):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@browser_needed
@pytest.mark.slow
def test_every_page_loads_and_fits_on_both_screens(browser, address, pages):
    problems = []
    for name in sorted(pages):
        browser.open(address + name.removesuffix("index.html"), ready=LOADED)
        problems += [f"{name}: {error}" for error in browser.errors]
        problems += [f"{name}: picture {source}" for source in browser.evaluate(PICTURES)]
        problems += [f"{name}: asks for {each}" for each in browser.requests if not each.startswith((address, "data:"))]
        for width in (WIDE, NARROW):
            browser.resize(width, 900)
            used = browser.evaluate("document.documentElement.scrollWidth")
            if used > width:
                problems.append(f"{name}: {used} pixels wide on a screen of {width}")
    assert problems == []


@browser_needed
def test_search_and_dark_colours(browser, address):
    browser.open(address, "dark", ready=LOADED)
    browser.wait_for("document.body.dataset.mdColorScheme === 'slate'")
    browser.evaluate("document.querySelector('input[name=query]').focus()")
    time.sleep(0.2)
    browser.call("Input.insertText", text="warmup")
    browser.wait_for("document.querySelectorAll('.md-search-result__link').length > 0")
    found = browser.evaluate("[...document.querySelectorAll('.md-search-result__link')].map((each) => each.href)")
    assert any("/schedules/" in link for link in found)
    assert browser.errors == []


TOTAL = 1_000_000
STEPS = [0, 1, 12_345, 125_000, 200_000, 333_333, 500_000, 800_000, 999_999, TOTAL, 2 * TOTAL]
ANSWERS = """texts.map((text) => {
    try { const { at } = Lehr.schedule(text, total); return [steps.map(at), null]; }
    catch (error) { if (error instanceof Lehr.ScheduleError) return [null, error.message]; throw error; }
})"""


def answer(text):
    """The values of a schedule, or the message of its error."""
    try:
        return [lehr.schedule(text, TOTAL)(step) for step in STEPS], None
    except lehr.InputError as error:
        return None, str(error)


def compared(message):
    """A message without what only Python says: a suggestion for a word, and the canonical text of the schedule."""
    message = re.sub(r"(unknown word .*?); (did you mean|known: ).*", r"\1", message)
    return re.sub(r"^(Phase \d+) of '.*?' would", r"\1 would", message)


@browser_needed
def test_the_page_understands_schedules_as_python_does(browser, address):
    misplaced = ["1 -> 0 linear warmup 5%", "1 -> 0 over 5k cosine", "1 -> 0 over 5k step", "1 -> 0 over 5k steps"]
    given = [
        *texts(1_000),
        *misplaced,
        "1 -> 0 over 5m",
        "0.1 over 1,000",
        "0.2 -> 0.1 over 1,234,567",
        "0.2 -> 0.1 over 1,500, 1",
        "1 over 5, 100",
        "1 at 0,100 at 1e5,200 at 2_000_00",
        "1 over 5k,100 -> 1",
        "",
        "cosine",
        "0.1 at 5",
        "1e400",
        "0.5 -> 0.1 repeat 20000",
        "1 -> 0 over 1e15",
    ]
    browser.open(f"{address}try-schedules/", ready=LOADED)
    names = f"const texts = {json.dumps(given)}, total = {TOTAL}, steps = {STEPS};"
    answers = browser.evaluate(f"(() => {{ {names} return {ANSWERS}; }})()")
    expected = [answer(text) for text in given]
    assert sum(values is not None for values, _ in expected) > 400
    assert sum(values is None for values, _ in expected) > 200
    for text, (values, message), (theirs, their_message) in zip(given, expected, answers, strict=True):
        if values is None:
            assert theirs is None, text
            assert compared(their_message) == compared(message), text
        else:
            assert their_message is None, text
            np.testing.assert_allclose(theirs, values, rtol=1e-12, err_msg=text)


@browser_needed
def test_the_page_draws_what_is_typed(browser, address):
    browser.open(f"{address}try-schedules/", ready=LOADED)
    assert browser.evaluate("document.querySelectorAll('#schedules-drawn path').length") == 4
    browser.evaluate(
        "(() => { const form = document.getElementById('schedules'); form.elements.texts.value = '2 -> 1\\n1 -> cosine';"
        "form.elements.total.value = '200k'; form.dispatchEvent(new Event('input')); })()"
    )
    assert browser.evaluate("document.querySelectorAll('#schedules-drawn path').length") == 1
    cells = browser.evaluate("[...document.querySelectorAll('#schedules-drawn tr')].map((row) => row.textContent)")
    assert cells == ["schedule050k100k150k200k", "2 -> 121.751.51.251"]
    assert "expected a value after '->', got 'cosine'" in browser.evaluate(
        "document.querySelector('.problem').textContent"
    )
    assert browser.errors == []
