"""The one exception for a mistake in what the user gave, and the words that name the nearest right thing."""

import difflib
from collections.abc import Iterable

MOST_LISTED = 60
"""So many known words are listed at the most."""


class InputError(ValueError):
    """What was given, what is allowed and what to do, in one sentence. The CLI prints it and exits with 2."""


def closest(given: str, known: Iterable[str]) -> str:
    """Name the known word nearest to `given`, or list them, the first of very many, when none is near.

    >>> closest("cosin", ["linear", "cosine"])
    "did you mean 'cosine'?"
    >>> closest("entropy", ["target_kl", "entropy_coef"])
    "did you mean 'entropy_coef'?"
    >>> closest("spline", ["linear", "cosine"])
    'known: linear, cosine'
    >>> closest("spline", map(str, range(100)))[-15:]
    ' 59 and 40 more'
    """
    words = list(known)
    match = [word for word in words if word.startswith(given)]
    match = match or difflib.get_close_matches(given, words, n=1, cutoff=0.7)
    if match:
        return f"did you mean {match[0]!r}?"
    more = f" and {len(words) - MOST_LISTED} more" if len(words) > MOST_LISTED else ""
    return f"known: {', '.join(words[:MOST_LISTED])}{more}"
