"""Actors of their own for environments on the host: they act while the learner learns, and feed it through a queue.

    newest parameters ─► actor 0 ─┐
    newest parameters ─► actor 1 ─┼─► queue, bounded ─► learner, one rollout an update
    newest parameters ─► actor … ─┘

An actor is a thread, a process, or a Ray actor on some machine. Each has environments of its own and makes whole
rollouts, with the parameters that were the newest when it began one; `rollout/lag` counts the updates until it is
learned from. Where the queue is full, actors wait, so that nothing grows old in it. An actor that is lost is replaced,
and nothing else stops.
"""

from lehr.acting.actors.actor import Blueprint
from lehr.acting.actors.pool import Pool

__all__ = ["Blueprint", "Pool"]
