"""Weights & Biases, for those who have it installed."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lehr.errors import InputError


class WeightsAndBiases:
    """Sends the rows to Weights & Biases, with env steps on the axis; offline they are kept to be synced later.

    Args:
        directory: of the run. Its name is the run's id there too, so that a resumed run goes on in the same one.
        config: what to show as the run's configuration.
        project: the project there.
        mode: "offline" keeps everything on this machine; None does what the environment variable WANDB_MODE says.
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
            raise InputError("Logging to Weights & Biases needs wandb, which is missing; pip install wandb.") from None
        name = directory.resolve().name
        options = {"id": name, "name": name, "project": project, "dir": directory, "config": dict(config)}
        try:
            self._run = wandb.init(**options, mode=mode, resume="allow")
        except wandb.Error:  # no account, no network: nobody should lose a run for that
            self._run = wandb.init(**options, mode="offline")
        self._run.define_metric("*", step_metric="env_steps")

    def log(self, row: Mapping[str, float | str]) -> None:
        """Queue one row."""
        self._run.log(dict(row))

    def flush(self) -> None:
        """Nothing to do: a process of its own takes the rows at once."""

    def close(self) -> None:
        """Wait until everything is sent or on disk."""
        self._run.finish()
