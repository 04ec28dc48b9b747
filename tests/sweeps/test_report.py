"""The report: its data, its escaping and its edge cases; how it looks and works is tested in a browser."""

import base64
import gzip
import hashlib
import json
import re
import shlex
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from lehr.errors import InputError
from lehr.sweeps import report
from lehr.sweeps.headline import facts, number, verdict
from lehr.sweeps.importance import permutation_importance
from lehr.sweeps.ranking import rank
from lehr.sweeps.report import write_report
from lehr.sweeps.report_data import command, plain, report_data, study
from lehr.sweeps.results import Halved
from lehr.sweeps.statistics import performance_profile
from tests.sweeps.example_results import example_results

plotly_offline = pytest.importorskip("plotly.offline", reason="needs lehr[sweeps]")
pytest.importorskip("sklearn", reason="needs lehr[sweeps]")

EVIL = """</script><script>alert("1")</script><img src=x onerror=alert(2)><!-- & $title ${env} ' \u2028 \ud800"""


class Page(HTMLParser):
    """A page as a browser reads it: the text in each element with an id or a class, and all tags."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.scripts, self.text, self._script = [], [], "", None
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), []))
            self._script = self.scripts[-1][1]

    def handle_endtag(self, tag):
        if tag == "script":
            self._script = None

    def handle_data(self, data):
        if self._script is None:
            self.text += data
        else:
            self._script.append(data)

    @property
    def data(self):
        return json.loads(self.script("data"))

    def script(self, identifier):
        return next("".join(parts) for attrs, parts in self.scripts if attrs.get("id") == identifier)


def page_of(results, directory):
    path = directory / "report.html"
    write_report(results, path)
    return Page(path)


@pytest.fixture(scope="module")
def example():
    return example_results(30, 4, failures=0.05)


@pytest.fixture(scope="module")
def page(example, tmp_path_factory):
    return page_of(example, tmp_path_factory.mktemp("report"))


def test_numbers_are_those_of_the_ranking(example, page):
    ranking = rank(example)
    for c, shown in enumerate(page.data["configurations"]):
        assert shown["selected"] == plain([values[c] for values in ranking.selected])
        assert shown["fresh"] == (plain(ranking.fresh[c]) if c in example.again else None)
        assert ranking.order[shown["place"] - 1] == c
        assert shown["failed"] == np.isnan(example.scores[c]).sum()
        assert shown["frozen"] == example.frozen[c].sum()
    assert page.data["top"] == ranking.order[:5].tolist()
    assert f"Configuration {ranking.winner} is the best" in page.text
    assert number(ranking.fresh[ranking.winner].value) in page.text


def test_curves_are_means_over_seeds_and_rows(example, page):
    returns = page.data["returns"]
    assert len(returns["steps"]) == 120  # few enough to be drawn as they are
    for i, c in enumerate(page.data["drawn"]):
        known = ~np.isnan(example.returns[:, c]).all(axis=1)
        expected = np.nanmean(example.returns[known, c], axis=1)
        np.testing.assert_allclose(np.array(returns["means"][i], dtype=float)[known], expected, rtol=1e-4)
    top = example.returns[:, page.data["top"]]
    np.testing.assert_allclose(returns["low"], np.nanmin(top, axis=-1).T, rtol=1e-4)
    np.testing.assert_allclose(returns["high"], np.nanmax(top, axis=-1).T, rtol=1e-4)


def test_long_curves_are_thinned_to_means_of_neighbours():
    results = example_results(30, 2, rows=1500, failures=0, again=0)
    data = report_data(results, rank(results))["returns"]
    assert len(data["steps"]) == 150
    expected = results.returns[:, rank(results).order].mean(axis=-1).reshape(150, 10, 30).mean(axis=1).T
    np.testing.assert_allclose(data["means"], expected, rtol=1e-4)
    np.testing.assert_allclose(data["steps"], results.env_steps.reshape(150, 10).mean(axis=1), rtol=1e-4)


def test_rows_without_an_episode_are_left_out_of_the_mean():
    results = example_results(2, 1, rows=2000, again=0, failures=0)
    returns = np.where(np.arange(2000)[:, None, None] % 2 == 0, np.nan, 7.0) * np.ones((1, 2, 1))
    data = report_data(replace(results, returns=returns), rank(results))["returns"]
    assert set(data["means"][0]) == {7}


def test_schedules_are_the_applied_values(example, page):
    panels = {panel["name"]: panel for panel in page.data["schedules"]["panels"]}
    assert list(panels) == ["learning_rate", "entropy_coef", "clip_range"]
    expected = example.schedules["entropy_coef"][:, page.data["drawn"]].T
    np.testing.assert_allclose(panels["entropy_coef"]["values"], expected, rtol=1e-4)
    rates = example.schedules["learning_rate"][[0, -1]][:, page.data["drawn"]].T  # constants: two ends are enough
    np.testing.assert_allclose(panels["learning_rate"]["values"], rates, rtol=1e-4)


def test_a_parameter_that_was_sampled_on_a_log_scale_has_a_logarithmic_axis(swept):
    """Their ranges are wide, but the four values of the learning rate may not be; a fixed 0 cannot be on such an axis."""
    assert swept.results.log_scaled == ("learning_rate", "entropy_coef.start")
    narrow = {"learning_rate": [1e-3, 2e-3, 3e-3], "discount": [0.9, 0.95, 0.99], "entropy_coef.end": [0.0, 1e-4, 0.1]}
    results = replace(example_results(3, 4, again=0), parameters=narrow)

    def logarithmic(**changes):
        shown = report_data(replace(results, **changes), rank(results))["parameters"]
        return [parameter["name"] for parameter in shown if parameter["log"]]

    assert logarithmic() == []
    assert logarithmic(log_scaled=("learning_rate",)) == ["learning_rate"]
    assert logarithmic(log_scaled=("entropy_coef.end",)) == []


@pytest.mark.parametrize(
    ("values", "floor"),
    [
        ([[1e-4, 1e-2]], 1e-4),  # two orders
        ([[0.1, 0.3]], None),
        ([[1.0, 1.0], [0.0, 0.0]], None),  # to 0, from equal peaks: a line is a line
        ([[1e-4, 1e-2], [0.0, 0.0]], 1e-6),  # to 0, from peaks two orders apart
        ([[-1.0, 100.0]], None),
        ([[0.0, 0.0]], None),
        ([[1.0, np.nan], [0.0, np.nan]], None),  # one configuration does not have it
    ],
)
def test_an_axis_is_logarithmic_where_it_helps(values, floor):
    results = replace(example_results(2, 1, rows=len(values), again=0), schedules={"x": np.array(values)})
    panel = report_data(results, rank(results))["schedules"]["panels"][0]
    assert panel["floor"] == floor
    if floor is not None:
        assert np.min(panel["values"]) >= floor


def test_a_coefficient_that_some_configurations_do_not_have_is_drawn_for_the_others():
    results = example_results(2, 1, rows=2, again=0)
    schedules = {"some": np.array([[np.nan, 0.2], [np.nan, 0.2]]), "none": np.full((2, 2), np.nan)}
    results = replace(results, schedules=schedules, parameters={"some": [None, 0.2], "none": [0.5, 0.8]})
    data = report_data(results, rank(results))
    (panel,) = data["schedules"]["panels"]
    assert panel["ends"]
    assert [panel["values"][data["drawn"].index(c)] for c in (0, 1)] == [[None, None], [0.2, 0.2]]
    assert [each["numeric"] for each in data["parameters"]] == [False, True]
    assert [each["values"] for each in data["configurations"]] == [[None, 0.5], ["0.2", 0.8]]
    assert [each["label"] for each in data["marginals"][0]] == ["0.2", "not set"]


def test_profiles_are_those_of_the_runs(example, page):
    profiles = page.data["profiles"]
    ranking = rank(example)
    everything = {line["name"]: line["share"][0] for line in profiles["lines"]}
    assert list(everything) == ["winner", "best 3 configurations", "all configurations"]
    thresholds = np.array(profiles["thresholds"])
    winner = performance_profile(ranking.runs[ranking.winner][None], thresholds)
    np.testing.assert_allclose(everything["winner"], winner, atol=1e-4)
    runs = np.nan_to_num(np.concatenate(ranking.runs), nan=-np.inf)
    assert len(runs) == 25 * 4 + 5 * 5
    expected = (runs > thresholds[:, None]).mean(axis=1)
    np.testing.assert_allclose(everything["all configurations"], expected, atol=1e-4)


def test_the_importance_and_the_marginals_are_in_it(example, page):
    assert page.data["importance"]["names"][0] == "learning_rate"
    assert page.data["importance"]["r_squared"] > 0.5
    by_name = dict(zip(example.parameters, page.data["marginals"], strict=True))
    assert [each["label"] for each in by_name["activation"]] == ["relu", "swish", "tanh"]
    selected = rank(example).selected.value
    relu = np.array(example.parameters["activation"]) == "relu"
    assert by_name["activation"][0]["score"][0] == pytest.approx(selected[relu].mean(), rel=1e-4)


def test_what_was_studied_before_is_used_if_it_fits(example, monkeypatch):
    ranking = rank(example)
    known = study(example, ranking)
    whole = report_data(example, ranking)
    found = []

    def counted(*given):
        found.append(given)
        return permutation_importance(*given)

    monkeypatch.setattr("lehr.sweeps.report_data.permutation_importance", counted)
    assert report_data(example, ranking, known) == whole
    assert not found
    other = known._replace(scores=known.scores + 1)
    assert report_data(example, ranking, other) == whole
    assert len(found) == 1


def test_the_page_asks_the_network_for_nothing(page):
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "base"), tag
        assert not {"src", "href", "action", "onclick"} & set(attributes), (tag, attributes)
    assert "url(" not in page.source[: page.source.index("</style>")]
    assert "@import" not in page.source[: page.source.index("</style>")]


def test_only_the_two_scripts_may_run(page):
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    directives = dict(directive.strip().split(" ", 1) for directive in policy.split(";"))
    assert directives["default-src"] == "'none'"
    library = gzip.decompress(base64.b64decode(page.script("library")))
    assert library.decode() == plotly_offline.get_plotlyjs()
    own = [parts for attrs, parts in page.scripts if attrs.get("type") == "module"]
    assert len(own) == 1
    assert len(page.scripts) == 3
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(s).digest()).decode()}'" for s in (library, "".join(own[0]).encode())
    ]
    assert directives["script-src"].split() == [*hashes, "'unsafe-eval'"]


def test_texts_of_the_user_are_escaped(tmp_path):
    results = example_results(25, 2)
    hostile = replace(
        results,
        title=EVIL,
        env=EVIL,
        algorithm=EVIL,
        parameters={EVIL: [EVIL] * 25, "learning_rate": results.parameters["learning_rate"]},
        texts=[{EVIL: EVIL}] * 25,
        schedules={EVIL: results.schedules["entropy_coef"]},
        notes={EVIL: EVIL},
    )
    page, harmless = page_of(hostile, tmp_path), page_of(results, tmp_path)
    assert len(page.scripts) == 3
    assert sorted({tag for tag, _ in page.tags}) == sorted({tag for tag, _ in harmless.tags})
    assert page.text.count(EVIL.replace("\ud800", "?")) >= 5
    assert page.data["parameters"][0]["name"] == EVIL
    assert page.data["configurations"][0]["values"][0] == EVIL


def test_the_command_is_read_by_a_shell_as_it_was_meant():
    results = replace(
        example_results(2, 1, again=0), texts=[{"entropy_coef": "0.03 -> 0 over 50%"}, {"reward_scale": "-1"}]
    )
    results = replace(results, settings={"total_steps": "500k", "entropy_coef": "0.01"})
    begin = ["lehr", "train", "ppo", "--env", "CartPole-v1", "--total-steps", "500k", "--entropy-coef"]
    assert shlex.split(command(results, 0)) == [*begin, "0.03 -> 0 over 50%"]
    assert shlex.split(command(results, 1)) == [*begin, "0.01", "--reward-scale=-1"]


def test_the_verdict_says_how_sure_it_is():
    results = example_results(2, 5, again=0, failures=0)
    far = replace(results, scores=np.array([[1.0, 2, 3, 4, 5], [11, 12, 13, 14, 15]]))
    assert verdict(rank(far)).startswith("Configuration 1 is the best, with a score of 13 (95% interval ")
    assert "lead over configuration 0, the runner-up, is clear" in verdict(rank(far))
    assert "best of 2 and was not trained again" in verdict(rank(far))
    near = replace(results, scores=np.array([[1.0, 2, 3, 4, 5], [1.5, 2.5, 3.5, 4.5, 5.5]]))
    assert "lead is not clear: a run of it scores higher than one of configuration 0, the runner-up, 60%" in verdict(
        rank(near)
    )
    single = replace(far, scores=far.scores[:, :1], members=far.members[:, :1])
    assert "With 1 and 1 seeds, its lead over configuration 0, the runner-up, may be chance" in verdict(rank(single))


@pytest.mark.parametrize(("seeds", "clear"), [(2, False), (3, False), (4, True), (5, True)])
def test_a_lead_of_few_seeds_is_never_clear(seeds, clear):
    """All above all others, by chance: 2 of 2 in 1 of 6 cases, 3 in 1 of 20, 4 in 1 of 70."""
    scores = np.array([np.arange(seeds), np.arange(seeds) + 100.0])
    results = replace(example_results(2, seeds, again=0), scores=scores)
    assert ("is clear" in verdict(rank(results))) == clear


def test_equally_good_configurations_have_no_clear_winner():
    """100 sweeps of noise, where a clear lead is a false one: by its 99% interval, in a few of them at most."""
    generator = np.random.default_rng(0)
    results = example_results(2, 5, again=0, failures=0)
    sweeps = [replace(results, scores=generator.normal(size=(2, 5))) for _ in range(100)]
    assert sum("is clear" in verdict(rank(sweep)) for sweep in sweeps) <= 7


def test_the_lead_of_runs_that_selected_the_winner_is_called_too_high():
    results = example_results(8, 5, failures=0, again=0)
    fresh = replace(results, again={rank(results).winner: results.scores[rank(results).winner]})
    for sweep, expected in [(results, True), (fresh, False)]:
        leads = [fact.meaning for fact in facts(sweep, rank(sweep)) if fact.name.startswith("Beats")]
        assert ["too high" in lead for lead in leads] == [expected] * 2


def test_the_facts_tell_fresh_scores_and_failures():
    results = example_results(3, 2, again=0, failures=0)
    results = replace(
        results,
        scores=np.array([[9.0, 9], [8, np.nan], [1, 2]]),
        again={0: np.array([4.0, 6.0]), 1: np.array([3.0, 3.0])},
    )
    shown = {fact.name: fact for fact in facts(results, rank(results))}
    assert shown["Score"].number == "5"
    assert shown["Score"].meaning == "interquartile mean of 2 fresh seeds, 95% interval 4 to 6"
    assert shown["Score when selected"].number == "9"
    # Selected: 9 and (8 + 1) / 2, the failed run counted as the worst, 1; fresh: 5 and 3.
    assert shown["Score when selected"].meaning.endswith(f"the best 2 lost {((9 - 5) + (4.5 - 3)) / 2:g} on average")
    assert shown["Configurations × seeds"].number == "3 × 2"
    assert shown["Configurations × seeds"].meaning == "1 of 6 runs failed, counted as the worst score, 1"
    assert shown["Beats the runner-up"].number == "100%"


def test_fresh_runs_that_failed_are_told(tmp_path):
    results = replace(example_results(2, 2, failures=0, again=0), scores=np.array([[5.0, 5], [1, 1]]))
    results = replace(results, again={0: np.array([4.0, np.nan, 4.0]), 1: np.array([1.0])})
    shown = {fact.name: fact for fact in facts(results, rank(results))}
    assert shown["Score"].number == "3"  # (4 + 1 + 4) / 3
    assert "of 3 fresh seeds (1 failed)" in shown["Score"].meaning
    configurations = report_data(results, rank(results))["configurations"]
    assert [each["fresh_failed"] for each in configurations] == [1, 0]


def halved_case():
    """Results of a sweep of which most members were stopped at a tenth of the budget."""
    results = example_results(30, 1, again=0, failures=0)
    stopped = np.arange(30)[:, None] >= 4
    returns, rates = results.returns.copy(), results.schedules["learning_rate"].copy()
    returns[12:, 4:], rates[12:, 4:] = np.nan, np.nan
    halved = Halved(np.where(stopped, 50_000.0, 500_000.0), np.full((30, 1), 20.0), stopped)
    scores = np.where(stopped, np.nan, results.scores)
    return replace(results, returns=returns, scores=scores, schedules={"learning_rate": rates}, halved=halved)


def edge_case(name):
    """Results at the edges of what a sweep may give."""
    results = example_results(12, 3)
    return {
        "one configuration and one seed": example_results(1, 1, again=0, failures=0),
        "one row": example_results(8, 2, rows=1),
        "no rows": replace(
            results,
            env_steps=results.env_steps[:0],
            returns=results.returns[:0],
            schedules={name: values[:0] for name, values in results.schedules.items()},
        ),
        "nothing swept": replace(example_results(3, 4), parameters={}, texts=[{}] * 3, schedules={}),
        "all failed": replace(results, scores=results.scores * np.nan, again={}, returns=results.returns * np.nan),
        "equal scores": replace(example_results(30, 2, again=0), scores=np.full((30, 2), 3.0)),
        "fewer seeds": replace(results, members=np.where(np.arange(3) < [[1], [3], [2]] * 4, results.members, -1)),
        "stopped early": halved_case(),
        "values missing": replace(results, parameters={"x": [None, 1.5] * 6, "y": [None, "a"] * 6, "z": [None] * 12}),
    }[name]


EDGES = [
    "one configuration and one seed",
    "one row",
    "no rows",
    "nothing swept",
    "all failed",
    "equal scores",
    "fewer seeds",
    "values missing",
    "stopped early",
]


@pytest.mark.parametrize("name", EDGES)
def test_edges_have_a_page(name, tmp_path):
    results = edge_case(name)
    page = page_of(results, tmp_path)
    assert len(page.data["configurations"]) == len(results.scores)
    assert ("nothing to rank" in page.text) == (name == "all failed")


def test_a_sweep_without_configurations_is_refused(tmp_path):
    with pytest.raises(InputError, match="no configurations"):
        write_report(replace(example_results(1, 1), scores=np.zeros((0, 1))), tmp_path / "report.html")


def test_a_thousand_configurations_make_a_small_page(tmp_path):
    page = page_of(example_results(1000, 5, rows=2000), tmp_path)
    assert len(page.data["configurations"]) == 1000
    assert len(page.data["returns"]["means"]) == 1000
    assert len(page.source) < 6e6


def test_more_curves_than_can_be_seen_are_drawn_evenly_by_place():
    results = example_results(2500, 1, rows=3, again=0)
    drawn = report_data(replace(results, parameters={}), rank(results))["drawn"]
    places = rank(results).place[drawn]
    assert len(places) == 1000
    assert places[:5].tolist() == [1, 2, 3, 4, 5]
    assert places[-1] == 2500
    assert np.diff(places).max() <= 3


def test_arrays_are_rounded_as_numbers_are():
    rng = np.random.default_rng(0)
    values = np.append(rng.normal(size=1998) * 10 ** rng.uniform(-9, 9, 1998), [np.nan, -0.0]).reshape(4, 5, 100)
    assert plain(values) == plain(values.tolist())
    assert plain(np.zeros((2, 0))) == [[], []]


def test_the_same_results_give_the_same_page(example, tmp_path, page):
    assert page_of(example, tmp_path).source == page.source


def test_without_plotly_the_error_tells_what_to_install(monkeypatch, tmp_path):
    report._library.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(InputError, match=r"pip install 'lehr\[sweeps\]'"):
        write_report(example_results(2, 2), tmp_path / "report.html")


def test_scripts_and_page_name_the_same_elements(page):
    """Every element that the scripts look for by its id is on the page."""
    own = next("".join(parts) for attrs, parts in page.scripts if attrs.get("type") == "module")
    wanted = set(re.findall(r'getElementById\("(\w+)"\)', own))
    assert wanted
    assert wanted <= {attrs["id"] for _, attrs in page.tags if "id" in attrs}
