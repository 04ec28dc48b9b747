"""Brax's own modules that the drop-in stands on, imported once and quietly; without them, one sentence says so."""

import contextlib
import io
from types import ModuleType
from typing import Any

from lehr.errors import InputError
from lehr.plugins import require

_WHAT = "lehr.compat.brax"

missing: InputError | None = None
"""Why Brax cannot be imported; said when training is asked for, so that this package itself can be imported."""

wrappers: Any = None
acting: Any = None
logger: Any = None
networks: Any = None
make_ppo_networks: Any = None
all_networks: Any = None
running_statistics: Any = None

try:
    with contextlib.redirect_stdout(io.StringIO()):  # MJX prints that it does without Warp
        wrappers = require("brax.envs.wrappers.training", "brax", _WHAT)
        acting = require("brax.training.acting", "brax", _WHAT)
        logger = require("brax.training.logger", "brax", _WHAT)
        networks = require("brax.training.agents.ppo.networks", "brax", _WHAT)
        make_ppo_networks = networks.make_ppo_networks
        all_networks = require("brax.training.networks", "brax", _WHAT)
        running_statistics = require("brax.training.acme.running_statistics", "brax", _WHAT)
except InputError as error:
    missing = error


def check() -> None:
    """Raise if Brax is not there."""
    if missing is not None:
        raise missing


def checkpoint() -> ModuleType:
    """Brax's checkpoints, imported when the first one is written or read: what they need is slow to import."""
    return require("brax.training.agents.ppo.checkpoint", "brax", _WHAT)
