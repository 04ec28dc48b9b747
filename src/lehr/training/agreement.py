"""What the processes of a run on several hosts must have in common: the command, settings, data and versions."""

from collections.abc import Mapping

from lehr import plugins
from lehr.errors import InputError, shortened
from lehr.training import settings_file
from lehr.training.directory import versions
from lehr.training.plan import Plan


def premises(plan: Plan, resumes: bool) -> dict[str, str]:
    """Return what the program of a run depends on, as texts by name."""
    settings = settings_file.to_json(plan.mapping)
    del settings["progress"]  # only process 0 shows it
    named = {name: value for name, value in settings.items() if not plugins.is_placeholder(value)}
    packages = {name: value for name, value in versions().items() if name not in ("python", "platform", "devices")}
    found = {"command": "resume" if resumes else "train"} | named | dict(plan.loaded.sources) | packages
    return {name: str(value) for name, value in found.items()}


def check(here: Mapping[str, str], leader: Mapping[str, str], process: int) -> None:
    """Refuse to take part in a run with other premises than those of process 0.

    >>> check({"command": "train", "seed": "3"}, {"command": "train", "seed": "0"}, process=1)
    Traceback (most recent call last):
    lehr.errors.InputError: In process 1, seed is 3, but in process 0 it is 0; start all processes with the same \
command, settings, data and versions.
    """
    for name in [*leader, *(name for name in here if name not in leader)]:
        own, wanted = (found.get(name, "missing") for found in (here, leader))
        if own != wanted:
            raise InputError(
                f"In process {process}, {name} is {shortened(own)}, but in process 0 it is {shortened(wanted)}; start "
                "all processes with the same command, settings, data and versions."
            )
