"""Names of settings: what other libraries call them, American spellings, and suggestions for unknown names."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from lehr.errors import quoted

MOST_SUGGESTED = 5


@dataclass(frozen=True)
class Conversion:
    """Another library's setting, whose value can be converted."""

    name: str
    convert: Callable[[Any, Callable[[str], Any]], dict[str, Any]]
    """Returns settings, given its value and a function that returns the value of a setting by name."""
    explain: Callable[[Mapping[str, Any]], str] = lambda given: ""
    """Returns why it cannot be converted beside these settings, and what to write instead; empty if it can."""


@dataclass(frozen=True)
class Names:
    """What other libraries call a setting; the annotation of its field declares it.

    Declare it at the field: `Annotated[int, Names(("n_envs",))]`. A subclass that only changes the default inherits it.
    """

    aliases: tuple[str, ...] = ()
    """Names with the same meaning."""
    conversions: tuple[Conversion, ...] = ()
    """Names with a meaning that can be converted to this setting."""
    others: tuple[tuple[str, str], ...] = ()
    """Names with another meaning; each with an explanation and what to write instead."""


_AMERICAN = re.compile(r"(normal|optim|standard|regular|initial)is(?=e|ation)")


def american(name: str) -> str:
    """Return a name in American spelling.

    >>> american("normalise_observations"), american("optimiser"), american("horizon")
    ('normalize_observations', 'optimizer', 'horizon')
    """
    return _AMERICAN.sub(r"\1iz", name)


def spellings(name: str, aliases: Iterable[str]) -> list[str]:
    """Return all spellings of a setting, its name first."""
    return list(dict.fromkeys(spelled for word in (name, *aliases) for spelled in (word, american(word))))


# A schedule in several settings -----------------------------------------------------------------------------------

_END = re.compile(r"(?:final|end|last|min|minimum)_(.+)|(.+)_(?:end|final|finish|last|min|minimum|target|to)")
_START = re.compile(r"(?:initial|start|first)_(.+)|(.+)_(?:start|initial|init|first|from)")
_ANNEALED = re.compile(
    r"(?:anneal|decay|annealed|linear)_(.+)|(.+)_(?:anneal|annealing|decay|anneal_steps|decay_steps)"
)


def as_one_text(
    key: str, given: Mapping[str, Any], coefficients: Mapping[str, str], defaults: Mapping[str, Any]
) -> str:
    """Explain a setting that is one part of a coefficient's schedule in another library; empty if it is none.

    Args:
        key: the unknown setting.
        given: all settings that the user gave.
        coefficients: the names of coefficients by all of their spellings.
        defaults: their defaults.

    >>> as_one_text("ent_coef_final", {"ent_coef": 0.02, "ent_coef_final": 0.001}, {"ent_coef": "entropy_coef"}, {})
    "a schedule is one text in Lehr: write entropy_coef='0.02 -> 0.001'"
    """
    for pattern in (_END, _START, _ANNEALED):
        match = pattern.fullmatch(key)
        spelled = next((part for part in match.groups() if part), "") if match else ""
        if spelled in coefficients:
            break
    else:
        return ""
    name = coefficients[spelled]
    values = [given[word] for word in (spelled, name) if word in given]
    start = _number_text(values[0] if values else defaults.get(name), "0.01")
    end = "0"
    if pattern is _END:
        end = _number_text(given.get(key), "0.001")
    elif pattern is _START:
        start = _number_text(given.get(key), start)
        end = _number_text(values[0] if values else None, "0")
    return f"a schedule is one text in Lehr: write {name}='{start} -> {end}'"


def _number_text(given: Any, otherwise: str) -> str:
    """A number, or the first one of a schedule, as a text."""
    try:
        return f"{float(str(given).partition('->')[0]):g}"
    except (TypeError, ValueError):
        return otherwise


# Suggestions ------------------------------------------------------------------------------------------------------

_MEANINGS = (
    "batch minibatch minibatches mini batches sgd",
    "steps timesteps horizon length unroll rollout fragment iterations step",
    "envs env environments environment workers runners parallel",
    "layers layer hidden arch net network fcnet mlp sizes size dims units hiddens width depth torso backbone",
    "epochs epoch iter iters updates passes",
    "entropy ent exploration",
    "value vf critic",
    "policy actor pi",
    "lr learning rate",
    "discount gamma discounting",
    "clip clipping eps epsilon",
    "normalise normalize norm standardise standardize normalisation normalization filter vecnormalize",
    "gradient grad gradients",
    "kl divergence trust",
    "evaluate eval evaluation test",
    "checkpoint checkpoints save saving",
    "log logs logging logger loggers wandb tensorboard tb track callback callbacks verbose",
    "progress bar callback verbose",
    "reward rewards",
    "return returns score",
    "observations observation obs state",
    "advantages advantage adv gae",
    "recurrent memory lstm rnn gru",
    "optimiser optimizer optim adam optimisation",
    "activation nonlinearity",
    "std sigma noise deviation",
    "total budget max maximum",
    "coef coeff cost weight coefficient loss",
    "seed random rng",
    "frame stack framestack",
    "repeat skip frameskip",
    "weight decay regularisation l2",
)
"""Words with a similar meaning in names of settings."""


def _likeness(one: str, other: str) -> float:
    """How much of the meaning of two names is the same, from 0 to 1; only words with known meanings count."""
    words = [set(name.lower().split("_")) - _EMPTY for name in (one, other)]
    groups = [{number for word in found for number in _GROUPS.get(word, ())} for found in words]
    unknown = {word for found in words for word in found if word not in _GROUPS}
    return len(groups[0] & groups[1]) / max(1, len(groups[0] | groups[1]) + len(unknown))


_EMPTY = {"num", "n", "of", "the", "use", "per", ""}
_GROUPS: dict[str, set[int]] = {}
for _number, _group in enumerate(_MEANINGS):
    for _word in _group.split():
        _GROUPS.setdefault(_word, set()).add(_number)


def suggestion(key: str, names: Mapping[str, str], otherwise: str) -> str:
    """Suggest at most five settings that an unknown one may mean, by spelling or by meaning.

    A setting's own name comes before another library's, unless that is clearly closer.

    Args:
        key: the unknown setting.
        names: the names of settings by all of their spellings.
        otherwise: what to say if nothing is near.

    >>> names = {word: word for word in ("entropy_coef", "hidden_sizes", "critic_hidden_sizes", "horizon")}
    >>> suggestion("entropy_cof", names, ""), suggestion("mlp_layers", names, "")
    ("did you mean 'entropy_coef'?", "did you mean 'hidden_sizes' or 'critic_hidden_sizes'?")
    """
    if len(key.strip("-_")) < 2:  # anything is close to a single letter
        return otherwise
    starting = sorted((word for word in names if word.startswith(key)), key=lambda word: names[word] != word)
    close = starting[:1] or _by_spelling(key, names)
    if not close:
        scores: dict[str, float] = {}
        for word, name in names.items():
            score = _likeness(key, word) + SequenceMatcher(None, key, word).ratio() / 100
            scores[name] = max(scores.get(name, 0.0), score)
        close = sorted((name for name, score in scores.items() if score >= 0.3), key=lambda name: -scores[name])
    if not close:
        return otherwise
    shown = [quoted(word) for word in close[:MOST_SUGGESTED]]
    return f"did you mean {' or '.join(filter(None, [', '.join(shown[:-1]), shown[-1]]))}?"


def _by_spelling(key: str, names: Mapping[str, str]) -> list[str]:
    """The word that differs least from a misspelled one, in a list; an empty list if none is close."""
    ratios = {word: SequenceMatcher(None, word, key).ratio() for word in names}
    best = max(ratios, key=lambda word: ratios[word] + _OWN_FIRST * (names[word] == word), default=None)
    return [best] if best is not None and ratios[best] >= 0.75 else []


_OWN_FIRST = 0.1
"""By how much another library's name must be more like a misspelled one to be suggested before Lehr's own."""
