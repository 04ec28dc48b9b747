"""Checks of the arguments of `train`, made before anything is compiled."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lehr.compat.brax import upstream
from lehr.compat.brax.coefficients import is_number
from lehr.compat.brax.loss import LossSettings
from lehr.errors import InputError, closest, quoted
from lehr.schedules import adaptive_kl

_RATE_SCHEDULES = ("NONE", "ADAPTIVE_KL")


def check_arguments(
    vision: bool, action_repeat: int, wrap_env: bool, episode_length: int | None, loss: LossSettings
) -> None:
    """Raise if arguments contradict each other, or one that others need is missing."""
    if vision and action_repeat != 1:
        raise InputError(
            f"vision is on and action_repeat is {action_repeat}, which would render frames that are never used; let "
            "the environment repeat its physics, and set action_repeat to 1."
        )
    if wrap_env and episode_length is None:
        raise InputError("episode_length is None; set it to the maximum number of steps of an episode.")
    if loss.use_distributional_critic and loss.clipping_epsilon_value is None:
        raise InputError(
            "use_distributional_critic is on, but clipping_epsilon_value, which the quantile Huber loss needs, is "
            "None; set it, for example to 1.0."
        )


def devices(most: int | None) -> list[Any]:
    """The devices that share the environments: all of this process, or the first `most`."""
    if jax.process_count() > 1:
        raise InputError(
            f"This is one of {jax.process_count()} processes, but lehr.compat.brax.train runs in a single process; "
            "start only one, with all devices of one machine."
        )
    found = jax.local_devices()
    return found[: most or len(found)]


def adaptive_rate(learning_rate: Any, rate_schedule: Any, desired_kl: float, minimum: float, maximum: float) -> Any:
    """The controller of an adaptive learning rate, or `None`; `rate_schedule` is its name or Brax's enum."""
    name = str(getattr(rate_schedule, "value", rate_schedule or "NONE"))
    if name not in _RATE_SCHEDULES:
        raise InputError(f"learning_rate_schedule is {rate_schedule!r}; {closest(name, _RATE_SCHEDULES)}")
    if name == "NONE":
        return None
    if not is_number(learning_rate):
        raise InputError(
            f"learning_rate_schedule is 'ADAPTIVE_KL', but learning_rate is itself a schedule, {learning_rate!r}; "
            "give learning_rate as a number, or remove learning_rate_schedule."
        )
    # As in Brax, training starts with the given rate even if it is outside the limits.
    start = min(max(float(learning_rate), minimum), maximum)
    # Brax accepts any target: 0 always lowers the rate, infinity always raises it.
    target = float(np.clip(desired_kl, np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    return adaptive_kl(start, target, minimum=minimum, maximum=maximum, metric="kl_mean")


def network_maker(factory: Any, vision: bool) -> Callable[..., Any]:
    """The network factory; a mapping, as in Playground's configs, holds options of Brax's own one.

    >>> upstream.check()
    >>> network_maker({"policy_hidden_layer_sizes": [32, 32]}, vision=False).keywords
    {'policy_hidden_layer_sizes': (32, 32)}
    """
    if callable(factory):
        return factory
    name = "make_ppo_networks_vision" if vision else "make_ppo_networks"
    if not hasattr(factory, "items"):
        raise InputError(
            f"network_factory is {quoted(factory)}; give a function such as {name}, or a mapping with its options."
        )
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in factory.items()}
    made = upstream.vision_networks().make_ppo_networks_vision if vision else upstream.make_ppo_networks
    known = inspect.signature(made).parameters
    for key in options:
        if key not in known:
            raise InputError(f"network_factory has the option {quoted(key)}, which {name} lacks; {closest(key, known)}")
    return functools.partial(made, **options)
