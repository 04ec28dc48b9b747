"""What changes the members of a sweep while they train: population-based training, successive halving, or nothing."""

from collections.abc import Callable
from functools import partial

from lehr.sweeps.definition import Definition
from lehr.sweeps.evolution import make_evolution
from lehr.sweeps.halving import make_halving
from lehr.training.plan import Plan
from lehr.training.runners.population import Evolution


def make_changes(definition: Definition) -> Callable[[Plan], Evolution] | None:
    """Return what makes it from the plan of a member; `None` if nothing changes.

    Members with fresh seeds, which confirm the best configurations, train without it.
    """
    if definition.evolution is not None:
        return partial(make_evolution, definition.evolution, definition.space, definition.sampler_seed)
    if definition.halving is not None:
        return partial(make_halving, definition.halving)
    return None
