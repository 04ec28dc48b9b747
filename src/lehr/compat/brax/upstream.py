"""The modules of Brax that the drop-in uses, imported once and quietly."""

import contextlib
import io
from types import ModuleType
from typing import Any

from lehr.errors import InputError
from lehr.plugins import require

_WHAT = "lehr.compat.brax"

missing: InputError | None = None
"""Why Brax cannot be imported. Raised by `check`, so that `lehr.compat.brax` itself can always be imported."""

wrappers: Any = None
acting: Any = None
logger: Any = None
networks: Any = None
make_ppo_networks: Any = None
all_networks: Any = None
running_statistics: Any = None

try:
    with contextlib.redirect_stdout(io.StringIO()):  # MJX prints a line if Warp is not installed
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
    """Raise if Brax is not installed."""
    if missing is not None:
        raise missing


def normalizer(normalize_observations: bool) -> Any:
    """Brax's function that networks preprocess observations with."""
    return running_statistics.normalize if normalize_observations else lambda obs, _: obs


def checkpoint() -> ModuleType:
    """Brax's checkpoint module, imported on first use: its dependencies are slow to import."""
    return require("brax.training.agents.ppo.checkpoint", "brax", _WHAT)


def vision_networks() -> ModuleType:
    """Brax's module with networks for pixels, imported on first use."""
    return require("brax.training.agents.ppo.networks_vision", "brax", _WHAT)
