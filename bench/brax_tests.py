"""Run Brax's PPO tests, as installed, against Lehr's drop-in replacement.

    python bench/brax_tests.py                    all tests, which takes a while
    python bench/brax_tests.py -k Asymmetric      tests whose name contains a word

All arguments are passed to pytest. `ppo.train` is `lehr.compat.brax.train`; the quantile Huber loss, the network
description and `load_policy` are Lehr's too. Loading and the file format are Brax's in both cases.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

PLACE = "brax.training.agents.ppo"


class DropIn:
    """A pytest plugin that replaces Brax's functions with Lehr's before each test."""

    @pytest.fixture(autouse=True)
    def _in_their_place(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        from lehr.compat import brax
        from lehr.compat.brax import loss, saving
        from lehr.envs.suites.foreign import by_their_rules

        theirs = {name: importlib.import_module(f"{PLACE}.{name}") for name in ("train", "losses", "checkpoint")}
        monkeypatch.setattr(theirs["train"], "train", brax.train)
        monkeypatch.setattr(theirs["losses"], "quantile_huber_loss", loss.quantile_huber_loss)
        monkeypatch.setattr(theirs["checkpoint"], "load_policy", saving.load_policy)
        with by_their_rules():
            yield


def main(arguments: list[str]) -> int:
    """Run the tests and return pytest's exit code."""
    folder = Path(importlib.import_module(PLACE).__path__[0])
    files = [str(folder / f"{name}_test.py") for name in ("train", "losses", "checkpoint")]
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", "/dev/null"]
    return int(pytest.main([*options, *files, *arguments], plugins=[DropIn()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
