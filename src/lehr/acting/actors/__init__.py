"""Asynchronous actors for environments on the host: they act while the learner learns, and feed it through a queue.

    latest parameters ─► actor 0 ─┐
    latest parameters ─► actor 1 ─┼─► bounded queue ─► learner, one rollout per update
    latest parameters ─► actor … ─┘

An actor is a thread, a process, or a Ray actor on any machine of a cluster. Each has its own environments and collects
whole rollouts with the parameters that were the latest when the rollout started; `rollout/lag` counts the updates
between that and learning from it. When the queue is full, actors wait, so rollouts do not grow stale in it. A lost
actor is replaced while everything else continues.
"""

from lehr.acting.actors.actor import Blueprint
from lehr.acting.actors.pool import Pool

__all__ = ["Blueprint", "Pool"]
