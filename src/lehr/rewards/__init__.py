"""Reward models add to the environment's reward, or replace it; `base.py` defines the protocol.

Pass a reward model to any algorithm as `reward_model`: its name, `module:Name`, or a class.
"""

from typing import Any

from lehr import plugins
from lehr.errors import InputError, closest, shortened
from lehr.rewards.base import EnvironmentReward, RewardModel

BUILT_IN = {
    "environment": "lehr.rewards.base:EnvironmentReward",
    "discriminator": "lehr.rewards.discriminator:Discriminator",
    "novelty": "lehr.rewards.novelty:Novelty",
}
"""Where the built-in reward models are, by name; each is imported when it is asked for."""
GROUP = "lehr.reward_models"
"""Entry-point group in which installed packages can register reward models."""


def find(model: Any) -> type[RewardModel]:
    """Return the class of a reward model, given its name, `module:Name`, or the class itself.

    >>> find("environment").__name__
    'EnvironmentReward'
    """
    found = model
    if isinstance(model, str):
        if model in BUILT_IN:
            found = plugins.import_object(BUILT_IN[model], "reward model")
        elif model in (offered := plugins.offered(GROUP)):
            found = offered[model].load()
        elif ":" in model:
            found = plugins.import_object(model, "reward model")
        else:
            raise InputError(f"There is no reward model {model!r}; {closest(model, [*BUILT_IN, *offered])}")
    if not (isinstance(found, type) and issubclass(found, RewardModel)):
        raise InputError(
            f"reward_model is {shortened(repr(found))}; give a class that inherits from "
            "lehr.rewards.RewardModel, or its name."
        )
    if missing := sorted(found.__abstractmethods__):
        raise InputError(f"reward_model {found.__name__} does not define {', '.join(missing)}; see lehr.rewards.base.")
    return found


__all__ = ["BUILT_IN", "EnvironmentReward", "RewardModel", "find"]
