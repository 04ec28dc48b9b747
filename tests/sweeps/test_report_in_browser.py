"""The report in headless Chromium: it loads without errors or requests, and its table and charts work."""

import pytest

from lehr.sweeps.ranking import rank
from lehr.sweeps.report import write_report
from tests.browser import CHROMIUM, Browser
from tests.sweeps.example_results import example_results
from tests.sweeps.test_report import EDGES, EVIL, edge_case, replace

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, such as Debian's package chromium")

CHARTS = "[...document.querySelectorAll('.chart')].filter((each) => each.offsetParent)"
CONFIGURATIONS = "[...document.querySelectorAll('tbody tr')].map((row) => parseInt(row.cells[1].textContent))"


@pytest.fixture(scope="module")
def results():
    return example_results(60, 3, failures=0.05)


@pytest.fixture(scope="module")
def browser(results, tmp_path_factory):
    directory = tmp_path_factory.mktemp("browser")
    write_report(results, directory / "report.html")
    with Browser(directory / "profile") as browser:
        browser.open(directory / "report.html")
        yield browser


@pytest.fixture(scope="module")
def second_browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


def head(name):
    return f"[...document.querySelectorAll('th button')].find((each) => each.textContent === '{name}')"


def cells(name):
    """The texts of one column."""
    column = f"[...document.querySelectorAll('th')].findIndex((each) => each.textContent === '{name}')"
    return f"[...document.querySelectorAll('tbody tr')].map((row) => row.cells[{column}].firstChild.textContent)"


def type_text(browser, text):
    browser.evaluate(
        "(() => { const box = document.querySelector('input[type=search]');"
        f"box.value = {text!r}; box.dispatchEvent(new Event('input')); }})()"
    )


def test_it_loads_without_errors_and_asks_for_nothing_else(browser):
    assert browser.errors == []
    addresses = [address for address in browser.requests if not address.startswith(("data:", "blob:"))]
    assert len(addresses) == 1
    assert addresses[0].endswith("report.html")


def test_the_policy_refuses_a_request_and_a_script(browser):
    """The check above can fail: a page that asks for something is seen, and refused."""
    assert browser.evaluate("fetch('https://example.com/').then(() => 'sent', () => 'refused')") == "refused"
    browser.evaluate(
        "(() => { const made = document.createElement('script'); made.textContent = 'window.ran = 1';"
        "document.body.append(made); })()"
    )
    assert browser.evaluate("window.ran === undefined")
    assert len(browser.errors) >= 2
    browser.errors.clear()


def test_every_chart_is_drawn(browser, results):
    assert browser.evaluate(f"{CHARTS}.length") == 1 + len(results.schedules) + 1 + 1 + len(results.parameters) + 1
    assert browser.evaluate(f"{CHARTS}.every((each) => each.querySelector('.main-svg'))")
    assert browser.evaluate("document.querySelectorAll('#coordinates .no-webgl').length") == 0
    assert browser.evaluate("document.querySelectorAll('#returns .legendtext').length") == 5


def test_axes_have_the_names_of_the_parameters(browser, results):
    def texts(places):
        return browser.evaluate(f"[...document.querySelectorAll('{places}')].map((each) => each.textContent)")

    assert sorted(texts("#importance > .chart .ytick text")) == sorted(results.parameters)
    assert texts("#importance .panels .gtitle") == list(results.parameters)
    assert texts("#schedules .gtitle") == list(results.schedules)
    assert texts("#coordinates .axis-title") == [*results.parameters, "score"]


def test_the_table_is_in_the_order_of_the_ranking(browser, results):
    assert browser.evaluate(CONFIGURATIONS) == rank(results).order.tolist()


def test_sorting_by_a_column_and_back(browser, results):
    rates = results.parameters["learning_rate"]
    ascending = sorted(range(60), key=rates.__getitem__)
    browser.evaluate(f"{head('learning_rate')}.click()")
    assert browser.evaluate(CONFIGURATIONS) == ascending
    assert browser.evaluate(f"{head('learning_rate')}.parentElement.ariaSort") == "ascending"
    browser.evaluate(f"{head('learning_rate')}.click()")
    assert browser.evaluate(CONFIGURATIONS) == ascending[::-1]
    browser.evaluate(f"{head('activation')}.click()")
    assert browser.evaluate(cells("activation")) == sorted(results.parameters["activation"])
    browser.evaluate(f"{head('score')}.click()")  # the highest first
    selected = rank(results).selected.value
    assert browser.evaluate(CONFIGURATIONS)[0] == selected.argmax()
    browser.evaluate(f"{head('fresh score')}.click()")
    fresh = [text != "–" for text in browser.evaluate(cells("fresh score"))]
    assert fresh == [True] * 5 + [False] * 55
    browser.evaluate(f"{head('fresh score')}.click()")  # what has none stays last
    assert [text != "–" for text in browser.evaluate(cells("fresh score"))] == fresh
    browser.evaluate(f"{head('place')}.click()")
    assert browser.evaluate(CONFIGURATIONS) == rank(results).order.tolist()


def test_filtering_by_text(browser, results):
    type_text(browser, "TANH cosine")
    expected = {c for c, name in enumerate(results.parameters["activation"]) if name == "tanh"}
    assert set(browser.evaluate(CONFIGURATIONS)) == expected
    assert browser.evaluate("document.querySelector('.count').textContent") == f"{len(expected)} of 60 configurations"
    type_text(browser, "no such thing")
    assert browser.evaluate(CONFIGURATIONS) == []
    browser.evaluate("document.querySelector('.clear').click()")
    assert len(browser.evaluate(CONFIGURATIONS)) == 60


def test_a_range_of_the_parallel_coordinates_filters_the_table(browser, results):
    """Drag with the mouse along the axis of clip_range, from a quarter to three quarters of its height."""
    axis = list(results.parameters).index("clip_range")
    chart = "document.querySelector('#coordinates .chart')"
    browser.evaluate(f"{chart}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    left, top, width, height = browser.evaluate(
        f"(({{x, y, width, height}}) => [x, y, width, height])({chart}.querySelectorAll('.axis .domain')[{axis}]"
        ".getBoundingClientRect())"
    )
    for kind, share in [
        ("mouseMoved", 0.25),
        ("mousePressed", 0.25),
        *[("mouseMoved", 0.25 + step / 20) for step in range(11)],
        ("mouseReleased", 0.75),
    ]:
        pressed = {"button": "left", "buttons": 1, "clickCount": 1} if kind != "mouseMoved" or share > 0.25 else {}
        browser.call("Input.dispatchMouseEvent", type=kind, x=left + width / 2, y=top + share * height, **pressed)
    browser.wait_for(f"{CONFIGURATIONS}.length < 60")
    (low, high) = browser.evaluate(f"{chart}.data[0].dimensions[{axis}].constraintrange")
    values = results.parameters["clip_range"]
    span = max(values) - min(values)
    assert [low, high] == pytest.approx([min(values) + 0.25 * span, max(values) - 0.25 * span], abs=0.05 * span)
    expected = {c for c, value in enumerate(values) if low <= value <= high}
    assert set(browser.evaluate(CONFIGURATIONS)) == expected
    browser.evaluate("document.querySelector('.clear').click()")
    assert len(browser.evaluate(CONFIGURATIONS)) == 60
    browser.wait_for(f"!{chart}.data[0].dimensions.some((each) => each.constraintrange)")


def test_the_settings_are_copied_as_a_command(browser, results):
    browser.evaluate(
        "navigator.clipboard.writeText = async (text) => { window.copied = text; };"
        "document.querySelector('tbody tr td button').click()"
    )
    text = results.texts[rank(results).winner]["entropy_coef"]
    assert "lehr train ppo --env CartPole-v1 --learning-rate" in browser.evaluate("window.copied")
    assert f"--entropy-coef '{text}'" in browser.evaluate("window.copied")
    browser.evaluate("window.copied = ''; document.querySelector('#winner button').click()")
    assert f"--entropy-coef '{text}'" in browser.evaluate("window.copied")


def test_the_theme_changes_page_and_charts(browser):
    look = "[document.body, document.querySelector('#returns .xtick text')].map((each) => getComputedStyle(each)).map((style, i) => i ? style.fill : style.backgroundColor)"
    light = browser.evaluate(look)
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
    browser.wait_for(f"{look}[1] !== '{light[1]}'")
    browser.evaluate("document.getElementById('theme').click()")
    browser.wait_for(f"JSON.stringify({look}) === JSON.stringify({light!r})".replace("'", '"'))
    assert browser.errors == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EDGES, "hostile"])
def test_edges_load_without_errors(name, second_browser, tmp_path):
    if name == "hostile":
        results = example_results(25, 2)
        results = replace(
            results, title=EVIL, env=EVIL, texts=[{EVIL: EVIL}] * 25, schedules={EVIL: results.schedules["entropy_coef"]},
            parameters={EVIL: [EVIL, "<b>"] * 12 + ["$x$"], "$x$": results.parameters["learning_rate"]},
        )  # fmt: skip
    else:
        results = edge_case(name)
    write_report(results, tmp_path / "report.html")
    second_browser.open(tmp_path / "report.html", "dark")
    assert second_browser.errors == []
    assert [
        address for address in second_browser.requests if not address.startswith(("data:", "blob:"))
    ] == second_browser.requests[:1]
    assert second_browser.evaluate(f"{CHARTS}.every((each) => each.querySelector('.main-svg'))")
    assert len(second_browser.evaluate(CONFIGURATIONS)) == len(results.scores)
    assert second_browser.evaluate("document.querySelectorAll('.chart img, .chart script, .chart a[href]').length") == 0
