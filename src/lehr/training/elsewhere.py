"""Settings that a run does not have, since they belong to another algorithm or to a reward model."""

from lehr import algorithms, rewards
from lehr.config.build import spellings_of
from lehr.errors import listed


def known_elsewhere(key: str) -> str:
    """Say which of Lehr's algorithms and reward models have a setting, and how to get it; empty if none has.

    >>> known_elsewhere("novelty_coef"), known_elsewhere("horizons")
    ("it is a setting of the reward model novelty; add reward_model='novelty'", '')
    """
    models = [name for name in rewards.BUILT_IN if key in spellings_of([rewards.find(name).Config])]
    users = [name for name in algorithms.names() if key in spellings_of([algorithms.find(name).Config])]
    said = [*(f"the reward model {name}" for name in models), *([listed(users)] if users else [])]
    if not said:
        return ""
    advice = f"; add reward_model='{models[0]}'" if models else ""
    return f"it is a setting of {' and of '.join(said)}{advice}"
