"""Many metrics in one array, so that a loop stores one row per iteration instead of one scalar per metric."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from lehr.types import Metrics


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MetricRow:
    """Metrics in one array, `[..., M]`; their names are static, so every JAX transformation preserves them.

    >>> _, rows = jax.lax.scan(lambda x, _: (x + 1, MetricRow.of({"a": x, "b": 2 * x})), jnp.float32(0), length=3)
    >>> {name: float(value) for name, value in rows.mean().items()}
    {'a': 1.0, 'b': 2.0}
    """

    values: jax.Array
    names: tuple[str, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, metrics: Metrics) -> "MetricRow":
        """Build a row from scalars."""
        names = tuple(sorted(metrics))
        return cls(jnp.stack([metrics[name].astype(jnp.float32) for name in names]), names)

    def mean(self) -> Metrics:
        """Return means over the first axis, by name."""
        return dict(zip(self.names, jnp.mean(self.values, axis=0), strict=True))
