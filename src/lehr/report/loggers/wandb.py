"""Logging to Weights & Biases, an optional dependency."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lehr.errors import InputError


class WeightsAndBiases:
    """Log rows to Weights & Biases, with env steps on the x axis; offline runs can be synced later.

    Args:
        directory: the run's directory. Its name is also the run ID, so that a resumed run continues the same one.
        config: the run's configuration.
        project: the W&B project.
        mode: "offline" keeps everything on this machine; None follows the environment variable WANDB_MODE.
    """

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any],
        project: str = "lehr",
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError:
            raise InputError(
                "Logging to Weights & Biases needs wandb, which is not installed; run pip install wandb."
            ) from None
        name = directory.resolve().name
        options = {"id": name, "name": name, "project": project, "dir": directory, "config": dict(config)}
        try:
            self._run = wandb.init(**options, mode=mode, resume="allow")
        except wandb.Error:  # no account or no network: log offline instead of failing the run
            self._run = wandb.init(**options, mode="offline")
        self._run.define_metric("*", step_metric="env_steps")

    def log(self, row: Mapping[str, float | str]) -> None:
        """Queue one row."""
        self._run.log(dict(row))

    def flush(self) -> None:
        """Do nothing: a separate process takes the rows immediately."""

    def close(self) -> None:
        """Wait until everything is sent or saved."""
        self._run.finish()
