"""Conditions on the parameters of a sweep."""

import pytest

from lehr.errors import InputError
from lehr.sweeps.definition import Definition

PARAMETERS = {
    "learning_rate": {"low": "1e-4", "high": "1e-2", "scale": "log"},
    "clip_range": [0.1, "0.3 -> 0.1 cosine"],
    "entropy_coef": {
        "start": {"low": "1e-3", "high": 0.1},
        "end": {"low": 0, "high": 0.1},
        "shape": ["linear", "exponential"],
        "over": ["50%", 100_000, "100%"],
    },
    "hidden_sizes": [[64], [32]],
    "epochs": {"low": 1, "high": 8},
}
POINT = {
    "learning_rate": 1e-3,
    "clip_range": 0.1,
    "entropy_coef.start": 0.05,
    "entropy_coef.end": 0.01,
    "entropy_coef.shape": "linear",
    "entropy_coef.over": "50%",
    "hidden_sizes": [64],
    "epochs": 4,
}


def definition(*conditions):
    return Definition.from_mapping(
        {
            "algorithm": "ppo",
            "settings": {"total_steps": 400_000},
            "parameters": PARAMETERS,
            "conditions": list(conditions),
            "sampler": "random",
            "samples": 10,
        }
    )


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("entropy_coef.end <= entropy_coef.start", True),
        ("entropy_coef.end > entropy_coef.start", False),
        ("entropy_coef.end<entropy_coef.start", True),
        ("epochs == 4", True),
        ("epochs != 4", False),
        ("4 >= epochs", True),
        ("learning_rate < 1e-3", False),
        ("learning_rate <= 1e-3", True),
        ("lr >= 1e-3", True),
        ("ent-coef.end == 0.01", True),
        ("entropy_coef.shape == exponential", False),
        ("entropy_coef.shape != exponential or entropy_coef.end > 0", True),
        ("entropy_coef.shape == exponential or entropy_coef.end > 0.02", False),
        ("entropy_coef.over == 200k", True),  # 50% of the budget
        ("entropy_coef.over < 75%", True),
        ("entropy_coef.over > 50%", False),
    ],
)
def test_a_point(condition, holds):
    assert definition(condition).holds(POINT) is holds


def test_all_conditions_must_hold():
    assert definition("epochs > 3", "epochs < 5").holds(POINT)
    assert not definition("epochs > 3", "epochs < 4").holds(POINT)


def test_texts_have_canonical_names():
    (condition,) = definition("ent_coef.end<=ent_coef.start  or  lr>1e-3").conditions
    assert str(condition) == "entropy_coef.end <= entropy_coef.start or learning_rate > 1e-3"


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (
            "entropy_coef.endd < 1",
            "the term 'entropy_coef.endd', which is neither .*; did you mean 'entropy_coef.end'?",
        ),
        ("gamma < 1", "the term 'gamma', which is neither a swept parameter"),
        ("epochs", "not a comparison of two terms"),
        ("epochs <", "not a comparison of two terms"),
        ("1 < epochs < 3", "write one comparison per condition"),
        ("1 < 2", "names no parameter; known: learning_rate"),
        (3, "The condition 3 is not a text"),
        ("clip_range < 0.2", "compares clip_range, but its value '0.3 -> 0.1 cosine' is not a number"),
        ("hidden_sizes == 64", r"compares hidden_sizes, but its value \[64\] is not a number"),
        ("entropy_coef.shape < linear", "but its value 'linear' is not a number"),
        ("entropy_coef.shape == linaer", "the term 'linaer'.* did you mean 'linear'?"),
        ("learning_rate < 50%", "the term '50%'"),
        ("__import__('os').system('true') < epochs", "which is neither a swept parameter"),
    ],
)
def test_bad_conditions(condition, message):
    with pytest.raises(InputError, match=message):
        definition(condition)
