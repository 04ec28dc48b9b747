"""Brax's PPO with every coefficient a schedule: `train` replaces `brax.training.agents.ppo.train.train`.

    from lehr.compat import brax as ppo

    make_policy, params, metrics = ppo.train(environment, num_timesteps=50_000_000, entropy_cost="0.01 -> 0.001 cosine")

Arguments, defaults, callbacks, metrics, parameters, checkpoints and random numbers are Brax's. See docs/brax.md.
"""

from lehr.compat.brax.saving import load_policy
from lehr.compat.brax.training import train

__all__ = ["load_policy", "train"]
