"""A member taken out of a sweep is an ordinary run."""

import numpy as np
import pytest

import lehr
from lehr.errors import InputError
from lehr.sweeps.directory import SweepDirectory
from lehr.sweeps.pick import pick_members


@pytest.fixture(scope="module")
def best(swept, tmp_path_factory):
    (path,) = lehr.pick(swept, "best", out=tmp_path_factory.mktemp("picked") / "best")
    return path


def test_the_best_is_the_best_member_of_the_winner(best, swept):
    winner = swept.ranking.winner
    run = lehr.load(best)
    found = np.concatenate([swept.results.scores[winner], swept.results.again[winner]])
    assert run.final["evaluate/return"] == pytest.approx(found.max())
    assert run.config["entropy_coef"] == swept.results.texts[winner]["entropy_coef"]
    assert run.metrics["update"].tolist() == list(range(1, 21))
    assert (best / "curve.png").stat().st_size > 1000


def test_its_state_is_read_and_not_made(swept, tmp_path, monkeypatch):
    monkeypatch.setattr("lehr.training.compile_options.compiled", None)
    (path,) = lehr.pick(swept, "best", out=tmp_path / "run")
    assert (path / "config.yaml").exists()


def test_it_evaluates_resumes_and_forks(best, tmp_path):
    run = lehr.load(best)
    assert len(lehr.evaluate(run.policy, run.env, episodes=3).returns) == 3
    fork = lehr.train(
        "ppo", from_run=best, run_dir=tmp_path / "fork", total_steps=32 * 24, learning_rate=1e-3, progress=False
    )
    assert int(fork.state.updates) == 24
    longer = lehr.resume(best, total_steps=32 * 30, progress=False)
    assert int(longer.state.updates) == 30
    assert longer.metrics["update"].tolist() == list(range(1, 31))


def test_the_best_member_of_any_configuration_is_taken(swept, tmp_path):
    """A number alone is a member's: 3 is the second seed of configuration 1."""
    for row in {1, swept.ranking.winner}:
        known = np.concatenate([swept.results.scores[row], swept.results.again.get(row, [])])
        (picked,) = pick_members(swept, f"c{row}", out=tmp_path / str(row))
        assert (picked.configuration, picked.score) == (row, known.max())
        run = lehr.load(picked.path)
        assert (run.config["seed"], run.config["entropy_coef"]) == (
            picked.seed,
            swept.results.texts[row]["entropy_coef"],
        )
        assert run.final["evaluate/return"] == pytest.approx(picked.score)
    (picked,) = pick_members(swept, 3, out=tmp_path / "member")
    score = swept.results.scores[1, 1]
    assert str(picked) == f"member 3: configuration 1, seed 1, score {score:.4g}"


def test_extending_a_picked_member_continues_the_run_alone(swept, tmp_path):
    """The member, extended, and a run of its settings with the longer budget differ by rounding at most."""
    member = SweepDirectory(swept.directory).read_waves()[0].members[2]
    (path,) = lehr.pick(swept, member.number, out=tmp_path / "run")
    constant = {"entropy_coef": 0.01, "learning_rate": 1e-3}
    there = lehr.resume(path, total_steps=32 * 22, progress=False, **constant)
    assert int(there.state.updates) == 22
    assert there.metrics["coef/entropy_coef"][-1] == pytest.approx(0.01)


def test_the_top_are_the_best_members_of_the_first_configurations(swept, tmp_path):
    paths = lehr.pick(swept, "top3", out=tmp_path / "top")
    texts = [lehr.load(path).config["entropy_coef"] for path in paths]
    assert texts == [swept.results.texts[row]["entropy_coef"] for row in swept.ranking.order[:3]]


@pytest.mark.parametrize(
    ("which", "sentence"),
    [
        ("worst", "'worst' is not a choice of members; give best, the number of a member, c4 for the best "),
        ("99", "Member 99 of the sweep .* is not trained; its trained members are 0 to 11."),
        ("c4", "Configuration 4 of the sweep .* is not trained; its trained configurations are 0 to 3."),
        ("top0", "'top0' is not a choice"),
    ],
)
def test_a_bad_choice_is_one_sentence(swept, which, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        lehr.pick(swept, which, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
