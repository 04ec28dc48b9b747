"""The exception for invalid user input, and suggestions for misspelled names."""

import difflib
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

MOST_LISTED = 60
"""The maximum number of known names to list."""


LONGEST = 2000
"""The maximum number of characters of an error message."""


class InputError(ValueError):
    """Invalid user input. The message says what was given, what is allowed and what to do.

    The CLI prints the message and exits with code 2. A message that quotes something long is cut in the middle.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(shortened(str(message), LONGEST))


def closest(given: str, known: Iterable[str], prefix: str = "") -> str:
    """Suggest the known name closest to `given`, or list the first `MOST_LISTED` of them if none is close.

    Upper and lower case are alike. A suggestion has the prefix that the user must write before it.

    >>> closest("PPO", ["a2c", "ppo"]), closest("inverted_pendulm", ["ant", "inverted_pendulum"], prefix="brax:")
    ("did you mean 'ppo'?", "did you mean 'brax:inverted_pendulum'?")
    >>> closest("cosin", ["linear", "cosine"])
    "did you mean 'cosine'?"
    >>> closest("entropy", ["target_kl", "entropy_coef"])
    "did you mean 'entropy_coef'?"
    >>> closest("spline", ["linear", "cosine"]), closest("l", ["linear", "cosine"])
    ('known: linear, cosine', 'known: linear, cosine')
    >>> closest("spline", map(str, range(100)))[-15:]
    ' 59 and 40 more'
    """
    words, folded = list(known), shortened(given).lower()
    spelling = {word.lower(): word for word in reversed(words)}
    match = [word for word in words if word.lower().startswith(folded)]
    match = match or [spelling[word] for word in difflib.get_close_matches(folded, spelling, n=1, cutoff=0.7)]
    if match and len(folded) > 1:  # anything is close to a single letter
        return f"did you mean {prefix + match[0]!r}?"
    more = f" and {len(words) - MOST_LISTED} more" if len(words) > MOST_LISTED else ""
    return f"known: {', '.join(words[:MOST_LISTED])}{more}"


def page(name: str) -> str:
    """Where the user finds a page of the documentation: in the checkout, or on the web if Lehr was installed.

    >>> page("migration.md").endswith("docs/migration.md")
    True
    """
    if (Path(__file__).parents[2] / "docs" / name).is_file():
        return f"docs/{name}"
    try:
        urls = metadata.metadata("lehr").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        urls = []
    return f"{dict(url.split(', ', 1) for url in urls).get('Documentation', 'docs')}/{name}"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence.

    >>> listed(["ppo"]), listed(["a2c", "impala", "ppo"]), listed([])
    ('ppo', 'a2c, impala and ppo', 'none')
    """
    if not names:
        return "none"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def shortened(text: str, most: int = 80) -> str:
    """The text, cut in the middle where it is long.

    >>> shortened("a" * 10, most=5)
    'aa…aa'
    """
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def quoted(thing: Any, most: int = 80) -> str:
    """What the user gave, as an error message quotes it: its `repr`, shortened, whatever it is.

    >>> quoted("cosin"), quoted([0.5, 1]), quoted(10**5000)
    ("'cosin'", '[0.5, 1]', 'a whole number of 16610 bits')
    """
    try:
        return shortened(repr(thing), most)
    except Exception:  # Python does not print an integer of more than 4300 digits, and a user's class may fail
        is_integer = isinstance(thing, int)
        return f"a whole number of {thing.bit_length()} bits" if is_integer else f"an object of type {type(thing)}"
