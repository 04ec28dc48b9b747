"""Many metrics as one array, so that a loop stores one row for each turn instead of one scalar for each metric."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from lehr.types import Metrics


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MetricRow:
    """Metrics side by side, `[..., M]`; their names are static, and so pass through every transformation.

    >>> _, rows = jax.lax.scan(lambda x, _: (x + 1, MetricRow.of({"a": x, "b": 2 * x})), jnp.float32(0), length=3)
    >>> {name: float(value) for name, value in rows.mean().items()}
    {'a': 1.0, 'b': 2.0}
    """

    values: jax.Array
    names: tuple[str, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, metrics: Metrics) -> "MetricRow":
        """The row of some scalars."""
        names = tuple(sorted(metrics))
        return cls(jnp.stack([metrics[name].astype(jnp.float32) for name in names]), names)

    def mean(self) -> Metrics:
        """Means over the first axis, by name."""
        return dict(zip(self.names, jnp.mean(self.values, axis=0), strict=True))
