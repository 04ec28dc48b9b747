"""Reward models: what is added to the environment's reward, or replaces it; `base.py` says what one is.

A reward model is given to any algorithm as `reward_model`: by its name, as `module:Name`, or as a class.
"""

from typing import Any

from lehr import plugins
from lehr.errors import InputError, closest, shortened
from lehr.rewards.base import EnvironmentReward, RewardModel

BUILT_IN: dict[str, type[RewardModel]] = {"environment": EnvironmentReward}
"""The reward models that come with Lehr, by name."""
GROUP = "lehr.reward_models"
"""The entry points under which an installed package offers reward models."""


def find(model: Any) -> type[RewardModel]:
    """The class of a reward model, from its name, from `module:Name`, or from the class itself.

    >>> find("environment").__name__
    'EnvironmentReward'
    """
    found = model
    if isinstance(model, str):
        offered = plugins.offered(GROUP)
        if model in BUILT_IN:
            return BUILT_IN[model]
        if model in offered:
            found = offered[model].load()
        elif ":" in model:
            found = plugins.import_object(model, "reward model")
        else:
            raise InputError(f"There is no reward model {model!r}; {closest(model, [*BUILT_IN, *offered])}")
    if not (isinstance(found, type) and issubclass(found, RewardModel)):
        raise InputError(
            f"reward_model is {shortened(repr(found))}; give a class that inherits from "
            "lehr.rewards.RewardModel, or the name of one."
        )
    if missing := sorted(found.__abstractmethods__):
        raise InputError(f"reward_model {found.__name__} lacks {', '.join(missing)}; see lehr.rewards.base.")
    return found


__all__ = ["BUILT_IN", "EnvironmentReward", "RewardModel", "find"]
