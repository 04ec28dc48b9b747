"""For the API reference: doctests become blocks of code, since Markdown would take their prompts for quotations."""

import re
from typing import Any

import griffe

_SESSION = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> )\S.*\n?|^ .*\n?)*)+", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Wrap the interactive sessions in an object's docstring."""
        if obj.docstring:
            fenced = _SESSION.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value)
            obj.docstring.value = fenced.rstrip("\n")
